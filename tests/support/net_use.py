"""What tests of connections share: a core that notes what it hears, and the two loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from penstock.net import Connection

RUNNERS: list[Callable[[Coroutine[Any, Any, Any]], Any]] = [uvloop.run, asyncio.run]
RUNNER_NAMES = ["uvloop", "asyncio"]


class Noting:
    """Notes every call; ``heard`` is an event for each word."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.data = b""
        self.connection: Connection
        self._changed = asyncio.Event()

    def _note(self, word: str, value: Any = None) -> None:
        self.calls.append((word, value))
        self._changed.set()

    def opened(self, connection: Connection) -> None:
        self.connection = connection
        self._note("opened")

    def received(self, data: bytes) -> None:
        self.data += data
        self._note("received", data)

    def congested(self) -> None:
        self._note("congested")

    def writable(self) -> None:
        self._note("writable")

    def expired(self) -> None:
        self._note("expired")

    def closed(self, reason: str) -> None:
        self._note("closed", reason)

    @property
    def words(self) -> list[str]:
        return [word for word, _ in self.calls]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def hears(self, word: str) -> Any:
        await self.until(lambda: word in self.words)
        return next(value for heard, value in self.calls if heard == word)

    async def gets(self, data: bytes) -> None:
        await self.until(lambda: len(self.data) >= len(data))
        assert self.data == data


class Cores:
    """Makes cores and hands out the n-th one once it is there."""

    def __init__(self, make: Callable[[], Any] = Noting) -> None:
        self.made: list[Any] = []
        self._make = make
        self._changed = asyncio.Event()

    def __call__(self) -> Any:
        self.made.append(self._make())
        self._changed.set()
        return self.made[-1]

    async def nth(self, number: int = 0) -> Any:
        async with asyncio.timeout(60):
            while len(self.made) <= number:
                self._changed.clear()
                await self._changed.wait()
        return self.made[number]


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until something outside any core has come true."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def open_raw(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect without anything of ours."""
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host.strip("[]"), int(port))
