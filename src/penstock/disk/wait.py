"""How to wait for something another process does: look, sleep longer and longer, then be woken where that is possible.

Linux tells of writes to the files of a folder (inotify), not of stores into a mapping.  So a waiter looks for a while,
as often as the back-off says, and when nothing came it lets the folder wake it; a change that it is not told of (on a
network file system) is still found at the next look, a second later.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, TypeVar

from penstock.disk.face import ReadDisk
from penstock.disk.inotify import FolderWatch
from penstock.disk.posix import PosixDisk
from penstock.errors import NotFoundError

__all__ = ["Backoff", "FolderWait", "LoopWait", "when_there"]

T = TypeVar("T")

LOOK_SECONDS: Final = 1.0
"""How often a waiter that is woken by its folder looks all the same."""


class Backoff:
    """The delays between looks: first 50 µs, doubling up to 10 ms; ``reset`` after each success.

    It owns no clock of its own, so it serves threads (``wait``) and asyncio (``delay``) alike.

    >>> backoff = Backoff()
    >>> [backoff.delay() for _ in range(3)]
    [5e-05, 0.0001, 0.0002]
    >>> backoff.reset(); backoff.delay()
    5e-05
    """

    FIRST = 50e-6
    LAST = 10e-3

    def __init__(self, *, first: float = FIRST, last: float = LAST) -> None:
        self._first, self._last = first, last
        self._next = first

    def delay(self, remaining: float | None = None) -> float:
        """Return how long to sleep now, at most ``remaining``; the next one is twice as long."""
        delay, self._next = self._next, min(self._next * 2, self._last)
        return delay if remaining is None else max(0.0, min(delay, remaining))

    @property
    def patient(self) -> bool:
        """Whether the delays have become as long as they get."""
        return self._next >= self._last

    def reset(self) -> None:
        """Begin with the shortest delay again."""
        self._next = self._first

    def pause(self, remaining: float | None = None) -> None:
        """Sleep for the next delay."""
        time.sleep(self.delay(remaining))

    def wait(
        self,
        ready: Callable[[], bool],
        timeout: float | None = None,
    ) -> bool:
        """Sleep until ``ready`` says so; False when ``timeout`` seconds are over.

        >>> Backoff().wait(lambda: True), Backoff().wait(lambda: False, timeout=0.001)
        (True, False)
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self.reset()
        while not ready():
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return False
            self.pause(remaining)
        return True


def when_there(open: Callable[[], T], timeout: float | None) -> T:
    """Return what ``open`` returns, tried again while nothing is there for up to ``timeout`` seconds; None: for ever.

    >>> def missing() -> None:
    ...     raise NotFoundError("ticks: there is no channel here")
    >>> when_there(missing, 0.001)
    Traceback (most recent call last):
    penstock.errors.NotFoundError: ticks: there is no channel here
    """
    deadline, backoff = None if timeout is None else time.monotonic() + timeout, Backoff()
    while True:
        try:
            return open()
        except NotFoundError:
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise
            backoff.pause(remaining)


class FolderWait(Backoff):
    """A back-off that is woken by changes of a folder once it has become patient; ``close`` lets go of that.

    >>> import pathlib, tempfile, threading
    >>> folder = tempfile.TemporaryDirectory()
    >>> made = threading.Timer(0.05, pathlib.Path(folder.name, "news").touch)
    >>> made.start()
    >>> with FolderWait(PosixDisk(), folder.name) as waiting:
    ...     waiting.wait(lambda: bool(PosixDisk().list(folder.name)))
    True
    >>> made.join(); folder.cleanup()
    """

    def __init__(self, disk: ReadDisk, folder: str, *, look: float = LOOK_SECONDS) -> None:
        super().__init__()
        self._folder = folder if isinstance(disk, PosixDisk) else ""
        self._watch: FolderWatch | None = None
        self._look = look

    def pause(self, remaining: float | None = None) -> None:
        """Sleep for the next delay, or until something changes."""
        if not self.patient or not self._folder:
            super().pause(remaining)
            return
        if self._watch is None:
            self._watch = FolderWatch.begin(self._folder)
            if self._watch is None:
                self._folder = ""  # it cannot be had: the back-off goes on
            return  # something may have come before we listened: look once more
        self._watch.wait(self._look if remaining is None else max(0.0, min(self._look, remaining)))

    def close(self) -> None:
        """Listen no longer."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class LoopWait:
    """The same on an event loop: ``pause`` is awaited, ``wake`` ends the pauses of others on that loop.

    A folder that changes all the time without news for this waiter wakes it a thousand times a second at most.

    >>> import pathlib, tempfile
    >>> async def demo(folder):
    ...     waiting = LoopWait(PosixDisk(), folder)
    ...     asyncio.get_running_loop().call_later(0.05, pathlib.Path(folder, "news").touch)
    ...     while not pathlib.Path(folder, "news").exists():
    ...         await waiting.pause()
    ...     waiting.close()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(demo(folder))
    """

    VAIN_SECONDS: Final = 1e-3

    def __init__(self, disk: ReadDisk | None = None, folder: str = "", *, last: float = Backoff.LAST) -> None:
        self._backoff, self._last = Backoff(last=last), last
        self._folder = folder if isinstance(disk, PosixDisk) else ""
        self._watch: FolderWatch | None = None
        self._pauses: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._vain = self._closed = False

    async def pause(self, remaining: float | None = None) -> None:
        """Sleep for the next delay, or until something changes, at most ``remaining`` seconds."""
        if not self._backoff.patient:
            await asyncio.sleep(self._backoff.delay(remaining))
        elif self._vain:  # it was woken, and found nothing
            self._vain = False
            await asyncio.sleep(self.VAIN_SECONDS if remaining is None else max(0.0, min(self.VAIN_SECONDS, remaining)))
        else:
            await self.long_pause(LOOK_SECONDS if remaining is None else max(0.0, min(LOOK_SECONDS, remaining)))

    async def long_pause(self, seconds: float) -> None:
        """Sleep until something changes, once the delays have become long."""
        if self._watch is None and self._folder and not self._closed:
            self._watch = FolderWatch.begin(self._folder)
            if self._watch is not None:
                return  # something may have come before we listened: look once more
            self._folder = ""  # it cannot be had: the back-off goes on
        if self._watch is None:
            await self.until_woken(min(seconds, self._last))
        else:
            await self.until_woken(seconds)

    async def until_woken(self, seconds: float) -> None:
        """Sleep until ``wake``, a change of the folder, or the end of this time."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(seconds, _resolve, woken)
        watch = self._watch
        if watch is not None and not self._pauses:
            loop.add_reader(watch.fd, self._changed)
        self._pauses.append((loop, woken))
        try:
            await woken
        finally:
            timer.cancel()
            self._pauses.remove((loop, woken))
            if watch is not None and not self._pauses:
                loop.remove_reader(watch.fd)
                if self._closed:
                    self._let_go()

    def reset(self) -> None:
        """Begin with the shortest delay again."""
        self._backoff.reset()
        self._vain = False

    def wake(self) -> None:
        """End the pauses of all who wait; any thread may call it."""
        for loop, woken in list(self._pauses):
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(_resolve, woken)

    def _changed(self) -> None:
        if self._watch is not None:
            self._watch.drain()
        self._vain = True
        for _, woken in self._pauses:
            _resolve(woken)

    def close(self) -> None:
        """Listen no longer; who waits looks once more."""
        self._closed = True
        if self._pauses:
            self.wake()  # the last of them lets go
        else:
            self._let_go()

    def _let_go(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def __del__(self) -> None:
        self._let_go()


def _resolve(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
