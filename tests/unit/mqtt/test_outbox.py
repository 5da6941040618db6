"""The outbox: publishes that wait on disk for their broker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from penstock.errors import Backpressure, ClosedError, OptionsError
from penstock.log import open_log
from penstock.log.envelope import decode_envelope
from penstock.mqtt import Client, MqttServer, Outbox, RemoteSpec, ServerOptions, durable_client
from penstock.mqtt.options import BrokerOptions
from penstock.mqtt.packets import Properties


class Broker:
    """A broker on a thread of its own that can come and go under one address."""

    def __init__(self) -> None:
        self.port = 0
        self.received: list[tuple[str, bytes, Properties]] = []
        self._loop: Any = None

    def start(self) -> None:
        ready = threading.Event()

        async def life() -> None:
            self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
            server = MqttServer(ServerOptions(port=self.port))
            await server.start()
            self.port = int(server.addresses["mqtt"].rpartition(":")[2])
            client = Client(server.addresses["mqtt"])
            await client.start()
            await client.subscribe("#", qos=2)
            listening = asyncio.create_task(self._listen(client))
            ready.set()
            await self._ended.wait()
            listening.cancel()
            await client.stop()
            await server.stop()

        self._thread = threading.Thread(target=asyncio.run, args=(life(),))
        self._thread.start()
        ready.wait()

    async def _listen(self, client: Client) -> None:
        async for message in client.messages():
            self.received.append((message.topic, message.payload, message.properties))

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()


@pytest.fixture
def broker() -> Any:
    made = Broker()
    made.start()
    made.stop()
    yield made
    if made._thread.is_alive():
        made.stop()


def address(broker: Broker) -> RemoteSpec:
    return RemoteSpec(url=f"mqtt://127.0.0.1:{broker.port}", reconnect_seconds=(0.01, 0.1))


def test_to_publish_is_enough_to_open_it(tmp_path: Path, broker: Broker) -> None:
    outbox = Outbox(f"{tmp_path}/outbox", address(broker))
    outbox.publish("plant/1", b"0")
    assert not outbox.flush(timeout=0.05)
    outbox.close()
    with pytest.raises(ClosedError):
        outbox.publish("plant/1", b"1")
    broker.start()
    again = Outbox(f"{tmp_path}/outbox", address(broker))
    assert again.flush(timeout=20), "what an earlier process left behind is sent without a publish"
    again.close()
    assert [payload for _, payload, _ in broker.received] == [b"0"]


def test_what_is_published_while_the_broker_is_away_arrives_when_it_is_there(tmp_path: Path, broker: Broker) -> None:
    given = Properties(user=(("a", "b"),), content_type="t")
    with Outbox(f"{tmp_path}/outbox", address(broker)) as outbox:
        position = outbox.publish("plant/1", b"0", properties=given)
        outbox.publish_many("plant/2", [b"1", b"2"], qos=2)
        assert not outbox.flush(timeout=0.05)
        deadline = time.monotonic() + 60
        while outbox.health().state.value != "degraded" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert outbox.health().state.value == "degraded"
        assert not outbox.delivered(position)
    with pytest.raises(ClosedError):
        outbox.publish("plant/1", b"closed")
    broker.start()
    with Outbox(f"{tmp_path}/outbox", address(broker)) as outbox:  # the process was another one meanwhile
        outbox.publish("plant/1", b"3")
        assert outbox.flush(timeout=30)
        assert outbox.delivered(position)
    broker.stop()
    assert [payload for _, payload, _ in broker.received] == [b"0", b"1", b"2", b"3"]
    assert broker.received[0][2] == given


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_who_flushes_an_outbox_that_sends_no_more_is_told_so(tmp_path: Path) -> None:
    """A closed one said that its broker had everything, and a child of a fork waited for ever."""
    with Outbox(str(tmp_path / "outbox"), "mqtt://127.0.0.1:1") as outbox:
        outbox.publish("plant/7", b"12")
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            try:
                signal.alarm(60)
                os.write(writes, repr(outbox.flush()).encode())
            finally:
                os._exit(0)
        os.close(writes)
        with open(reads) as told:
            assert told.read() == "False"
        os.waitpid(child, 0)
    assert not outbox.flush()
    assert not outbox.describe()["empty"]


def test_threads_publish_and_room_comes_back(tmp_path: Path, broker: Broker) -> None:
    broker.start()
    with Outbox(f"{tmp_path}/outbox", address(broker), max_bytes=8 << 20) as outbox:

        def work(number: int) -> None:
            for each in range(20):
                while True:
                    try:
                        outbox.publish(f"t/{number}", b"%d:" % each + bytes(100_000))
                        break
                    except Backpressure:
                        outbox.flush(timeout=1)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outbox.flush(timeout=60)
    broker.stop()
    for number in range(6):
        got = [payload.partition(b":")[0] for topic, payload, _ in broker.received if topic == f"t/{number}"]
        assert got == [b"%d" % each for each in range(20)]


def test_a_full_outbox_says_so(tmp_path: Path, broker: Broker) -> None:
    kept = 0
    with Outbox(f"{tmp_path}/outbox", address(broker), max_bytes=8 << 20) as outbox, contextlib.suppress(Backpressure):
        while kept < 20:
            outbox.publish("t", bytes(1 << 20))
            kept += 1
    assert 3 <= kept <= 8


def test_a_client_of_paho_becomes_durable_with_one_line(tmp_path: Path, broker: Broker) -> None:
    client = durable_client(paho.Client(CallbackAPIVersion.VERSION2), f"{tmp_path}/outbox")
    info = client.publish("plant/1", "text", qos=0)  # before it was ever connected
    client.publish("plant/1", 12.5)
    assert (info.rc, info.is_published()) == (0, False)
    client.close()
    broker.start()
    with durable_client(paho.Client(CallbackAPIVersion.VERSION2), f"{tmp_path}/outbox") as client:
        client.connect("127.0.0.1", broker.port)
        client.loop_start()
        last = client.publish("plant/2", b"bytes", retain=True)
        last.wait_for_publish(30)
        assert last.is_published()
        assert info.mid < last.mid
        client.disconnect()
        client.loop_stop()
    broker.stop()
    assert [(topic, payload) for topic, payload, _ in broker.received] == [
        ("plant/1", b"text"),
        ("plant/1", b"12.5"),
        ("plant/2", b"bytes"),
    ]


async def test_what_a_server_refuses_a_durable_client_of_paho_is_sent_again(tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text("topic readwrite plant/#\n")
    options = ServerOptions(port=0, acl=str(rules), broker=BrokerOptions(max_queued_messages=0))
    server = MqttServer(options)
    await server.start()
    given: Any = {"client_id": "away", "clean": False, "session_expiry": 1000}
    async with Client(server.addresses["mqtt"], **given) as away:
        await away.subscribe("plant/#", qos=1)
    refused = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_publish(*about: Any) -> None:
        if about[3].is_failure and about[3].value != 0x87:
            loop.call_soon_threadsafe(refused.set)

    def work() -> None:
        made = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        with durable_client(made, f"{tmp_path}/outbox") as client:
            client.on_publish = on_publish
            assert made.on_publish is on_publish
            client.connect("127.0.0.1", int(server.addresses["mqtt"].rpartition(":")[2]))
            client.loop_start()
            client.publish("forbidden", b"never")
            last = client.publish("plant/1", b"in the end")
            last.wait_for_publish(30)
            assert last.is_published()
            client.disconnect()
            client.loop_stop()
            assert client.outbox._feed.passed["NOT_AUTHORIZED"] >= 1

    working = asyncio.create_task(asyncio.to_thread(work))
    async with asyncio.timeout(60):
        await refused.wait()
        roomy = msgspec.structs.replace(options.broker, max_queued_messages=10)
        server.use_limits(msgspec.structs.replace(options, broker=roomy))
        await working
    assert server.broker.sessions["away"].queued_messages >= 1
    await server.stop()


def test_what_is_no_message_is_refused(tmp_path: Path, broker: Broker) -> None:
    with pytest.raises(OptionsError):
        Outbox(f"{tmp_path}/outbox", address(broker), max_bytes=1)
    with Outbox(f"{tmp_path}/outbox", address(broker)) as outbox:
        for topic in ("", "a/#", "a/+", "x" * 70000):
            with pytest.raises(OptionsError):
                outbox.publish(topic, b"")
        with pytest.raises(OptionsError):
            outbox.publish("a", b"", qos=3)
        for payload in (5, "on", None, [1, 2]):  # bytes(5) would be five zeros
            with pytest.raises(TypeError):
                outbox.publish("a", payload)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            outbox.publish_many("a", b"abc")  # type: ignore[arg-type]
        assert outbox.publish("a", memoryview(b"kept")) >= 0  # type: ignore[arg-type]
    with open_log(f"{tmp_path}/outbox") as log:
        assert [decode_envelope(each).payload for each in log.read(log.first_position).to_payloads()] == [b"kept"]
