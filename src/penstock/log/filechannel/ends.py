"""The end of a queue as receivers and groups see it: how far they may read, and how they wait for more.

OwnedEnd     in the process that owns the queue: whoever sends wakes who waits
WatchedEnd   beside the owner, or with several owners in turn: who waits looks again and again

An end knows nothing of receivers, and receivers know nothing of the channel that made them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

from penstock.disk import FolderWait, LoopWait
from penstock.log.filechannel.log import check_same, end_of
from penstock.log.filechannel.retain import Retention
from penstock.log.filechannel.segments import Folder
from penstock.log.filechannel.spool import Spool
from penstock.log.sidecar import Sidecar

__all__ = ["QueueEnd", "OwnedEnd", "WatchedEnd"]

QUEUE_LOOK_SECONDS: Final = 0.25
"""How often who waits in a thread looks whether the queue was closed here."""


class QueueEnd(Protocol):
    """What a receiver needs of its queue."""

    path: str
    folder: Folder

    @property
    def visible(self) -> int | None:
        """The bound of what may be read, where it is known."""

    @property
    def closed(self) -> str:
        """Why nothing more will come, or nothing."""

    def end(self) -> int:
        """Where the queue ends now."""

    def wait(self, look: Callable[[], bool], gone: Callable[[], bool], position: int, timeout: float | None) -> bool:
        """Wait until ``look`` may find something at ``position``, or the receiver is ``gone``."""

    async def arrival(self, position: int, timeout: float | None, waiting: LoopWait) -> None:
        """Wait a while, or until something is at ``position``, without blocking the event loop."""

    def waiter(self) -> LoopWait:
        """Return what ``arrival`` waits with; its owner closes it."""

    def pause_collection(self) -> contextlib.AbstractContextManager[Any]:
        """Collect nothing while a receiver finds its place, where that is in our power."""

    @property
    def first_end(self) -> int:
        """Where the oldest segment ends: a receiver below it need not tell that it moved."""

    def moved(self, position: int) -> None:
        """Note that a receiver has passed everything below ``position``."""


class OwnedEnd:
    """The end of a queue that this process writes."""

    def __init__(self, folder: Folder, spool: Spool, retention: Retention) -> None:
        self.path, self.folder, self._spool, self._retention = folder.path, folder, spool, retention

    @property
    def visible(self) -> int:
        """Behind the newest message receivers see."""
        return self._spool.visible

    @property
    def closed(self) -> str:
        """Why nothing more will come, or nothing."""
        return self._spool.closed

    def end(self) -> int:
        """Where the queue ends for receivers."""
        return self._spool.visible

    def wait(self, look: Callable[[], bool], gone: Callable[[], bool], position: int, timeout: float | None) -> bool:
        """Wait for a message at ``position``, which whoever sends it tells."""
        del look
        return self._spool.wait(gone, position, timeout)

    def waiter(self) -> LoopWait:
        """Return what is not needed here: who sends wakes who waits."""
        return LoopWait()

    async def arrival(self, position: int, timeout: float | None, waiting: LoopWait) -> None:
        """Wait for a message at ``position`` on an event loop, which whoever sends it wakes."""
        del waiting
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

    def pause_collection(self) -> contextlib.AbstractContextManager[Any]:
        """Collect nothing while a receiver finds its place."""
        return self._retention.mutex

    @property
    def first_end(self) -> int:
        """Where the oldest segment ends, as far as is known."""
        return self._retention.boundary or 0

    def moved(self, position: int) -> None:
        """Note that a receiver has passed everything below ``position``."""
        if not self._spool.closed:
            self._retention.moved(position)


class WatchedEnd:
    """The end of a queue that others write: only looking tells."""

    visible = None
    """Only who writes knows it; what is whole is read."""
    first_end = 1 << 63

    def __init__(self, folder: Folder, sidecar: Sidecar) -> None:
        self.path, self.folder, self._sidecar = folder.path, folder, sidecar
        self.closed = ""
        self._ends: dict[int, int] = {}
        self._waits = threading.local()  # each thread waits with a descriptor of its own, and keeps it
        identity = sidecar.identity()
        self.log_id = None if identity is None else identity.log_id

    def end(self) -> int:
        """Where the queue ends now: this walks the newest segment."""
        return end_of(self.folder, self._ends)

    def wait(self, look: Callable[[], bool], gone: Callable[[], bool], position: int, timeout: float | None) -> bool:
        """Look again and again, then whenever the folder changes."""
        del gone, position

        def ready() -> bool:
            if self.closed or look():
                return True
            check_same(self._sidecar, self.path, self.log_id)
            return False

        waiting: FolderWait | None = getattr(self._waits, "waiting", None)
        if waiting is None:
            waiting = self._waits.waiting = FolderWait(self.folder.disk, self.path, look=QUEUE_LOOK_SECONDS)
        return waiting.wait(ready, timeout) and not self.closed

    def waiter(self) -> LoopWait:
        """Return what waits for the folder to change."""
        return LoopWait(self.folder.disk, self.path)

    async def arrival(self, position: int, timeout: float | None, waiting: LoopWait) -> None:
        """Sleep a little, or until the folder changes."""
        del position
        check_same(self._sidecar, self.path, self.log_id)
        await waiting.pause(timeout)

    def pause_collection(self) -> contextlib.AbstractContextManager[Any]:
        """Do nothing: who collects is elsewhere."""
        return contextlib.nullcontext()

    def moved(self, position: int) -> None:
        """Do nothing: who collects reads the cursors."""
