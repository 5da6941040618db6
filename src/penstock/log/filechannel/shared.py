"""A queue that several processes send into, one turn at a time.

A FileChannel holds the lock as long as it is open.  Here the lock is held for a turn, and a turn begins by looking at
what others have sent meanwhile:

    nothing                     the newest segment is as long as it was, and the newest: two stats
    messages                    walk over the new bytes only
    segments, or half a frame   find the end as opening does: somebody rolled, or died in the middle of a write

The lock is the one of the original: while it, or a FileChannel, owns the queue, nobody here has a turn.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.disk import Disk, File, Turns
from penstock.errors import LockedError, OptionsError, ReplacedError, Timeout
from penstock.log.filechannel.format import HEADER_BYTES, segment_path
from penstock.log.filechannel.opening import find_end, make_folder
from penstock.log.filechannel.options import ChannelOptions
from penstock.log.filechannel.patient import PatientSpool
from penstock.log.filechannel.recover import Tail, find_tail, walk_to_end
from penstock.log.filechannel.retain import Retention
from penstock.log.filechannel.segments import Folder
from penstock.log.filechannel.sender import Sender
from penstock.log.filechannel.spool import Spool
from penstock.log.filechannel.stats import ChannelStats, stats_of
from penstock.log.filechannel.view import ChannelView
from penstock.log.sidecar import Sidecar
from penstock.types import Problem

__all__ = ["SharedChannel", "SharedSpool"]

logger = logging.getLogger(__name__)

TURN_SECONDS: Final = 10.0
"""How long a send waits for its turn, unless it is told otherwise."""
LINE: Final = "penstock-line"


class SharedSpool(Spool):
    """The end of a queue that other processes append to as well: every send is a turn."""

    def __init__(
        self, disk: Disk, path: str, options: ChannelOptions, sidecar: Sidecar, tail: Tail, turns: Turns,
        folder: Folder, **hooks: Any,
    ) -> None:  # fmt: skip
        self._turns, self._folder = turns, folder
        super().__init__(disk, path, options, sidecar, tail, **hooks)
        self._syncs_names = True  # whoever syncs next may be another process, and does not know what this one made
        self._identity = self._file.stat().identity
        self.changed = False
        """Whether the last turn found something that others had done."""

    def _wants_room(self) -> bool:
        return False  # others look at the length of the file

    def check_whole(self, *, named: bool = False) -> None:
        """Do nothing: each turn looks which file the segment is, and how long."""
        del named

    def append_at_once(self, payload: Any) -> None:
        """Return None: a turn may have to be waited for, so nothing is sent on an event loop."""
        del payload

    def _take(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        super()._take(timeout)
        try:
            left = TURN_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
            self._begin_turn(left)
        except BaseException:
            self._lock.release()
            raise

    def _begin_turn(self, seconds: float) -> None:
        try:
            self._turns.take(seconds)
        except FileNotFoundError:
            raise ReplacedError(self.path, "its folder is gone") from None
        except Timeout as exc:
            raise Timeout(f"{exc}; nothing was sent within {seconds:.3g} s") from None
        try:
            self._catch_up()
        except BaseException:
            self._turns.release()
            raise

    def _give(self) -> None:
        self._turns.release()
        super()._give()

    def _make_segment(self, index: int, begin: int) -> File:
        file = super()._make_segment(index, begin)
        self._identity = file.stat().identity
        return file

    def _catch_up(self) -> None:
        """Find the end of the queue, wherever others have moved it."""
        found = self._disk.stat(segment_path(self.path, self.index))
        self.changed = False
        if found is not None and found.identity == self._identity:
            newest = self._disk.stat(segment_path(self.path, self.index + 1)) is None
            if newest and found.size == HEADER_BYTES + self.end - self.begin:
                return
            if newest and found.size > HEADER_BYTES + self.end - self.begin:
                end, _ = walk_to_end(self._file, self.begin, found.size, None, self.end)
                if HEADER_BYTES + end - self.begin == found.size:
                    self._stand(self.index, self.begin, end)
                    return
        self._check_same()
        tail, _ = find_tail(self._disk, self._folder, self._sidecar)
        if tail.end < self.end:
            logger.warning("%s: it ended at %d, and ends at %d now: somebody cut it", self.path, self.end, tail.end)
        self._file.close()
        self.index = tail.index
        self._file = self._open_segment() if tail.exists else self._make_segment(tail.index, tail.begin)
        self._identity = self._file.stat().identity
        self._stand(tail.index, tail.begin, tail.end)

    def _stand(self, index: int, begin: int, end: int) -> None:
        self.index, self.begin, self.end, self.visible = index, begin, end, end
        self._must_rotate = False
        if index not in self._unsynced:
            self._unsynced.append(index)
        self.changed = True

    def _check_same(self) -> None:
        identity = self._sidecar.identity()
        if identity is None or (self._log_id is not None and identity.log_id != self._log_id):
            raise ReplacedError(self.path, "its log id changed" if identity else "its folder is gone")

    _log_id: str | None = None

    def forked(self) -> None:
        """Close in the child of a fork; a turn under way stays the parent's."""
        super().forked()
        self._turns.close()


class PatientSharedSpool(PatientSpool, SharedSpool):
    """A shared spool whose sends wait for room at a bound instead of being refused."""


class SharedChannel(ChannelView):
    """A queue that this process and others send into, a turn each; receivers and groups as beside an owner.

    A single send costs about twice what it costs the only owner, and sealed segments stay plain: the next owner, or
    ``penstock compact``, compresses them.

    >>> import tempfile
    >>> from penstock.log.filechannel import FileChannel
    >>> folder = tempfile.TemporaryDirectory()
    >>> one, two = FileChannel.share(folder.name + "/jobs"), FileChannel.share(folder.name + "/jobs")
    >>> one.append(b"from one"), two.append(b"from two")
    (0, 16)
    >>> one.rx().recv_many().to_payloads()
    [b'from one', b'from two']
    >>> one.close(); two.close(); folder.cleanup()
    """

    def __init__(self, path: str, options: ChannelOptions, disk: Disk) -> None:
        if options.flush_seconds:
            raise OptionsError(f"{path}: flush_seconds={options.flush_seconds}: what is shared is visible at once")
        make_folder(disk, path, options)
        self.options = options
        turns = Turns(disk, f"{path}/lock", f"{path}/{LINE}", path, of=path)
        try:
            turns.take(TURN_SECONDS)
        except Timeout:
            turns.close()
            raise LockedError(
                f"{path}: one process owns this queue and keeps it; with FileChannel.share there, others may send too"
            ) from None
        try:
            folder, sidecar = Folder(disk, path), Sidecar(disk, path + "/penstock-")
            tail, problems = find_end(disk, folder, sidecar, options)
            super().__init__(path, disk)
            self.problems: list[Problem] = problems
            self._retention = Retention(disk, folder, options, sidecar, self.open_receivers)
            bounded = bool(options.keep_bytes or options.keep_seconds)
            kind = PatientSharedSpool if bounded and options.policy == "block" else SharedSpool
            self._spool: SharedSpool = kind(
                disk, path, options, self._sidecar, tail, turns, folder,
                admit=self._admit if bounded else None, rotated=self._retention.rotated,
            )  # fmt: skip
            spool = self._spool
            spool._log_id = self._end.log_id
            self._retention.newest = lambda: spool.index
            self._retention.end = lambda: spool.end
            self._retention.measure()
            self._durable_acks = options.sync == "always"
        except BaseException:
            turns.close()
            raise
        turns.release()
        self._turns = turns

    # --- Sending

    def tx(self) -> Sender:
        """Return a sender."""
        self._check_open()
        return Sender(self._spool)

    def append(self, payload: Any, timeout: float | None = None) -> int:
        """Send one message in a turn of its own and return its position."""
        return self._spool.append(payload, timeout)

    def append_many(self, payloads: Any, timeout: float | None = None) -> NDArray[np.int64]:
        """Send many messages in one turn and return their positions."""
        return self._spool.append_many(payloads, timeout)

    def sync(self) -> int:
        """Return when everything sent so far survives a power cut, with the position that bounds it."""
        return self._spool.sync()

    def rotate(self) -> None:
        """Seal the newest segment and go on in a new one, if it has any message."""
        self._spool.rotate()

    def gc(self) -> int:
        """Remove the segments that every named receiver and group has passed; return how many."""
        self._check_open()
        self._spool._take(None)
        try:
            return self._retention.collect()
        finally:
            self._spool._give()

    def stats(self) -> ChannelStats:
        """Return where the queue and its receivers stand."""
        self._check_open()
        self._spool._take(None)
        try:
            return stats_of(self.folder, self._spool, self._retention, self._sidecar)
        finally:
            self._spool._give()

    def _admit(self, size: int) -> None:
        if self._spool.changed:
            self._retention.measure()
        self._retention.admit(size)

    def _send_again(self, payloads: list[bytes]) -> None:
        self.append_many(payloads)
        self.sync()

    # --- Open and closed

    def close(self) -> None:
        """Sync once more if that is promised, close its receivers and groups."""
        if self._spool.closed:
            return
        try:
            super().close()
        finally:
            with contextlib.suppress(ReplacedError):
                self._spool.close()
            self._turns.close()

    def forked(self) -> None:
        """Close in the child of a fork."""
        super().forked()
        if hasattr(self, "_spool"):
            self._spool.forked()

    def __repr__(self) -> str:
        return f"<SharedChannel {self.path} {self._spool.closed or f'at {self._spool.end}'}>"
