"""Promises of embedded buckets beyond the suite of all backends: history, expiry, retention, several processes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from penstock.disk import MemoryDisk
from penstock.errors import (
    AlreadyExists,
    Backpressure,
    ClosedError,
    CorruptionError,
    ExpiredError,
    OptionsError,
    PenstockError,
    ReplacedError,
    RevisionMismatch,
)
from penstock.kv import EmbeddedConnection, EmbeddedKvStore, EmbeddedOptions, StoreConfig
from penstock.kv.embedded.bucket import COLUMNS, TURNS, Bucket
from penstock.kv.embedded.plan import Change
from penstock.log.detect import open_log
from penstock.log.envelope import open_envelopes
from penstock.store import open_store
from penstock.testing.clock import FakeClock
from penstock.testing.kv_conformance import collect, quiet, short
from penstock.types import Op, VersionToken, WatchCursor

PLAIN = EmbeddedOptions(sync="none")


@pytest.fixture
async def connection(tmp_path: Path) -> AsyncIterator[EmbeddedConnection]:
    async with EmbeddedConnection(tmp_path / "buckets", PLAIN) as connection:
        yield connection


async def new(connection: EmbeddedConnection, **settings: object) -> EmbeddedKvStore:
    return await connection.store_with_config(StoreConfig(name="b", **settings))  # type: ignore[arg-type]


async def test_a_value_is_bytes_and_nothing_else(connection: EmbeddedConnection) -> None:
    store = await new(connection)
    for value in (5, [1, 2], "on", None):  # bytes(5) would be five zeros
        with pytest.raises(TypeError):
            await store.writer.put("k", value)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            await store.writer.create("k", value)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            await store.writer.put_many([("k", value)])  # type: ignore[list-item]
    assert await store.reader.get("k") is None
    await store.writer.put_many([("k", memoryview(b"kept"))])  # type: ignore[list-item]
    found = await store.reader.get("k")
    assert found is not None
    assert found.value == b"kept"


# --- Two connections stand for two processes: they share nothing but the folder


async def test_what_one_process_writes_another_reads_at_once(tmp_path: Path) -> None:
    async with EmbeddedConnection(tmp_path, PLAIN) as one, EmbeddedConnection(tmp_path, PLAIN) as two:
        ours, theirs = await one.store("b"), await two.store("b")
        for n in range(50):
            writer, reader = (ours.writer, theirs.reader) if n % 2 else (theirs.writer, ours.reader)
            version = await writer.put("k", b"%d" % n)
            found = await reader.get("k")
            assert found is not None
            assert (found.value, found.version) == (b"%d" % n, version)


async def test_compare_and_set_holds_between_processes(tmp_path: Path) -> None:
    async with EmbeddedConnection(tmp_path, PLAIN) as one, EmbeddedConnection(tmp_path, PLAIN) as two:
        ours, theirs = await one.store("b"), await two.store("b")
        version = await ours.writer.create("lock", b"me")
        with pytest.raises(AlreadyExists):
            await theirs.writer.create("lock", b"you")
        await theirs.writer.update("lock", b"you", version)
        with pytest.raises(RevisionMismatch):
            await ours.writer.update("lock", b"me", version)


async def test_a_watch_sees_what_another_process_writes(tmp_path: Path) -> None:
    async with EmbeddedConnection(tmp_path, PLAIN) as one, EmbeddedConnection(tmp_path, PLAIN) as two:
        ours, theirs = await new(one), await two.store("b")
        async with await theirs.watcher.watch_prefix("node.") as watch:
            await ours.writer.put_many([("node.a", b"1"), ("svc.a", b"2"), ("node.b", b"3")])
            assert [update.key for update in await collect(watch, 2)] == ["node.a", "node.b"]


async def test_a_process_that_slept_through_retention_still_has_every_key(tmp_path: Path) -> None:
    config = StoreConfig(name="b", max_bytes=400_000)
    async with EmbeddedConnection(tmp_path, PLAIN) as one, EmbeddedConnection(tmp_path, PLAIN) as two:
        ours, theirs = await one.store_with_config(config), await two.store_with_config(config)
        await ours.writer.put("first", b"stays")
        assert await theirs.reader.get("first") is not None
        for n in range(30):
            await ours.writer.put_many((f"k{m}", b"%d" % n * 500) for m in range(100))
        assert ours.bucket.first_revision() > 1000
        found = await theirs.reader.get("first")
        assert found is not None
        assert found.value == b"stays"
        assert (await theirs.reader.scan()).to_pylist() == (await ours.reader.scan()).to_pylist()
        assert theirs.bucket.stat()["digest"] == ours.bucket.stat()["digest"]


# --- History


async def test_history_keeps_the_newest_changes_of_a_key(connection: EmbeddedConnection) -> None:
    store = await new(connection, history=3)
    for n in range(5):
        await store.writer.put("a", b"%d" % n)
        await store.writer.put("ab", b"other")
    assert short(await store.reader.history("a")) == [("put", "a", b"2"), ("put", "a", b"3"), ("put", "a", b"4")]
    await store.writer.delete("a")
    assert [update.op for update in await store.reader.history("a")] == [Op.PUT, Op.PUT, Op.DELETE]


async def test_a_purge_hides_the_history_before_it(connection: EmbeddedConnection) -> None:
    store = await new(connection, history=5)
    await store.writer.put("a", b"1")
    await store.writer.purge("a")
    assert [update.op for update in await store.reader.history("a")] == [Op.PURGE]
    await store.writer.put("a", b"2")
    assert short(await store.reader.history("a")) == [("purge", "a", b""), ("put", "a", b"2")]


# --- Time to live


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def timed(tmp_path: Path, clock: FakeClock) -> AsyncIterator[EmbeddedKvStore]:
    async with EmbeddedConnection(tmp_path / "timed", PLAIN, clock=clock) as connection:
        yield await new(connection)


async def test_a_key_that_expires_is_purged_where_watches_see_it(timed: EmbeddedKvStore, clock: FakeClock) -> None:
    async with await timed.watcher.watch_all() as watch:
        await timed.writer.put_with_ttl("lease", b"me", 5.0)
        assert short(await collect(watch, 1)) == [("put", "lease", b"me")]
        clock.pass_(5.0)
        assert short(await collect(watch, 1)) == [("purge", "lease", b"")]
    assert await timed.reader.entry("lease") is None
    await timed.writer.create("lease", b"you")


async def test_a_key_written_again_does_not_expire(timed: EmbeddedKvStore, clock: FakeClock) -> None:
    await timed.writer.put_with_ttl("lease", b"me", 5.0)
    await timed.writer.put("lease", b"for good")
    clock.pass_(6.0)
    async with await timed.watcher.watch_all() as watch:
        assert short(await collect(watch, 1)) == [("put", "lease", b"for good")]
        await timed.writer.put("next", b"1")
        assert short(await collect(watch, 1)) == [("put", "next", b"1")]  # and no purge before it
    found = await timed.reader.get("lease")
    assert found is not None


async def test_a_lease_is_taken_only_when_it_ends(tmp_path: Path, clock: FakeClock) -> None:
    async with (
        EmbeddedConnection(tmp_path, PLAIN, clock=clock) as one,
        EmbeddedConnection(tmp_path, PLAIN, clock=clock) as two,
    ):
        ours, theirs = await one.store("b"), await two.store("b")
        await ours.writer.put_with_ttl("lease", b"me", 3600)
        with pytest.raises(AlreadyExists):
            await theirs.writer.create("lease", b"you")
        clock.pass_(3600.0)
        await theirs.writer.create("lease", b"you")
        found = await ours.reader.get("lease")
        assert found is not None
        assert found.value == b"you"


async def test_an_expiry_survives_checkpoint_and_restart(tmp_path: Path, clock: FakeClock) -> None:
    options = EmbeddedOptions(sync="none", checkpoint_bytes=1)
    async with EmbeddedConnection(tmp_path, options, clock=clock) as connection:
        store = await connection.store("b")
        await store.writer.put_with_ttl("lease", b"me", 3600)
        await store.writer.put("other", b"1" * 200)
    async with EmbeddedConnection(tmp_path, options, clock=clock) as connection:
        store = await connection.store("b")
        assert store.bucket.stat()["checkpoint"] == 1  # so the time is known from expiry.json alone
        assert await store.reader.get("lease") is not None
        clock.pass_(3600.0)
        async with await store.watcher.watch_all_from(WatchCursor.of(2)) as watch:
            assert short(await collect(watch, 1)) == [("purge", "lease", b"")]
        assert await store.reader.keys() == ["other"]


async def test_a_time_to_live_that_cannot_be_is_refused(connection: EmbeddedConnection) -> None:
    store = await new(connection)
    for seconds in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(OptionsError):
            await store.writer.put_with_ttl("a", b"1", seconds)


# --- Retention


async def test_retention_by_bytes_expires_cursors_and_no_key(connection: EmbeddedConnection) -> None:
    store = await new(connection, max_bytes=300_000)
    first = await store.writer.put("first", b"stays")
    for n in range(40):
        await store.writer.put_many((f"k{m}", b"%04d" % n * 100) for m in range(50))
    with pytest.raises(ExpiredError):
        await store.watcher.watch_all_from(WatchCursor(first))
    size = sum(path.stat().st_size for path in Path(store.bucket.folder).rglob("*.log"))
    assert size < 400_000
    assert len(await store.reader.keys()) == 51
    async with await store.watcher.watch_all_from(WatchCursor.of(store.bucket.first_revision() - 1)) as watch:
        assert len(await watch.next_batch()) > 0


async def test_retention_by_age_expires_cursors_and_no_key(tmp_path: Path, clock: FakeClock) -> None:
    async with EmbeddedConnection(tmp_path, PLAIN, clock=clock) as connection:
        store = await new(connection, max_age_seconds=3600)
        first = await store.writer.put("first", b"stays")
        await store.writer.put("second", b"stays")
        clock.pass_(3700.0)
        last = await store.writer.put("third", b"new")
        with pytest.raises(ExpiredError) as caught:
            await store.watcher.watch_all_from(WatchCursor(first))
        assert (caught.value.position, caught.value.first) == (1, 3)
        async with await store.watcher.watch_all_from(WatchCursor(last)) as watch:
            assert watch.hydrated
        assert sorted(await store.reader.keys()) == ["first", "second", "third"]


async def test_a_watch_that_retention_overtakes_is_told(connection: EmbeddedConnection) -> None:
    store = await new(connection, max_bytes=300_000)
    async with await store.watcher.watch_all() as watch:
        await store.writer.put("a", b"1")
        await collect(watch, 1)
        for n in range(40):
            await store.writer.put_many((f"k{m}", b"%04d" % n * 100) for m in range(50))
        with pytest.raises(ExpiredError):
            await watch.next_batch()


async def test_a_full_bucket_refuses_new_keys_and_keeps_the_old(connection: EmbeddedConnection) -> None:
    store = await new(connection, max_bytes=2000)
    version = await store.writer.put("a", b"x" * 1500)
    with pytest.raises(Backpressure):
        await store.writer.put("b", b"x" * 600)
    await store.writer.update("a", b"x" * 1000, version)
    await store.writer.put("b", b"x" * 600)
    assert sorted(await store.reader.keys()) == ["a", "b"]
    async with EmbeddedConnection(Path(connection.folder) / "old", PLAIN) as other:
        grows = await other.store_with_config(StoreConfig(name="b", max_bytes=2000, discard="old"))
        for n in range(10):
            await grows.writer.put(f"k{n}", b"x" * 1000)
        assert len(await grows.reader.keys()) == 10


# --- Checkpoints and restarts


async def test_a_bucket_is_the_same_after_a_restart(tmp_path: Path) -> None:
    for checkpoint_bytes in (1, 1 << 30):
        folder = tmp_path / str(checkpoint_bytes)
        options = EmbeddedOptions(sync="none", checkpoint_bytes=checkpoint_bytes)
        async with EmbeddedConnection(folder, options) as connection:
            store = await connection.store("b")
            await store.writer.put_many((f"k{n % 40}", b"%d" % n) for n in range(300))
            await store.writer.delete("k7")
            before = (await store.reader.scan()).to_pylist()
        async with EmbeddedConnection(folder, options) as connection:
            store = await connection.store("b")
            assert (await store.reader.scan()).to_pylist() == before
            assert (await store.writer.put("next", b"1")) == VersionToken.of(302)


async def test_the_checkpoint_is_a_store_anyone_can_read(tmp_path: Path) -> None:
    async with EmbeddedConnection(tmp_path, EmbeddedOptions(sync="none", checkpoint_bytes=1)) as connection:
        store = await connection.store("b")
        await store.writer.put_many([("a", b"1"), ("b", b"2"), ("a", b"3")])
        with open_store(tmp_path / "b" / "state.snap") as snapshot:
            assert [(entry.key, entry.value) for entry in snapshot.range()] == [("a", b"3"), ("b", b"2")]
            assert snapshot.cursor() == WatchCursor.of(3)


async def test_a_bucket_made_by_two_at_once_has_one_configuration(tmp_path: Path) -> None:
    connections = [EmbeddedConnection(tmp_path, PLAIN) for _ in range(6)]
    for connection in connections:
        await connection.connect()
    stores = await asyncio.gather(
        *(each.store_with_config(StoreConfig(name="b", history=n + 1)) for n, each in enumerate(connections))
    )
    assert len({store.config.history for store in stores}) == 1
    assert len({store.bucket.log_id for store in stores}) == 1
    await asyncio.gather(*(store.writer.put(f"k{n}", b"1") for n, store in enumerate(stores)))
    assert len(await stores[0].reader.keys()) == 6
    for connection in connections:
        await connection.shutdown()


# --- What goes wrong


async def test_a_bucket_that_was_removed_is_noticed(tmp_path: Path) -> None:
    async with EmbeddedConnection(tmp_path, PLAIN) as connection:
        store = await connection.store("b")
        await store.writer.put("a", b"1")
        shutil.rmtree(tmp_path / "b")
        with pytest.raises(ReplacedError):
            await store.writer.put("a", b"2")


async def test_a_watch_of_a_closed_bucket_says_so(tmp_path: Path) -> None:
    connection = EmbeddedConnection(tmp_path, PLAIN)
    await connection.connect()
    store = await new(connection)
    watch = await store.watcher.watch_all()
    waiting = asyncio.create_task(watch.next_batch())
    await asyncio.sleep(0.02)
    await connection.shutdown()
    with pytest.raises(ClosedError):
        await waiting
    with pytest.raises(ClosedError):
        await store.writer.put("a", b"1")
    with pytest.raises(ClosedError):
        await store.reader.get("a")


async def test_a_damaged_description_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "bucket.json").write_text('{"name": "b", "history": 1000}')
    async with EmbeddedConnection(tmp_path, PLAIN) as connection:
        with pytest.raises(CorruptionError, match=r"bucket\.json"):
            await connection.store("b")


async def test_a_writer_that_is_cancelled_leaves_the_others_alone(connection: EmbeddedConnection) -> None:
    store = await new(connection)
    tasks = [asyncio.create_task(store.writer.put(f"k{n}", b"1")) for n in range(20)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(result, VersionToken) for result in results) >= 19


async def test_values_and_keys_past_the_limits_are_refused(connection: EmbeddedConnection) -> None:
    store = await new(connection, max_bytes=-1)
    with pytest.raises(OptionsError):
        await store.writer.put("a", bytes(connection.capabilities.max_value_bytes + 1))
    with pytest.raises(OptionsError):
        await store.writer.put("k" * 2000, b"1")
    await store.writer.put("a", bytes(connection.capabilities.max_value_bytes))
    await store.writer.put("k" * 1024, b"1")


# --- The law: a bucket is a dict with revisions

KEYS = st.sampled_from(["a", "b", "c.d"])
WHAT = st.sampled_from(["put", "create", "update", "delete", "purge"])
CHANGES = st.lists(st.tuples(WHAT, KEYS, st.binary(max_size=9), st.booleans()), max_size=30)
Turn = list[tuple[str, str, bytes, bool]]


@settings(max_examples=60, deadline=None)
@given(st.lists(CHANGES, max_size=5), st.integers(1, 400))
def test_turns_do_to_a_bucket_what_they_do_to_a_dict(turns: list[Turn], checkpoint: int) -> None:
    disk = MemoryDisk()
    options = EmbeddedOptions(sync="none", checkpoint_bytes=checkpoint)
    buckets = [Bucket.open("b", StoreConfig(name="b"), options, disk=disk) for _ in range(2)]
    model: dict[str, tuple[bytes, int]] = {}
    revision = 0
    for number, turn in enumerate(turns):
        changes, expected = [], list[int | type]()
        for what, key, value, right in turn:
            known = model.get(key, (b"", 0))[1]
            changes.append(Change(what, key, value, known if right else known + 1))  # type: ignore[arg-type]
            if what == "create" and key in model:
                expected.append(AlreadyExists)
            elif what == "update" and not (key in model and right):
                expected.append(RevisionMismatch)
            else:
                revision += 1
                expected.append(revision)
                if what in ("delete", "purge"):
                    model.pop(key, None)
                else:
                    model[key] = (value, revision)
        found = buckets[number % 2].commit(changes)
        assert [outcome if isinstance(outcome, int) else type(outcome) for outcome in found] == expected
    for bucket in [*buckets, Bucket.open("b", StoreConfig(name="b"), options, disk=disk)]:
        assert bucket.catch_up() == revision
        rows = {update.key: (update.value, update.version.as_int()) for update in bucket.scan("", hidden=True)[0]}
        assert rows == model
        bucket.close()


def test_the_clock_of_a_lease_is_the_machines() -> None:
    disk = MemoryDisk()
    bucket = Bucket.open("b", StoreConfig(name="b"), PLAIN, disk=disk)
    bucket.commit([Change("put", "late", b"1", ttl_ns=1)])
    assert bucket.entry("late") is None
    assert bucket.commit([Change("create", "late", b"2")]) == [3]
    bucket.close()


def test_a_write_on_the_event_loop_waits_for_nothing() -> None:
    disk = MemoryDisk()
    one, two = (Bucket.open("b", StoreConfig(name="b"), PLAIN, disk=disk) for _ in range(2))
    put = [Change("put", "k", b"1")]
    assert one.commit_now(put) is None  # the log has to be opened and its first segment made
    assert one.commit(put) == [1]
    assert one.commit_now(put) == [2]
    assert two.commit_now(put) is None  # it has to catch up first
    assert two.commit(put) == [3]
    assert two.commit_now([Change("put", "k", bytes(100_000))]) is None
    assert one._log is not None
    with one._log.turn():
        assert two.commit_now(put) is None
    assert two.commit_now(put) == [4]
    assert one.catch_up() == two.revision == 4
    one.close()
    two.close()


async def test_writes_of_one_moment_share_a_turn_and_a_lone_one_needs_no_thread(
    connection: EmbeddedConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await new(connection)
    await store.writer.put("a", b"0")  # makes the first segment
    turns, threads = TURNS.value(bucket="b"), 0
    real = Bucket.commit

    def counting(self: Bucket, changes: list[Change]) -> list[int | PenstockError]:
        nonlocal threads
        threads += 1
        return real(self, changes)

    monkeypatch.setattr(Bucket, "commit", counting)
    versions = [await store.writer.put("a", b"%d" % n) for n in range(5)]
    assert [version.as_int() for version in versions] == [2, 3, 4, 5, 6]
    assert (TURNS.value(bucket="b") - turns, threads) == (5, 0)
    await asyncio.gather(*(store.writer.put(f"k.{n}", b"v") for n in range(100)))
    assert (TURNS.value(bucket="b") - turns, threads) == (6, 1)
    assert len(await store.reader.keys("k.")) == 100


async def test_cancelling_one_caller_leaves_the_batched_writes_of_others_intact(connection: EmbeddedConnection) -> None:
    store = await new(connection)
    await store.writer.put("a", b"0")
    first, *others = (asyncio.create_task(store.writer.put(f"k.{n}", b"v")) for n in range(4))
    await asyncio.sleep(0)  # the first lets the others join
    first.cancel()
    await asyncio.wait_for(asyncio.gather(*others), 60)
    with pytest.raises(asyncio.CancelledError):
        await first
    assert sorted(await store.reader.keys("k.")) == ["k.1", "k.2", "k.3"]
    alone = asyncio.create_task(store.writer.put("k.4", b"v"))
    await asyncio.sleep(0)
    alone.cancel()
    await asyncio.gather(alone, return_exceptions=True)
    await store.writer.put("k.5", b"v")
    assert sorted(await store.reader.keys("k.")) == ["k.1", "k.2", "k.3", "k.5"]


async def test_a_head_ahead_of_the_log_does_no_harm(connection: EmbeddedConnection) -> None:
    store = await new(connection)
    await store.writer.put("a", b"1")
    (Path(store.bucket.folder) / "head").write_bytes((1000).to_bytes(8, "little"))  # what a power cut can leave
    assert (await store.reader.get("a")) is not None
    async with await store.watcher.watch_all() as watch:
        await collect(watch, 1)
        assert await quiet(watch, 0.05)
        await store.writer.put("b", b"2")
        assert short(await collect(watch, 1)) == [("put", "b", b"2")]


async def test_whoever_has_a_bucket_open_that_another_deletes_is_told(tmp_path: Path) -> None:
    async with EmbeddedConnection(tmp_path, PLAIN) as ours, EmbeddedConnection(tmp_path, PLAIN) as theirs:
        store = await new(ours)
        await store.writer.put("a", b"1")
        watch = await store.watcher.watch_all()
        await collect(watch, 1)
        waiting = asyncio.create_task(watch.next_batch())
        assert await theirs.delete("b")
        assert not (tmp_path / "b").exists()
        with pytest.raises(ReplacedError):
            await asyncio.wait_for(waiting, 60)
        with pytest.raises(ReplacedError):
            await store.writer.put("a", b"2")
        with pytest.raises(ReplacedError):
            await store.reader.scan()
        assert await ours.buckets() == []
        again = await new(ours)
        assert await again.reader.keys() == []
        assert (await again.writer.put("a", b"3")).as_int() == 1


async def test_a_run_of_puts_long_enough_for_columns_leaves_the_same_records(tmp_path: Path) -> None:
    """Promise: how many puts share a turn shows in no record."""
    items = [(f"node.{number}", b"v" * (number % 7 + 1)) for number in range(COLUMNS + 1)]
    async with EmbeddedConnection(tmp_path, sync="none") as connection:
        store = await connection.store("b")
        assert len(await store.writer.put_many(items)) == len(items)
        for key, value in items[:3]:
            await store.writer.put(key, value)
        assert {entry.key: entry.value for entry in await store.reader.scan()} == dict(items)
    with open_log(f"{tmp_path}/b/log") as log:
        batch = open_envelopes(log.read(1, 10_000))
    again = len(items)
    assert [(row["key"], row["payload"], row["op"]) for row in batch.to_pylist()][again:] == [
        (row["key"], row["payload"], row["op"]) for row in batch.to_pylist()
    ][:3]
    assert [row["key"].decode() for row in batch.to_pylist()][:again] == [key for key, _ in items]
