"""What an embedded bucket keeps: when state.snap is written, and when history goes.

What must stay true:

1. state.snap never names a revision that a power cut could take out of the log: the log is synced first.
2. A segment goes only when state.snap covers it.  So retention takes history and never a live key.
3. History goes by the time that went by since it was written (ages.py), never by one reading of the calendar.
"""

from __future__ import annotations

from typing import Final

from penstock.disk import Disk
from penstock.errors import CorruptionError
from penstock.kv.embedded.ages import HistoryAgesFile, add_mark, advance
from penstock.kv.embedded.options import EmbeddedOptions
from penstock.kv.embedded.reckon import Reckoner
from penstock.kv.embedded.state import BucketState
from penstock.kv.roles import StoreConfig
from penstock.log.messagelog import MessageLogReader
from penstock.log.messagelog.shared import SharedLog
from penstock.log.sidecar import Register
from penstock.metrics import REGISTRY

__all__ = ["BucketRetention"]

CHECKPOINTS: Final = REGISTRY.counter("bucket_checkpoints", "times a state.snap was written", labels=("bucket",))

TEND_NS: Final = 1_000_000_000


class BucketRetention:
    """The rules of one bucket; ``tend`` and ``forget`` are called inside of a turn that has applied everything."""

    def __init__(
        self,
        folder: str,
        config: StoreConfig,
        options: EmbeddedOptions,
        reader: MessageLogReader,
        state: BucketState,
        disk: Disk,
        reckoner: Reckoner,
        log_id: str,
    ) -> None:
        self._config, self._options = config, options
        self._reader, self._state, self._reckoner = reader, state, reckoner
        self._first = Register(disk, f"{reader.path}/penstock-first")
        self._ages = HistoryAgesFile(disk, f"{folder}/ages.json")
        self._owner = bytes.fromhex(log_id)
        self._age_ns = int(config.max_age_seconds * 1e9)
        self._tended_ns: int | None = None
        self._wrote: list[tuple[int, int]] = []  # (revision, when) of what was written here since it was tended

    def first_revision(self) -> int:
        """Return the first revision whose change can still be read."""
        return max(self._reader.first_position, min(self._forgotten(), self._state.revision + 1))

    def idle(self, size: int) -> bool:
        """Whether nothing is due after ``size`` more bytes in the active segment."""
        return self._state.unsaved_bytes + size < self._options.checkpoint_bytes and not self._age_due()

    def wrote(self, revision: int) -> None:
        """Take note that this revision is being written now, so that its age is known later."""
        if self._age_ns:
            add_mark(self._wrote, revision, self._reckoner.monotonic_ns(), self._age_ns)

    def tend(self, log: SharedLog) -> None:
        """Write state.snap if it is time, and let old history go."""
        state, limit = self._state, self._config.max_bytes
        if state.unsaved_bytes >= max(self._options.checkpoint_bytes, state.live_bytes) and not state.saved_elsewhere():
            self._checkpoint(log)
        first = 0
        if limit > 0:
            total = log.total_bytes
            for last, size in log.sealed_ends:
                if total <= limit:
                    break
                total, first = total - size, last + 1
        first = max(first, self._aged())
        if first:
            self.forget(log, first)

    def forget(self, log: SharedLog, first: int) -> None:
        """Note that history begins at ``first``, and drop the segments below that state.snap covers."""
        if first > self._forgotten():
            self._first.write(self._owner, first)
        ends = [last for last, _ in log.sealed_ends if last < first]
        if ends:
            if ends[-1] > self._state.saved:
                self._checkpoint(log)
            log.drop_before(first)

    def save(self, log: SharedLog) -> None:
        """Write state.snap now."""
        self._checkpoint(log)

    def close(self) -> None:
        """Let go of the file."""
        self._first.close()

    def _age_due(self) -> bool:
        if not self._age_ns:
            return False
        if self._tended_ns is None:
            return True
        return self._reckoner.monotonic_ns() - self._tended_ns >= min(self._age_ns // 4, TEND_NS)

    def _aged(self) -> int:
        """Return the first revision that is not too old; 0 if none is, or it is not time to look."""
        if not self._age_due():
            return 0
        now = self._reckoner.moment()
        self._tended_ns = now.monotonic_ns
        try:
            before = self._ages.read()
        except CorruptionError:  # ages are no data: they begin anew, and history is kept that much longer
            before = None
        seen, self._wrote = self._wrote, []
        ages, first = advance(before, now, self._age_ns, self._state.revision, seen)
        self._ages.write(ages)
        return first

    def _checkpoint(self, log: SharedLog) -> None:
        log.sync()
        self._state.save()
        CHECKPOINTS.add(bucket=self._config.name)

    def _forgotten(self) -> int:
        found = self._first.read()
        return found[1] if found is not None and found[0] == self._owner else 1
