"""The state of a group that all its processes share, reached in turns.

A turn: take the group's lock, read what others have noted, decide, note it, let go of the lock.  What fails on the way
has not happened: the state is then read anew from the journal.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from penstock.clock import Clock, shown_ns
from penstock.disk import Disk, Turns
from penstock.errors import ClosedError, CorruptionError, ExpiredError, OptionsError, ReplacedError
from penstock.log.filechannel.ack import SEEN_SECONDS
from penstock.log.filechannel.ends import QueueEnd
from penstock.log.filechannel.group.core import GroupCore
from penstock.log.filechannel.group.format import Done, Event, GroupSnapshot
from penstock.log.filechannel.group.journal import GroupJournal
from penstock.log.filechannel.receiver import aligned, resolve
from penstock.log.filechannel.recover import set_aside
from penstock.log.filechannel.seen import check_seen, fingerprint_at
from penstock.log.filechannel.segments import Folder
from penstock.log.fingerprint import Fingerprint
from penstock.log.options import Start
from penstock.log.sidecar import Register, Sidecar

__all__ = ["GroupState", "group_turns", "journal_path", "remove_group", "safe_bound", "HOLD"]

logger = logging.getLogger(__name__)
T = TypeVar("T")
TURN_SECONDS: Final = 30.0
"""How long a worker waits for its turn before it says that something is wrong."""
HOLD: Final = "group."
"""What the cursor of a group is called by, before its name: it holds segments as a named receiver does."""


class GroupState:
    """One process's copy of a group's state.  Safe to use from several threads."""

    def __init__(
        self, end: QueueEnd, disk: Disk, sidecar: Sidecar, name: str, *,
        ordered: bool | None, start: Start | int, durable: bool, clock: Clock,
    ) -> None:  # fmt: skip
        sidecar.read_cursor(HOLD + name)  # refuses what is no name
        self._end, self._disk, self._sidecar, self._clock = end, disk, sidecar, clock
        self._path, self._name, self._ordered, self._start = end.path, name, ordered, start
        self.mutex = threading.RLock()
        self._turns = group_turns(disk, sidecar, name, end.path)
        self._journal = GroupJournal(disk, journal_path(sidecar, name), sync=durable)
        self._register = Register(disk, f"{sidecar.prefix}cursor-{HOLD}{name}")
        self.core: GroupCore | None = None
        """What was known at the end of the last turn; None when it must be read again."""
        self.was_cut = False
        """Whether messages that were read are gone: a power cut took the end of the queue."""
        self.closed = ""
        self._held = -1
        self._seen: Fingerprint | None = None  # of a message that is finished, as are all before it
        self._seen_at, self._checked = float("-inf"), False
        self._last = self._written = -1  # where the last one is that was finished here, and the one on disk
        self._alone = False  # whether nobody else had a turn since our last one
        identity = sidecar.identity()
        self._log_id = bytes(16) if identity is None else bytes.fromhex(identity.log_id)

    def run(self, decide: Callable[[GroupCore], T], *, create: bool = False) -> T:
        """Decide something on what is known now, and note it; what fails has not happened."""
        with self.mutex:
            if self.closed:
                raise ClosedError(f"{self._path}: {self.closed}")
            try:
                self._turns.take(TURN_SECONDS)
            except FileNotFoundError:
                raise ReplacedError(self._path, "its folder is gone") from None
            try:
                core = self._catch_up(create)
                try:
                    answer = decide(core)
                    events = core.drain()
                    if events:
                        self._journal.append(events)
                except BaseException:
                    self.core = None  # it may know what the journal does not
                    self._journal.forget()
                    raise
                if self._journal.is_long:
                    self._journal.rewrite(core.snapshot(self._log_id, self._disk.boot_id()))
                self._note_finished(events, core.floor)
                self._hold(core.floor)
            finally:
                self._turns.release()
            return answer

    def changed(self) -> bool:
        """Whether others may have done something since the last turn; cheap, and asked without a turn."""
        return self.core is None or self._journal.changed()

    def keep_seen(self) -> None:
        """Keep the fingerprint of the last message that was finished here: before it is closed, and in a turn."""
        if self._last > self._written:
            self._seen_at, self._held = float("-inf"), -1
            self.run(lambda core: self._note_finished((), core.floor))

    def close(self, why: str) -> None:
        """Take part no longer."""
        with self.mutex:
            self.closed = why
            self._turns.close()
            self._journal.forget()
            self._register.close()

    def forked(self, why: str) -> None:
        """Close in the child of a fork."""
        self.mutex = threading.RLock()
        self.closed = why
        self._turns.close()

    def _catch_up(self, create: bool) -> GroupCore:
        """Read what others have noted; the first time, everything."""
        core = self.core
        if not self._checked:
            whose, anew = f"group {self._name!r} has finished", "forget the group to begin anew"
            self._seen = check_seen(self._end, self._sidecar, HOLD + self._name, whose, anew)
            self._checked = True
        try:
            events = self._journal.read_new()
        except CorruptionError as exc:
            self.core = None
            target = set_aside(self._disk, self._path, self._journal.path.rpartition("/")[2])
            logger.warning("%s; set aside as %s, the group goes on at its first unfinished message", exc, target)
            events = None
            create = True
        self._alone = core is not None and events == []
        if core is not None and self._alone:
            return core
        if events is None:
            if not create and core is not None:
                raise ReplacedError(f"{self._path}, group {self._name!r},", "it was forgotten")
            return self._begin()
        if events and isinstance(events[0], GroupSnapshot):
            return self._restore(events[0], events[1:])
        assert core is not None
        for event in events:
            core.apply(event)
        return core

    def _begin(self) -> GroupCore:
        """Make the group: at its cursor, where there is one, or where it is to start."""
        known = self._sidecar.read_cursor(HOLD + self._name)
        position = resolve(self._end, self._start) if known is None else self._resume(known)
        self._hold(position)  # from now on it holds, here and for every other process
        while position < (first := self._end.folder.first_position()):  # collected just before that
            position = first
            self._hold(position)
        core = self.core = GroupCore(position, ordered=bool(self._ordered))
        self._journal.rewrite(core.snapshot(self._log_id, self._disk.boot_id()))
        return core

    def _resume(self, position: int) -> int:
        first, end = self._end.folder.first_position(), self._end.end()
        return min(max(position, first), end)

    def _restore(self, snapshot: GroupSnapshot, events: Sequence[Event]) -> GroupCore:
        """Take over what the journal says, unless it is of another queue or another life of the machine."""
        identity = self._sidecar.identity()
        log_id = bytes(16) if identity is None else bytes.fromhex(identity.log_id)
        if log_id != self._log_id and self.core is not None:
            raise ReplacedError(self._path, "its log id changed")
        if snapshot.log_id != log_id:
            return self._begin()
        if self._ordered is not None and snapshot.ordered is not self._ordered:
            told = "keeps the order of keys" if snapshot.ordered else "keeps no order of keys"
            raise OptionsError(f"{self._path}: group {self._name!r} {told}: all its workers must agree on that")
        core = GroupCore.restore(snapshot)
        for event in events:
            core.apply(event)
        boot = self._disk.boot_id()
        if snapshot.boot != boot:
            core.start_again(self._clock.monotonic(), shown_ns(self._clock))
            self._cut_to_end(core)
            core.drain()
            self._journal.rewrite(core.snapshot(log_id, boot))
        elif self.core is None:
            self._cut_to_end(core)
        self.core = core
        return core

    def _cut_to_end(self, core: GroupCore) -> None:
        """Forget messages that a power cut took from the end of the queue."""
        folder = self._end.folder
        bound = safe_bound(folder, folder.newest_bound(), core.next, self._end.end, self._end.visible)
        if bound < core.next:
            logger.warning("%s: group %r had read up to %d, it goes on at %d", self._path, self._name, core.next, bound)
            core.cut(bound)
            self.was_cut = True

    def _note_finished(self, events: Iterable[Event], floor: int) -> None:
        """Keep the fingerprint of a message that was finished; a hundred times a second is enough."""
        done = [at for event in events if isinstance(event, Done) for at in event.positions if at < floor]
        self._last = max(done, default=self._last if self._last < floor else -1)
        if self._last < 0 or (now := self._clock.monotonic()) - self._seen_at < SEEN_SECONDS:
            return
        if self._seen is None or self._seen.position < self._last:
            self._seen_at = now
            self._seen = fingerprint_at(self._end, self._last) or self._seen

    def _take_over_seen(self, floor: int) -> None:
        """Go by what another process has noted, if it is newer; by nothing that is not finished any more."""
        noted = None
        if not self._alone:
            with contextlib.suppress(CorruptionError):
                noted = self._register.seen()
        self._seen = max(
            (seen for seen in (self._seen, noted) if seen is not None and seen.position < floor),
            key=lambda seen: seen.position,
            default=None,
        )

    def _hold(self, floor: int) -> None:
        """Keep what is not finished from being collected, as the cursor of a named receiver does."""
        if floor != self._held:
            self._take_over_seen(floor)
            self._register.write(self._log_id, floor, sync=False, fresh=not self._alone, seen=self._seen)
            self._held, self._written = floor, -1 if self._seen is None else self._seen.position
            self._end.moved(floor)


def journal_path(sidecar: Sidecar, name: str) -> str:
    """Return the path of a group's journal."""
    return f"{sidecar.prefix}group-{name}"


def remove_group(disk: Disk, sidecar: Sidecar, name: str, path: str) -> None:
    """Remove the journal and the cursor of a group, in a turn; its lock files stay for whoever waits for them."""
    turns = group_turns(disk, sidecar, name, path)
    turns.take(TURN_SECONDS)
    try:
        with contextlib.suppress(FileNotFoundError):
            disk.remove(journal_path(sidecar, name))
        sidecar.remove_cursor(HOLD + name)
    finally:
        turns.release()
        turns.close()


def safe_bound(
    folder: Folder, newest: tuple[int, int] | None, position: int, end: Callable[[], int], visible: int | None
) -> int:
    """Return where reading can go on for who had read up to ``position``: there, or before it if that is no place now.

    A power cut may leave other bytes where messages were, in the ``newest`` segment: then everything from its beginning
    is read again.
    """
    if newest is None or position < newest[0]:
        return position  # in a sealed segment: what is there stays
    if position > newest[1] or position > end():
        position = end()
    with contextlib.suppress(ExpiredError):
        return position if aligned(folder, position, visible) else newest[0]
    return position


def group_turns(disk: Disk, sidecar: Sidecar, name: str, path: str) -> Turns:
    """Return the turns of a group."""
    return Turns(disk, f"{sidecar.prefix}grouplock-{name}", f"{sidecar.prefix}groupline-{name}", path)
