"""The suite every key-value backend passes: what the roles of penstock.kv promise, tried on a real backend.

A backend's test module subclasses KvConformance and says how to connect and how to lose history:

    class TestMyBuckets(KvConformance):
        def new_connection(self): ...
        async def compact(self, store, revision): ...

The methods are pytest tests (asyncio, auto mode); each is named after the promise it holds.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.errors import (
    AlreadyExists,
    ExpiredError,
    NotConnected,
    OptionsError,
    ReplacedError,
    RevisionMismatch,
    UnsupportedError,
)
from penstock.kv.roles import Connection, KvStore, StoreConfig, Watch
from penstock.types import KvUpdate, Op, VersionToken, WatchCursor

__all__ = ["KvConformance", "collect", "quiet"]

WAIT_SECONDS = 20.0


async def collect(watch: Watch, count: int, limit: int = 65536) -> list[KvUpdate]:
    """Return the next ``count`` updates of a watch, as objects."""
    found: list[KvUpdate] = []
    async with asyncio.timeout(WAIT_SECONDS):
        while len(found) < count:
            found += list(await watch.next_batch(min(limit, count - len(found))))
    return found


async def quiet(watch: Watch, seconds: float = 0.2) -> bool:
    """Whether a watch delivers nothing for a moment."""
    try:
        async with asyncio.timeout(seconds):
            await watch.next_batch()
    except TimeoutError:
        return True
    return False


def short(updates: list[KvUpdate]) -> list[tuple[str, str, bytes]]:
    """Return updates as (op, key, value)."""
    return [(update.op.name.lower(), update.key, update.value) for update in updates]


def cursor_of(token: VersionToken) -> WatchCursor:
    """Return the cursor behind an entry."""
    return WatchCursor(token)


class KvConformance:
    """Subclass it for a backend; see the head of this module."""

    def new_connection(self) -> Connection:
        """Return a connection of the backend, not connected yet."""
        raise NotImplementedError

    async def compact(self, store: KvStore, revision: int) -> None:
        """Make the backend forget every change up to and including ``revision``."""
        raise NotImplementedError

    @pytest.fixture
    async def connection(self) -> AsyncIterator[Connection]:
        async with self.new_connection() as connection:
            yield connection

    @pytest.fixture
    async def store(self, connection: Connection) -> KvStore:
        return await self.new_store(connection)

    async def new_store(self, connection: Connection, **settings: Any) -> KvStore:
        return await connection.store_with_config(StoreConfig(name=f"t{uuid.uuid4().hex}", **settings))

    # --- Connection

    async def test_health_follows_connect_and_shutdown(self) -> None:
        connection = self.new_connection()
        seen = [connection.is_healthy]
        await connection.connect()
        seen.append(connection.is_healthy)
        await connection.shutdown()
        seen.append(connection.is_healthy)
        await connection.shutdown()
        assert seen == [False, True, False]

    async def test_a_connection_can_be_used_again_after_shutdown(self) -> None:
        connection = self.new_connection()
        await connection.connect()
        await connection.shutdown()
        await connection.connect()
        store = await self.new_store(connection)
        assert store.writer is not None
        await store.writer.put("a", b"1")
        await connection.shutdown()

    async def test_connects_that_race_share_one_connection(self) -> None:
        connection = self.new_connection()
        await asyncio.gather(*(connection.connect() for _ in range(16)))
        assert connection.is_healthy
        await connection.connect()
        await connection.shutdown()

    async def test_a_store_needs_a_connection(self) -> None:
        with pytest.raises(NotConnected):
            await self.new_connection().store("early")

    async def test_a_store_is_made_once_and_then_taken_as_it_is(self, connection: Connection) -> None:
        first = await self.new_store(connection, history=5)
        assert first.writer is not None
        await first.writer.put("a", b"1")
        again = await connection.store_with_config(StoreConfig(name=first.name, history=1, max_bytes=1))
        found = await again.reader.get("a")
        assert found is not None
        assert found.value == b"1"

    def test_a_bucket_name_that_cannot_be_is_refused(self) -> None:
        for name in ("", "a.b", "a b", "a/b", "é", "a*"):
            with pytest.raises(OptionsError):
                StoreConfig(name=name)

    # --- Reading and writing

    async def test_what_was_put_is_read_with_its_version(self, store: KvStore) -> None:
        assert store.writer is not None
        version = await store.writer.put("node.a", b"v1")
        for found in (await store.reader.get("node.a"), await store.reader.entry("node.a")):
            assert found is not None
            assert (found.key, found.value, found.version) == ("node.a", b"v1", version)
        assert await store.reader.get("node.b") is None
        assert await store.reader.entry("node.b") is None

    async def test_many_puts_keep_their_order(self, store: KvStore) -> None:
        assert store.writer is not None
        tokens = await store.writer.put_many((f"k{n % 50}", b"%d" % n) for n in range(700))
        revisions = [token.as_int() or 0 for token in tokens]
        assert revisions == sorted(revisions)
        last = await store.reader.get("k49")
        assert last is not None
        assert last.value == b"699"

    async def test_only_one_create_wins(self, store: KvStore) -> None:
        writer = store.writer
        assert writer is not None
        results = await asyncio.gather(*(writer.create("lock", b"%d" % n) for n in range(8)), return_exceptions=True)
        assert sum(isinstance(result, VersionToken) for result in results) == 1
        assert sum(isinstance(result, AlreadyExists) for result in results) == 7

    async def test_a_deleted_key_can_be_created_again(self, store: KvStore) -> None:
        assert store.writer is not None
        await store.writer.create("lock", b"1")
        assert await store.writer.delete("lock") is True
        await store.writer.create("lock", b"2")
        found = await store.reader.get("lock")
        assert found is not None
        assert found.value == b"2"

    async def test_a_tombstone_cannot_be_created_over(self, store: KvStore) -> None:
        assert store.writer is not None
        version = await store.writer.create("lock", b"1")
        assert await store.writer.delete_with_version("lock", version) is True
        with pytest.raises(AlreadyExists):
            await store.writer.create("lock", b"2")
        tombstone = await store.reader.entry("lock")
        assert tombstone is not None
        await store.writer.update("lock", b"3", tombstone.version)

    async def test_an_update_needs_the_version_it_has_seen(self, store: KvStore) -> None:
        assert store.writer is not None
        first = await store.writer.put("a", b"1")
        second = await store.writer.update("a", b"2", first)
        for version in (first, VersionToken.of(1 << 40)):
            with pytest.raises(RevisionMismatch):
                await store.writer.update("a", b"3", version)
            with pytest.raises(RevisionMismatch):
                await store.writer.delete_with_version("a", version)
        found = await store.reader.get("a")
        assert found is not None
        assert (found.value, found.version) == (b"2", second)

    async def test_comparing_with_an_absent_key_is_a_mismatch(self, store: KvStore) -> None:
        assert store.writer is not None
        for version in (VersionToken.of(7), VersionToken.of(1)):
            with pytest.raises(RevisionMismatch):
                await store.writer.update("absent", b"1", version)
        for version in (VersionToken.of(7), VersionToken.of(0)):
            with pytest.raises(RevisionMismatch):
                await store.writer.delete_with_version("absent", version)
        assert await store.reader.entry("absent") is None

    async def test_comparing_needs_a_known_version(self, store: KvStore) -> None:
        assert store.writer is not None
        await store.writer.put("a", b"1")
        for version in (VersionToken(), VersionToken(b"0123456789")):
            with pytest.raises(OptionsError):
                await store.writer.update("a", b"2", version)
            with pytest.raises(OptionsError):
                await store.writer.delete_with_version("a", version)

    async def test_a_delete_hides_the_key_whether_it_was_there_or_not(self, store: KvStore) -> None:
        assert store.writer is not None
        await store.writer.put("a", b"1")
        assert await store.writer.delete("a") is True
        assert await store.writer.delete("never") is True
        for key in ("a", "never"):
            assert await store.reader.get(key) is None
            assert await store.reader.entry(key) is None
        assert await store.reader.keys() == []

    async def test_an_empty_value_is_hidden_but_its_version_can_be_seen(self, store: KvStore) -> None:
        assert store.writer is not None
        version = await store.writer.put("a", b"")
        assert await store.reader.get("a") is None
        found = await store.reader.entry("a")
        assert found is not None
        assert (found.value, found.version) == (b"", version)
        assert await store.reader.keys() == []
        assert len(await store.reader.scan()) == 0

    async def test_a_purge_removes_the_key_and_may_be_repeated(self, connection: Connection) -> None:
        store = await self.new_store(connection, history=5)
        assert store.writer is not None
        if not connection.capabilities.purge:
            with pytest.raises(UnsupportedError):
                await store.writer.purge("a")
            return
        for value in (b"1", b"2", b"3"):
            await store.writer.put("a", value)
        assert await store.writer.purge("a") is True
        assert await store.writer.purge("a") is True
        assert await store.reader.entry("a") is None
        await store.writer.create("a", b"4")

    async def test_a_time_to_live_is_kept_or_refused(self, connection: Connection, store: KvStore) -> None:
        assert store.writer is not None
        if not connection.capabilities.ttl:
            with pytest.raises(UnsupportedError):
                await store.writer.put_with_ttl("a", b"1", 1.0)
            return
        await store.writer.put_with_ttl("a", b"1", 1.0)
        async with asyncio.timeout(WAIT_SECONDS):
            while await store.reader.get("a") is not None:
                await asyncio.sleep(0.05)

    @pytest.mark.parametrize("key", ["", ".lead", "trail.", "a..b", "bad key", "star.*", "gt.>", "é", "a\nb"])
    async def test_a_key_that_cannot_be_is_refused(self, store: KvStore, key: str) -> None:
        assert store.writer is not None
        with pytest.raises(OptionsError):
            await store.writer.put(key, b"1")
        with pytest.raises(OptionsError):
            await store.reader.get(key)

    @pytest.mark.parametrize("key", ["a", "a.b.c", "UP", "a/b=c_d-e", "0"])
    async def test_a_key_that_can_be_is_taken(self, store: KvStore, key: str) -> None:
        assert store.writer is not None
        await store.writer.put(key, b"1")
        assert await store.reader.keys() == [key]

    # --- Scans

    async def test_a_scan_has_the_last_value_and_a_version_to_compare_with(self, store: KvStore) -> None:
        assert store.writer is not None
        for key, value in (("node.a", b"1"), ("node.b", b"2"), ("svc.x", b"3"), ("node.a", b"4")):
            await store.writer.put(key, value)
        entries = {entry.key: entry for entry in await store.reader.entries("node.")}
        assert {key: entry.value for key, entry in entries.items()} == {"node.a": b"4", "node.b": b"2"}
        await store.writer.update("node.a", b"5", entries["node.a"].version)
        assert sorted(await store.reader.keys("svc.")) == ["svc.x"]
        assert sorted(await store.reader.keys()) == ["node.a", "node.b", "svc.x"]

    async def test_a_scan_of_nothing_is_empty(self, store: KvStore) -> None:
        assert await store.reader.keys() == []
        assert await store.reader.keys("none.") == []
        assert len(await store.reader.scan("none.")) == 0

    async def test_a_scan_is_whole_however_many_keys_there_are(self, store: KvStore) -> None:
        assert store.writer is not None
        await store.writer.put_many((f"k.{n:05d}", b"v%d" % n) for n in range(1500))
        assert len(await store.reader.keys("k.")) == 1500
        batch = await store.reader.scan()
        assert {update.key: update.value for update in batch} == {f"k.{n:05d}": b"v%d" % n for n in range(1500)}

    async def test_a_prefix_that_would_match_nothing_is_refused(self, store: KvStore) -> None:
        for prefix in ("node", ".", "a..", "*."):
            with pytest.raises(OptionsError):
                await store.reader.keys(prefix)
            assert store.watcher is not None
            with pytest.raises(OptionsError):
                await store.watcher.watch_prefix(prefix)

    # --- Watches

    async def test_a_watch_begins_with_the_current_state_and_goes_on(self, store: KvStore) -> None:
        assert store.writer is not None
        assert store.watcher is not None
        for key, value in (("a", b"1"), ("b", b"2"), ("a", b"3")):
            await store.writer.put(key, value)
        async with await store.watcher.watch_all() as watch:
            before = watch.hydrated
            found = await collect(watch, 2)
            assert short(found) == [("put", "b", b"2"), ("put", "a", b"3")]
            assert (before, watch.hydrated, watch.lag) == (False, True, 0)
            await store.writer.put("c", b"4")
            await store.writer.delete("a")
            version = await store.writer.put("d", b"")
            found = await collect(watch, 3)
            assert short(found) == [("put", "c", b"4"), ("delete", "a", b""), ("put", "d", b"")]
            assert found[-1].version == version

    async def test_a_watch_of_an_empty_bucket_is_hydrated_at_once(self, store: KvStore) -> None:
        assert store.writer is not None
        assert store.watcher is not None
        async with await store.watcher.watch_all() as watch:
            assert watch.hydrated
            await store.writer.put("a", b"1")
            assert short(await collect(watch, 1)) == [("put", "a", b"1")]

    async def test_a_watch_covers_a_write_between_scan_and_watch(self, store: KvStore) -> None:
        assert store.writer is not None
        assert store.watcher is not None
        await store.writer.put("node.a", b"1")
        seed = await store.reader.scan("node.")
        await store.writer.put("node.b", b"2")
        async with await store.watcher.watch_prefix("node.") as watch:
            keys = {update.key for update in await collect(watch, 2)}
        assert len(seed) == 1
        assert keys == {"node.a", "node.b"}

    async def test_a_prefix_watch_sees_its_prefix_only(self, store: KvStore) -> None:
        assert store.writer is not None
        assert store.watcher is not None
        await store.writer.put("node.a", b"1")
        await store.writer.put("svc.a", b"2")
        async with await store.watcher.watch_prefix("node.") as watch:
            await store.writer.put("svc.b", b"3")
            await store.writer.put("node.b", b"4")
            assert [update.key for update in await collect(watch, 2)] == ["node.a", "node.b"]
            assert await quiet(watch)

    async def test_a_watch_of_prefixes_sees_all_of_them_in_order(self, store: KvStore) -> None:
        assert store.writer is not None
        assert store.watcher is not None
        for key in ("svc.a", "node.a", "other.a"):
            await store.writer.put(key, b"1")
        prefixes = ["node.", "svc.", "node.", "node.deep."]
        async with await store.watcher.watch_prefixes(prefixes) as watch:
            assert [update.key for update in await collect(watch, 2)] == ["svc.a", "node.a"]
            for key in ("other.b", "node.deep.b", "svc.b"):
                await store.writer.put(key, b"2")
            assert [update.key for update in await collect(watch, 2)] == ["node.deep.b", "svc.b"]
            assert await quiet(watch)

    async def test_a_watch_of_no_prefix_ends_at_once(self, store: KvStore) -> None:
        assert store.watcher is not None
        assert [batch async for batch in await store.watcher.watch_prefixes([])] == []
        assert [batch async for batch in await store.watcher.watch_prefixes_from([], WatchCursor.of(3))] == []

    @pytest.mark.parametrize("scope", ["all", "prefix", "prefixes"])
    async def test_a_resumed_watch_delivers_the_delta_only(self, connection: Connection, scope: str) -> None:
        store = await self.new_store(connection, history=5)
        assert store.writer is not None
        await store.writer.put("node.a", b"1")
        seen = await store.writer.put("node.b", b"2")
        await store.writer.put("node.a", b"3")
        await store.writer.delete("node.b")
        async with await self._watch_from(store, scope, cursor_of(seen)) as watch:
            found = await collect(watch, 2)
            assert short(found) == [("put", "node.a", b"3"), ("delete", "node.b", b"")]
            assert watch.hydrated
            await store.writer.put("node.c", b"4")
            assert short(await collect(watch, 1)) == [("put", "node.c", b"4")]
        async with await self._watch_from(store, scope, WatchCursor(found[-1].version)) as watch:
            assert short(await collect(watch, 1)) == [("put", "node.c", b"4")]

    @pytest.mark.parametrize("cursor", [WatchCursor(), WatchCursor.of(0), WatchCursor(VersionToken(b"0123456789"))])
    async def test_a_cursor_that_names_nothing_is_the_beginning(self, store: KvStore, cursor: WatchCursor) -> None:
        assert store.writer is not None
        await store.writer.put("node.a", b"1")
        for scope in ("all", "prefix", "prefixes"):
            async with await self._watch_from(store, scope, cursor) as watch:
                assert short(await collect(watch, 1)) == [("put", "node.a", b"1")]

    async def test_a_cursor_past_every_revision_is_refused(self, store: KvStore) -> None:
        assert store.writer is not None
        await store.writer.put("node.a", b"1")
        for scope in ("all", "prefix", "prefixes"):
            with pytest.raises(OptionsError):
                await self._watch_from(store, scope, WatchCursor.of((1 << 64) - 1))

    async def test_a_cursor_ahead_of_the_bucket_means_it_was_replaced(self, store: KvStore) -> None:
        assert store.writer is not None
        await store.writer.put("node.a", b"1")
        for scope in ("all", "prefix", "prefixes"):
            with pytest.raises(ReplacedError):
                await self._watch_from(store, scope, WatchCursor.of(100))

    async def test_a_cursor_behind_what_is_kept_has_expired(self, store: KvStore) -> None:
        assert store.writer is not None
        tokens = await store.writer.put_many((f"node.{n}", b"v") for n in range(6))
        revisions = [token.as_int() or 0 for token in tokens]
        await self.compact(store, revisions[2])
        for scope in ("all", "prefix", "prefixes"):
            with pytest.raises(ExpiredError) as caught:
                await self._watch_from(store, scope, cursor_of(tokens[1]))
            assert (caught.value.position, caught.value.first) == (revisions[1], revisions[3])
            async with await self._watch_from(store, scope, cursor_of(tokens[2])) as watch:
                assert len(await collect(watch, 3)) == 3

    async def test_a_batch_is_never_longer_than_asked_for(self, store: KvStore) -> None:
        assert store.writer is not None
        assert store.watcher is not None
        await store.writer.put_many((f"k{n}", b"v%d" % n) for n in range(100))
        async with await store.watcher.watch_all() as watch:
            sizes, keys = [], []
            while not watch.hydrated:
                batch = await watch.next_batch(7)
                sizes.append(len(batch))
                keys += [update.key for update in batch]
            assert max(sizes) <= 7
            assert keys == [f"k{n}" for n in range(100)]
            with pytest.raises(OptionsError):
                await watch.next_batch(0)

    async def test_a_slow_watcher_loses_nothing(self, connection: Connection) -> None:
        store = await self.new_store(connection, max_bytes=1 << 28)
        assert store.writer is not None
        assert store.watcher is not None
        async with await store.watcher.watch_all() as watch:
            await store.writer.put_many((f"k{n}", b"%d" % n + b"x" * 20_000) for n in range(400))
            await asyncio.sleep(0.2)
            found = await collect(watch, 400, limit=3)
        assert [update.key for update in found] == [f"k{n}" for n in range(400)]
        assert all(update.op is Op.PUT and len(update.value) > 20_000 for update in found)

    async def test_closing_a_watch_ends_it_for_whoever_waits(self, store: KvStore) -> None:
        assert store.watcher is not None
        watch = await store.watcher.watch_all()

        async def wait() -> int:
            return sum([len(batch) async for batch in watch])

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0.05)
        await watch.aclose()
        await watch.aclose()
        async with asyncio.timeout(WAIT_SECONDS):
            assert await waiting == 0

    async def test_two_watches_do_not_disturb_each_other(self, store: KvStore) -> None:
        assert store.writer is not None
        assert store.watcher is not None
        first, second = await store.watcher.watch_all(), await store.watcher.watch_prefix("b.")
        await store.writer.put_many([("a.1", b"1"), ("b.1", b"2"), ("a.2", b"3"), ("b.2", b"4")])
        assert [update.key for update in await collect(second, 2)] == ["b.1", "b.2"]
        await second.aclose()
        await store.writer.put("b.3", b"5")
        assert [update.key for update in await collect(first, 5)] == ["a.1", "b.1", "a.2", "b.2", "b.3"]
        await first.aclose()

    async def _watch_from(self, store: KvStore, scope: str, cursor: WatchCursor) -> Watch:
        assert store.watcher is not None
        if scope == "all":
            return await store.watcher.watch_all_from(cursor)
        if scope == "prefix":
            return await store.watcher.watch_prefix_from("node.", cursor)
        return await store.watcher.watch_prefixes_from(["node.", "svc."], cursor)
