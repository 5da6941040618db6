"""A store in memory that fails on demand, and a watcher whose script the test writes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from penstock.batch import UpdateBatch
from penstock.errors import ExpiredError
from penstock.fold import AppliedWatch, BatchConfig, WatchScope
from penstock.kv.roles import KvReader, KvWatcher, Watch
from penstock.types import KvEntry, KvUpdate, Op, WatchCursor

QUICK = BatchConfig(window_seconds=0.01, max_updates=100, channel_capacity=256, retry_seconds=0.0)
PATIENT = BatchConfig(window_seconds=60.0, max_updates=100, channel_capacity=256, retry_seconds=0.0)
ALL = WatchScope.all()
EXPIRED = ExpiredError("KV_b", 3, 9)


class MemoryStore:
    """Entries and a cursor, changed together; ``failing`` applies are refused first."""

    def __init__(self, entries: dict[str, bytes] | None = None, revision: int | None = None) -> None:
        self.entries: dict[str, bytes] = dict(entries or {})
        self.at = WatchCursor() if revision is None else WatchCursor.of(revision)
        self.failing = 0
        self.failing_keys = False
        self.applies: list[tuple[list[str], int | None]] = []

    def apply(self, updates: UpdateBatch, cursor: WatchCursor) -> None:
        if self.failing:
            self.failing -= 1
            raise OSError("no space left")
        for update in updates:
            if update.op is Op.PUT:
                self.entries[update.key] = update.value
            else:
                self.entries.pop(update.key, None)
        self.at = cursor
        self.applies.append(([update.key for update in updates], cursor.token.as_int()))

    def cursor(self) -> WatchCursor:
        return self.at

    def keys(self, prefix: str = "") -> list[str]:
        if self.failing_keys:
            raise OSError("cannot read")
        return [key for key in self.entries if key.startswith(prefix)]

    @property
    def revision(self) -> int | None:
        return self.at.token.as_int()


class ScriptedWatch(Watch):
    """Delivers what the test feeds: updates, an exception, or the end (None)."""

    def __init__(self, script: Sequence[Any] = ()) -> None:
        self.items: asyncio.Queue[Any] = asyncio.Queue()
        self.closed = False
        self.taken = 0
        self.quiet_at = 0
        for item in script:
            self.feed(item)

    def feed(self, item: Any) -> None:
        self.items.put_nowait(item)

    hydrated = True
    lag = 0

    @property
    def progress(self) -> int:
        return self.quiet_at if self.items.empty() else 0

    async def next_batch(self, limit: int = 65536) -> UpdateBatch:
        item = await self.items.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        self.taken += 1
        return UpdateBatch.of(item if isinstance(item, list) else [item])

    async def aclose(self) -> None:
        self.closed = True


class ScriptedWatcher(KvWatcher):
    """``resumed`` answers the _from calls, ``full`` the others: one answer, or a list; an exception is raised."""

    closed = False

    def __init__(self, resumed: Any = None, full: Any = None) -> None:
        self.resumed, self.full = resumed, full
        self.calls: list[tuple[Any, ...]] = []

    async def watch_all(self) -> Watch:
        return self._answer(self.full, "all")

    async def watch_prefix(self, prefix: str) -> Watch:
        return self._answer(self.full, "prefix", prefix)

    async def watch_prefixes(self, prefixes: Sequence[str]) -> Watch:
        return self._answer(self.full, "prefixes", *prefixes)

    async def watch_all_from(self, cursor: WatchCursor) -> Watch:
        return self._answer(self.resumed, "all from", cursor.token.as_int())

    async def watch_prefix_from(self, prefix: str, cursor: WatchCursor) -> Watch:
        return self._answer(self.resumed, "prefix from", prefix, cursor.token.as_int())

    async def watch_prefixes_from(self, prefixes: Sequence[str], cursor: WatchCursor) -> Watch:
        return self._answer(self.resumed, "prefixes from", *prefixes, cursor.token.as_int())

    def _answer(self, answer: Any, *call: Any) -> Watch:
        self.calls.append(call)
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Watch), call
        return answer


class ListedReader(KvReader):
    """Lists these keys, each time the next ones of several, or fails."""

    def __init__(self, *keys: list[str], error: Exception | None = None) -> None:
        self.live, self.error = list(keys), error

    async def get(self, key: str) -> KvEntry | None:
        raise AssertionError(key)

    async def entry(self, key: str) -> KvEntry | None:
        raise AssertionError(key)

    async def keys(self, prefix: str = "") -> list[str]:
        if self.error:
            raise self.error
        live = self.live.pop(0) if len(self.live) > 1 else self.live[0]
        return [key for key in live if key.startswith(prefix)]

    async def scan(self, prefix: str = "") -> UpdateBatch:
        raise AssertionError(prefix)


def put(key: str, revision: int | None, value: bytes = b"v") -> KvUpdate:
    return KvUpdate.put(key, value, revision)


class Seen:
    """Collects what apply was given, and what the cursor was meanwhile."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.reported: list[int | None] = []

    def apply(self, batch: UpdateBatch) -> None:
        self.batches.append([update.key for update in batch])

    def on_applied(self, cursor: WatchCursor) -> None:
        self.reported.append(cursor.token.as_int())

    @property
    def keys(self) -> list[str]:
        return [key for batch in self.batches for key in batch]


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def fold(watch: Any, seen: Seen, **settings: Any) -> AppliedWatch:
    watcher = settings.pop("watcher", None) or ScriptedWatcher(resumed=watch)
    settings.setdefault("config", QUICK)
    return AppliedWatch(watcher, settings.pop("scope", ALL), apply=seen.apply, on_applied=seen.on_applied, **settings)
