"""What hands out receivers and groups: everything that a queue can be asked for by who reads it."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import Any

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.disk import ClosingHandle, Disk, Lock
from penstock.errors import ClosedError, CorruptionError, ExpiredError, LockedError, OptionsError
from penstock.log.face import OnDamage
from penstock.log.filechannel.ack import AckReceiver, Bury
from penstock.log.filechannel.ends import QueueEnd
from penstock.log.filechannel.group import Group, GroupOptions
from penstock.log.filechannel.group.dead import open_when_free
from penstock.log.filechannel.group.options import check_group_name
from penstock.log.filechannel.group.state import HOLD, remove_group
from penstock.log.filechannel.group.stats import group_names
from penstock.log.filechannel.options import ChannelOptions
from penstock.log.filechannel.receiver import Receiver, aligned, resolve
from penstock.log.filechannel.seen import check_seen
from penstock.log.filechannel.segments import Folder
from penstock.log.fingerprint import Fingerprint
from penstock.log.options import Start
from penstock.log.sidecar import Register, Sidecar
from penstock.options import options_from, shows_options

__all__ = ["QueueHandle"]

logger = logging.getLogger(__name__)


class QueueHandle(ClosingHandle):
    """What a channel of its owner, one looking on and a shared one have in common: handing out receivers and groups."""

    path: str
    folder: Folder
    _end: QueueEnd

    def __init__(self, path: str, disk: Disk) -> None:
        super().__init__()
        self.path, self._disk = path, disk
        self.folder = Folder(disk, path)
        self._sidecar = Sidecar(disk, path + "/penstock-")
        # By id, because a list of its values is made in one step: others open and close receivers meanwhile.
        self._receivers: weakref.WeakValueDictionary[int, Receiver] = weakref.WeakValueDictionary()
        self._groups: dict[str, Group] = {}
        self._groups_mutex = threading.Lock()

    def _left(self, receiver: Receiver) -> None:
        """Note that a receiver was closed."""
        self._receivers.pop(id(receiver), None)

    def open_receivers(self) -> list[Receiver]:
        """Return the receivers that are open now; one that nobody has any more is not."""
        return [receiver for ref in self._receivers.valuerefs() if (receiver := ref()) is not None]

    def rx(self, start: Start | int = "earliest", *, on_damage: OnDamage = "raise") -> Receiver:
        """Return a receiver of everything from ``start`` on: ``earliest``, ``latest``, or a position."""
        self._check_open()
        with self._end.pause_collection():
            receiver = Receiver(self._end, resolve(self._end, start), on_damage, on_close=self._left)
            self._receivers[id(receiver)] = receiver
        return receiver

    def ack_rx(
        self,
        name: str | None = None,
        start: Start | int = "earliest",
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
        with self._end.pause_collection():
            if name is None:
                receiver = AckReceiver(
                    self._end, resolve(self._end, start), on_damage, on_close=self._left, max_tries=max_tries, bury=bury
                )
            else:
                receiver = self._named(name, start, on_damage, max_tries, bury)
            self._receivers[id(receiver)] = receiver
        return receiver

    def _named(
        self, name: str, start: Start | int, on_damage: OnDamage, max_tries: int, bury: Bury | None
    ) -> AckReceiver:
        if name.startswith(HOLD):
            raise OptionsError(f"receiver name {name!r}: names that begin with {HOLD!r} are those of groups")
        self._known(name)  # refuses what is no name
        lock = self._lock_name(name)
        try:
            known = self._known(name)
            seen = None if known is None else self._check_seen(name)
            position = resolve(self._end, start) if known is None else self._resume(name, known)
            if position != known:
                seen = None
            identity = self._sidecar.identity()
            log_id = bytes(16) if identity is None else bytes.fromhex(identity.log_id)
            register = Register(self._disk, f"{self._sidecar.prefix}cursor-{name}")
            register.write(log_id, position, seen=seen)  # from now on it holds, here and for every other process
            while position < (first := self.folder.first_position()):  # collected just before that
                position = first
                register.write(log_id, position)
            return AckReceiver(
                self._end, position, on_damage, on_close=self._left, name=name, register=register, seen=seen,
                log_id=log_id, lock=lock, durable=self._durable_acks, max_tries=max_tries, bury=bury,
            )  # fmt: skip
        except BaseException:
            lock.release()
            raise

    @shows_options(GroupOptions)
    def group(
        self, name: str, options: GroupOptions | None = None, *, clock: Clock = SYSTEM_CLOCK, **given: Any
    ) -> Group:
        """Return this process's part in a named group: workers that share the messages, each its own.

        Asked for again, the same part is returned.
        """
        self._check_open()
        check_group_name(name)
        wanted = options_from(GroupOptions, options, given)
        with self._groups_mutex:
            known = self._groups.get(name)
            if known is not None and not known.closed:
                if (options or given) and known.options != wanted:
                    raise OptionsError(f"{self.path}: group {name!r} is open here with other options")
                return known
            group = Group(
                self._end, self._disk, self._sidecar, name, wanted,
                send=self._send_again, durable=self._durable_acks, clock=clock,
            )  # fmt: skip
            self._groups[name] = group
            return group

    def groups(self) -> list[str]:
        """Return the names of the groups this queue has."""
        self._check_open()
        return group_names(self._disk, self.path)

    def forget_group(self, name: str) -> None:
        """Remove a group for good: it holds nothing any more.  Its dead letters stay."""
        self._check_open()
        if name not in self.groups():
            raise OptionsError(f"{self.path}: there is no group named {name!r}")
        with self._groups_mutex:
            known = self._groups.pop(name, None)
        if known is not None:
            known.close()
        remove_group(self._disk, self._sidecar, name, self.path)

    def _send_again(self, payloads: list[bytes]) -> None:
        """Append messages, durably, for groups that redrive their dead letters."""
        raise NotImplementedError

    def _close_groups(self) -> None:
        with self._groups_mutex:
            groups, self._groups = list(self._groups.values()), {}
        for group in groups:
            group.close()

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

    def _check_seen(self, name: str) -> Fingerprint | None:
        """Return the fingerprint of the last message a receiver acknowledged; ReplacedError if that is another now."""
        whose, anew = f"receiver {name!r} has acknowledged", "forget the receiver to begin anew"
        return check_seen(self._end, self._sidecar, name, whose, anew)

    def _resume(self, name: str, position: int) -> int:
        """Return where a named receiver goes on: at its cursor, or safely before it."""
        end = self._end.end()
        if position > end:
            logger.warning("%s: receiver %r was at %d, the channel ends at %d", self.path, name, position, end)
            return end
        try:
            if aligned(self.folder, position, self._end.visible):
                return position
        except ExpiredError as exc:
            logger.warning("%s: receiver %r lost the messages from %d to %d: a bound or a repair has removed them",
                           self.path, name, position, exc.first)  # fmt: skip
            return exc.first
        indexes = list(self.folder.files())
        place = self.folder.locate(indexes, position) or 0
        begin = self.folder.begin(indexes[place]) or 0
        logger.warning("%s: no message begins at %d, where receiver %r was; it starts again at %d",
                       self.path, position, name, begin)  # fmt: skip
        return begin

    def _check_open(self) -> None:
        if self._end.closed:
            raise ClosedError(f"{self.path}: {self._end.closed}")


def _bury(path: str, payloads: list[bytes], disk: Disk) -> None:
    """Append to the channel of dead letters, durably; other receivers may be at it, each for a moment."""
    with open_when_free(path, ChannelOptions(sync="always", compression="none"), disk) as dead:
        dead.append_many(payloads)
