"""What every key-value backend promises about watches."""

from __future__ import annotations

import asyncio

import pytest

from penstock.errors import ExpiredError, OptionsError, ReplacedError
from penstock.kv.roles import KvConnection, KvStore, Watch
from penstock.testing.kv_backend import WAIT_SECONDS, KvBackend, collect, quiet, short
from penstock.types import Op, VersionToken, WatchCursor

__all__ = ["KvWatchesConformance"]


class KvWatchesConformance(KvBackend):
    """Watches from the start and from a cursor, of everything and of prefixes."""

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

    async def test_a_watch_hears_that_a_time_to_live_ran_out(self, connection: KvConnection, store: KvStore) -> None:
        assert store.writer is not None
        assert store.watcher is not None
        if not connection.capabilities.ttl:
            return
        async with await store.watcher.watch_all() as watch:
            await store.writer.create("lease", b"me", ttl_seconds=1.0)
            assert short(await collect(watch, 2)) == [("put", "lease", b"me"), ("purge", "lease", b"")]

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
    async def test_a_resumed_watch_delivers_the_delta_only(self, connection: KvConnection, scope: str) -> None:
        store = await self.new_store(connection, history=5)
        assert store.writer is not None
        await store.writer.put("node.a", b"1")
        seen = await store.writer.put("node.b", b"2")
        await store.writer.put("node.a", b"3")
        await store.writer.delete("node.b")
        async with await self._watch_from(store, scope, WatchCursor(seen)) as watch:
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
                await self._watch_from(store, scope, WatchCursor(tokens[1]))
            assert (caught.value.position, caught.value.first) == (revisions[1], revisions[3])
            async with await self._watch_from(store, scope, WatchCursor(tokens[2])) as watch:
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

    async def test_a_slow_watcher_loses_nothing(self, connection: KvConnection) -> None:
        store = await self.new_store(connection, max_bytes=1 << 28)
        assert store.writer is not None
        assert store.watcher is not None
        async with await store.watcher.watch_all() as watch:
            await store.writer.put_many((f"k{n}", b"%d" % n + b"x" * 20_000) for n in range(400))
            found = await collect(watch, 400, limit=3)
        assert [update.key for update in found] == [f"k{n}" for n in range(400)]
        assert all(update.op is Op.PUT and len(update.value) > 20_000 for update in found)

    async def test_closing_a_watch_ends_it_for_whoever_waits(self, store: KvStore) -> None:
        assert store.watcher is not None
        watch = await store.watcher.watch_all()

        async def wait() -> int:
            return sum([len(batch) async for batch in watch])

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)  # it waits now
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
