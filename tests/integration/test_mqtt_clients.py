"""Promise: public client libraries talk to the broker, both versions, over TCP, TLS and WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import ssl
from collections.abc import Iterator
from typing import Any, Self

import aiomqtt
import gmqtt
import paho.mqtt.client as paho
import pytest
from mqtt_server import Served, serve
from paho.mqtt.enums import CallbackAPIVersion

from penstock.net import make_development_certificate

SECONDS = 60


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("certificate")
    files = make_development_certificate(str(folder))
    words = ("--ws-port", "0", "--tls-port", "0", "--wss-port", "0", "--cert", files.certificate, "--key", files.key)
    with serve(*words) as served:
        served.certificate = files.certificate  # type: ignore[attr-defined]
        yield served


class Paho:
    """paho's client with its messages in a queue."""

    def __init__(self, served: Served, transport: str, protocol: int, client_id: str, **given: Any) -> None:
        kind = "websockets" if transport in ("ws", "wss") else "tcp"
        self.client = paho.Client(CallbackAPIVersion.VERSION2, client_id, protocol=protocol, transport=kind, **given)  # type: ignore[arg-type]
        if transport in ("mqtts", "wss"):
            self.client.tls_set(served.certificate)  # type: ignore[attr-defined]
        self.messages: queue.Queue[paho.MQTTMessage] = queue.Queue()
        self.connected: queue.Queue[Any] = queue.Queue()
        self.subscribed: queue.Queue[Any] = queue.Queue()
        self.client.on_message = lambda *args: self.messages.put(args[2])
        self.client.on_connect = lambda *args: self.connected.put(args[3])
        self.client.on_subscribe = lambda *args: self.subscribed.put(args[3])
        self.client.connect("localhost", served.port(transport))
        self.client.loop_start()
        assert self.connected.get(timeout=SECONDS) == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.disconnect()
        self.client.loop_stop()


@pytest.mark.parametrize("transport", ["mqtt", "mqtts", "ws", "wss"])
@pytest.mark.parametrize("protocol", [paho.MQTTv311, paho.MQTTv5])
def test_paho_publishes_and_receives_every_qos(broker: Served, transport: str, protocol: int) -> None:
    topic = f"paho/{transport}/{protocol}"
    with (
        Paho(broker, transport, protocol, f"sub-{topic}") as sub,
        Paho(broker, transport, protocol, f"pub-{topic}") as pub,
    ):
        sub.client.subscribe(topic, 2)
        sub.subscribed.get(timeout=SECONDS)
        sent = []
        for qos in (0, 1, 2):
            for number in range(20):
                payload = f"{qos} {number}".encode() + bytes(number * 1000)
                info = pub.client.publish(topic, payload, qos)
                sent.append((qos, payload))
            info.wait_for_publish(SECONDS)
        got = [sub.messages.get(timeout=SECONDS) for _ in sent]
        for qos in (0, 1, 2):
            assert [m.payload for m in got if m.qos == qos] == [payload for each, payload in sent if each == qos]


def test_paho_resumes_a_session_and_sees_retained_messages_and_wills(broker: Served) -> None:
    topic = "paho/session"
    with Paho(broker, "mqtt", paho.MQTTv311, "keeper", clean_session=False) as sub:
        sub.client.subscribe(f"{topic}/#", 1)
        sub.subscribed.get(timeout=SECONDS)
    with Paho(broker, "mqtt", paho.MQTTv5, "other") as pub:
        pub.client.publish(f"{topic}/kept", b"kept", 1, retain=True).wait_for_publish(SECONDS)
        pub.client.publish(f"{topic}/away", b"away", 1).wait_for_publish(SECONDS)
    with Paho(broker, "mqtt", paho.MQTTv311, "keeper", clean_session=False) as sub:
        assert {sub.messages.get(timeout=SECONDS).payload for _ in range(2)} == {b"kept", b"away"}
        client = paho.Client(CallbackAPIVersion.VERSION2, "dying", protocol=paho.MQTTv5)
        client.will_set(f"{topic}/will", b"gone", 1)
        client.connect("localhost", broker.port())
        while not client.is_connected():
            client.loop()
        client.socket().close()  # type: ignore[union-attr]
        assert sub.messages.get(timeout=SECONDS).payload == b"gone"
        sub.client.publish(f"{topic}/kept", b"", 1, retain=True).wait_for_publish(SECONDS)


@pytest.mark.parametrize("protocol", [aiomqtt.ProtocolVersion.V311, aiomqtt.ProtocolVersion.V5])
@pytest.mark.parametrize("transport", ["mqtt", "mqtts", "ws"])
async def test_aiomqtt_talks_to_itself(broker: Served, protocol: Any, transport: str) -> None:
    context = ssl.create_default_context(cafile=broker.certificate) if transport == "mqtts" else None  # type: ignore[attr-defined]
    client = aiomqtt.Client(
        "localhost",
        broker.port(transport),
        protocol=protocol,
        tls_context=context,
        transport="websockets" if transport == "ws" else "tcp",
    )
    async with asyncio.timeout(SECONDS), client:
        topic = f"aio/{transport}/{protocol}"
        await client.subscribe(topic, qos=2)
        for number in range(50):
            await client.publish(topic, b"%d" % number, qos=number % 3)
        got: list[bytes] = []
        async for message in client.messages:
            got.append(bytes(message.payload))  # type: ignore[arg-type]
            if len(got) == 50:
                break
        for qos in range(3):
            own = [int(each) for each in got if int(each) % 3 == qos]
            assert own == sorted(own)
        assert len(set(got)) == 50


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("transport", ["mqtt", "mqtts"])
async def test_gmqtt_talks_to_itself(broker: Served, version: int, transport: str) -> None:
    context: Any = False
    if transport == "mqtts":
        context = ssl.create_default_context(cafile=broker.certificate)  # type: ignore[attr-defined]
    got: asyncio.Queue[tuple[bytes, int, dict[str, Any]]] = asyncio.Queue()
    subscribed = asyncio.Event()

    async def on_message(client: Any, topic: str, payload: bytes, qos: int, properties: dict[str, Any]) -> int:
        await got.put((payload, qos, properties))
        return 0

    client = gmqtt.Client(f"gmqtt-{transport}-{version}")
    client.on_message = on_message
    client.on_subscribe = lambda *_: subscribed.set()
    async with asyncio.timeout(SECONDS):
        await client.connect("localhost", broker.port(transport), ssl=context, version=version)
        client.subscribe(f"gmqtt/{transport}/{version}", qos=2)
        await subscribed.wait()
        for number in range(30):
            properties = {"user_property": ("n", str(number))} if version == 5 else {}
            client.publish(f"gmqtt/{transport}/{version}", b"%d" % number, qos=number % 3, **properties)
        received = [await got.get() for _ in range(30)]
        assert {payload for payload, _, _ in received} == {b"%d" % number for number in range(30)}
        if version == 5:
            for payload, _, properties in received:
                assert properties["user_property"] == [("n", payload.decode())]
        with contextlib.suppress(ssl.SSLError):  # it closes while its last acknowledgements are still on their way
            await client.disconnect()
