"""Promises of the client: both versions on every wire, nothing lost or doubled across reconnects, bounded both ways."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from mqtt_server_use import address, broker, trusted
from net_use import eventually

from penstock.errors import ClosedError, NotConnected, OptionsError, Refused
from penstock.kernel.mqtt import make_run
from penstock.mqtt.client import Client, ClientOptions, Message
from penstock.mqtt.client_core import Arrived, ClientCore
from penstock.mqtt.codec import encode
from penstock.mqtt.options import BrokerOptions
from penstock.mqtt.packets import NONE, Ack, Connack, Connect, Filter, Kind, Properties, Will
from penstock.mqtt.reasons import Reason
from penstock.mqtt.remote import RemoteSpec
from penstock.mqtt.state_options import PersistenceOptions
from penstock.net import change_credentials, hash_password
from penstock.testing.proxy import TcpProxy

WIRES = ["mqtt", "mqtts", "ws", "wss", "unix"]


async def take(client: Client, count: int) -> list[Message]:
    found: list[Message] = []
    async with asyncio.timeout(60):
        async for message in client.messages():
            found.append(message)
            if len(found) == count:
                break
    return found


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("version", [4, 5])
async def test_every_wire_and_version_carries_every_qos(tmp_path: Path, wire: str, version: int) -> None:
    async with broker(tmp_path) as server:
        options = ClientOptions(version=version, client_id="c", tls=trusted(tmp_path))
        async with Client(address(server, wire), options) as client:
            assert await client.subscribe("t/#", qos=2) == (2,)
            for qos in (0, 1, 2):
                await client.publish(f"t/{qos}", b"one", qos=qos)
                await client.publish_many(f"t/{qos}", [b"%d" % number for number in range(500)], qos=qos)
            found = await take(client, 3 * 501)
            for qos in (0, 1, 2):
                own = [message for message in found if message.topic == f"t/{qos}"]
                assert [message.payload for message in own] == [b"one", *(b"%d" % number for number in range(500))]
                assert {message.qos for message in own} == {qos}
            assert client.connected


async def test_properties_travel_both_ways(tmp_path: Path) -> None:
    async with broker(tmp_path) as server, Client(address(server, "mqtt")) as client:
        assert client.client_id  # given by the server
        await client.subscribe(Filter("t", 1, retain_as_published=True), identifier=7)
        sent = Properties(content_type="x", user=(("a", "1"), ("a", "2")), correlation_data=b"c", message_expiry=60)
        await client.publish("t", b"p", qos=1, properties=sent)
        (found,) = await take(client, 1)
        assert found.properties.user == sent.user
        assert found.properties.content_type == "x"
        assert found.properties.subscription_ids == (7,)
        assert found.properties.message_expiry == 60


async def test_more_messages_than_ids_or_window_go_in_order(tmp_path: Path) -> None:
    from penstock.mqtt.options import BrokerOptions

    narrow = BrokerOptions(receive_maximum=100)
    async with broker(tmp_path, broker=narrow) as server, Client(address(server, "mqtt")) as client:
        await client.subscribe("t", qos=2)
        sent = [b"%d" % number for number in range(3_000)]
        for qos in (1, 2):
            publishing = asyncio.create_task(client.publish_many("t", sent, qos=qos))
            assert [message.payload for message in await take(client, 3_000)] == sent
            await publishing


async def test_ids_wrap_around(tmp_path: Path) -> None:
    async with broker(tmp_path) as server, Client(address(server, "mqtt")) as client:
        payloads = [b""] * 20_000
        for _ in range(4):
            await client.publish_many("t", payloads, qos=1)
        await asyncio.gather(*(client.publish("t", b"", qos=2) for _ in range(200)))
        assert client._core.unfinished == 0


@pytest.mark.parametrize("version", [4, 5])
async def test_a_lost_connection_is_made_again_and_nothing_is_lost_or_doubled(tmp_path: Path, version: int) -> None:
    async with broker(tmp_path) as server:
        with TcpProxy(int(server.addresses["mqtt"].rpartition(":")[2])) as proxy:
            options = ClientOptions(
                version=version, client_id="c", clean=False, session_expiry=600, reconnect_seconds=(0.01, 0.1)
            )
            async with Client(f"mqtt://127.0.0.1:{proxy.port}", options) as client:
                await client.subscribe("t", qos=2)
                got: list[bytes] = []

                async def consume() -> None:
                    async for batch in client.batches():
                        got.extend(payload for run in batch for payload in run.payloads())

                consuming = asyncio.create_task(consume())
                for number in range(40):
                    publishing = asyncio.create_task(client.publish_many("t", [b"%d" % number] * 1, qos=2))
                    if number % 8 == 3:
                        proxy.cut()
                        proxy.heal()
                    async with asyncio.timeout(60):
                        await publishing
                await eventually(lambda: len(got) >= 40)
                assert got == [b"%d" % number for number in range(40)]
                assert client.reconnects >= 1
                consuming.cancel()


async def test_a_server_that_forgot_the_session_is_subscribed_to_again(tmp_path: Path) -> None:
    async with broker(tmp_path) as server:
        with TcpProxy(int(server.addresses["mqtt"].rpartition(":")[2])) as proxy:
            options = ClientOptions(version=5, reconnect_seconds=(0.01, 0.1))
            async with Client(f"mqtt://127.0.0.1:{proxy.port}", options) as client:
                await client.subscribe("t", qos=1)
                proxy.cut()
                proxy.heal()
                await eventually(lambda: client.reconnects == 1)
                await client.publish("t", b"again", qos=1)
                assert (await take(client, 1))[0].payload == b"again"


async def test_what_a_consumer_had_not_dealt_with_comes_again(tmp_path: Path) -> None:
    async with broker(tmp_path) as server:
        options = ClientOptions(client_id="worker", clean=False, session_expiry=600)
        async with Client(address(server, "mqtt"), options) as client:
            await client.subscribe("jobs", qos=1)
        async with Client(address(server, "mqtt")) as boss:
            await boss.publish_many("jobs", [b"%d" % number for number in range(10)], qos=1)

        async def fail_on_the_fourth() -> None:
            async with Client(address(server, "mqtt"), options) as client:
                async for message in client.messages():
                    if message.payload == b"3":
                        raise RuntimeError("on 3")

        with pytest.raises(RuntimeError, match="on 3"):
            await fail_on_the_fourth()
        async with Client(address(server, "mqtt"), options) as client:
            assert [message.payload for message in await take(client, 4)] == [b"3", b"4", b"5", b"6"]
        async with Client(address(server, "mqtt"), options) as client:
            assert [message.payload for message in await take(client, 3)] == [b"7", b"8", b"9"]


async def test_a_batch_that_a_consumer_failed_on_comes_again_as_a_whole(tmp_path: Path) -> None:
    """All but its last message were acknowledged."""
    async with broker(tmp_path) as server:
        options = ClientOptions(client_id="worker", clean=False, session_expiry=600)
        sent = [b"%d" % number for number in range(10)]

        async def fail() -> None:
            async with Client(address(server, "mqtt"), options) as client:
                async for _ in client.batches():
                    raise RuntimeError("on all of it")

        async with Client(address(server, "mqtt"), options) as client:
            await client.subscribe("jobs", qos=1)
        async with Client(address(server, "mqtt")) as boss:
            await boss.publish_many("jobs", sent, qos=1)
        with pytest.raises(RuntimeError, match="on all of it"):
            await fail()
        async with Client(address(server, "mqtt"), options) as client:
            assert [message.payload for message in await take(client, 10)] == sent


async def test_iterations_that_share_a_client_lose_and_keep_back_nothing(tmp_path: Path) -> None:
    """One took the other's place in its run: what was left there, or its acknowledgements, were gone."""
    async with broker(tmp_path) as server:
        options = ClientOptions(client_id="worker", clean=False, session_expiry=600)
        async with Client(address(server, "mqtt"), options) as client, Client(address(server, "mqtt")) as boss:
            await client.subscribe("#", qos=1)
            for topic in "abcd":
                await boss.publish_many(topic, [topic.encode() + b"%d" % number for number in range(3)], qos=1)
            await eventually(lambda: client._arrived_count == 12)
            one, other = client.messages(), client.messages()
            found = [(await anext(each)).payload for each in (one, other, other, other, one, other)]
            await other.aclose()
            runs = client.batches()
            found += [bytes(payload) for run in await anext(runs) for payload in run.payloads()]
            assert found == [b"%c%d" % (topic, number) for topic in b"abcd" for number in range(3)]
            await boss.publish_many("e", [b"e0", b"e1", b"e2"], qos=1)
            assert (await anext(one)).payload == b"e0"
            assert [bytes(payload) for run in await anext(runs) for payload in run.payloads()] == [b"e1", b"e2"]
        (session,) = [each for each in server.broker.sessions.values() if each.client_id == "worker"]
        assert not session.exchange.messages  # all of it was acknowledged


async def test_who_stops_in_the_middle_of_a_run_goes_on_there(tmp_path: Path) -> None:
    async with broker(tmp_path) as server:
        options = ClientOptions(client_id="worker", clean=False, session_expiry=600)
        sent = [b"%d" % number for number in range(12)]
        async with Client(address(server, "mqtt"), options) as client, Client(address(server, "mqtt")) as boss:
            await client.subscribe("jobs", qos=1)
            await boss.publish_many("jobs", sent, qos=1)
            await eventually(lambda: client._arrived_count == 12)
            found = [message.payload for _ in range(3) for message in await take(client, 2)]
            assert found == sent[:6]
            async for batch in client.batches():
                found += [bytes(payload) for run in batch for payload in run.payloads()]
                break
            assert found == sent
        async with Client(address(server, "mqtt"), options) as client:  # what was seen was acknowledged
            async with Client(address(server, "mqtt")) as boss:
                await boss.publish("jobs", b"last", qos=1)
            assert [message.payload for message in await take(client, 1)] == [b"last"]


async def test_a_slow_consumer_stops_the_reading(tmp_path: Path) -> None:
    async with broker(tmp_path) as server:
        options = ClientOptions(max_queued_messages=100)
        async with Client(address(server, "mqtt"), options) as slow, Client(address(server, "mqtt")) as fast:
            await slow.subscribe("t", qos=1)
            sent = [b"%05d" % number + bytes(200) for number in range(5_000)]
            await fast.publish_many("t", sent, qos=1)
            await eventually(lambda: slow._arrived_count > 100)
            assert slow._arrived_count <= 2_000  # the receive maximum and a read
            assert [message.payload for message in await take(slow, 5_000)] == sent


async def test_batches_are_runs_and_count_as_one_acknowledgement(tmp_path: Path) -> None:
    async with broker(tmp_path) as server, Client(address(server, "mqtt")) as client:
        await client.subscribe("t", qos=1)
        await client.publish_many("t", [b"x"] * 900, qos=1)
        count = 0
        async for batch in client.batches():
            count += sum(run.count for run in batch)
            if count == 900:
                break
        assert count == 900


async def test_a_will_is_published_and_retained_messages_come(tmp_path: Path) -> None:
    async with broker(tmp_path) as server, Client(address(server, "mqtt")) as watcher:
        await watcher.publish("state", b"on", qos=1, retain=True)
        await watcher.subscribe("state", "gone")
        assert [(m.payload, m.retain) for m in await take(watcher, 1)] == [(b"on", True)]
        mortal = Client(address(server, "mqtt"), ClientOptions(will=Will("gone", b"bye"), reconnect=False))
        await mortal.start()
        assert mortal._connection is not None
        mortal._connection.abort("the end")
        assert (await take(watcher, 1))[0].payload == b"bye"


async def test_who_is_refused_is_told_why(tmp_path: Path) -> None:
    passwords = str(tmp_path / "passwords")
    change_credentials(passwords, "ann", hash_password("s3cret"))
    acl = tmp_path / "acl.toml"
    acl.write_text('everyone = ["r"]\n[roles.r]\nallow = ["all own/%u/#"]\n')
    async with broker(tmp_path, passwords=passwords, acl=str(acl)) as server:
        for version in (4, 5):
            for wrong in ({"username": "ann", "password": "guess"}, {}):
                options: dict[str, Any] = {"version": version, **wrong}
                with pytest.raises(Refused, match=r"BAD_USER_NAME_OR_PASSWORD|NOT_AUTHORIZED"):
                    await Client(address(server, "mqtt"), ClientOptions(**options)).start()
        good = ClientOptions(username="ann", password="s3cret")
        async with Client(address(server, "mqtt"), good) as client:
            assert await client.subscribe("own/ann/#", "own/bob/#") == (0, 0x87)
            await client.publish("own/ann/x", b"", qos=1)
            with pytest.raises(Refused, match="NOT_AUTHORIZED"):
                await client.publish("own/bob/x", b"", qos=1)


async def test_use_before_and_after_its_life_and_wrong_arguments_are_told(tmp_path: Path) -> None:
    async with broker(tmp_path) as server:
        client = Client(address(server, "mqtt"))
        with pytest.raises(NotConnected, match="not started"):
            await client.publish("t", b"")
        await client.start()
        with pytest.raises(OptionsError, match="no topic"):
            await client.publish("a/#", b"")
        with pytest.raises(OptionsError, match="65535"):
            await client.publish("x" * 70_000, b"")
        waiting = asyncio.create_task(anext(client.messages(), None))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await client.stop()
        await client.stop()
        assert await waiting is None
        with pytest.raises(ClosedError):
            await client.publish("t", b"", qos=1)
    with pytest.raises(NotConnected):
        await Client(address(server, "mqtt")).start()


async def test_a_server_that_falls_silent_is_noticed(tmp_path: Path) -> None:
    async with broker(tmp_path) as server:
        with TcpProxy(int(server.addresses["mqtt"].rpartition(":")[2])) as proxy:
            options = ClientOptions(keep_alive=1, reconnect_seconds=(0.01, 0.1), connect_seconds=2.0)
            async with Client(f"mqtt://127.0.0.1:{proxy.port}", options) as client:
                proxy.stall()
                await eventually(lambda: not client.connected)
                proxy.heal()
                await eventually(lambda: client.reconnects == 1)


def test_what_is_in_hand_is_not_acknowledged_because_it_came_again() -> None:
    """With QoS 2 a server that sent it again after a reconnect was told that it had been dealt with."""
    core = ClientCore(Connect("c", version=5, clean=False))
    run = make_run(b"t", [b"1", b"2", b"3"], 2, False)

    def connect() -> bytes:
        core.begin()
        core.data_to_send()
        assert len(core.receive(encode(Connack(session_present=core.session > 0), 5))) == 1
        assert core.receive(run.frames(True, 12, b"t", b"", 7))[1:] == []  # three of them, QoS 2, DUP
        return core.data_to_send()

    core.begin()
    core.receive(encode(Connack(), 5))
    (arrived,) = core.receive(run.frames(True, 4, b"t", b"", 7))
    assert isinstance(arrived, Arrived)
    core.data_to_send()
    core.lost()
    assert connect() == b""
    head, tail = arrived.run.split(1)
    core.acknowledge(Arrived(head, arrived.session))
    assert core.data_to_send() == encode(Ack(Kind.PUBREC, 7), 5)
    core.lost()
    assert connect() == encode(Ack(Kind.PUBREC, 7), 5)  # the server had not heard it
    core.lost()
    core.acknowledge(Arrived(tail, arrived.session))  # nobody hears it
    assert connect() == b"".join(encode(Ack(Kind.PUBREC, number), 5) for number in (7, 8, 9))


def test_a_release_that_the_server_had_finished_before_is_no_refusal() -> None:
    core = ClientCore(Connect("c", version=5, clean=False))
    worst: list[int] = []
    core.begin()
    core.receive(encode(Connack(), 5))
    core.publish("a", [b"x"], 2, False, NONE, lambda reason, _: worst.append(reason))
    core.receive(encode(Ack(Kind.PUBREC, 1), 5))
    core.lost()
    core.begin()  # the PUBCOMP was lost with the connection
    core.data_to_send()
    core.receive(encode(Connack(session_present=True), 5))
    assert core.data_to_send() == encode(Ack(Kind.PUBREL, 1), 5)
    core.receive(encode(Ack(Kind.PUBCOMP, 1, Reason.PACKET_ID_NOT_FOUND), 5))  # MQTT 5, 3.7.2.1: not an error
    assert worst == [0]


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (ClientOptions, {"keep_alive": 70_000}),
        (ClientOptions, {"reconnect_seconds": (0.0, 1.0)}),
        (ClientOptions, {"connect_seconds": float("nan")}),
        (ClientOptions, {"receive_maximum": 0}),
        (ClientOptions, {"session_expiry": -1}),
        (RemoteSpec, {"url": "mqtt://hub", "keep_alive": -1}),
        (RemoteSpec, {"url": "mqtt://hub", "reconnect_seconds": (0.1, float("inf"))}),
        (BrokerOptions, {"sys_seconds": -1.0}),
        (BrokerOptions, {"connect_seconds": float("nan")}),
        (BrokerOptions, {"max_subscriptions": -1}),
        (PersistenceOptions, {"checkpoint_seconds": float("nan")}),
        (PersistenceOptions, {"sync_interval_secs": float("nan")}),
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_their_name(options: Any, given: dict[str, Any]) -> None:
    with pytest.raises(OptionsError, match=f"{list(given)[-1]}="):
        options(**given)
