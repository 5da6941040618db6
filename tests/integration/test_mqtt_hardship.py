"""Promise: peers that are slow, silent, huge or many cost bounded memory and stall nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.metrics import REGISTRY
from penstock.mqtt import packets as p
from penstock.mqtt.codec import LARGEST, decode, encode
from penstock.mqtt.options import BrokerOptions
from penstock.mqtt.reasons import Reason
from penstock.mqtt.server import MqttServer, ServerOptions
from penstock.net.credentials import CredentialsFile, change_credentials, hash_password

SECONDS = 60


class Stream:
    """A client on an asyncio stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, version: int) -> None:
        self.reader, self.writer, self.version = reader, writer, version

    async def send(self, *packets: p.Packet) -> None:
        self.writer.write(b"".join(encode(packet, self.version) for packet in packets))
        await self.writer.drain()

    async def read(self) -> p.Packet:
        head = await self.reader.readexactly(2)
        while head[-1] >= 128:
            head += await self.reader.readexactly(1)
        size = sum((byte & 127) << 7 * place for place, byte in enumerate(head[1:]))
        return decode(head + await self.reader.readexactly(size), self.version)[0]

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            pass


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[MqttServer]:
    server = MqttServer(ServerOptions(port=0, broker=BrokerOptions(sys_seconds=0, **options)))
    await server.start()
    try:
        async with asyncio.timeout(SECONDS):
            yield server
    finally:
        await server.stop()


async def opened(server: MqttServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.addresses["mqtt"].rpartition(":")
    return await asyncio.open_connection(host, int(port), limit=1 << 25)


async def client(server: MqttServer, name: str, version: int = 4, filter: str = "", qos: int = 0) -> Stream:
    stream = Stream(*await opened(server), version)
    await stream.send(p.Connect(name, version, keep_alive=0))
    assert isinstance(await stream.read(), p.Connack)
    if filter:
        await stream.send(p.Subscribe(1, (p.Filter(filter, qos),)))
        assert isinstance(await stream.read(), p.Suback)
    return stream


async def test_a_subscriber_that_stops_reading_costs_bounded_memory_and_stalls_nobody() -> None:
    async with served(max_queued_messages=1000, max_queued_bytes=1 << 20) as server:
        slow = await client(server, "slow", filter="#", qos=1)
        fast = await client(server, "fast", filter="#", qos=0)
        pub = await client(server, "pub")
        slow.reader._transport.pause_reading()  # type: ignore[attr-defined]  # it reads no more
        total, payload = 3000, bytes(10_000)

        async def count() -> None:
            for _ in range(total):
                assert isinstance(await fast.read(), p.Publish)

        counting = asyncio.create_task(count())
        for number in range(total):
            await pub.send(p.Publish("a", payload, number % 2, packet_id=1 if number % 2 else 0))
        await counting
        session = server.broker.sessions["slow"]
        assert session.queued_bytes <= (1 << 20) + 20_000
        assert session.exchange.size <= (1 << 20) + 20_000
        assert sum(session.dropped.values()) > 0
        assert session.link is not None
        assert session.link.connection.buffered < 8 << 20
        for each in (slow, fast, pub):
            await each.close()


async def test_a_payload_of_16_mebibytes_and_a_topic_of_65535_bytes_pass() -> None:
    async with served(max_topic_levels=65535) as server:
        sub = await client(server, "sub", 5, "#", 2)
        pub = await client(server, "pub", 4)
        topic = "t" * 65535
        await pub.send(p.Publish(topic, bytes(16 << 20), 1, packet_id=1))
        message = await sub.read()
        assert isinstance(message, p.Publish)
        assert (message.topic, len(message.payload)) == (topic, 16 << 20)
        assert await pub.read() == p.Ack(p.Kind.PUBACK, 1)
        for each in (sub, pub):
            await each.close()


async def test_a_packet_above_the_limit_is_refused_before_it_is_read() -> None:
    async with served(max_packet_bytes=1000) as server:
        pub = await client(server, "pub", 5)
        pub.writer.write(encode(p.Publish("a", bytes(2000)), 5)[:20])
        goodbye = await pub.read()
        assert isinstance(goodbye, p.Disconnect)
        assert goodbye.reason == 0x95
        await pub.close()


async def test_a_peer_that_sends_byte_by_byte_or_nothing_is_cut_off_in_time() -> None:
    async with served(connect_seconds=0.5) as server:
        reader, writer = await opened(server)
        silent, silent_writer = await opened(server)
        raw = encode(p.Connect("slow", 5), 5)
        try:
            for byte in raw[:-1]:
                writer.write(bytes([byte]))
                await writer.drain()
                if await asyncio.wait_for(reader.read(1), 0.1) == b"":
                    break
        except (TimeoutError, ConnectionError):
            pass
        assert await reader.read() == b""  # an end, not an answer
        assert await silent.read() == b""
        assert server.broker.sessions == {}
        for each in (writer, silent_writer):
            each.close()


async def test_a_flood_of_connects_leaves_nothing_behind() -> None:
    async with served() as server:
        for _ in range(10):
            streams = [await opened(server) for _ in range(50)]
            for number, (_, writer) in enumerate(streams):
                writer.write(encode(p.Connect(f"c{number}", 4), 4) if number % 2 else b"GET / HTTP/1.1\r\n\r\n")
            for _, writer in streams:
                await writer.drain()
                writer.transport.abort()
        while server.broker.links:
            await asyncio.sleep(0)
        assert server.broker.sessions == {}
        last = await client(server, "last", 5, "a")
        await last.send(p.Publish("a", b"fine"))
        message = await last.read()
        assert isinstance(message, p.Publish)
        await last.close()


async def test_a_half_open_connection_is_noticed_by_its_keep_alive() -> None:
    async with served() as server:
        stream = Stream(*await opened(server), 5)
        await stream.send(p.Connect("quiet", 5, keep_alive=1))
        assert isinstance(await stream.read(), p.Connack)
        goodbye = await stream.read()
        assert isinstance(goodbye, p.Disconnect)
        assert goodbye.reason == 0x8D
        await stream.close()


async def test_retained_messages_of_many_topics_all_arrive() -> None:
    async with served() as server:
        for number in range(20_000):
            server.broker.publish_message(f"kept/{number}", bytes(200), retain=True)
        stream = await client(server, "sub", 4, "kept/#", 0)
        topics = set()
        for _ in range(20_000):
            message = await stream.read()
            assert isinstance(message, p.Publish)
            topics.add(message.topic)
        assert len(topics) == 20_000
        assert msgspec.structs.asdict(message)["retain"] is True
        await stream.close()


async def test_a_fault_at_a_deadline_does_not_stop_those_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as server:
        watcher = await client(server, "watcher", 5, "wills/#")
        tick, faults = server.broker.tick, [KeyError("nobody expected this")]

        def sometimes() -> None:
            if faults:
                raise faults.pop()
            tick()

        monkeypatch.setattr(server.broker, "tick", sometimes)
        device = Stream(*await opened(server), 5)
        will = p.Will("wills/device", b"lost", properties=p.Properties(will_delay=1))
        await device.send(p.Connect("device", 5, will=will, properties=p.Properties(session_expiry=60)))
        assert isinstance(await device.read(), p.Connack)
        await device.close()
        async with asyncio.timeout(30):
            said = await watcher.read()
        assert isinstance(said, p.Publish)
        assert (said.topic, faults) == ("wills/device", [])
        await watcher.close()


async def test_a_password_that_cannot_be_checked_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_memory(*_: Any) -> bool:
        raise MemoryError

    monkeypatch.setattr(CredentialsFile, "check", no_memory)
    change_credentials(str(tmp_path / "passwords"), "ann", hash_password("word"))
    made = MqttServer(port=0, passwords=str(tmp_path / "passwords"))
    await made.start()
    try:
        stream = Stream(*await opened(made), 5)
        await stream.send(p.Connect("device", 5, username="ann", password=b"word"))
        async with asyncio.timeout(30):
            connack = await stream.read()
        assert isinstance(connack, p.Connack)
        assert connack.reason == Reason.SERVER_UNAVAILABLE
        await stream.close()
    finally:
        await made.stop()


def test_the_largest_packet_of_the_standard_is_the_default() -> None:
    assert BrokerOptions().max_packet_bytes == LARGEST


def test_metrics_are_brought_up_to_date_without_sys_topics() -> None:
    async def run() -> None:
        async with served() as server:
            metric = REGISTRY.gauge("penstock_mqtt_retained", "retained messages")
            server.broker.publish_message("kept", b"x", retain=True)
            while metric.value() != 1:
                await asyncio.sleep(0.05)

    asyncio.run(run())
