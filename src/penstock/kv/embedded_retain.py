"""What an embedded bucket keeps: when state.snap is written, and when history goes.

What must stay true:

1. state.snap never names a revision that a power cut could take out of the log: the log is synced first.
2. A segment goes only when state.snap covers it.  So retention takes history and never a live key.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from penstock.disk import Disk
from penstock.kv.embedded_options import EmbeddedOptions
from penstock.kv.embedded_state import BucketState
from penstock.kv.roles import StoreConfig
from penstock.log.messagelog import MessageLogReader
from penstock.log.messagelog.shared import SharedLog
from penstock.log.options import DEFAULT_LIMIT
from penstock.log.sidecar import Register
from penstock.metrics import REGISTRY

__all__ = ["Retention"]

CHECKPOINTS: Final = REGISTRY.counter("bucket_checkpoints", "times a state.snap was written", labels=("bucket",))

TEND_NS: Final = 1_000_000_000


class Retention:
    """The rules of one bucket; ``tend`` and ``forget`` are called inside of a turn that has applied everything."""

    def __init__(
        self,
        config: StoreConfig,
        options: EmbeddedOptions,
        log: SharedLog,
        reader: MessageLogReader,
        state: BucketState,
        disk: Disk,
    ) -> None:
        self._config, self._options = config, options
        self._log, self._reader, self._state = log, reader, state
        self._first = Register(disk, f"{log.path}/penstock-first")
        self._owner = bytes.fromhex(log.log_id)
        self._age_ns = int(config.max_age_seconds * 1e9)
        self._tended_ns = 0

    def first_revision(self) -> int:
        """Return the first revision whose change can still be read."""
        return max(self._reader.first_position, min(self._forgotten(), self._state.revision + 1))

    def idle(self, size: int, now_ns: int) -> bool:
        """Whether nothing is due after ``size`` more bytes in the active segment."""
        return self._state.unsaved_bytes + size < self._options.checkpoint_bytes and not self._age_due(now_ns)

    def tend(self, now_ns: int) -> None:
        """Write state.snap if it is time, and let old history go."""
        state, limit = self._state, self._config.max_bytes
        if state.unsaved_bytes >= max(self._options.checkpoint_bytes, state.live_bytes) and not state.saved_elsewhere():
            self._checkpoint()
        first = 0
        if limit > 0:
            total = self._log.total_bytes
            for last, size in self._log.sealed_ends:
                if total <= limit:
                    break
                total, first = total - size, last + 1
        if self._age_due(now_ns):
            self._tended_ns = now_ns
            first = max(first, self._older_than(now_ns - self._age_ns))
        if first:
            self.forget(first)

    def forget(self, first: int) -> None:
        """Note that history begins at ``first``, and drop the segments below that state.snap covers."""
        if first > self._forgotten():
            self._first.write(self._owner, first)
        ends = [last for last, _ in self._log.sealed_ends if last < first]
        if ends:
            if ends[-1] > self._state.saved:
                self._checkpoint()
            self._log.drop_before(first)

    def close(self) -> None:
        """Let go of the file."""
        self._first.close()

    def _age_due(self, now_ns: int) -> bool:
        return bool(self._age_ns) and now_ns - self._tended_ns >= min(self._age_ns // 4, TEND_NS)

    def _checkpoint(self) -> None:
        self._log.sync()
        self._state.save()
        CHECKPOINTS.add(bucket=self._config.name)

    def _older_than(self, cutoff_ns: int) -> int:
        """Return the first revision that is not older than this, or the next one."""
        first = self.first_revision()
        while True:
            batch = self._reader.read(first, DEFAULT_LIMIT)
            if not len(batch):
                return first
            assert batch.timestamps is not None
            old = int(np.searchsorted(batch.timestamps, np.uint64(max(cutoff_ns, 0))))
            if old < len(batch):
                return int(batch.positions[old])
            first = batch.next_position

    def _forgotten(self) -> int:
        found = self._first.read()
        return found[1] if found is not None and found[0] == self._owner else 1
