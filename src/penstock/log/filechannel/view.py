"""What hands out receivers, and a channel seen from beside its writer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

from penstock.disk import Backoff, ClosingHandle, Disk, Lock
from penstock.errors import ClosedError, CorruptionError, ExpiredError, LockedError, OptionsError
from penstock.log.filechannel.ack import AckReceiver, Bury
from penstock.log.filechannel.log import check_same, end_of
from penstock.log.filechannel.options import ChannelOptions
from penstock.log.filechannel.receiver import OnDamage, Receiver, Start, aligned, resolve
from penstock.log.filechannel.segments import Folder
from penstock.log.sidecar import Register, Sidecar

__all__ = ["ChannelReceivers", "ChannelView"]

logger = logging.getLogger(__name__)
BURY_SECONDS: Final = 5.0
"""How long a dead letter waits for others who write there."""


class ChannelReceivers(ClosingHandle):
    """What a writer's channel and one looking on have in common: handing out receivers."""

    path: str
    folder: Folder

    def __init__(self, path: str, disk: Disk) -> None:
        super().__init__()
        self.path, self._disk = path, disk
        self.folder = Folder(disk, path)
        self._sidecar = Sidecar(disk, path + "/penstock-")
        # By id, because a list of its values is made in one step: others open and close receivers meanwhile.
        self._receivers: weakref.WeakValueDictionary[int, Receiver] = weakref.WeakValueDictionary()

    @property
    def visible(self) -> int | None:
        """The bound of what may be read, where it is known."""
        raise NotImplementedError

    @property
    def closed(self) -> str:
        """Why nothing more will come, or nothing."""
        raise NotImplementedError

    def end(self) -> int:
        """Where the channel ends now."""
        raise NotImplementedError

    def wait(self, look: Callable[[], bool], gone: Callable[[], bool], position: int, timeout: float | None) -> bool:
        """Wait for a message at ``position``; used by receivers."""
        raise NotImplementedError

    async def arrival(self, position: int, timeout: float | None, backoff: Backoff) -> None:
        """Wait a while for a message at ``position``, on an event loop; used by receivers."""
        raise NotImplementedError

    def moved(self, position: int) -> None:
        """Note that a receiver has passed everything below ``position``; used by receivers."""

    def still(self) -> contextlib.AbstractContextManager[Any]:
        """Collect nothing while a receiver finds its place, where that is in our power; used by receivers."""
        return contextlib.nullcontext()

    def joined(self, receiver: Receiver) -> None:
        """Note that a receiver was opened."""
        self._receivers[id(receiver)] = receiver

    def left(self, receiver: Receiver) -> None:
        """Note that a receiver was closed; used by receivers."""
        self._receivers.pop(id(receiver), None)

    def open_receivers(self) -> list[Receiver]:
        """Return the receivers that are open now; one that nobody has any more is not."""
        return [receiver for ref in self._receivers.valuerefs() if (receiver := ref()) is not None]

    def rx(self, start: Start | int = "first", *, on_damage: OnDamage = "raise") -> Receiver:
        """Return a receiver of everything from ``start`` on: ``first``, ``latest``, or a position."""
        self._check_open()
        with self.still():
            receiver = Receiver(self, resolve(self, start), on_damage)
            self.joined(receiver)
        return receiver

    def ack_rx(
        self,
        name: str | None = None,
        start: Start | int = "first",
        *,
        on_damage: OnDamage = "raise",
        max_tries: int = 0,
        dead_letters: str | os.PathLike[str] | None = None,
    ) -> AckReceiver:
        """Return a receiver that acknowledges.

        With a ``name`` it goes on where the last one of that name had acknowledged, and ``start`` counts only the
        first time.  One receiver a name: LockedError while another has it.  With ``max_tries`` a message that was
        ``nack``-ed so often goes to ``dead_letters``, a channel beside this one (``<path>-dead``) unless given.
        """
        self._check_open()
        if max_tries < 0:
            raise OptionsError(f"max_tries={max_tries}: must not be negative")
        target = os.fspath(dead_letters) if dead_letters is not None else self.path + "-dead"
        bury = (lambda payloads: _bury(target, payloads, self._disk)) if max_tries else None
        with self.still():
            if name is None:
                receiver = AckReceiver(self, resolve(self, start), on_damage, max_tries=max_tries, bury=bury)
            else:
                receiver = self._named(name, start, on_damage, max_tries, bury)
            self.joined(receiver)
        return receiver

    def _named(
        self, name: str, start: Start | int, on_damage: OnDamage, max_tries: int, bury: Bury | None
    ) -> AckReceiver:
        self._known(name)  # refuses what is no name
        lock = self._lock_name(name)
        try:
            known = self._known(name)
            position = resolve(self, start) if known is None else self._resume(name, known)
            identity = self._sidecar.identity()
            log_id = bytes(16) if identity is None else bytes.fromhex(identity.log_id)
            register = Register(self._disk, f"{self._sidecar.prefix}cursor-{name}")
            register.write(log_id, position)  # from now on it holds, here and for every other process
            while position < (first := self.folder.first_position()):  # collected just before that
                position = first
                register.write(log_id, position)
            return AckReceiver(
                self, position, on_damage, name=name, register=register, log_id=log_id, lock=lock,
                durable=self._durable_acks, max_tries=max_tries, bury=bury,
            )  # fmt: skip
        except BaseException:
            lock.release()
            raise

    def forget(self, name: str) -> None:
        """Remove a named receiver for good: it holds nothing any more.  LockedError while it is open."""
        self._check_open()
        if name not in self._sidecar.cursor_names():
            raise OptionsError(f"{self.path}: there is no receiver named {name!r}")
        lock = self._lock_name(name)
        try:
            self._sidecar.remove_cursor(name)
        finally:
            lock.release()  # its file stays: whoever waits for it would have another lock than the next one

    _durable_acks = False

    def _lock_name(self, name: str) -> Lock:
        try:
            return self._disk.lock(f"{self._sidecar.prefix}lock-{name}")
        except LockedError:
            raise LockedError(f"{self.path}: another receiver is named {name!r} at the moment") from None

    def _known(self, name: str) -> int | None:
        try:
            return self._sidecar.read_cursor(name)
        except CorruptionError as exc:
            logger.warning("%s; receiver %r starts at the first message", exc, name)
            self._disk.remove(exc.file)
            return None

    def _resume(self, name: str, position: int) -> int:
        """Return where a named receiver goes on: at its cursor, or safely before it."""
        end = self.end()
        if position > end:
            logger.warning("%s: receiver %r was at %d, the channel ends at %d", self.path, name, position, end)
            return end
        try:
            if aligned(self.folder, position, self.visible):
                return position
        except ExpiredError as exc:
            logger.warning("%s: receiver %r lost the messages from %d to %d to a bound of the channel",
                           self.path, name, position, exc.first)  # fmt: skip
            return exc.first
        indexes = list(self.folder.files())
        place = self.folder.locate(indexes, position) or 0
        begin = self.folder.begin(indexes[place]) or 0
        logger.warning("%s: no message begins at %d, where receiver %r was; it starts again at %d",
                       self.path, position, name, begin)  # fmt: skip
        return begin

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{self.path}: {self.closed}")


class ChannelView(ChannelReceivers):
    """A channel seen from beside its writer: receivers wait by looking, and no segment is ever changed.

    Named receivers work here too: their cursors are files, and the writer collects nothing they still need.

    >>> import tempfile
    >>> from penstock.log.filechannel import FileChannel
    >>> folder = tempfile.TemporaryDirectory()
    >>> channel = FileChannel.open(folder.name)
    >>> view = FileChannel.attach(folder.name)
    >>> rx = view.ack_rx("mirror")
    >>> position = channel.append(b"hello")
    >>> rx.recv(timeout=5)
    b'hello'
    >>> rx.ack(); channel.stats().lag_bytes
    {'mirror': 0}
    >>> view.close(); channel.close(); folder.cleanup()
    """

    def __init__(self, path: str, disk: Disk) -> None:
        super().__init__(path, disk)
        self._dead = ""
        self._ends: dict[int, int] = {}
        found = disk.stat(path)
        if found is None or not found.is_folder:
            raise OptionsError(f"{path}: there is no channel here")
        identity = self._sidecar.identity()
        self._log_id = None if identity is None else identity.log_id

    @property
    def visible(self) -> None:
        """Only the writer knows it; what is whole is read."""
        return None

    @property
    def closed(self) -> str:
        """Whether this view was closed."""
        return self._dead

    def end(self) -> int:
        """Where the channel ends now: this walks the newest segment."""
        return end_of(self.folder, self._ends)

    def wait(self, look: Callable[[], bool], gone: Callable[[], bool], position: int, timeout: float | None) -> bool:
        """Look again and again, at most a hundred times a second; used by receivers."""
        del gone, position

        def ready() -> bool:
            if self._dead or look():
                return True
            check_same(self._sidecar, self.path, self._log_id)
            return False

        return Backoff().wait(ready, timeout) and not self._dead

    async def arrival(self, position: int, timeout: float | None, backoff: Backoff) -> None:
        """Sleep a little; used by receivers."""
        del position
        check_same(self._sidecar, self.path, self._log_id)
        await asyncio.sleep(backoff.delay(timeout))

    def close(self) -> None:
        """Close its receivers."""
        self._dead = self._dead or "the view of the channel is closed"
        for receiver in self.open_receivers():
            receiver.close()
        self._sidecar.close()

    def forked(self) -> None:
        """Close in the child of a fork."""
        self._dead = "the view was opened before a fork: open its own in the child"


def _bury(path: str, payloads: list[bytes], disk: Disk) -> None:
    """Append to the channel of dead letters, durably; other receivers may be at it, each for a moment."""
    from penstock.log.filechannel.channel import FileChannel

    options, backoff = ChannelOptions(sync="always", compression="none"), Backoff()
    deadline = time.monotonic() + BURY_SECONDS
    while True:
        try:
            dead = FileChannel.open(path, options, disk=disk)
            break
        except LockedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(backoff.delay())
    with dead:
        dead.append_many(payloads)
