"""What a NATS bucket promises beyond the roles: traces of the reference, limits, markers."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nats_use import new_store

from penstock.errors import (
    AlreadyExists,
    Backpressure,
    ExpiredError,
    OptionsError,
    PenstockError,
    ReplacedError,
    RetryError,
    RevisionMismatch,
    Timeout,
    UnsupportedError,
)
from penstock.kv import NatsConnection, StoreConfig, Watch
from penstock.kv.nats.api import JetStream
from penstock.kv.nats.bucket import NatsKvStore
from penstock.testing.kv_conformance import collect, quiet
from penstock.types import KvUpdate, Op, VersionToken, WatchCursor

VECTORS = Path(__file__).parents[2] / "vectors" / "slipstream_kv"


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
        assert store.config["allow_msg_ttl"] is True
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
            await connection.store_with_config(StoreConfig(name=name))
        return
    assert (await connection.store_with_config(StoreConfig(name=name))).name == name


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
