"""Promise: a fold that fell behind, or whose bucket could not be reached, ends up as the bucket is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fold_fakes import (
    ALL,
    EXPIRED,
    PATIENT,
    ListedReader,
    MemoryStore,
    ScriptedWatch,
    ScriptedWatcher,
    Seen,
    fold,
    put,
    until,
)

from penstock.batch import UpdateBatch
from penstock.errors import NotConnected, RetryError, Timeout
from penstock.fold import WatchScope
from penstock.types import WatchCursor


@pytest.mark.parametrize(
    ("scope", "kept", "calls"),
    [
        (ALL, {"node.live"}, [("all from", 3), ("all",)]),
        (
            WatchScope.prefix("node."),
            {"node.live", "svc.other"},
            [("prefix from", "node.", 3), ("prefix", "node.")],
        ),
        (
            WatchScope.of(["node.", "x."]),
            {"node.live", "svc.other"},
            [("prefixes from", "node.", "x.", 3), ("prefixes", "node.", "x.")],
        ),
    ],
)
async def test_a_resync_deletes_what_vanished_in_scope_before_the_re_list(
    scope: WatchScope, kept: set[str], calls: list[tuple[Any, ...]]
) -> None:
    store = MemoryStore({"node.live": b"1", "node.gone": b"1", "svc.other": b"1"}, 3)
    seen, full = Seen(), ScriptedWatch([put("node.live", 12), None])
    watcher = ScriptedWatcher(resumed=EXPIRED, full=full)
    run = fold(None, seen, watcher=watcher, scope=scope, store=store, reader=ListedReader(["node.live"]))
    assert await run.run() == WatchCursor.of(12)
    assert store.entries.keys() == kept
    gone = ["node.gone", "svc.other"] if scope == ALL else ["node.gone"]
    assert store.applies == [(gone, 3), (["node.live"], 12)]  # the deletes do not move the cursor
    assert seen.keys == [*gone, "node.live"]
    assert run.resyncs == 1
    assert watcher.calls == calls


async def test_a_key_that_came_back_after_the_listing_is_there_in_the_end() -> None:
    store = MemoryStore({"k": b"old"}, 3)
    full = ScriptedWatch([put("k", 12, b"new"), None])
    await fold(None, Seen(), watcher=ScriptedWatcher(EXPIRED, full), store=store, reader=ListedReader([])).run()
    assert store.entries == {"k": b"new"}
    assert [cursor for _, cursor in store.applies] == [3, 12]


async def test_the_full_watch_waits_until_the_deletes_are_in_the_store() -> None:
    store = MemoryStore({"k": b"old"}, 3)
    store.failing = 4
    watcher = ScriptedWatcher(EXPIRED, ScriptedWatch([put("k", 12, b"new"), None]))
    real = store.apply

    def spy(updates: UpdateBatch, cursor: WatchCursor) -> None:
        if store.failing:
            assert watcher.calls == [("all from", 3)]
        real(updates, cursor)

    store.apply = spy
    await fold(None, Seen(), watcher=watcher, store=store, reader=ListedReader([])).run()
    assert watcher.calls == [("all from", 3), ("all",)]
    assert store.entries == {"k": b"new"}


@pytest.mark.parametrize("with_store", [True, False])
async def test_without_a_reader_or_a_store_the_full_watch_is_all_there_is(with_store: bool) -> None:
    store = MemoryStore({"stale": b"1"}, 3) if with_store else None
    watcher = ScriptedWatcher(EXPIRED, ScriptedWatch([put("a", 12), None]))
    cursor = await fold(None, Seen(), watcher=watcher, store=store, resume=WatchCursor.of(3)).run()
    assert cursor == WatchCursor.of(12)
    if store is not None:
        assert store.entries.keys() == {"stale", "a"}


async def test_a_listing_that_fails_stops_the_fold() -> None:
    store = MemoryStore({"k": b"1"}, 3)
    reader = ListedReader([], error=NotConnected("gone"))
    with pytest.raises(RetryError, match="listing live keys"):
        await fold(None, Seen(), watcher=ScriptedWatcher(EXPIRED), store=store, reader=reader).run()
    assert (store.entries.keys(), store.revision) == ({"k"}, 3)


async def test_a_fold_that_cannot_be_scanned_stops() -> None:
    store = MemoryStore({"k": b"1"}, 3)
    store.failing_keys = True
    with pytest.raises(OSError, match="cannot read"):
        await fold(None, Seen(), watcher=ScriptedWatcher(EXPIRED), store=store, reader=ListedReader([])).run()
    assert store.revision == 3


async def test_a_watch_overrun_by_retention_is_resynced_behind_what_it_had_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.fold.applied.RESYNC_PAUSE_SECONDS", 0.0)
    store = MemoryStore({}, 1)
    running = ScriptedWatch([put("early", 2), put("stays", 3), EXPIRED])
    watcher = ScriptedWatcher(running, ScriptedWatch([put("stays", 12), None]))
    run = fold(None, Seen(), watcher=watcher, store=store, reader=ListedReader(["stays"]))
    assert await run.run() == WatchCursor.of(12)
    assert store.entries.keys() == {"stays"}  # "early" had been delivered, and vanished meanwhile
    assert running.closed


async def test_an_error_of_the_watch_comes_out_after_what_came_before_it_is_folded() -> None:
    store = MemoryStore()
    with pytest.raises(NotConnected):
        await fold(ScriptedWatch([put("a", 1), NotConnected("closed")]), Seen(), store=store, config=PATIENT).run()
    assert store.revision == 1


# --- A network that is away


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.fold.applied.ATTACH_PAUSE_SECONDS", 0.001)


@pytest.mark.usefixtures("impatient")
async def test_the_first_attach_waits_for_the_network() -> None:
    store = MemoryStore({"a": b"1"}, 7)
    watch = ScriptedWatch([put("b", 8), None])
    watcher = ScriptedWatcher(resumed=[NotConnected("away"), Timeout("still away"), watch])
    assert await fold(None, Seen(), watcher=watcher, store=store).run() == WatchCursor.of(8)
    assert watcher.calls == [("all from", 7)] * 3
    assert store.entries.keys() == {"a", "b"}


@pytest.mark.usefixtures("impatient")
async def test_whoever_stops_a_fold_that_waits_for_the_network_gets_its_cursor() -> None:
    stop, watcher = asyncio.Event(), ScriptedWatcher(resumed=NotConnected("away"))
    run = fold(None, Seen(), watcher=watcher, store=MemoryStore({}, 7), stop=stop)
    running = asyncio.create_task(run.run())
    await until(lambda: len(watcher.calls) > 2)
    assert (run.hydrated, run.lag) == (False, None)
    stop.set()
    assert await running == WatchCursor.of(7)


@pytest.mark.parametrize(("closed", "error"), [(True, NotConnected("shut down")), (False, RetryError("what?"))])
async def test_an_attach_that_waiting_cannot_help_ends_the_fold(closed: bool, error: Exception) -> None:
    watcher = ScriptedWatcher(resumed=error)
    watcher.closed = closed
    with pytest.raises(type(error), match=str(error).rstrip("?")):
        await asyncio.wait_for(fold(None, Seen(), watcher=watcher).run(), 60)
    assert len(watcher.calls) == 1


@pytest.mark.usefixtures("impatient")
async def test_a_full_watch_that_cannot_start_begins_again_with_the_listing() -> None:
    store = MemoryStore({"early": b"1", "late": b"1", "stays": b"1"}, 3)
    # "late" is there when the keys are listed, and vanishes without a trace while the network is away.
    reader = ListedReader(["late", "stays"], ["stays"])
    watcher = ScriptedWatcher(
        resumed=[EXPIRED, NotConnected("away"), EXPIRED],
        full=[Timeout("away"), ScriptedWatch([put("stays", 12), None])],
    )
    run = fold(None, Seen(), watcher=watcher, store=store, reader=reader)
    assert await run.run() == WatchCursor.of(12)
    assert store.entries.keys() == {"stays"}
    again = ("all from", 3)
    assert watcher.calls == [again, ("all",), again, again, ("all",)]
    assert run.resyncs == 2


# --- Between flushes
