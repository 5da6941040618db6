"""Writes that are asked for in the same moment share one turn: one lock, one append, one sync."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from typing import Any, Final

from penstock.disk import in_disk_thread
from penstock.errors import PenstockError
from penstock.kv.embedded.bucket import Bucket
from penstock.kv.embedded.plan import Change

__all__ = ["ChangeTurns", "CHANGES_A_TURN"]

CHANGES_A_TURN: Final = 4096
"""The most changes of one turn, unless one call asks for more."""

WRITES_IN_A_ROW: Final = 8
"""How many lone writes one task makes before the event loop goes round."""

Outcomes = list[int | PenstockError]


class ChangeTurns:
    """Gathers the changes of many tasks into turns; used on one event loop.

    Who asks while nobody is at it lets the others of the same moment join, which takes one round of the loop.  If
    none did, a small change is written right there; otherwise a task takes turns until nobody waits.  One task that
    writes on and on lets the loop go round after every few writes.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._waiting: deque[tuple[list[Change], asyncio.Future[Outcomes]]] = deque()
        self._busy = False
        self._writer: weakref.ref[asyncio.Task[Any]] | None = None
        self._in_a_row = 0
        self._work: asyncio.Task[None] | None = None  # the loop itself keeps no hold on its tasks

    async def commit(self, changes: list[Change]) -> Outcomes:
        """Return the outcomes of these changes, written in one turn together with whatever else waits."""
        answer: asyncio.Future[Outcomes]
        if self._busy:
            answer = asyncio.get_running_loop().create_future()
            self._waiting.append((changes, answer))
            return await answer
        self._busy = True
        try:
            if not self._goes_on():
                await asyncio.sleep(0)
            if not self._waiting and len(changes) == 1:
                outcomes = self._bucket.commit_now(changes)
                if outcomes is not None:
                    return outcomes
            answer = asyncio.get_running_loop().create_future()
            self._waiting.appendleft((changes, answer))
        finally:
            if self._waiting:
                self._work = asyncio.create_task(self._run())
            else:
                self._busy = False
        return await answer

    def _goes_on(self) -> bool:
        """Whether this is the task that wrote last, and not too often yet: then nobody else was there meanwhile."""
        task = asyncio.current_task()
        if task is None or self._writer is None or self._writer() is not task or self._in_a_row == WRITES_IN_A_ROW:
            self._writer, self._in_a_row = None if task is None else weakref.ref(task), 0
            return False
        self._in_a_row += 1
        return True

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._turn()
        finally:
            self._busy = False

    async def _turn(self) -> None:
        taken: list[tuple[list[Change], asyncio.Future[Outcomes]]] = []
        count = 0
        while self._waiting and (not taken or count + len(self._waiting[0][0]) <= CHANGES_A_TURN):
            taken.append(self._waiting.popleft())
            count += len(taken[-1][0])
        try:
            wanted = [change for changes, _ in taken for change in changes]
            outcomes = await in_disk_thread(self._bucket.commit, wanted)
        except BaseException as exc:  # it belongs to those who wait for it
            for _, answer in taken:
                if not answer.done():
                    answer.set_exception(exc)
            if not isinstance(exc, Exception):
                raise
            return
        at = 0
        for changes, answer in taken:
            if not answer.done():
                answer.set_result(outcomes[at : at + len(changes)])
            at += len(changes)
