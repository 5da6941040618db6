"""A channel in a folder: opening it, and what hangs together in one process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.disk import Backoff, Disk, Lock, PosixDisk
from penstock.disk.posix import folder_of
from penstock.errors import CorruptionError, LockedError, OptionsError, PenstockError
from penstock.log.filechannel.ack import AckReceiver
from penstock.log.filechannel.options import ChannelOptions
from penstock.log.filechannel.packer import Packer
from penstock.log.filechannel.receiver import Receiver
from penstock.log.filechannel.recover import find_tail, readable_cursors
from penstock.log.filechannel.retain import Retention
from penstock.log.filechannel.sender import Sender
from penstock.log.filechannel.spool import PatientSpool, Spool
from penstock.log.filechannel.view import ChannelReceivers, ChannelView
from penstock.types import Problem

__all__ = ["FileChannel", "ChannelStats"]

logger = logging.getLogger(__name__)


class ChannelStats(msgspec.Struct, frozen=True):
    """Where a channel and its receivers stand; positions are exclusive bounds.

    >>> ChannelStats(0, 22, 22, None, 1, 86, {"billing": 11}, {"billing": 11}, None).lag_bytes
    {'billing': 11}
    """

    first_position: int
    write_position: int
    visible_position: int
    durable_position: int | None
    segments: int
    disk_bytes: int
    receivers: dict[str, int]
    """What each named receiver, open or away, and each open one without a name holds from."""
    lag_bytes: dict[str, int]
    error: str | None
    """Why nothing more can be sent."""


class FileChannel(ChannelReceivers):
    """A durable queue in a folder, owned by this process: senders, receivers, and the log's writer face.

    Byte-compatible with risingwavelabs/filechannel.  Safe to use from several threads.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with FileChannel.open(folder.name + "/jobs", ChannelOptions(segment_bytes=1 << 20)) as channel:
    ...     tx, rx = channel.tx(), channel.rx()
    ...     position = tx.send(b"hello")
    ...     rx.recv(timeout=1), channel.stats().write_position
    (b'hello', 13)
    >>> folder.cleanup()
    """

    def __init__(self, path: str, options: ChannelOptions, disk: Disk) -> None:
        super().__init__(path, disk)
        self.options = options
        self.problems: list[Problem] = []
        """What opening it trimmed or set aside."""
        if options.create:
            disk.make_folder(path)
            if options.sync != "none":
                disk.sync_folder(folder_of(path))
        elif disk.stat(path) is None:
            raise OptionsError(f"{path}: there is no channel here, and it is not to be created")
        self._held: Lock = self._take_lock()
        try:
            self._open()
        except BaseException:
            if hasattr(self, "_spool"):
                with contextlib.suppress(OSError, PenstockError):
                    self._spool.close()
            self._sidecar.close()
            self._held.release()
            raise

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], options: ChannelOptions | None = None, *, disk: Disk | None = None
    ) -> FileChannel:
        """Open a channel, made if it is not there; LockedError while another process or handle has it."""
        return cls(os.fspath(path).rstrip("/") or "/", options or ChannelOptions(), disk or PosixDisk())

    @staticmethod
    def attach(path: str | os.PathLike[str], *, disk: Disk | None = None) -> ChannelView:
        """Look on at a channel that another process owns, or nobody: receivers, and nothing is sent."""
        return ChannelView(os.fspath(path).rstrip("/") or "/", disk or PosixDisk())

    # --- Receivers

    def forget(self, name: str) -> None:
        """Remove a named receiver for good: it holds nothing any more.  LockedError while it is open."""
        super().forget(name)
        if self.options.collect:
            self._retention.collect()

    # --- Senders, and the face of a log's writer

    def tx(self) -> Sender:
        """Return a sender."""
        self._check_open()
        return Sender(self._spool)

    def append(self, payload: Any, *, kind: int = 0, timestamp_ns: int | None = None) -> int:
        """Send one message and return its position; this format keeps no kind and no time."""
        del timestamp_ns
        if kind:
            raise OptionsError(f"{self.path}: kind={kind}: a filechannel has no room for kinds")
        return self._spool.append(payload)

    def append_many(self, payloads: Any, *, kind: Any = 0, timestamp_ns: Any = None) -> NDArray[np.int64]:
        """Send many messages and return their positions."""
        del timestamp_ns
        if np.any(kind):
            raise OptionsError(f"{self.path}: kind: a filechannel has no room for kinds")
        return self._spool.append_many(payloads)

    def flush(self) -> None:
        """Make everything sent visible; needed only with ``flush_seconds``."""
        self._check_open()
        self._spool.flush()

    def sync(self) -> int:
        """Return when everything sent so far survives a power cut, with the position that bounds it."""
        return self._spool.sync()

    # --- Looking after it

    def rotate(self) -> None:
        """Seal the newest segment and go on in a new one, if it has any message."""
        self._spool.rotate()

    def gc(self) -> int:
        """Remove the segments that every receiver has passed; return how many."""
        self._check_open()
        return self._retention.collect()

    def compact(self) -> int:
        """Compress now what may be compressed; return how many segments."""
        self._check_open()
        return 0 if self._packer is None else self._packer.run(again=True)

    def stats(self) -> ChannelStats:
        """Return where the channel and its receivers stand."""
        self._check_open()
        receivers = self._retention.holding()
        end = self._spool.end
        return ChannelStats(
            first_position=self.folder.first_position(),
            write_position=end,
            visible_position=self._spool.visible,
            durable_position=self._sidecar.durable_position(),
            segments=len(self.folder.files()),
            disk_bytes=self._retention.measure(),
            receivers=receivers,
            lag_bytes={name: max(0, end - position) for name, position in receivers.items()},
            error=self._spool.error,
        )

    # --- For receivers

    def still(self) -> contextlib.AbstractContextManager[Any]:
        """Collect nothing while a receiver finds its place; used by receivers."""
        return self._retention.mutex

    @property
    def visible(self) -> int:
        """Behind the newest message receivers see."""
        return self._spool.visible

    @property
    def closed(self) -> str:
        """Why nothing more will come, or nothing."""
        return self._spool.closed

    def end(self) -> int:
        """Where the channel ends for receivers."""
        return self._spool.visible

    def wait(self, look: Callable[[], bool], gone: Callable[[], bool], position: int, timeout: float | None) -> bool:
        """Wait for a message at ``position``; used by receivers."""
        del look
        return self._spool.wait(gone, position, timeout)

    async def arrival(self, position: int, timeout: float | None, backoff: Backoff) -> None:
        """Wait for a message at ``position`` on an event loop, which whoever sends it wakes; used by receivers."""
        del backoff
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(woken.set)

        self._spool.listen(wake, position)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await woken.wait()
        finally:
            self._spool.unlisten(wake)

    def moved(self, position: int) -> None:
        """Note that a receiver has passed everything below ``position``; used by receivers."""
        if not self._spool.closed:
            self._retention.moved(position)

    def left(self, receiver: Receiver) -> None:
        """Let go of what a closed receiver held alone; used by receivers."""
        super().left(receiver)
        self._spool.wake_all()  # it may be waiting in another thread or task
        if self.options.collect and not self._spool.closed:
            self._retention.collect()

    # --- Open and closed

    def _take_lock(self) -> Lock:
        try:
            return self._disk.lock(self.path + "/lock")
        except LockedError:
            raise LockedError(f"{self.path}: another process or handle has this channel open") from None

    def _open(self) -> None:
        options, disk = self.options, self._disk
        self._sweep()
        self._identify()
        tail, self.problems = find_tail(disk, self.folder, self._sidecar)
        if options.sync == "none":
            self._sidecar.remove_mark()  # from here on nothing is promised that it could tell
        self._retention = Retention(disk, self.folder, options, self._sidecar, self.open_receivers)
        bounded = bool(options.keep_bytes or options.keep_seconds)
        self._packer: Packer | None = None
        if options.compression != "none":
            self._packer = Packer(disk, self.folder, options.compression, self._retention)
        self._spool = (PatientSpool if bounded and options.policy == "block" else Spool)(
            disk, self.path, options, self._sidecar, tail,
            admit=self._retention.admit if bounded else None, rotated=self._rotated,
        )  # fmt: skip
        spool = self._spool
        self._retention.newest = lambda: spool.index
        self._retention.end = lambda: spool.end
        self._retention.measure()
        self._durable_acks = options.sync == "always"
        if self._packer is not None and any(
            files.plain and index < spool.index - 1 for index, files in self.folder.files().items()
        ):
            self._packer.kick()

    def _sweep(self) -> None:
        """Remove what a crash left half made."""
        for name in self._disk.list(self.path):
            if name == "penstock-new" or (name.startswith("segment.") and name.endswith(".z.ing")):
                self._disk.remove(f"{self.path}/{name}")

    def _identify(self) -> None:
        """Give a channel of the original its id; receivers that had looked on before keep their places."""
        try:
            identity = self._sidecar.identity()
        except CorruptionError as exc:
            logger.warning("%s; the channel gets a new id", exc)
            identity = None
        if identity is None:
            cursors = readable_cursors(self._sidecar)
            self._sidecar.create_identity(self.options.content)
            for name, position in cursors.items():
                self._sidecar.write_cursor(name, position)

    def _rotated(self) -> None:
        self._retention.rotated()
        if self._packer is not None:
            self._packer.kick()

    def close(self) -> None:
        """Flush, stop background work, let go of the lock.  Receivers without a name can read on to the end."""
        if self._spool.closed:
            return
        try:
            self._spool.close()
        finally:
            if self._packer is not None:
                self._packer.close()
            for receiver in self.open_receivers():
                if isinstance(receiver, AckReceiver) and receiver.name is not None:
                    receiver.close()  # its name is free for the next one
            self._sidecar.close()
            self._held.release()

    def forked(self) -> None:
        """Close in the child of a fork; the channel and its lock stay the parent's."""
        if not hasattr(self, "_spool"):
            return  # it could not be opened, or another thread is just about to: nobody has it here
        self._spool.forked()
        if self._packer is not None:
            self._packer.forked()
        self._retention.mutex = threading.RLock()
        self._held.release()

    def __repr__(self) -> str:
        return f"<FileChannel {self.path} {self._spool.closed or f'at {self._spool.end}'}>"
