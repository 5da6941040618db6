"""A channel in a folder: opening it, and what hangs together in one process."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.disk import Disk, Lock, Owned, disk_for, when_there
from penstock.errors import LockedError, OptionsError, PenstockError
from penstock.log.filechannel.ack import AckReceiver
from penstock.log.filechannel.ends import OwnedEnd
from penstock.log.filechannel.format import LARGEST, segment_path
from penstock.log.filechannel.handle import QueueHandle
from penstock.log.filechannel.opening import find_end, make_folder
from penstock.log.filechannel.options import ChannelOptions
from penstock.log.filechannel.packer import Packer
from penstock.log.filechannel.patient import PatientSpool
from penstock.log.filechannel.receiver import Receiver
from penstock.log.filechannel.retain import Retention
from penstock.log.filechannel.sender import Sender
from penstock.log.filechannel.shared import SharedChannel
from penstock.log.filechannel.spool import Spool
from penstock.log.filechannel.stats import ChannelStats, stats_of
from penstock.log.filechannel.view import ChannelView
from penstock.log.writers import note_writer
from penstock.options import options_from, shows_options
from penstock.types import Problem

__all__ = ["FileChannel"]


class FileChannel(QueueHandle):
    """A durable queue in a folder, owned by this process: senders, receivers, and the log's writer face.

    Byte-compatible with risingwavelabs/filechannel.  Safe to use from several threads.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with FileChannel.open(folder.name + "/jobs", segment_bytes=1 << 20) as channel:
    ...     tx, rx = channel.tx(), channel.rx()
    ...     position = tx.send(b"hello")
    ...     rx.recv(timeout=1), channel.stats().write_position
    (b'hello', 13)
    >>> folder.cleanup()
    """

    has_times = False
    largest_message = LARGEST

    def __init__(self, path: str, options: ChannelOptions, disk: Disk) -> None:
        super().__init__(path, disk)
        self.options = options
        self.problems: list[Problem] = []
        """What opening it trimmed or set aside."""
        make_folder(disk, path, options)
        self._held: Lock = self._take_lock()
        self._owned = Owned(disk, path)
        try:
            self._open()
        except BaseException:
            if hasattr(self, "_spool"):
                with contextlib.suppress(OSError, PenstockError):
                    self._spool.close()
            self._sidecar.close()
            self._owned.release()
            self._held.release()
            raise
        note_writer(disk, path, self)

    @classmethod
    @shows_options(ChannelOptions)
    def open(
        cls,
        path: str | os.PathLike[str],
        options: ChannelOptions | None = None,
        *,
        disk: Disk | None = None,
        **given: Any,
    ) -> FileChannel:
        """Open a channel, made if it is not there; LockedError while another process or handle has it.

        Options as keywords or as one object; ChannelOptions says what each means.
        """
        options = options_from(ChannelOptions, options, given)
        return cls(os.fspath(path).rstrip("/") or "/", options, disk or disk_for(path))

    @staticmethod
    @shows_options(ChannelOptions)
    def share(
        path: str | os.PathLike[str],
        options: ChannelOptions | None = None,
        *,
        disk: Disk | None = None,
        **given: Any,
    ) -> SharedChannel:
        """Open a channel that any number of processes send into, a turn each; made if it is not there.

        Options as keywords or as one object; ChannelOptions says what each means.
        """
        options = options_from(ChannelOptions, options, given)
        return SharedChannel(os.fspath(path).rstrip("/") or "/", options, disk or disk_for(path))

    @staticmethod
    def attach(path: str | os.PathLike[str], *, timeout: float | None = 0.0, disk: Disk | None = None) -> ChannelView:
        """Look on at a channel that another process owns, or nobody: receivers and groups, and nothing is sent.

        For one that nobody has made yet it waits up to ``timeout`` seconds, None for ever; then NotFoundError.
        """
        return when_there(lambda: ChannelView(os.fspath(path).rstrip("/") or "/", disk or disk_for(path)), timeout)

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
        if timestamp_ns is not None:
            raise OptionsError(f"{self.path}: timestamp_ns={timestamp_ns}: a filechannel has no room for times")
        if kind:
            raise OptionsError(f"{self.path}: kind={kind}: a filechannel has no room for kinds")
        return self._spool.append(payload)

    def append_many(self, payloads: Any, *, kind: Any = 0, timestamp_ns: Any = None) -> NDArray[np.int64]:
        """Send many messages and return their positions."""
        if timestamp_ns is not None:
            raise OptionsError(f"{self.path}: timestamp_ns: a filechannel has no room for times")
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

    def _send_again(self, payloads: list[bytes]) -> None:
        self._spool.append_many(payloads)
        self._spool.sync()

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
        return stats_of(self.folder, self._spool, self._retention, self._sidecar)

    def _left(self, receiver: Receiver) -> None:
        """Let go of what a closed receiver held alone."""
        super()._left(receiver)
        self._spool.wake_all()  # it may be waiting in another thread or task
        if self.options.collect and not self._spool.closed:
            self._retention.collect()

    # --- Open and closed

    def _take_lock(self) -> Lock:
        try:
            return self._disk.lock(self.path + "/lock", of=self.path)
        except LockedError:
            raise LockedError(f"{self.path}: another process or handle has this channel open") from None

    def _newest_segment(self) -> str | None:
        """Return the path of the segment that is written to, None when there is none."""
        plain = [index for index, files in self.folder.files().items() if files.plain]
        return segment_path(self.path, max(plain)) if plain else None

    def _open(self) -> None:
        options, disk = self.options, self._disk
        self._owned.take(self._newest_segment())
        tail, self.problems = find_end(disk, self.folder, self._sidecar, options)
        self._retention = Retention(disk, self.folder, options, self._sidecar, self.open_receivers)
        bounded = bool(options.keep_bytes or options.keep_seconds)
        self._packer: Packer | None = None
        if options.compression != "none":
            self._packer = Packer(disk, self.folder, options.compression, self._retention)
        self._spool = (PatientSpool if bounded and options.policy == "block" else Spool)(
            disk, self.path, options, self._sidecar, tail, self._owned,
            admit=self._retention.admit if bounded else None, rotated=self._rotated,
        )  # fmt: skip
        spool = self._spool
        self._end: OwnedEnd = OwnedEnd(self.folder, spool, self._retention)
        self._retention.newest = lambda: spool.index
        self._retention.end = lambda: spool.end
        self._retention.measure()
        self._durable_acks = options.sync == "always"
        if self._packer is not None and any(
            files.plain and index < spool.index - 1 for index, files in self.folder.files().items()
        ):
            self._packer.kick()

    def _rotated(self) -> None:
        self._retention.rotated()
        if self._packer is not None:
            self._packer.kick()

    def close(self) -> None:
        """Flush, stop background work, let go of the lock.  Receivers without a name can read on to the end."""
        if self._spool.closed:
            return
        self._close_groups()
        try:
            self._spool.close()
        finally:
            if self._packer is not None:
                self._packer.close()
            for receiver in self.open_receivers():
                if isinstance(receiver, AckReceiver) and receiver.name is not None:
                    receiver.close()  # its name is free for the next one
            self._sidecar.close()
            self._owned.release()
            self._held.release()

    def forked(self) -> None:
        """Close in the child of a fork; the channel and its lock stay the parent's."""
        if not hasattr(self, "_spool"):
            return  # it could not be opened, or another thread is just about to: nobody has it here
        self._spool.forked()
        if self._packer is not None:
            self._packer.forked()
        self._retention.mutex = threading.RLock()
        self._owned.release()
        self._held.release()

    def __repr__(self) -> str:
        return f"<FileChannel {self.path} {self._spool.closed or f'at {self._spool.end}'}>"
