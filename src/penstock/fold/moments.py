"""Work that asked for a moment in which nothing is applied to a store, such as an export of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.disk import in_disk_thread
from penstock.errors import ClosedError

__all__ = ["Moments"]

T = TypeVar("T")


class Moments:
    """Calls that wait for the fold to come to them, first come first served.

    >>> async def example():
    ...     moments = Moments("fold.snap")
    ...     asked = asyncio.ensure_future(moments.ask(len))
    ...     await asyncio.sleep(0)
    ...     await moments.serve("store")
    ...     return await asked
    >>> asyncio.run(example())
    5
    """

    def __init__(self, name: str) -> None:
        self._name, self.ended = name, False
        self._waiting: deque[tuple[Callable[[Any], Any], asyncio.Future[Any]]] = deque()

    def __bool__(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    def ask(self, call: Callable[[Any], T]) -> asyncio.Future[T]:
        """Return what will have the answer of ``call(store)``; ClosedError when the fold has ended or ends first."""
        if self.ended:
            raise ClosedError(f"{self._name}: the fold has ended")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, answer))
        return answer

    async def serve(self, store: Any) -> None:
        """Answer one of those who asked, in a disk thread; what its call raises belongs to it."""
        call, answer = self._waiting.popleft()
        if answer.done():  # whoever asked has gone away
            return
        try:
            found = await in_disk_thread(call, store)
        except Exception as exc:  # noqa: BLE001 - see above
            if not answer.done():
                answer.set_exception(exc)
        else:
            if not answer.done():
                answer.set_result(found)

    def begin(self) -> None:
        """Take requests, again if the fold had ended."""
        self.ended = False

    def end(self) -> None:
        """Tell everyone who waits that the fold has ended, and whoever asks from now on."""
        self.ended = True
        for _, answer in self._waiting:
            if not answer.done():
                answer.set_exception(ClosedError(f"{self._name}: the fold has ended"))
        self._waiting.clear()
