"""Promise: a fold of a log is exactly that of the records below its cursor, whatever happens in between."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from penstock.batch import Batch
from penstock.disk import MemoryDisk
from penstock.errors import ExpiredError, OptionsError, ReplacedError, RetryError
from penstock.fold import Follow, FollowOptions, each_record, follow
from penstock.log import open_log
from penstock.log.envelope import Envelope, encode_envelope
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.log.updates import envelope_updates
from penstock.log.xchannel import Writer
from penstock.store import AppendLogStore, LmdbStore
from penstock.types import KvUpdate, Op, VersionToken, WatchCursor

ENVELOPES = MessageLogOptions(sync="none", content="envelope/1", segment_bytes=2000)


def envelope(key: str, value: bytes = b"", op: Op = Op.PUT) -> bytes:
    return encode_envelope(Envelope(key.encode(), value, op))


def numbered(start: int, count: int) -> list[bytes]:
    return [envelope(f"k{n % 7}", b"%d" % n) for n in range(start, start + count)]


def contents(store: Any) -> dict[str, tuple[bytes, int | None]]:
    return {entry.key: (entry.value, entry.version.as_int()) for entry in store.range()}


def folded(records: Iterable[bytes], first: int = 1) -> dict[str, tuple[bytes, int | None]]:
    """Return the fold of envelopes, computed in the plainest way."""
    batch = Batch.of(list(records))
    state: dict[str, tuple[bytes, int | None]] = {}
    for number, update in enumerate(envelope_updates(batch), first):
        if update.op is Op.PUT:
            state[update.key] = (update.value, number)
        else:
            state.pop(update.key, None)
    return state


@pytest.mark.parametrize("kind", [AppendLogStore, LmdbStore])
async def test_envelopes_are_folded_with_their_position_as_version(tmp_path: Path, kind: Any) -> None:
    records = [envelope("a", b"1"), envelope("b", b"2"), envelope("a", op=Op.DELETE), envelope("c", b"3")]
    with MessageLog.open(tmp_path / "log", ENVELOPES) as writer:
        writer.append_many(records)
    with open_log(str(tmp_path / "log")) as log, kind.open(tmp_path / "fold") as store:
        assert await follow(log, store, once=True) == WatchCursor.of(5)
        assert contents(store) == {"b": (b"2", 2), "c": (b"3", 4)}
        assert store.cursor() == WatchCursor.of(5)


async def test_a_fold_goes_on_where_it_was(tmp_path: Path) -> None:
    records: list[bytes] = []
    with MessageLog.open(tmp_path / "log", ENVELOPES) as writer:
        for part in range(4):
            new = numbered(part * 40, 40)
            records += new
            writer.append_many(new)
            with open_log(str(tmp_path / "log")) as log, AppendLogStore.open(tmp_path / "fold.snap") as store:
                fold = Follow(log, store, options=FollowOptions(batch_records=9))
                await fold.run(once=True)
                assert (fold.records, fold.lag) == (40, 0)
                assert contents(store) == folded(records)


async def test_the_cursor_is_reported_after_the_store_has_it(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "log", ENVELOPES) as writer:
        writer.append_many(numbered(0, 30))
    with open_log(str(tmp_path / "log")) as log, AppendLogStore.open(tmp_path / "fold.snap") as store:
        seen = []

        def reported(cursor: WatchCursor) -> None:
            assert store.cursor() == cursor
            seen.append(cursor.token.as_int())

        await follow(log, store, once=True, on_applied=reported, options=FollowOptions(batch_records=10))
        assert seen == [11, 21, 31]


async def test_a_log_without_keys_is_folded_by_a_function(tmp_path: Path) -> None:
    with Writer.open(str(tmp_path / "ticks")) as writer:
        for n in range(50):
            writer.append(b"%d" % n, kind=n % 3 + 1)
    latest = each_record(lambda record: KvUpdate.put(f"kind.{record.kind}", bytes(record.payload)))
    with open_log(str(tmp_path / "ticks")) as log, AppendLogStore.open(tmp_path / "fold.snap") as store:
        with pytest.raises(OptionsError, match="no envelopes"):
            Follow(log, store)
        await follow(log, store, latest, once=True)
        assert {entry.key: entry.value for entry in store.range()} == {
            "kind.1": b"48", "kind.2": b"49", "kind.3": b"47"
        }  # fmt: skip
        assert store.cursor() == WatchCursor.of(log.next_position)
        assert await follow(log, store, latest, once=True) == WatchCursor.of(log.next_position)


async def test_a_function_may_leave_records_out_and_the_cursor_passes_them(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "log", ENVELOPES) as writer:
        writer.append_many(numbered(0, 20))
    with open_log(str(tmp_path / "log")) as log, AppendLogStore.open(tmp_path / "fold.snap") as store:
        assert await follow(log, store, each_record(lambda record: None), once=True) == WatchCursor.of(21)
        assert store.count() == 0


async def test_a_follower_takes_what_comes_until_it_is_stopped(tmp_path: Path) -> None:
    stop = asyncio.Event()
    with MessageLog.open(tmp_path / "log", ENVELOPES) as writer:
        writer.append_many(numbered(0, 5))
        with open_log(str(tmp_path / "log")) as log, AppendLogStore.open(tmp_path / "fold.snap") as store:
            task = asyncio.create_task(follow(log, store, stop=stop))
            for part in range(1, 4):
                writer.append_many(numbered(part * 5, 5))
                async with asyncio.timeout(60):
                    while store.cursor().token.as_int() != part * 5 + 6:
                        await asyncio.sleep(0.005)
            stop.set()
            assert await task == WatchCursor.of(21)
            assert contents(store) == folded(numbered(0, 20))


# --- What was lost or replaced


async def test_expired_records_stop_the_fold_or_begin_it_again(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "log", ENVELOPES) as writer, AppendLogStore.open(tmp_path / "fold.snap") as store:
        writer.append_many([envelope("gone", b"1"), *numbered(0, 9)])
        with open_log(str(tmp_path / "log")) as log:
            await follow(log, store, once=True)
        writer.append_many(numbered(0, 200))
        writer.drop_before(100)
        first = writer.first_seq
        assert first > 11
        with open_log(str(tmp_path / "log")) as log:
            with pytest.raises(ExpiredError):
                await follow(log, store, once=True)
            assert store.get("gone") is not None
            fold = Follow(log, store, options=FollowOptions(on_expired="restart"))
            await fold.run(once=True)
        assert fold.restarts == 1
        assert store.get("gone") is None
        assert contents(store) == folded(numbered(0, 200)[first - 11 :], first)


@pytest.mark.parametrize("longer", [True, False])
async def test_a_recreated_log_stops_the_fold_or_begins_it_again(tmp_path: Path, longer: bool) -> None:
    with MessageLog.open(tmp_path / "log", ENVELOPES) as writer:
        writer.append_many([envelope("old", b"1"), *numbered(0, 20)])
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        with open_log(str(tmp_path / "log")) as log:
            await follow(log, store, once=True)
        shutil.rmtree(tmp_path / "log")
        records = numbered(100, 40 if longer else 3)
        with MessageLog.open(tmp_path / "log", ENVELOPES) as writer:
            writer.append_many(records)
        with open_log(str(tmp_path / "log")) as log:
            with pytest.raises(ReplacedError):
                await follow(log, store, once=True)
            assert contents(store)["old"] == (b"1", 1)
        log = open_log(str(tmp_path / "log"))
        await follow(log, store, once=True, options=FollowOptions(on_replaced="restart"))
        assert contents(store) == folded(records)


async def test_a_log_recreated_while_it_is_followed_is_noticed(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "log", ENVELOPES) as writer:
        writer.append_many(numbered(0, 20))
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        log = open_log(str(tmp_path / "log"))
        fold = Follow(log, store, options=FollowOptions(on_replaced="restart"))
        await fold.run(once=True)
        shutil.rmtree(tmp_path / "log")
        records = numbered(100, 60)
        with MessageLog.open(tmp_path / "log", ENVELOPES) as writer:
            writer.append_many(records)
        await fold.run(once=True)
        assert fold.restarts == 1
        assert contents(store) == folded(records)


async def test_a_store_of_something_else_is_refused(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "log", ENVELOPES) as writer:
        writer.append_many(numbered(0, 3))
    with open_log(str(tmp_path / "log")) as log, AppendLogStore.open(tmp_path / "fold.snap") as store:
        store.apply([], WatchCursor(VersionToken(b"0123456789")))
        with pytest.raises(OptionsError, match="no position"):
            await follow(log, store, once=True)


# --- A store that fails


class Failing:
    """A store that refuses some applies."""

    def __init__(self, store: AppendLogStore, failures: int) -> None:
        self._store, self.failures, self.error = store, failures, OSError(28, "No space left on device")
        self.path = store.path

    def apply(self, updates: Any, cursor: WatchCursor) -> None:
        if self.failures:
            self.failures -= 1
            raise self.error
        self._store.apply(updates, cursor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


async def test_a_fold_told_to_stop_does_not_wait_for_room(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "log", ENVELOPES) as writer:
        writer.append_many(numbered(0, 20))
    stop = asyncio.Event()
    with open_log(str(tmp_path / "log")) as log, AppendLogStore.open(tmp_path / "fold.snap") as store:
        fold = Follow(log, Failing(store, 1 << 30), stop=stop)  # type: ignore[arg-type]
        running = asyncio.create_task(fold.run())
        async with asyncio.timeout(60):
            while not fold.failures:
                await asyncio.sleep(0.001)
        stop.set()
        await running
        assert store.cursor().at_start


async def test_a_batch_the_store_refused_is_not_passed(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "log", ENVELOPES) as writer:
        writer.append_many(numbered(0, 20))
    options = FollowOptions(retry_seconds=0)
    with open_log(str(tmp_path / "log")) as log, AppendLogStore.open(tmp_path / "fold.snap") as store:
        failing: Any = Failing(store, 50)
        await follow(log, failing, once=True, options=options)
        assert contents(store) == folded(numbered(0, 20))
        failing.failures, failing.error = 100, OSError(5, "Input/output error")
        with MessageLog.open(tmp_path / "log", ENVELOPES) as writer:
            writer.append(envelope("more", b"1"))
        with pytest.raises(RetryError, match="16 times"):
            await follow(log, failing, once=True, options=options)
        assert store.cursor() == WatchCursor.of(21)


# --- The law

RECORD = st.tuples(st.sampled_from(["a", "b", "ü.c"]), st.binary(max_size=20), st.sampled_from(list(Op)))


@settings(max_examples=60, deadline=None)
@given(st.lists(RECORD, max_size=60), st.integers(1, 13))
def test_a_fold_of_envelopes_equals_the_plain_one(rows: list[tuple[str, bytes, Op]], batch_records: int) -> None:
    disk = MemoryDisk()
    records = [envelope(*row) for row in rows]
    with MessageLog.open("log", ENVELOPES, disk=disk) as writer:
        writer.append_many(records)
        expected: dict[str, tuple[bytes, int | None]] = {}
        for number, (key, value, op) in enumerate(rows, 1):
            expected.pop(key, None)
            if op is Op.PUT:
                expected[key] = (value, number)
        log = open_log("log", disk=disk, format="messagelog")
        store = AppendLogStore.open("fold.snap", disk=disk)
        options = FollowOptions(batch_records=batch_records)
        asyncio.run(follow(log, store, once=True, options=options, disk=disk))
        assert contents(store) == expected
        store.close()
