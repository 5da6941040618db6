"""Mirrors: a bucket and retained topics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from penstock.kv import EmbeddedConnection, KvStore
from penstock.kv.embedded.format import MAX_VALUE_BYTES
from penstock.kv.keys import check_key
from penstock.mqtt import Broker, Mirror, MirrorSpec
from penstock.mqtt.journal import MemoryJournal
from penstock.mqtt.mirror import key_of, text_of


class Keeping(MemoryJournal):
    """Says that retained messages survive, which the test sees to."""

    keeps = True


class World:
    """A broker, a bucket and a mirror between them."""

    def __init__(self, folder: Path, store: KvStore, **spec: Any) -> None:
        self.folder, self.store, self.spec = folder, store, spec
        self.broker = Broker(journal=Keeping())
        self.heard: list[tuple[str, bytes]] = []
        self.mirror: Mirror

    async def start(self) -> None:
        place = {"place": str(self.folder / "buckets"), "bucket": "devices", "prefix": "state/"}
        self.mirror = Mirror(MirrorSpec(**{**place, **self.spec}), self.broker, str(self.folder / "mirrors"))
        await self.mirror.start()
        async with asyncio.timeout(30):
            await self.mirror.ready()

    def retain(self, topic: str, payload: bytes) -> None:
        self.broker.publish_message(topic, payload, retain=True)

    def topics(self) -> dict[str, bytes]:
        return {
            kept.run.topic.decode(): kept.run.payload()
            for kept in self.broker.retained.match("#")
            if kept.run is not None
        }

    async def keys(self) -> dict[str, bytes]:
        return {entry.key: entry.value for entry in await self.store.reader.entries()}

    async def until(self, topics: dict[str, bytes], keys: dict[str, bytes] | None = None) -> None:
        wanted = keys if keys is not None else {name.removeprefix("state/"): value for name, value in topics.items()}
        async with asyncio.timeout(30):
            while self.topics() != topics or await self.keys() != wanted:
                await asyncio.sleep(0.01)
            await self.mirror.settled()
        assert self.topics() == topics


@contextlib.asynccontextmanager
async def bucket(folder: Path) -> AsyncIterator[KvStore]:
    async with EmbeddedConnection(str(folder / "buckets")) as connection:
        yield await connection.store("devices")


async def test_changes_and_deletes_go_both_ways_and_nothing_echoes(tmp_path: Path) -> None:
    async with bucket(tmp_path) as store:
        assert store.writer is not None
        await store.writer.put("a", b"1")
        world = World(tmp_path, store)
        world.retain("state/b", b"2")
        world.retain("elsewhere", b"x")
        await world.start()
        await world.until({"state/a": b"1", "state/b": b"2", "elsewhere": b"x"}, {"a": b"1", "b": b"2"})
        world.retain("state/a", b"topic")
        await store.writer.put("c/d", b"bucket")
        both = {"state/a": b"topic", "state/b": b"2", "state/c/d": b"bucket", "elsewhere": b"x"}
        await world.until(both, {"a": b"topic", "b": b"2", "c/d": b"bucket"})
        world.retain("state/b", b"")
        await store.writer.delete("c/d")
        await world.until({"state/a": b"topic", "elsewhere": b"x"}, {"a": b"topic"})
        world.retain("state/b", b"again")  # a key that was deleted can come back
        await world.until({"state/a": b"topic", "state/b": b"again", "elsewhere": b"x"}, {"a": b"topic", "b": b"again"})
        # Two from the bucket and a delete, three from topics and a delete: no change was carried back.
        assert (world.mirror.to_topics, world.mirror.to_bucket) == (3, 4)
        await world.mirror.stop()


async def test_what_changed_while_it_was_away_is_carried_the_right_way(tmp_path: Path) -> None:
    async with bucket(tmp_path) as store:
        assert store.writer is not None
        world = World(tmp_path, store)
        for name in ("same", "topic-changed", "topic-gone", "bucket-changed", "bucket-gone", "both"):
            await store.writer.put(name, b"0")
        await world.start()
        await world.until({f"state/{name}": b"0" for name in await world.keys()})
        await world.mirror.stop()
        world.retain("state/topic-changed", b"1")
        world.retain("state/topic-gone", b"")
        world.retain("state/topic-new", b"1")
        world.retain("state/both", b"topic")
        await store.writer.put("bucket-changed", b"1")
        await store.writer.delete("bucket-gone")
        await store.writer.put("bucket-new", b"1")
        await store.writer.put("both", b"bucket")
        await world.start()
        names = {"same": b"0", "topic-changed": b"1", "topic-new": b"1", "bucket-changed": b"1", "bucket-new": b"1"}
        names["both"] = b"bucket"
        await world.until({f"state/{name}": value for name, value in names.items()})
        await world.mirror.stop()


async def test_what_one_side_cannot_hold_stays_on_the_other_and_keeps_nothing_back(tmp_path: Path) -> None:
    async with bucket(tmp_path) as store:
        assert store.writer is not None
        deep = "/".join("x" * 200)
        await store.writer.put(deep, b"too many levels for a retained message")
        world = World(tmp_path, store)
        world.retain("state/large", bytes(MAX_VALUE_BYTES + 1))
        world.retain("state/small", b"1")
        for _ in range(2):  # the second time it is not taken for what both had agreed on
            await world.start()
            await world.until(
                {"state/large": bytes(MAX_VALUE_BYTES + 1), "state/small": b"1"},
                {deep: b"too many levels for a retained message", "small": b"1"},
            )
            assert world.mirror.passed == 2
            assert world.mirror.health().state.value == "ready"
            await world.mirror.stop()


async def test_a_broker_that_forgot_everything_gets_it_back_and_deletes_nothing(tmp_path: Path) -> None:
    async with bucket(tmp_path) as store:
        assert store.writer is not None
        world = World(tmp_path, store)
        await store.writer.put("a", b"1")
        await world.start()
        await world.until({"state/a": b"1"})
        await world.mirror.stop()
        again = World(tmp_path, store)
        again.broker = Broker()  # in memory
        await again.start()
        await again.until({"state/a": b"1"})
        await again.mirror.stop()


@pytest.mark.parametrize("direction", ["to_topics", "to_bucket"])
async def test_one_direction_leaves_the_other_side_alone(tmp_path: Path, direction: str) -> None:
    async with bucket(tmp_path) as store:
        assert store.writer is not None
        await store.writer.put("k", b"bucket")
        world = World(tmp_path, store, direction=direction)
        world.retain("state/t", b"topic")
        await world.start()
        if direction == "to_topics":
            await world.until({"state/k": b"bucket"})
        else:
            await world.until({"state/t": b"topic"})
        await world.mirror.stop()


async def test_both_sides_agree_after_any_changes_at_once(tmp_path: Path) -> None:
    async with bucket(tmp_path) as store:
        writer = store.writer
        assert writer is not None
        world = World(tmp_path, store)
        await world.start()

        async def change(number: int) -> None:
            for step in range(40):
                key = f"k{(number + step) % 3}"
                if number % 2:
                    await writer.put(key, b"b%d" % step)
                    if step % 5 == 0:
                        await writer.delete(key)
                else:
                    world.retain(f"state/{key}", b"" if step % 7 == 0 else b"t%d" % step)
                await asyncio.sleep(0)

        await asyncio.gather(*(change(number) for number in range(4)))
        await asyncio.sleep(0.1)
        await world.mirror.settled()
        async with asyncio.timeout(120):
            while world.topics() != {f"state/{key}": value for key, value in (await world.keys()).items()}:
                await asyncio.sleep(0.02)
        await world.mirror.stop()


@given(st.text(min_size=1))
def test_every_topic_has_a_key_of_its_own(text: str) -> None:
    if "\0" in text or "+" in text or "#" in text or any(0xD800 <= ord(sign) < 0xE000 for sign in text):
        return
    assert text_of(check_key(key_of(text))) == text
