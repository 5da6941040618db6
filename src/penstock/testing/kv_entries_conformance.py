"""What every key-value backend promises about connections, entries and scans."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from penstock.errors import (
    AlreadyExists,
    NotConnected,
    OptionsError,
    ReplacedError,
    RevisionMismatch,
    UnsupportedError,
)
from penstock.kv.roles import KvConnection, KvStore, StoreConfig
from penstock.testing.kv_backend import WAIT_SECONDS, KvBackend
from penstock.types import VersionToken, WatchCursor

__all__ = ["KvEntriesConformance"]


class KvEntriesConformance(KvBackend):
    """Connections, reading and writing, scans."""

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

    async def test_looking_at_a_bucket_makes_none(self, connection: KvConnection) -> None:
        name = f"t{uuid.uuid4().hex}"
        store = await connection.store(name)
        assert store.writer is not None
        assert store.watcher is not None
        version = VersionToken.of(1)
        for look in (
            lambda: store.reader.get("a"),
            lambda: store.reader.entry("a"),
            store.reader.keys,
            lambda: store.reader.scan("a."),
            store.watcher.watch_all,
            lambda: store.watcher.watch_prefix("a."),
            lambda: store.watcher.watch_all_from(WatchCursor.of(3)),
            lambda: store.writer.delete("a"),
            lambda: store.writer.purge("a"),
            lambda: store.writer.update("a", b"1", version),
            lambda: store.writer.delete_with_version("a", version),
        ):
            with pytest.raises(ReplacedError, match="does not exist"):
                await look()
        assert await connection.find(name) is None
        assert name not in await connection.buckets()
        assert await connection.delete(name) is False

    @pytest.mark.parametrize("how", ["put", "create", "put_many"])
    async def test_the_first_put_or_create_makes_a_bucket(self, connection: KvConnection, how: str) -> None:
        name = f"t{uuid.uuid4().hex}"
        store = await connection.store(name)
        assert store.writer is not None
        if how == "put_many":
            await store.writer.put_many([("a", b"1")])
        else:
            await getattr(store.writer, how)("a", b"1")
        assert await store.reader.keys() == ["a"]
        assert name in await connection.buckets()
        found = await connection.find(name)
        assert found is not None
        assert await found.reader.keys() == ["a"]

    async def test_a_bucket_that_was_deleted_stays_deleted(self, connection: KvConnection) -> None:
        store = await self.new_store(connection)
        assert store.writer is not None
        await store.writer.put("a", b"1")
        assert await connection.delete(store.name) is True
        with pytest.raises(ReplacedError):
            await store.writer.put("a", b"2")
        with pytest.raises(ReplacedError):
            await store.reader.get("a")
        again = await connection.store(store.name)
        assert again.watcher is not None
        with pytest.raises(ReplacedError):
            await again.watcher.watch_all_from(WatchCursor.of(1))
        assert await connection.find(store.name) is None

    async def test_a_store_is_made_once_and_then_taken_as_it_is(self, connection: KvConnection) -> None:
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

    async def test_a_purge_removes_the_key_and_may_be_repeated(self, connection: KvConnection) -> None:
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

    async def test_a_time_to_live_is_kept_or_refused(self, connection: KvConnection, store: KvStore) -> None:
        assert store.writer is not None
        if not connection.capabilities.ttl:
            with pytest.raises(UnsupportedError):
                await store.writer.put_with_ttl("a", b"1", 1.0)
            return
        await store.writer.put_with_ttl("a", b"1", 1.0)
        await self._vanishes(store, "a")

    async def test_a_created_key_with_a_time_to_live_vanishes_and_can_be_created_again(
        self, connection: KvConnection, store: KvStore
    ) -> None:
        assert store.writer is not None
        if not connection.capabilities.ttl:
            for write in (
                store.writer.create("lease", b"1", ttl_seconds=1.0),
                store.writer.update("lease", b"1", VersionToken.of(1), ttl_seconds=1.0),
            ):
                with pytest.raises(UnsupportedError):
                    await write
            return
        await store.writer.create("lease", b"first", ttl_seconds=1.0)
        with pytest.raises(AlreadyExists):
            await store.writer.create("lease", b"second", ttl_seconds=1.0)
        await self._vanishes(store, "lease")
        await store.writer.create("lease", b"third", ttl_seconds=3600)
        found = await store.reader.get("lease")
        assert found is not None
        assert found.value == b"third"

    async def test_an_update_sets_the_time_to_live_anew_or_ends_it(
        self, connection: KvConnection, store: KvStore
    ) -> None:
        assert store.writer is not None
        if not connection.capabilities.ttl:
            return
        mine = await store.writer.create("mine", b"1", ttl_seconds=1.0)
        kept = await store.writer.create("kept", b"1", ttl_seconds=1.0)
        await store.writer.update("kept", b"2", kept)
        again = await store.writer.update("mine", b"2", mine, ttl_seconds=1.0)
        with pytest.raises(RevisionMismatch):
            await store.writer.update("mine", b"3", mine, ttl_seconds=1.0)
        await self._vanishes(store, "mine")
        with pytest.raises(RevisionMismatch):
            await store.writer.update("mine", b"4", again, ttl_seconds=1.0)
        found = await store.reader.get("kept")  # its first time to live has run out with the other's
        assert found is not None
        assert found.value == b"2"

    async def test_a_time_to_live_that_cannot_be_is_refused(self, connection: KvConnection, store: KvStore) -> None:
        assert store.writer is not None
        if not connection.capabilities.ttl:
            return
        for seconds in (0, -1, 1e9, float("nan")):
            with pytest.raises(OptionsError):
                await store.writer.create("a", b"1", ttl_seconds=seconds)
        assert await store.reader.entry("a") is None

    async def _vanishes(self, store: KvStore, key: str) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while await store.reader.get(key) is not None:
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
