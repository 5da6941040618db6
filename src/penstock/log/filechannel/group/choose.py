"""Choosing what a worker gets in its turn: what waits again, and what nobody has read yet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from penstock.errors import CorruptionError, ExpiredError
from penstock.log.damage import log_skipped
from penstock.log.filechannel.ends import QueueEnd
from penstock.log.filechannel.format import FRAME_HEAD
from penstock.log.filechannel.group.ahead import ReadAhead
from penstock.log.filechannel.group.core import LEASE_ENDED, GroupCore
from penstock.log.filechannel.group.options import GroupOptions
from penstock.log.filechannel.segments import Walk
from penstock.types import Problem

__all__ = ["Chooser", "Spent"]

logger = logging.getLogger(__name__)
SCAN_MESSAGES: Final = 4096
"""How many messages one turn reads ahead to find some whose key is free."""

Spent = tuple[int, int, bytes, str]
"""A message that was tried often enough: position, tries, payload, reason."""


class Chooser:
    """Reads the queue for one worker.  Everything is called during a turn, but ``has_unread``."""

    def __init__(
        self, end: QueueEnd, group: str, options: GroupOptions, bury: Callable[[Sequence[Spent]], None]
    ) -> None:
        self._end, self._path, self._group, self._options, self._bury = end, end.path, group, options, bury
        self._ahead, self._again = ReadAhead(end.folder), Walk(end.folder)
        self.problems: list[Problem] = []

    def choose(self, core: GroupCore, limit: int, now: float) -> tuple[dict[int, bytes], int]:
        """Return messages for a worker by position, and where reading goes on; leases that have ended are over."""
        self._end_leases(core, now)
        payloads: dict[int, bytes] = {}
        for position in core.pick(now, limit):
            payload = self.read_again(core, position)
            if payload is not None:
                payloads[position] = payload
        room = min(limit - len(payloads), self._options.max_unfinished - len(core.entries))
        after = self._read_on(core, payloads, room, now) if room > 0 else core.next
        return payloads, after

    def has_unread(self, core: GroupCore) -> bool:
        """Whether there is something that nobody has read yet, and room for it."""
        if len(core.entries) >= self._options.max_unfinished:
            return False
        try:
            return self._ahead.has(core.next, self._end.visible)
        except (CorruptionError, ExpiredError):
            return True  # the turn says what is wrong

    def forget(self) -> None:
        """Forget what was read ahead."""
        self._ahead.forget()

    def close(self) -> None:
        """Let go of the files."""
        self._ahead.close()
        self._again.close()

    def _end_leases(self, core: GroupCore, now: float) -> None:
        """Give back what workers have kept past their leases; what was tried often enough is buried."""
        over = core.overdue(now)
        spent = [position for position in over if self._options.is_spent(core.entries[position].tries)]
        if spent:
            letters = []
            for position in spent:
                payload = self.read_again(core, position)
                if payload is not None:
                    letters.append((position, core.entries[position].tries, payload, LEASE_ENDED))
            self._bury(letters)
            core.bury([position for position, *_ in letters])
        core.release([position for position in over if position in core.entries])

    def _read_on(self, core: GroupCore, payloads: dict[int, bytes], room: int, now: float) -> int:
        """Read messages that nobody has read yet, and choose of them; return where reading goes on."""
        if self._options.key is None:
            after = core.next
            while room > 0:
                try:
                    positions, found, after = self._read(after, room, core)
                except CorruptionError:
                    if not payloads:
                        raise
                    break  # first what is good before the damage
                if not positions:
                    break
                payloads.update(zip(positions, found, strict=True))
                room -= len(positions)
            return after
        scanned, limit = 0, len(payloads) + room
        while len(payloads) < limit and scanned < SCAN_MESSAGES and len(core.entries) < self._options.max_unfinished:
            most = min(max(16, room), 256, self._options.max_unfinished - len(core.entries))
            positions, found, after = self._read(core.next, most, core)
            if not positions:
                break
            scanned += len(positions)
            core.see(positions, [self._key(payload) for payload in found], after)
            read = dict(zip(positions, found, strict=True))
            for position in core.pick(now, limit - len(payloads)):
                payloads[position] = read[position]
        return core.next

    def _key(self, payload: bytes) -> bytes | None:
        assert self._options.key is not None
        key = self._options.key(payload)
        return key.encode() if isinstance(key, str) else key

    def _read(self, position: int, limit: int, core: GroupCore) -> tuple[list[int], list[bytes], int]:
        """Return messages from a position on, and where to go on; what is gone, or to be skipped, is passed over."""
        while True:
            try:
                return self._ahead.read(position, limit, self._end.visible)
            except ExpiredError as exc:
                said = "%s: group %r lost the messages from %d to %d: a bound or a repair has removed them"
                logger.warning(said, self._path, self._group, position, exc.first)
                position = exc.first
            except CorruptionError:
                if self._options.on_damage == "raise":
                    raise
                found = self._ahead.skip_damage(position, self._end.visible)
                if found is None:
                    raise
                position, problem = found
                log_skipped(problem)
                self.problems.append(problem)
            core.pass_over(position)

    def read_again(self, core: GroupCore, position: int) -> bytes | None:
        """Return a message that was read before; None, and it is finished, when it is gone or to be skipped."""
        try:
            batch = self._again.read(position, 1, self._end.visible, FRAME_HEAD)
            if len(batch):
                return batch.to_payloads()[0]
            problem = Problem(self._path, position, "the message at this position is gone")
        except (
            ExpiredError
        ) as exc:  # behind the group's cursor: it was finished before a power cut, or dropped by a bound
            problem = Problem(self._path, position, str(exc))
        except CorruptionError as exc:
            if self._options.on_damage == "raise":
                raise
            problem = Problem(exc.file, exc.byte, exc.reason)
        logger.warning("%s; group %r goes on without it", problem, self._group)
        self.problems.append(problem)
        core.bury([position])
        return None
