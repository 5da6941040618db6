"""What a NATS bucket promises beyond the roles: traces of the reference, traps, outages, retention."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nats
import pytest

from penstock.errors import (
    AlreadyExists,
    Backpressure,
    ExpiredError,
    NotConnected,
    OptionsError,
    PenstockError,
    ReplacedError,
    RetryError,
    RevisionMismatch,
    Timeout,
    UnsupportedError,
)
from penstock.fold import WatchScope
from penstock.kv import NatsConnection, NatsOptions, StoreConfig, Watch
from penstock.kv.nats import NatsKvStore
from penstock.kv.nats_api import JetStream
from penstock.kv.nats_lane import Lane
from penstock.kv.nats_watch import NatsWatch
from penstock.testing.kv_conformance import collect, quiet
from penstock.testing.nats import NatsServer
from penstock.testing.proxy import TcpProxy
from penstock.types import KvUpdate, Op, VersionToken, WatchCursor

VECTORS = Path(__file__).parents[1] / "vectors" / "slipstream_kv"
WAIT_SECONDS = 20.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(str(tmp_path_factory.mktemp("nats"))) as running:
        yield running


@pytest.fixture
async def connection(server: NatsServer) -> AsyncIterator[NatsConnection]:
    async with NatsConnection(NatsOptions(url=server.url)) as connected:
        yield connected


async def new_store(connection: NatsConnection, **settings: Any) -> NatsKvStore:
    return await connection.store_with_config(StoreConfig(name=f"t{uuid.uuid4().hex}", **settings))


@pytest.fixture
async def store(connection: NatsConnection) -> NatsKvStore:
    return await new_store(connection)


def watch_of(store: NatsKvStore, revision: int | None, *, guarded: bool = True, **seconds: float) -> NatsWatch:
    prefix = f"$KV.{store.name}."
    return NatsWatch(store._api, prefix.encode(), [prefix + ">"], revision, guarded=guarded, **seconds)


async def purge_below(store: NatsKvStore, sequence: int) -> None:
    await store._api.call(f"STREAM.PURGE.{store._api.stream}", {"seq": sequence})


# --- The reference's own traces


def as_json(update: KvUpdate) -> dict[str, str]:
    row = {"key": update.key, "op": update.op.name.lower(), "version": update.version.raw.hex()}
    return {**row, "value": update.value.hex()} if update.op is Op.PUT else row


async def write(store: NatsKvStore, step: dict[str, Any]) -> object:
    value, key = bytes.fromhex(step.get("value", "")), step["key"]
    match step["op"]:
        case "put":
            return await store.writer.put(key, value)
        case "create":
            return await store.writer.create(key, value)
        case "update":
            return await store.writer.update(key, value, VersionToken.of(step["expected"]))
        case "delete":
            return await store.writer.delete(key)
        case "cas_delete":
            return await store.writer.delete_with_version(key, VersionToken.of(step["expected"]))
        case "purge":
            return await store.writer.purge(key)
    raise AssertionError(step)


def kind_of(text: str) -> type[PenstockError]:
    kinds = {
        "key already exists": AlreadyExists,
        "revision mismatch": RevisionMismatch,
        "watch cursor expired (compacted)": ExpiredError,
    }
    return kinds.get(text, OptionsError)  # a key that cannot be, or a revision past the last


async def open_watch(store: NatsKvStore, trace: dict[str, Any]) -> Watch:
    prefixes, watcher = trace.get("prefixes", []), store.watcher
    if "cursor" not in trace:
        match trace["scope"]:
            case "all":
                return await watcher.watch_all()
            case "prefix":
                return await watcher.watch_prefix(prefixes[0])
        return await watcher.watch_prefixes(prefixes)
    cursor = WatchCursor.of(trace["cursor"])
    match trace["scope"]:
        case "all":
            return await watcher.watch_all_from(cursor)
        case "prefix":
            return await watcher.watch_prefix_from(prefixes[0], cursor)
    return await watcher.watch_prefixes_from(prefixes, cursor)


@pytest.mark.parametrize("history", [1, 5])
async def test_a_bucket_answers_as_the_reference_recorded_it(connection: NatsConnection, history: int) -> None:
    trace = json.loads((VECTORS / f"trace_history_{history}.json").read_text())
    store = await new_store(connection, history=trace["history"])
    for step in trace["writes"]:
        expected = step["result"]
        if "error" in expected:
            with pytest.raises(kind_of(expected["error"])):
                await write(store, step)
        else:
            answer = await write(store, step)
            assert answer == (VersionToken.of(expected["revision"]) if "revision" in expected else True)
    for read in trace["reads"]:
        for name in ("get", "entry"):
            expected = read[name]
            if expected is not None and "error" in expected:
                with pytest.raises(OptionsError):
                    await getattr(store.reader, name)(read["key"])
                continue
            found = await getattr(store.reader, name)(read["key"])
            assert expected == (
                found and {"key": found.key, "value": found.value.hex(), "version": found.version.raw.hex()}
            )
    assert sorted(await store.reader.keys()) == trace["keys"]
    scanned = sorted(await store.reader.scan(), key=lambda update: update.key)
    assert [{**as_json(update), "op": "put"} for update in scanned] == [{**row, "op": "put"} for row in trace["scan"]]
    for recorded in trace["watches"]:
        if recorded.get("cursor") == 100:  # we notice that such a bucket is not the one the cursor is of
            with pytest.raises(ReplacedError):
                await open_watch(store, recorded)
        elif recorded.get("prefixes") == ["node"]:  # we refuse a prefix that can match nothing
            with pytest.raises(OptionsError):
                await open_watch(store, recorded)
        elif recorded["ended"] not in ("still open", "ok"):
            with pytest.raises(kind_of(recorded["ended"])):
                await open_watch(store, recorded)
        else:
            async with await open_watch(store, recorded) as watch:
                found = await collect(watch, len(recorded["delivered"]))
                assert [as_json(update) for update in found] == recorded["delivered"]
                if recorded["ended"] == "ok":
                    assert [batch async for batch in watch] == []
                else:
                    assert await quiet(watch, 0.05)


# --- Buckets


async def test_discard_policies_are_what_was_asked_for(connection: NatsConnection) -> None:
    new, old = await new_store(connection, discard="new"), await new_store(connection, discard="old")
    assert (new.config["discard"], new.config["deny_delete"]) == ("new", True)
    assert (old.config["discard"], old.config.get("deny_delete", False)) == ("old", False)
    for store in (new, old):
        assert store.config["allow_rollup_hdrs"] is True
        assert store.config["allow_direct"] is True
        assert not store.config.get("allow_msg_ttl")
        assert store.config["storage"] == "file"


async def test_a_value_longer_than_the_server_takes_is_refused_before_it_is_sent(store: NatsKvStore) -> None:
    with pytest.raises(OptionsError, match="longer than the server takes"):
        await store.writer.put("a", bytes(store._api.client().max_payload + 1))
    await store.writer.put("a", b"1")


async def test_a_full_bucket_refuses_or_evicts(connection: NatsConnection) -> None:
    refusing = await new_store(connection, max_bytes=4096, discard="new")
    with pytest.raises(Backpressure):
        await refusing.writer.put_many((f"k{n}", b"x" * 200) for n in range(100))
    evicting = await new_store(connection, max_bytes=4096, discard="old")
    for n in range(100):
        await evicting.writer.put(f"k{n}", b"x" * 200)
    assert await evicting.reader.get("k0") is None
    assert await evicting.reader.get("k99") is not None


@pytest.mark.parametrize("failure", [RetryError("the answer could not be read"), Timeout("no answer")])
async def test_a_bucket_is_made_by_the_plain_form_when_the_first_fails(
    connection: NatsConnection, monkeypatch: pytest.MonkeyPatch, failure: RetryError
) -> None:
    real = JetStream.call

    async def unreadable(self: JetStream, subject: str, body: object = None) -> dict[str, Any]:
        if subject.startswith("STREAM.CREATE"):
            raise failure
        return await real(self, subject, body)

    monkeypatch.setattr(JetStream, "call", unreadable)
    store = await new_store(connection, history=4)
    assert store.config.get("deny_delete", False) is False  # the mark of the plain form
    assert store.config["max_msgs_per_subject"] == 4
    await store.writer.put("a", b"1")


@pytest.mark.parametrize("exists", [True, False])
async def test_an_account_at_its_limit_of_streams_still_finds_its_bucket(
    connection: NatsConnection, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    name = (await new_store(connection)).name if exists else f"t{uuid.uuid4().hex}"
    asked, request = 0, JetStream.request
    full = {"error": {"code": 400, "err_code": 10027, "description": "maximum number of streams reached"}}

    async def at_the_limit(self: JetStream, subject: str, *args: Any) -> Any:
        nonlocal asked
        if "STREAM.CREATE" in subject:
            return SimpleNamespace(data=json.dumps(full).encode())
        asked += 1
        if asked == 1:  # that is why a creation is tried at all
            raise Timeout("no answer in time")
        return await request(self, subject, *args)

    monkeypatch.setattr(JetStream, "request", at_the_limit)
    if not exists:
        with pytest.raises(UnsupportedError, match="maximum number of streams"):
            await connection.store(name)
        return
    assert (await connection.store(name)).name == name


async def test_a_bucket_that_cannot_be_made_says_why(connection: NatsConnection) -> None:
    with pytest.raises(PenstockError, match="replicas"):
        await new_store(connection, replicas=3)


async def test_a_bucket_made_by_others_without_direct_reads_is_read_all_the_same(connection: NatsConnection) -> None:
    name = f"t{uuid.uuid4().hex}"
    await connection.client.jetstream().create_key_value(bucket=name, history=2)
    store = await connection.store_with_config(StoreConfig(name=name))
    assert not store.config.get("allow_direct")
    version = await store.writer.put("a", b"1")
    found = await store.reader.get("a")
    assert found is not None
    assert (found.value, found.version) == (b"1", version)
    assert await store.reader.get("b") is None
    await store.writer.delete("a")
    assert await store.reader.entry("a") is None
    await store.writer.create("a", b"2")


async def test_a_purge_gives_bytes_back(connection: NatsConnection) -> None:
    store = await new_store(connection, history=10)
    for _ in range(10):
        await store.writer.put("a", b"x" * 1000)
    before = (await store._api.info()).state.bytes
    await store.writer.purge("a")
    await store.writer.purge("a")
    assert (await store._api.info()).state.bytes < before / 10


async def test_a_marker_the_server_wrote_counts_as_a_removal_everywhere(connection: NatsConnection) -> None:
    name = f"t{uuid.uuid4().hex}"
    api = JetStream(lambda: connection.client, f"KV_{name}")
    await api.call(
        f"STREAM.CREATE.KV_{name}",
        {
            "name": f"KV_{name}", "subjects": [f"$KV.{name}.>"], "max_msgs_per_subject": 5, "storage": "memory",
            "allow_direct": True, "allow_rollup_hdrs": True, "allow_msg_ttl": True, "max_age": 1_000_000_000,
            "duplicate_window": 1_000_000_000, "subject_delete_marker_ttl": 60_000_000_000,
        },
    )  # fmt: skip
    store = await connection.store_with_config(StoreConfig(name=name))
    watches = [await store.watcher.watch_all(), await store.watcher.watch_prefixes(["node.", "svc."])]
    await api.publish(f"$KV.{name}.node.a", b"1")
    for watch in watches:
        found = await collect(watch, 2)
        assert [update.op for update in found] == [Op.PUT, Op.PURGE]
        await watch.aclose()
    assert await store.reader.entry("node.a") is None
    assert await store.reader.keys() == []
    await store.writer.create("node.a", b"2")


# --- Consumers


async def test_several_prefixes_cost_one_consumer_and_nothing_is_left_behind(store: NatsKvStore) -> None:
    async def consumers() -> int:
        return (await store._api.info()).state.consumer_count

    await store.writer.put("node.a", b"1")
    async with await store.watcher.watch_prefixes(["node.", "svc.", "x."]) as watch:
        assert await consumers() == 1
        await collect(watch, 1)
    assert await consumers() == 0
    await store.reader.keys()
    await store.reader.scan()
    assert await consumers() == 0
    lane = store._api.client()._ps
    assert isinstance(lane, Lane)
    assert not lane.inboxes


@pytest.mark.parametrize("headers_only", [True, False])
async def test_a_scan_listens_first_and_needs_no_acknowledgements(
    store: NatsKvStore, monkeypatch: pytest.MonkeyPatch, headers_only: bool
) -> None:
    await store.writer.put("a", b"1")
    asked, real = [], JetStream.create_consumer

    async def asking(self: JetStream, config: dict[str, Any]) -> tuple[str, int]:
        asked.append((config, [inbox.subject for inbox in self.client()._ps.inboxes.values()]))
        return await real(self, config)

    monkeypatch.setattr(JetStream, "create_consumer", asking)
    await (store.reader.keys() if headers_only else store.reader.scan())
    async with await store.watcher.watch_all() as watch:
        await collect(watch, 1)
    (scan, before_scan), (live, before_live) = asked
    assert scan["deliver_subject"] in before_scan
    assert live["deliver_subject"] in before_live
    assert (scan["deliver_policy"], scan["ack_policy"], scan["headers_only"]) == (
        "last_per_subject", "none", headers_only,
    )  # fmt: skip
    assert (live["deliver_policy"], live["ack_policy"]) == ("last_per_subject", "none")


async def test_a_scan_over_a_link_that_swallows_everything_ends_in_time(server: NatsServer, store: NatsKvStore) -> None:
    await store.writer.put_many((f"k.{n}", b"x" * 200) for n in range(500))
    with TcpProxy(server.port) as proxy:
        options = NatsOptions(url=f"nats://127.0.0.1:{proxy.port}", operation_seconds=0.5, ping_seconds=60)
        async with NatsConnection(options) as connection:
            remote = await connection.store(store.name)
            proxy.stall(after=50_000)
            with pytest.raises(Timeout):
                async with asyncio.timeout(WAIT_SECONDS):
                    await remote.reader.scan()
            proxy.heal()


async def test_a_scan_that_stands_still_ends_when_the_server_has_no_more(store: NatsKvStore) -> None:
    """Retention may remove what a scan still waits for: the count at its beginning is not the end."""
    await store.writer.put("a", b"1")
    real = store._api.create_consumer

    async def more_than_there_is(config: dict[str, Any]) -> tuple[str, int]:
        name, pending = await real({**config, "deliver_policy": "new"})
        return name, pending + 5

    store._api.create_consumer = more_than_there_is  # type: ignore[method-assign]
    assert await store.reader.keys() == []


async def test_a_scan_whose_connection_ends_fails_and_is_never_partial(store: NatsKvStore) -> None:
    await store.writer.put("a", b"1")
    real = store._api.create_consumer

    async def cut(config: dict[str, Any]) -> tuple[str, int]:
        answer = await real({**config, "deliver_policy": "new"})
        await store._api.client().close()
        return answer[0], 5

    store._api.create_consumer = cut  # type: ignore[method-assign]
    with pytest.raises(NotConnected):
        await store.reader.keys()


async def test_a_hole_in_the_deliveries_is_healed_where_it_is(store: NatsKvStore) -> None:
    await store.writer.put_many((f"k{n}", b"v") for n in range(5))
    watch = watch_of(store, None, heartbeat_seconds=60)  # no heartbeat will tell
    await watch.attach()
    await collect(watch, 5)
    watch._consumer_seq += 1  # as if a message had been lost on the way
    await store.writer.put_many((f"k{n}", b"v") for n in range(5, 10))
    assert [update.key for update in await collect(watch, 5)] == [f"k{n}" for n in range(5, 10)]
    assert watch.resets >= 1
    await watch.aclose()


@pytest.mark.parametrize("revision", [None, 3])
async def test_a_consumer_lost_before_any_delivery_starts_where_it_was_asked_to(
    connection: NatsConnection, revision: int | None
) -> None:
    store = await new_store(connection, history=5)
    await store.writer.put_many((f"k{n % 2}", b"%d" % n) for n in range(6))
    watch = watch_of(store, revision)
    await watch.attach()
    watch._broken = True
    found = await collect(watch, 2 if revision is None else 3)
    expected = [5, 6] if revision is None else [4, 5, 6]
    assert [update.version.as_int() for update in found] == expected
    assert watch.resets == 1
    await watch.aclose()


async def test_a_consumer_deleted_behind_our_back_is_made_again(store: NatsKvStore) -> None:
    watch = watch_of(store, None, heartbeat_seconds=0.2)
    await watch.attach()
    await store._api.delete_consumer(watch._consumer)
    await store.writer.put("a", b"1")
    assert [update.key for update in await collect(watch, 1)] == ["a"]
    await watch.aclose()


async def prefix_watch(store: NatsKvStore) -> NatsWatch:
    prefix, quick = f"$KV.{store.name}.", 0.1
    watch = NatsWatch(
        store._api, prefix.encode(), [prefix + "node.>"], None,
        guarded=False, heartbeat_seconds=quick, probe_seconds=quick,
    )  # fmt: skip
    await watch.attach()
    await store.writer.put("node.a", b"1")
    await collect(watch, 1)
    return watch


async def test_a_quiet_prefix_makes_progress(store: NatsKvStore) -> None:
    watch = await prefix_watch(store)
    last = await store.writer.put_many((f"svc.{n}", b"v") for n in range(20))
    waiting = asyncio.create_task(watch.next_batch())
    async with asyncio.timeout(WAIT_SECONDS):
        while watch.progress < (last[-1].as_int() or 0):
            await asyncio.sleep(0.02)
    await watch.aclose()
    with pytest.raises(StopAsyncIteration):
        await waiting


async def test_a_quiet_prefix_claims_no_progress_over_removed_history(store: NatsKvStore) -> None:
    watch = await prefix_watch(store)
    await store.writer.put_many((f"svc.{n}", b"v") for n in range(20))
    await purge_below(store, 15)
    waiting = asyncio.create_task(watch.next_batch())
    async with asyncio.timeout(WAIT_SECONDS):
        while watch._heartbeat < 20:
            await asyncio.sleep(0.02)
    probed = watch._probed_at
    async with asyncio.timeout(WAIT_SECONDS):
        while watch._probed_at < probed + 0.2:  # it has looked at least twice since
            await asyncio.sleep(0.02)
    assert watch.progress == 1
    await watch.aclose()
    with pytest.raises(StopAsyncIteration):
        await waiting


# --- Retention


async def test_a_live_watch_overrun_by_retention_is_told_before_the_batch(connection: NatsConnection) -> None:
    store = await new_store(connection, history=5)
    await store.writer.put_many((f"k{n}", b"v") for n in range(3))
    watch = watch_of(store, 3)
    await watch.attach()
    # Deliveries stop while the history passes by: the consumer goes on behind what was evicted.
    await watch._drop()
    await store.writer.put_many((f"k{n}", b"v") for n in range(3, 8))
    await purge_below(store, 7)
    await watch._open(4)
    with pytest.raises(ExpiredError) as caught:
        await watch.next_batch()
    assert (caught.value.position, caught.value.first) == (3, 7)
    await watch.aclose()


async def test_a_server_starts_behind_what_it_has_evicted_without_a_word(connection: NatsConnection) -> None:
    """The trap itself: were it ever to say so, the checks around it would be one too many."""
    store = await new_store(connection, history=5)
    await store.writer.put_many((f"k{n}", b"v") for n in range(6))
    await purge_below(store, 5)
    watch = watch_of(store, None, guarded=False)
    await watch._open(3)  # as a resume at revision 2 would, without the checks
    assert [update.version.as_int() for update in await collect(watch, 2)] == [5, 6]
    await watch.aclose()
    for scope in (WatchScope.all(), WatchScope.prefix("k."), WatchScope.of(["k.", "x."])):
        with pytest.raises(ExpiredError):
            await scope.watch_from(store.watcher, WatchCursor.of(2))


async def test_a_gap_that_lost_nothing_is_passed(connection: NatsConnection) -> None:
    store = await new_store(connection, history=1)
    await store.writer.put_many([("a", b"1"), ("b", b"2"), ("b", b"3"), ("b", b"4"), ("c", b"5")])
    watch = watch_of(store, 1)
    await watch.attach()
    assert [update.version.as_int() for update in await collect(watch, 2)] == [4, 5]
    await watch.aclose()


async def test_a_gap_nobody_can_judge_is_delivered_again(
    connection: NatsConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await new_store(connection, history=1)
    await store.writer.put_many([("a", b"1"), ("b", b"2"), ("b", b"3"), ("c", b"4")])
    watch = watch_of(store, 1)
    await watch.attach()
    real, unanswered = JetStream.info, [Timeout("no answer")]

    async def info(self: JetStream) -> Any:
        if unanswered:
            raise unanswered.pop()
        return await real(self)

    monkeypatch.setattr(JetStream, "info", info)
    assert [update.version.as_int() for update in await collect(watch, 2)] == [3, 4]
    assert not unanswered
    assert watch.resets == 1
    await watch.aclose()


async def test_a_list_cut_short_is_guarded_where_it_goes_on(connection: NatsConnection) -> None:
    store = await new_store(connection, history=5)
    await store.writer.put_many((f"k{n}", b"v") for n in range(3))
    watch = watch_of(store, None)
    await watch.attach()
    await collect(watch, 3)
    watch._hydrated = False  # as if more of the list had been to come when the connection broke
    await watch._drop()
    await store.writer.put_many((f"k{n}", b"v") for n in range(3, 8))
    await purge_below(store, 7)
    await watch._open(4)
    with pytest.raises(ExpiredError):
        await asyncio.wait_for(watch.next_batch(), WAIT_SECONDS)
    await watch.aclose()


async def test_an_idle_watch_finds_out_too(connection: NatsConnection) -> None:
    store = await new_store(connection, history=5)
    await store.writer.put_many((f"k{n}", b"v") for n in range(3))
    watch = watch_of(store, 3, heartbeat_seconds=0.1, probe_seconds=0.2)
    await watch.attach()
    await store._api.delete_consumer(watch._consumer)
    await store.writer.put_many((f"k{n}", b"v") for n in range(3, 8))
    await purge_below(store, 8)
    with pytest.raises(ExpiredError):
        await asyncio.wait_for(watch.next_batch(), WAIT_SECONDS)
    await watch.aclose()


async def test_the_window_is_checked_again_after_attaching(store: NatsKvStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.writer.put_many((f"k{n}", b"v") for n in range(6))
    real = JetStream.create_consumer

    async def overtaken(self: JetStream, config: dict[str, Any]) -> tuple[str, int]:
        await purge_below(store, 5)
        return await real(self, config)

    monkeypatch.setattr(JetStream, "create_consumer", overtaken)
    with pytest.raises(ExpiredError):
        await store.watcher.watch_all_from(WatchCursor.of(2))


async def test_a_bucket_deleted_and_made_again_is_noticed(connection: NatsConnection) -> None:
    store = await new_store(connection)
    await store.writer.put("a", b"1")
    watch = watch_of(store, None, heartbeat_seconds=0.1)
    await watch.attach()
    await collect(watch, 1)
    await store._api.call(f"STREAM.DELETE.{store._api.stream}")
    with pytest.raises(ReplacedError):
        await store.writer.put("a", b"2")
    again = await connection.store_with_config(StoreConfig(name=store.name))
    await again.writer.put("a", b"other")
    with pytest.raises(ReplacedError):
        await asyncio.wait_for(watch.next_batch(), WAIT_SECONDS)
    await watch.aclose()


# --- Connections


async def test_a_given_client_is_used_and_never_dialled_again(server: NatsServer) -> None:
    client = await nats.connect(server.url)
    connection = NatsConnection.from_client(client)
    assert connection.is_healthy
    store = await new_store(connection)
    await store.writer.put("a", b"1")
    async with await store.watcher.watch_all() as watch:
        assert len(await collect(watch, 1)) == 1
    await connection.shutdown()
    assert not connection.is_healthy
    with pytest.raises(NotConnected, match="from_client"):
        await connection.connect()


async def test_sixteen_connects_dial_once(server: NatsServer) -> None:
    connection = NatsConnection(NatsOptions(url=server.url))
    await asyncio.gather(*(connection.connect() for _ in range(16)))
    first = connection.client
    await connection.connect()
    assert connection.client is first
    await connection.shutdown()
    with pytest.raises(NotConnected):
        connection.client  # noqa: B018


async def test_a_watch_ends_when_its_connection_is_shut_down(server: NatsServer) -> None:
    connection = NatsConnection(NatsOptions(url=server.url))
    await connection.connect()
    store = await new_store(connection)
    watch = await store.watcher.watch_all()
    waiting = asyncio.create_task(watch.next_batch())
    await asyncio.sleep(0.05)
    await connection.shutdown()
    with pytest.raises(NotConnected):
        await asyncio.wait_for(waiting, WAIT_SECONDS)
    await watch.aclose()


async def test_a_connection_without_a_network_is_shut_down_all_the_same(server: NatsServer) -> None:
    with TcpProxy(server.port) as proxy:
        connection = NatsConnection(NatsOptions(url=f"nats://127.0.0.1:{proxy.port}", operation_seconds=0.5))
        await connection.connect()
        store = await new_store(connection)
        proxy.cut()
        async with asyncio.timeout(WAIT_SECONDS):
            while connection.is_healthy:
                await asyncio.sleep(0.01)
        waiting = asyncio.create_task(store.reader.get("a"))  # goes out with the next connection, if there is one
        await asyncio.sleep(0.05)
        await connection.shutdown()
        with pytest.raises(RetryError):
            await waiting
        assert not connection.is_healthy
        await asyncio.sleep(0.05)
        assert [task for task in asyncio.all_tasks() if "site-packages/nats" in repr(task)] == []
        proxy.heal()
        await connection.connect()
        await store.writer.put("a", b"1")  # a bucket found before is found again
        await connection.shutdown()


async def test_user_and_password_in_the_address_are_used(tmp_path: Path) -> None:
    with NatsServer(str(tmp_path), "--user", "me", "--pass", "s@cret") as server:
        address = server.url.removeprefix("nats://")
        async with NatsConnection(NatsOptions(url=f"nats://me:s%40cret@{address}")) as connection:
            assert connection.is_healthy
        with pytest.raises(NotConnected):
            await NatsConnection(NatsOptions(url=f"nats://me:wrong@{address}")).connect()


async def test_health_and_watches_live_through_a_crash_of_the_server(tmp_path: Path) -> None:
    with NatsServer(str(tmp_path)) as server:
        connection = NatsConnection(NatsOptions(url=server.url))
        await connection.connect()
        store = await new_store(connection)
        watch = await store.watcher.watch_all()
        await store.writer.put("a", b"1")
        assert [update.key for update in await collect(watch, 1)] == ["a"]

        server.stop()
        async with asyncio.timeout(WAIT_SECONDS):
            while connection.is_healthy:
                await asyncio.sleep(0.02)
        server.start()
        async with asyncio.timeout(WAIT_SECONDS):
            while not connection.is_healthy:
                await asyncio.sleep(0.02)

        await store.writer.put("b", b"2")
        assert [update.key for update in await collect(watch, 1)] == ["b"]
        assert isinstance(watch, NatsWatch)
        assert watch.resets >= 1
        await watch.aclose()
        await connection.shutdown()
