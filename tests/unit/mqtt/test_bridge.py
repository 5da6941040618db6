"""Bridges between two brokers of ours."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.clock import SystemClock
from penstock.errors import OptionsError
from penstock.mqtt import BridgeRule, BridgeSpec, Client, ClientOptions, MqttServer, RemoteSpec, ServerOptions
from penstock.mqtt.bridge import Bridge, overlap
from penstock.mqtt.packets import Properties

FAST = (0.01, 0.1)


async def serve(folder: Path, name: str, port: int = 0, **options: Any) -> MqttServer:
    server = MqttServer(ServerOptions(port=port, **options), data=str(folder / name))
    await server.start()
    return server


def remote(server: MqttServer, version: Any = "5") -> RemoteSpec:
    return RemoteSpec(url=f"mqtt://{server.addresses['mqtt']}", version=version, reconnect_seconds=FAST)


def bridge_of(server: MqttServer) -> Bridge:
    assert server.attached is not None
    found = server.attached.parts[-1]
    assert isinstance(found, Bridge)
    return found


async def connected(server: MqttServer) -> None:
    async with asyncio.timeout(30):
        while bridge_of(server).health().reason or not bridge_of(server).describe()["connected"]:
            await asyncio.sleep(0.01)


async def payloads(client: Client, count: int) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    async with asyncio.timeout(30):
        async for message in client.messages():
            found.append((message.topic, message.payload))
            if len(found) == count:
                break
    return found


@pytest.mark.parametrize("version", ["3.1.1", "5"])
async def test_both_directions_with_filters_and_prefixes(tmp_path: Path, version: str) -> None:
    hub = await serve(tmp_path, "hub")
    spec = BridgeSpec(
        name="hub",
        remote=remote(hub, version),
        send=(BridgeRule(filter="plant/#", remote_prefix="site-7/"),),
        receive=(BridgeRule(filter="commands/#", remote_prefix="site-7/", local_prefix="hub/"),),
    )
    edge = await serve(tmp_path, "edge", bridges=(spec,))
    await connected(edge)
    async with Client(hub.addresses["mqtt"]) as there, Client(edge.addresses["mqtt"]) as here:
        await there.subscribe("#", qos=1)
        await here.subscribe("hub/#", qos=1)
        await here.publish("plant/1", b"up", qos=1)
        await here.publish("office/1", b"no", qos=1)
        await here.publish("plant/2", b"up again", qos=0)
        assert await payloads(there, 2) == [("site-7/plant/1", b"up"), ("site-7/plant/2", b"up again")]
        await there.publish("elsewhere", b"no", qos=1)
        await there.publish("site-7/commands/9", b"down", qos=2)
        assert await payloads(here, 1) == [("hub/commands/9", b"down")]
    await edge.stop()
    await hub.stop()


@pytest.mark.parametrize("version", ["3.1.1", "5"])
async def test_the_same_topics_both_ways_make_no_loop(tmp_path: Path, version: str) -> None:
    both = (BridgeRule(filter="shared/#"),)
    hub = await serve(tmp_path, "hub")
    spec = BridgeSpec(name="hub", remote=remote(hub, version), send=both, receive=both)
    edge = await serve(tmp_path, "edge", bridges=(spec,))
    await connected(edge)
    async with Client(hub.addresses["mqtt"]) as there, Client(edge.addresses["mqtt"]) as here:
        await there.subscribe("shared/#", qos=1)
        await here.subscribe("shared/#", qos=1)
        for number in range(10):
            await here.publish("shared/1", b"here %d" % number, qos=1)
            await there.publish("shared/1", b"there %d" % number, qos=1)
        await there.publish("shared/end", b"", qos=1)
        await here.publish("shared/end", b"", qos=1)
        expected = Counter([("shared/end", b"")] * 2)
        expected += Counter(("shared/1", b"%s %d" % (side, n)) for side in (b"here", b"there") for n in range(10))
        assert Counter(await payloads(there, 22)) == expected
        assert Counter(await payloads(here, 22)) == expected
        assert hub.broker.counts.publish_received == 22
    await edge.stop()
    await hub.stop()


async def test_a_ring_of_three_brokers_ends_where_it_began(tmp_path: Path) -> None:
    everything = (BridgeRule(filter="ring/#"),)
    ports: list[int] = []
    for name in ("a", "b", "c"):  # free ports, known before the ring is closed
        server = await serve(tmp_path, name)
        ports.append(int(server.addresses["mqtt"].rpartition(":")[2]))
        await server.stop()
    ring = []
    for at, name in enumerate(("a", "b", "c")):
        to = RemoteSpec(url=f"mqtt://127.0.0.1:{ports[(at + 1) % 3]}", reconnect_seconds=FAST)
        spec = BridgeSpec(name="next", remote=to, send=everything)
        ring.append(await serve(tmp_path, name, ports[at], bridges=(spec,)))
    for server in ring:
        await connected(server)
    clients = [Client(server.addresses["mqtt"]) for server in ring]
    for client in clients:
        await client.start()
        await client.subscribe("ring/#", qos=1)
    await clients[0].publish("ring/1", b"once", qos=1)
    for client in clients:
        assert await payloads(client, 1) == [("ring/1", b"once")]
    async with asyncio.timeout(30):
        while not bridge_of(ring[0]).cut:  # it has come round and was not sent on
            await asyncio.sleep(0.01)
    for client in clients:
        await client.stop()
    for server in ring:
        await server.stop()


@pytest.mark.parametrize("version", ["3.1.1", "5"])
async def test_nothing_is_lost_while_the_other_broker_or_the_link_is_away(tmp_path: Path, version: Any) -> None:
    hub = await serve(tmp_path, "hub")
    port = int(hub.addresses["mqtt"].rpartition(":")[2])
    spec = BridgeSpec(name="hub", remote=remote(hub, version), send=(BridgeRule(filter="plant/#"),))
    edge = await serve(tmp_path, "edge", bridges=(spec,))
    found: list[bytes] = []
    async with Client(edge.addresses["mqtt"]) as here:
        for round_ in range(3):
            async with Client(f"127.0.0.1:{port}") as there:
                await there.subscribe("plant/#", qos=1)
                await here.publish("plant/1", b"%d" % (2 * round_), qos=1)
                while not found or found[-1] != b"%d" % (2 * round_):
                    found += [payload for _, payload in await payloads(there, 1)]
            await hub.stop()
            await here.publish("plant/1", b"%d" % (2 * round_ + 1), qos=1)  # acknowledged while the hub is away
            hub = await serve(tmp_path, "hub", port)
            bridge = bridge_of(edge)
            await bridge.caught_up()
    assert hub.broker.counts.publish_received == 1
    assert bridge_of(edge).describe()["sent"] == 6
    await edge.stop()
    await hub.stop()


@pytest.mark.parametrize("version", ["3.1.1", "5"])
@pytest.mark.parametrize("away", [True, False])
async def test_what_has_expired_while_the_other_broker_was_away_is_not_sent(
    tmp_path: Path, version: Any, away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour goes by while this broker is ``away``; or it is the calendar that was set, and no time went by."""
    hub = await serve(tmp_path, "hub")
    port = int(hub.addresses["mqtt"].rpartition(":")[2])
    spec = BridgeSpec(name="hub", remote=remote(hub, version), send=(BridgeRule(filter="plant/#"),))
    await hub.stop()
    edge = await serve(tmp_path, "edge", bridges=(spec,))
    async with Client(edge.addresses["mqtt"]) as here:
        for name, expiry in (("never", None), ("short", 60), ("long", 7200)):
            properties = Properties(message_expiry=expiry)
            await here.publish(f"plant/{name}", b"x", qos=1, retain=True, properties=properties)
    if away:
        await edge.stop()
    monkeypatch.setattr(SystemClock, "now_ns", lambda _: time.time_ns() + 3600 * 1_000_000_000)
    if away:
        edge = await serve(tmp_path, "edge", bridges=(spec,))
    hub = await serve(tmp_path, "hub", port)
    await bridge_of(edge).caught_up()
    left = {kept.run.topic[6:]: kept.run.expiry for kept in hub.broker.retained.match("plant/#") if kept.run}
    passed = bridge_of(edge).describe()["passed"]
    await edge.stop()
    await hub.stop()
    assert left.keys() == ({b"never", b"long"} if away else {b"never", b"long", b"short"})
    assert passed == ({"expired on the way": 1} if away else {})
    if version == "5":
        assert left[b"never"] == -1
        assert 7000 < left[b"long"] + 3600 * away <= 7200


async def test_what_waits_survives_a_restart_of_this_broker(tmp_path: Path) -> None:
    hub = await serve(tmp_path, "hub")
    port = int(hub.addresses["mqtt"].rpartition(":")[2])
    spec = BridgeSpec(name="hub", remote=remote(hub), send=(BridgeRule(filter="plant/#"),))
    await hub.stop()
    edge = await serve(tmp_path, "edge", bridges=(spec,))
    async with Client(edge.addresses["mqtt"]) as here:
        await here.publish_many("plant/1", [b"%d" % n for n in range(100)], qos=1)
    assert bridge_of(edge).health().state.value == "degraded"
    await edge.stop()
    hub = await serve(tmp_path, "hub", port)
    async with Client(hub.addresses["mqtt"]) as there:
        await there.subscribe("#", qos=1)
        edge = await serve(tmp_path, "edge", bridges=(spec,))
        assert await payloads(there, 100) == [("plant/1", b"%d" % n) for n in range(100)]
    await edge.stop()
    await hub.stop()


async def test_the_remote_is_told_only_when_this_broker_has_the_message(tmp_path: Path) -> None:
    hub = await serve(tmp_path, "hub")
    spec = BridgeSpec(name="hub", remote=remote(hub), receive=(BridgeRule(filter="down/#"),))
    edge = await serve(tmp_path, "edge", bridges=(spec,))
    await connected(edge)
    bridge = bridge_of(edge)
    held = asyncio.Event()
    publish = bridge._inlet.publish

    async def slowly(runs: Any) -> None:
        await held.wait()
        await publish(runs)

    bridge._inlet.publish = slowly  # type: ignore[method-assign]
    async with Client(hub.addresses["mqtt"]) as there:
        await there.publish("down/1", b"x", qos=1)
    (session,) = [each for each in hub.broker.sessions.values() if each.subscriptions]
    async with asyncio.timeout(30):
        while not session.exchange.messages:
            await asyncio.sleep(0.01)
    held.set()
    async with asyncio.timeout(30):
        while session.exchange.messages:
            await asyncio.sleep(0.01)
    assert bridge.received == 1
    await edge.stop()
    assert hub.broker.sessions[session.client_id].persistent  # the session waits for the bridge
    await hub.stop()


async def test_what_a_bridge_could_not_hand_on_before_it_stopped_comes_again(tmp_path: Path) -> None:
    """A bridge that stopped while this broker took nothing, as on a full disk, told the other one that it had it."""
    hub = await serve(tmp_path, "hub")
    spec = BridgeSpec(name="hub", remote=remote(hub), receive=(BridgeRule(filter="down/#", qos=1),))
    edge = await serve(tmp_path, "edge", bridges=(spec,))
    await connected(edge)
    came = asyncio.Event()

    async def never(_: Any) -> None:
        came.set()
        await asyncio.Event().wait()

    bridge_of(edge)._inlet.publish = never  # type: ignore[method-assign]
    async with Client(hub.addresses["mqtt"]) as there, asyncio.timeout(30):
        await there.publish_many("down/1", [b"%d" % n for n in range(5)], qos=1)
        await came.wait()
    await edge.stop()
    edge = await serve(tmp_path, "edge")
    async with Client(edge.addresses["mqtt"], client_id="here", clean=False, session_expiry=60) as here:
        await here.subscribe("#", qos=1)
    await edge.stop()
    edge = await serve(tmp_path, "edge", bridges=(spec,))
    async with Client(edge.addresses["mqtt"], client_id="here", clean=False, session_expiry=60) as here:
        assert await payloads(here, 5) == [("down/1", b"%d" % n) for n in range(5)]
    await edge.stop()
    await hub.stop()


async def test_a_bridge_bit_asks_for_nothing_back_and_for_retained_as_such(tmp_path: Path) -> None:
    hub = await serve(tmp_path, "hub")
    async with Client(hub.addresses["mqtt"], ClientOptions(version=4, bridge=True, client_id="b")) as bridge:
        await bridge.subscribe("#", qos=1)
        await bridge.publish("mine", b"x", qos=1)
        async with Client(hub.addresses["mqtt"]) as other:
            await other.publish("theirs", b"y", qos=1, retain=True)
        async with asyncio.timeout(30):
            message = await anext(aiter(bridge.messages()))
        assert (message.topic, message.retain) == ("theirs", True)
    await hub.stop()


async def test_a_bridge_whose_password_cannot_be_read_goes_on_when_it_can(tmp_path: Path) -> None:
    hub = await serve(tmp_path, "hub")
    secret = tmp_path / "secret"
    there = msgspec.structs.replace(remote(hub), username="edge", password_file=str(secret))
    spec = BridgeSpec(name="hub", remote=there, receive=(BridgeRule(filter="commands/#"),))
    edge = await serve(tmp_path, "edge", bridges=(spec,))
    async with asyncio.timeout(30):
        while str(secret) not in bridge_of(edge).health().reason:
            await asyncio.sleep(0.01)
        secret.write_text("word\n")
        await connected(edge)
        async with Client(hub.addresses["mqtt"]) as publisher, Client(edge.addresses["mqtt"]) as here:
            await here.subscribe("#", qos=1)
            await publisher.publish("commands/9", b"down", qos=1)
            assert await payloads(here, 1) == [("commands/9", b"down")]
    await edge.stop()
    await hub.stop()


def test_filters_that_can_meet_overlap() -> None:
    yes = [("#", "a"), ("a/#", "a"), ("a/+", "+/b"), ("a/b", "a/b"), ("a/#", "a/b/c")]
    no = [("a", "b"), ("a/b", "a"), ("a/+/c", "a/b/d"), ("a/+", "a/b/c"), ("a/b/#", "a/c")]
    assert all(overlap(*pair) and overlap(*reversed(pair)) for pair in yes)
    assert not any(overlap(*pair) or overlap(*reversed(pair)) for pair in no)


def test_specs_are_checked(tmp_path: Path) -> None:
    hub = RemoteSpec(url="mqtt://hub")
    rule = BridgeRule(filter="a/#")
    for make in (
        lambda: BridgeSpec(name="../x", remote=hub, send=(rule,)),
        lambda: BridgeSpec(name="x", remote=hub),
        lambda: BridgeRule(filter="a/#/b"),
        lambda: BridgeRule(filter="a", qos=0),
        lambda: BridgeRule(filter="a", remote_prefix="+/"),
        lambda: RemoteSpec(url="http://hub"),
    ):
        with pytest.raises(OptionsError):
            make()
