"""Promise: devices and people share a channel: what one side says the other hears once, in order, and nobody twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from wire_use import PlainAuthenticator, plain_token

from penstock.channels import ChannelServer, Client as Member
from penstock.channels.wire import Heard
from penstock.errors import OptionsError, Refused
from penstock.lifecycle import State
from penstock.mqtt import Client as Device, MqttServer
from penstock.node.config import load_config
from penstock.node.meeting import Meeting, MeetingSpec
from penstock.node.node import Node

SECONDS = 60.0


async def heard_by(member: Member, count: int) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    async for message in member.messages():
        assert isinstance(message, Heard)
        found.append((message.sender, message.payload))
        if len(found) == count:
            break
    return found


async def test_devices_and_people_share_a_channel(tmp_path: Path) -> None:
    overrides = {
        "data": str(tmp_path / "data"), "mqtt.port": 0, "channels.port": None, "channels.plain_port": 0,
        "http.enabled": False, "ingest.enabled": False, "channels.modulator": "wire_use:PlainAuthenticator",
        "meeting": [{"channel": "ops/east", "filter": "plant/7/chat", "persist": True}],
    }  # fmt: skip
    node = Node(load_config(None, overrides))
    await node.start()
    try:
        assert node.failures == {}
        async with (
            asyncio.timeout(SECONDS),
            Device(node.addresses["mqtt"], client_id="pump") as pump,
            Device(node.addresses["mqtt"], client_id="valve") as valve,
            await Member.connect(f"plain://{node.addresses['channels-plain']}", token=plain_token("ann")) as ann,
        ):
            await valve.subscribe("plant/7/chat", qos=1)
            await ann.join("ops/east")
            for number in range(100):
                await pump.publish("plant/7/chat", b"reading %d" % number, qos=1)
            assert await heard_by(ann, 100) == [("mqtt@localhost", b"reading %d" % n) for n in range(100)]
            for number in range(100):
                await ann.broadcast("ops/east", b"order %d" % number)
            said = [b"reading %d" % n for n in range(100)] + [b"order %d" % n for n in range(100)]
            got: list[bytes] = []
            async for message in valve.messages():
                got.append(message.payload)
                if len(got) == len(said):
                    break
            assert got == said
            # No echo on either side: the next thing each hears is what is said now.
            await pump.publish("plant/7/chat", b"last", qos=1)
            assert await heard_by(ann, 1) == [("mqtt@localhost", b"last")]
            async for message in valve.messages():
                assert message.payload == b"last"
                break
            assert [str(entry.payload, "utf-8") for entry in await ann.history("ops/east", limit=3)] == [
                "reading 0", "reading 1", "reading 2",
            ]  # fmt: skip
            told = node.describe()["parts"]["meeting:ops/east"]
            assert (told["state"], told["to_channel"], told["to_topic"], told["lost"]) == ("ready", 101, 100, {})
    finally:
        await node.stop()


async def test_an_acknowledgement_waits_for_the_channel_and_a_deleted_channel_is_joined_again(tmp_path: Path) -> None:
    """What a device was told is on the channel; what the rules of a channel refuse is counted and stops nothing."""
    broker = MqttServer(port=0, data=str(tmp_path / "mqtt"), holds=True)
    channels = ChannelServer(tmp_path / "channels", port=None, plain_port=0, modulator=PlainAuthenticator())
    await broker.start()
    await channels.start()
    meeting = Meeting(
        MeetingSpec(channel="ops", filter="plant/+", topic="people/ops", member="devices", persist=True),
        lambda: broker.broker,
        lambda: channels.manager,
    )
    await meeting.start()
    try:
        async with (
            asyncio.timeout(SECONDS),
            Device(broker.addresses["mqtt"]) as pump,
            await Member.connect(f"plain://{channels.addresses['channels-plain']}", token=plain_token("ann")) as ann,
        ):
            await pump.publish("plant/1", b"one", qos=1)
            stored = await channels.manager.channel("ops").history("devices@localhost")
            assert [entry.payload for entry in stored] == [b"one"]
            await pump.publish("plant/2", b"", qos=1)
            await pump.publish("plant/2", b"x" * (channels.options.limits.max_payload_size + 1), qos=1)
            await pump.publish("plant/2", b"two", qos=1)
            assert meeting.lost == {"to channel: empty": 1, "to channel: POLICY_VIOLATION": 1}
            await channels.manager.channel("ops").delete("devices@localhost")
            await ann.join("ops")
            await pump.publish("plant/3", b"three", qos=1)
            assert await heard_by(ann, 1) == [("devices@localhost", b"three")]
    finally:
        await meeting.drain(5)
        await meeting.stop()
        await meeting.stop()
        assert meeting.health().state is State.STOPPED
        await channels.stop()
        await broker.stop()


async def test_who_waits_for_a_meeting_that_ends_is_refused_and_not_kept_waiting(tmp_path: Path) -> None:
    """The channel server of a node may fail while its broker goes on; the meeting ends with it, and begins anew."""
    broker = MqttServer(port=0, data=str(tmp_path / "mqtt"), holds=True)
    channels = ChannelServer(tmp_path / "channels", port=None, plain_port=0, modulator=PlainAuthenticator())
    await broker.start()
    await channels.start()
    meeting = Meeting(
        MeetingSpec(channel="ops", filter="plant/+", topic="people/ops"),
        lambda: broker.broker,
        lambda: channels.manager,
    )
    await meeting.start()
    try:
        async with asyncio.timeout(SECONDS), Device(broker.addresses["mqtt"]) as pump:
            await channels.stop()
            waiting = asyncio.create_task(pump.publish("plant/1", b"one", qos=1))
            while not meeting.describe()["waiting"]["channel"]:
                await asyncio.sleep(0.005)
            await meeting.drain(0)
            await meeting.stop()
            with pytest.raises(Refused, match="QUOTA_EXCEEDED"):
                await waiting
            assert meeting.lost == {"to channel: stopped": 1}
            await pump.publish("office/1", b"two", qos=1)
    finally:
        await meeting.stop()
        await broker.stop()


def test_a_meeting_that_cannot_be_is_refused_by_name() -> None:
    for wrong, reason in (
        ({"channel": "a b", "filter": "t"}, "channel='a b'"),
        ({"channel": "a", "filter": "t/#/x"}, "filter='t/#/x'"),
        ({"channel": "a", "filter": "t/#"}, "has wildcards"),
        ({"channel": "a", "filter": "t", "qos": 3}, "qos=3"),
        ({"channel": "a", "filter": "t", "member": "a b"}, "member='a b'"),
        ({"channel": "a", "filter": "t", "room": 0}, "room=0"),
    ):
        with pytest.raises(OptionsError, match=reason):
            MeetingSpec(**wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match="needs mqtt and channels"):
        load_config(None, {"channels.enabled": False, "meeting": [{"channel": "a", "filter": "t"}]})
