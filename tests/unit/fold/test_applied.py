"""Every row of the fold's state table and failure table, with a store and a watch that do as they are told."""

from __future__ import annotations

import asyncio
import errno
import itertools
from pathlib import Path
from typing import Any

import pytest
from fold_fakes import (
    ALL,
    EXPIRED,
    PATIENT,
    QUICK,
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
from penstock.errors import ClosedError, OptionsError, RetryError
from penstock.fold import AppliedWatch, BatchConfig, WatchScope, watch_applied
from penstock.store import AppendLogStore
from penstock.types import KvUpdate, Op, WatchCursor


async def test_the_lag_is_told_whenever_it_changes_and_ends_at_nought() -> None:
    seen, watch, told = Seen(), ScriptedWatch([]), []
    watch.lag = 2  # what the backend still has
    config = BatchConfig(window_seconds=0.002, max_updates=2, progress_seconds=0.02)
    run = fold(watch, seen, config=config, on_lag=told.append)
    running = asyncio.create_task(run.run())
    await until(lambda: told == [2])
    watch.lag = 1
    watch.feed(put("a", 1))
    await until(lambda: told[-1] == 1)
    watch.lag = 0
    watch.feed(put("b", 2))
    await until(lambda: told[-1] == 0)
    assert run.lag == 0
    watch.feed(None)
    await running
    assert all(one != two for one, two in itertools.pairwise(told))


# --- Flushing


async def test_the_rest_is_flushed_when_the_watch_ends() -> None:
    seen, store = Seen(), MemoryStore()
    cursor = await fold(ScriptedWatch([put("a", 1), put("b", 2), None]), seen, store=store, config=PATIENT).run()
    assert cursor == WatchCursor.of(2)
    assert seen.batches == [["a", "b"]]
    assert (store.entries.keys(), store.revision) == ({"a", "b"}, 2)
    assert seen.reported == [2]


async def test_a_window_that_is_over_flushes() -> None:
    seen, watch = Seen(), ScriptedWatch([put("a", 1)])
    running = asyncio.create_task(fold(watch, seen).run())
    await until(lambda: seen.reported == [1])
    watch.feed(None)
    await running


async def test_a_full_batch_flushes_without_waiting() -> None:
    seen, watch = Seen(), ScriptedWatch([put("a", 1), put("b", 2), put("c", 3)])
    config = BatchConfig(window_seconds=60, max_updates=2)
    running = asyncio.create_task(fold(watch, seen, config=config).run())
    await until(lambda: seen.reported == [2])
    assert seen.batches == [["a", "b"]]
    watch.feed(None)
    await running
    assert seen.batches == [["a", "b"], ["c"]]


async def test_shutdown_flushes_what_waits_and_closes_the_watch() -> None:
    seen, store, stop, watch = Seen(), MemoryStore(), asyncio.Event(), ScriptedWatch([put("a", 1)])
    run = fold(watch, seen, store=store, stop=stop, config=PATIENT)
    running = asyncio.create_task(run.run())
    await until(lambda: len(run._queue) == 1)
    assert seen.batches == []
    stop.set()
    assert await running == WatchCursor.of(1)
    assert store.revision == 1
    assert watch.closed


async def test_shutdown_with_nothing_waiting_returns_where_it_stood() -> None:
    stop, store = asyncio.Event(), MemoryStore({"a": b"1"}, 7)
    stop.set()
    assert await fold(ScriptedWatch(), Seen(), store=store, stop=stop).run() == WatchCursor.of(7)
    assert store.applies == []


# --- The cursor


async def test_the_cursor_moves_only_after_apply_has_returned() -> None:
    store, seen = MemoryStore(), Seen()
    during: list[tuple[int | None, int | None]] = []

    async def slow(batch: UpdateBatch) -> None:
        during.append((run.applied.token.as_int(), store.revision))
        await asyncio.sleep(0.01)
        during.append((run.applied.token.as_int(), store.revision))

    config = BatchConfig(window_seconds=60, max_updates=1)
    watch = ScriptedWatch([put("a", 1), put("b", 2), None])
    run = AppliedWatch(ScriptedWatcher(resumed=watch), ALL, apply=slow, store=store, config=config)
    assert await run.run() == WatchCursor.of(2)
    assert during == [(None, None), (None, None), (1, 1), (1, 1)]
    assert seen.reported == []


async def test_an_apply_that_fails_stops_the_fold_and_the_cursor() -> None:
    store = MemoryStore()

    def broken(batch: UpdateBatch) -> None:
        raise ZeroDivisionError

    watch = ScriptedWatch([put("a", 1), None])
    with pytest.raises(ZeroDivisionError):
        await watch_applied(ScriptedWatcher(resumed=watch), ALL, apply=broken, store=store, config=QUICK)
    assert store.applies == []


async def test_rejected_updates_are_covered_by_the_cursor() -> None:
    seen, store = Seen(), MemoryStore()
    got: list[list[str]] = []

    def parse(batch: UpdateBatch) -> list[str]:
        return [update.key for update in batch if update.key == "good"]

    watch = ScriptedWatch([[put("bad", 1), put("good", 2), put("bad", 3)], None])
    cursor = await watch_applied(
        ScriptedWatcher(resumed=watch), ALL, parse=parse, apply=got.append, store=store,
        on_applied=seen.on_applied, config=QUICK,
    )  # fmt: skip
    assert got == [["good"]]
    assert (cursor, store.revision, seen.reported) == (WatchCursor.of(3), 3, [3])
    assert store.entries.keys() == {"bad", "good"}


async def test_an_unknown_version_is_applied_and_never_moves_the_cursor() -> None:
    seen, store = Seen(), MemoryStore()
    watch = ScriptedWatch([put("a", 5), put("b", None), put("c", None), None])
    assert await fold(watch, seen, store=store, config=PATIENT).run() == WatchCursor.of(5)
    assert seen.keys == ["a", "b", "c"]
    only_unknown = MemoryStore({}, 4)
    await fold(ScriptedWatch([put("b", None), None]), Seen(), store=only_unknown).run()
    assert (only_unknown.revision, only_unknown.entries.keys()) == (4, {"b"})


async def test_a_revision_that_comes_again_does_not_move_the_cursor_back() -> None:
    store = MemoryStore()
    await fold(ScriptedWatch([put("a", 9), put("a", 4), None]), Seen(), store=store, config=PATIENT).run()
    assert store.revision == 9


async def test_a_fold_goes_on_at_the_cursor_of_its_store_however_far_the_caller_had_come() -> None:
    for asked, expected in ((None, 5), (9, 5), (3, 3)):
        watcher = ScriptedWatcher(resumed=ScriptedWatch([None]))
        resume = None if asked is None else WatchCursor.of(asked)
        await fold(None, Seen(), watcher=watcher, store=MemoryStore({}, 5), resume=resume).run()
        assert watcher.calls == [("all from", expected)]


@pytest.mark.parametrize(
    ("scope", "call"),
    [
        (ALL, ("all from", 5)),
        (WatchScope.prefix("node."), ("prefix from", "node.", 5)),
        (WatchScope.of(["node.", "svc."]), ("prefixes from", "node.", "svc.", 5)),
    ],
)
async def test_the_scope_decides_which_watch_is_used(scope: WatchScope, call: tuple[Any, ...]) -> None:
    watcher = ScriptedWatcher(resumed=ScriptedWatch([None]))
    await fold(None, Seen(), watcher=watcher, scope=scope, resume=WatchCursor.of(5)).run()
    assert watcher.calls == [call]


async def test_the_cursor_of_a_quiet_scope_follows_the_bucket() -> None:
    seen, store, watch = Seen(), MemoryStore(), ScriptedWatch([put("node.a", 1)])
    config = BatchConfig(window_seconds=0.001, progress_seconds=0.01)
    running = asyncio.create_task(fold(watch, seen, store=store, config=config, scope=WatchScope.prefix("node.")).run())
    await until(lambda: seen.reported == [1])
    watch.quiet_at = 40
    await until(lambda: store.revision == 40)
    watch.feed(None)
    assert await running == WatchCursor.of(40)
    assert store.entries.keys() == {"node.a"}


# --- A store that fails


async def test_a_refused_batch_stays_in_front_and_nothing_is_reported_before_it_is_stored() -> None:
    seen, store = Seen(), MemoryStore()
    store.failing = 3
    watch = ScriptedWatch([put("a", 1)])
    run = fold(watch, seen, store=store)
    running = asyncio.create_task(run.run())
    await until(lambda: store.failing < 3)
    watch.feed(put("b", 2))
    watch.feed(None)
    assert await running == WatchCursor.of(2)
    assert seen.batches == [["a"], ["b"]]  # applied once each, however often the store refused
    assert (store.entries.keys(), store.revision) == ({"a", "b"}, 2)
    assert store.applies[0][0][0] == "a"
    assert None not in seen.reported
    assert run.failures == 0


async def test_on_applied_never_reports_what_the_store_has_not() -> None:
    store = MemoryStore()
    store.failing = 5
    wrong: list[int | None] = []

    def on_applied(cursor: WatchCursor) -> None:
        if cursor != store.at:
            wrong.append(cursor.token.as_int())

    watch = ScriptedWatch([put("a", 1), None])
    await AppliedWatch(
        ScriptedWatcher(resumed=watch), ALL, apply=lambda batch: None, store=store, on_applied=on_applied, config=QUICK
    ).run()
    assert wrong == []
    assert store.revision == 1


async def test_sixteen_failures_in_a_row_stop_the_fold() -> None:
    store, seen = MemoryStore(), Seen()
    store.failing = 16
    with pytest.raises(RetryError, match="16 consecutive"):
        await fold(ScriptedWatch([put("a", 1)]), seen, store=store).run()
    assert (store.revision, seen.reported) == (None, [])
    again, watch = MemoryStore(), ScriptedWatch([put("a", 1)])
    again.failing = 15
    running = asyncio.create_task(fold(watch, Seen(), store=again).run())
    await until(lambda: again.revision == 1)
    again.failing = 15  # one success, and counting begins anew
    watch.feed(put("b", 2))
    watch.feed(None)
    await running
    assert again.revision == 2


async def test_while_the_store_fails_the_watch_waits() -> None:
    store, watch = MemoryStore(), ScriptedWatch([put(f"k{n}", n + 1) for n in range(500)])
    store.failing = 6
    config = BatchConfig(window_seconds=0.001, max_updates=10, channel_capacity=20, retry_seconds=0.01)
    running = asyncio.create_task(fold(watch, Seen(), store=store, config=config).run())
    await until(lambda: store.failing <= 2)
    assert watch.taken <= 10 + 20 + 1
    watch.feed(None)
    assert await running == WatchCursor.of(500)
    assert len(store.entries) == 500


async def test_a_full_channel_makes_the_watch_wait() -> None:
    watch = ScriptedWatch([put(f"k{n}", n + 1) for n in range(100)])
    gate = asyncio.Event()

    async def blocked(batch: UpdateBatch) -> None:
        await gate.wait()

    config = BatchConfig(window_seconds=0.0, max_updates=5, channel_capacity=10)
    run = AppliedWatch(ScriptedWatcher(resumed=watch), ALL, apply=blocked, config=config)
    running = asyncio.create_task(run.run())
    await asyncio.sleep(0.05)
    assert watch.taken <= 5 + 10 + 1
    gate.set()
    watch.feed(None)
    assert await running == WatchCursor.of(100)


# --- An expired cursor


async def test_a_request_sees_everything_delivered_before_it_and_the_fold_goes_on() -> None:
    store, watch = MemoryStore(), ScriptedWatch([put("a", 1), put("b", 2)])
    run = fold(watch, Seen(), store=store, config=PATIENT)
    running = asyncio.create_task(run.run())
    await until(lambda: len(run._queue) == 2)
    assert store.revision is None
    assert await run.between_flushes(lambda held: (held.revision, sorted(held.entries))) == (2, ["a", "b"])
    assert await run.between_flushes(lambda held: held.revision) == 2  # with nothing waiting as well
    watch.feed(put("c", 3))
    watch.feed(None)
    assert await running == WatchCursor.of(3)


async def test_a_request_that_fails_fails_for_who_asked_only() -> None:
    store, watch = MemoryStore(), ScriptedWatch([put("a", 1)])
    run = fold(watch, Seen(), store=store)
    running = asyncio.create_task(run.run())

    def broken(held: Any) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        await run.between_flushes(broken)
    watch.feed(None)
    assert await running == WatchCursor.of(1)
    with pytest.raises(ClosedError):
        await run.between_flushes(lambda held: None)


async def test_a_request_without_a_store_is_refused() -> None:
    with pytest.raises(OptionsError):
        await fold(ScriptedWatch(), Seen()).between_flushes(lambda held: None)


async def test_a_request_nobody_waits_for_any_more_is_dropped() -> None:
    store, watch, stop = MemoryStore(), ScriptedWatch(), asyncio.Event()
    run = fold(watch, Seen(), store=store, stop=stop)
    asking = asyncio.create_task(run.between_flushes(lambda held: None))
    await asyncio.sleep(0)
    asking.cancel()
    running = asyncio.create_task(run.run())
    watch.feed(put("a", 1))
    await until(lambda: store.revision == 1)
    unanswered = asyncio.create_task(run.between_flushes(lambda held: None))
    stop.set()
    await running
    with pytest.raises(ClosedError):
        await unanswered


async def test_cancelling_a_fold_closes_its_watch() -> None:
    watch = ScriptedWatch([put("a", 1)])
    running = asyncio.create_task(fold(watch, Seen()).run())
    await until(lambda: watch.taken == 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert watch.closed


def test_deletes_have_no_version_of_their_own() -> None:
    assert not KvUpdate.delete("k").version.known


# --- A store without room


class FullStore(MemoryStore):  # type: ignore[misc]
    """Has no room for so many applies."""

    def __init__(self, full: int) -> None:
        super().__init__()
        self.full = full

    def apply(self, updates: UpdateBatch, cursor: WatchCursor) -> None:
        if self.full:
            self.full -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        super().apply(updates, cursor)


async def test_a_store_without_room_is_waited_for_however_long_it_takes() -> None:
    seen, store, watch = Seen(), FullStore(50), ScriptedWatch([put("a", 1)])
    run = fold(watch, seen, store=store)
    running = asyncio.create_task(run.run())
    await until(lambda: run.failures > 20 or store.revision)
    watch.feed(put("b", 2))
    await until(lambda: store.revision == 2)
    assert store.entries == {"a": b"v", "b": b"v"}
    assert seen.reported == [2] or seen.reported == [1, 2]
    watch.feed(None)
    await running


async def test_a_fold_told_to_stop_does_not_wait_for_room() -> None:
    store, stop, watch = FullStore(1000), asyncio.Event(), ScriptedWatch([put("a", 1)])
    run = fold(watch, Seen(), store=store, stop=stop)
    running = asyncio.create_task(run.run())
    await until(lambda: run.failures > 2)
    stop.set()
    with pytest.raises(RetryError, match="No space left"):
        await running


async def test_a_fold_without_a_store_is_repaired_with_a_reader_alone() -> None:
    seen = Seen()
    first = ScriptedWatch([put("stays", 1), put("gone", 2), EXPIRED])
    second = ScriptedWatch([put("stays", 1), None])
    watcher = ScriptedWatcher(resumed=first, full=second)
    await fold(None, seen, watcher=watcher, reader=ListedReader(["stays"])).run()
    assert seen.keys == ["stays", "gone", "gone", "stays"]


# --- Options and memory


async def test_options_are_keywords_and_a_name_that_does_not_exist_is_refused() -> None:
    seen, watch = Seen(), ScriptedWatch([put("a", 1), None])
    await AppliedWatch(ScriptedWatcher(resumed=watch), ALL, apply=seen.apply, window_seconds=0.0).run()
    assert seen.keys == ["a"]
    with pytest.raises(OptionsError, match="did you mean window_seconds"):
        AppliedWatch(ScriptedWatcher(), ALL, apply=seen.apply, window_second=0.0)
    with pytest.raises(OptionsError, match="not both"):
        AppliedWatch(ScriptedWatcher(), ALL, apply=seen.apply, config=QUICK, max_updates=3)


async def test_memory_is_filled_from_the_store_before_anything_new_is_applied(tmp_path: Path) -> None:
    view: dict[str, bytes] = {}

    def apply(batch: UpdateBatch) -> None:
        for update in batch:
            if update.op is Op.PUT:
                view[update.key] = update.value
            else:
                del view[update.key]

    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        store.apply([put("node.a", 1), put("node.b", 2), put("svc.x", 3)], WatchCursor.of(3))
        watch = ScriptedWatch([put("node.c", 4), KvUpdate.delete("node.a", 5), None])
        scope = WatchScope.of(["node.", "svc."])
        cursor = await watch_applied(ScriptedWatcher(resumed=watch), scope, apply=apply, store=store, fill=True)
        assert cursor == WatchCursor.of(5)
        assert view == {entry.key: entry.value for entry in store.range()}
    with pytest.raises(OptionsError, match="fill"):
        AppliedWatch(ScriptedWatcher(), ALL, apply=apply, store=MemoryStore(), fill=True)
