"""Promise: what a broker keeps comes back as it was: layouts, keys, time, bounds; damage is set aside and named."""

from __future__ import annotations

import asyncio
import struct
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from mqtt_state_use import Kept
from mqtt_use import Device

from penstock.errors import NotFoundError
from penstock.lifecycle import State
from penstock.mqtt import packets as p
from penstock.mqtt.packets import Kind
from penstock.mqtt.reasons import Reason
from penstock.mqtt.retained_data import decode_retained
from penstock.mqtt.server import MqttServer, ServerOptions
from penstock.mqtt.state_backup import back_up, verify
from penstock.mqtt.state_checkpoint import AGAIN_SECONDS
from penstock.mqtt.state_dump import dump
from penstock.mqtt.state_options import PersistenceOptions
from penstock.store import AppendLogStore


def test_values_and_keys_are_those_of_the_seed() -> None:
    kept = Kept()
    pub = kept.subscriber("pump/7", "plant/+", 1)
    pub.publish("plant/7", b"on", 1, 1, retain=True, properties={"message_expiry": 60, "content_type": "text"})
    kept.settle()
    kept.kept.close()
    with AppendLogStore.open("data/state.snap", read_only=True, disk=kept.disk) as store:
        keys = list(store.keys())
        found = store.get("retained/plant/7")
    assert keys == ["retained/plant/7", "sessions/pump/7", "subscriptions/pump%2F7/plant/+"]
    assert found is not None
    properties = b"\x03\x00\x04text"
    assert found.value == b"".join(
        (
            b"\x01",
            struct.pack("<Q", 2) + b"on",
            b"\x01" + struct.pack("<Q", len(properties)) + properties,
            struct.pack("<Q", kept.clock.now_ns() // 10**9),
            b"\x01" + struct.pack("<I", 60),
        )
    )


@pytest.mark.parametrize("how", ["kill", "restart"])
def test_retained_messages_stay_go_and_expire(how: str) -> None:
    kept = Kept()
    pub = kept.device("pub")
    for number in range(4):
        pub.publish(f"a/{number}", b"%d" % number, 0, retain=True)
    pub.publish("a/1", b"", 0, retain=True)
    pub.publish("a/brief", b"x", 0, retain=True, properties={"message_expiry": 10})
    kept.broker.publish_message("a/own", b"broker", retain=True)
    kept.settle()
    kept.clock.pass_(11)
    getattr(kept, how)()
    sub = kept.device("sub")
    came = sub.subscribe("a/+")
    kept.settle()
    came += sub.read()
    payloads = sorted(packet.payload for packet in came if isinstance(packet, p.Publish))
    assert payloads == [b"0", b"2", b"3", b"broker"]
    kept.restart()
    assert sorted(kept.broker.retained.topics()) == [b"a/0", b"a/2", b"a/3", b"a/own"]


def test_everything_kept_is_dumped_under_the_names_of_the_seed_while_the_broker_goes_on() -> None:
    kept = Kept()
    sub = kept.subscriber("s/1", qos=2)
    pub = kept.device("pub")
    pub.publish("a/b", b"released", 2, 1)
    kept.settle()
    (message,) = sub.messages()
    sub.ack(Kind.PUBREC, message.packet_id)
    pub.publish("a/b", b"sent", 1, 2, retain=True)
    kept.settle()
    sub.read()
    sub.drop()
    pub.publish("a/c", b"waits", 1, 3)
    kept.settle()
    kept.disk.calls.clear()
    found, problems = dump("data", kept.disk)
    assert problems == []
    assert {call for call, _ in kept.disk.calls} <= {"open", "read_at", "list", "stat"}
    values = {update.key: update.value for update in found}
    assert list(values) == sorted(values)
    pending = [msgspec.json.decode(value) for key, value in values.items() if key.startswith("pending/s%2F1/")]
    phases = {each["phase"]: (each["packet_id"], each.get("topic")) for each in pending}
    assert phases == {"released": (1, None), "sent": (2, "a/b"), "waits": (None, "a/c")}
    assert [key for key in values if not key.startswith("pending/")] == [
        "retained/a/b", "sessions/pub", "sessions/s/1", "subscriptions/s%2F1/a/#"
    ]  # fmt: skip
    assert decode_retained("", "", values["retained/a/b"]).payload == b"sent"
    kept.kept.close()
    with AppendLogStore.open("data/state.snap", disk=kept.disk) as store:
        assert store.get("retained/a/b").value == values["retained/a/b"]
    with pytest.raises(NotFoundError):
        dump("elsewhere", kept.disk)


def test_one_turn_is_one_write_and_a_message_is_written_once_for_all_who_wait() -> None:
    kept = Kept()
    for number in range(100):
        kept.subscriber(f"s{number}").drop()
    pub = kept.device("pub")
    pub.publish("a/b", b"x" * 1000, 1, 1)  # it names the hundred, for those that follow
    kept.settle()
    writes = [call for call in kept.disk.calls if call[0] == "write_many_at"]
    before = kept.kept.journal.log.written
    for number in range(2, 52):
        pub.publish("a/b", b"x" * 1000, 1, number)
    kept.settle()
    again = [call for call in kept.disk.calls if call[0] == "write_many_at"]
    assert len(again) == len(writes) + 1
    assert (kept.kept.journal.log.written - before) / 50 < 1000 + 120
    kept.kill()
    assert kept.broker.budget.queued_messages == 100 * 51
    waiting = [each for session in kept.broker.sessions.values() for each in session.queue]
    assert all(each.run is None and each.stored is not None and each.stored.run is None for each in waiting)
    sub = kept.device("s7")
    kept.settle()
    payloads = [packet.payload for packet in [*sub.rest, *sub.messages()] if isinstance(packet, p.Publish)]
    assert payloads == [b"x" * 1000] * 51
    kept.kept.close()


def test_a_checkpoint_that_could_not_begin_takes_nothing_for_written(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    kept.device("pub").publish("a/b", b"on", 1, 1, retain=True)
    kept.settle()
    checkpoints = kept.kept.checkpoints
    with monkeypatch.context() as full:
        full.setattr(kept.kept.journal, "write_totals", _no_room)
        with pytest.raises(OSError, match="No space"):
            checkpoints.begin()
    for _ in range(3):
        checkpoints.go_on()
        kept.settle()
        checkpoints.sweep()
    kept.kill()
    assert list(kept.broker.retained.topics()) == [b"a/b"]
    assert "pub" in kept.broker.sessions
    kept.kept.close()


@pytest.mark.parametrize("where", ["apply", "encode"])
def test_a_checkpoint_that_meets_what_nobody_expected_takes_nothing_for_written(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept()
    kept.device("pub").publish("a/b", b"on", 1, 1, retain=True)
    kept.settle()
    checkpoints = kept.kept.checkpoints
    with monkeypatch.context() as short:
        owner, name = (checkpoints.store, "apply") if where == "apply" else (checkpoints, "_updates")
        short.setattr(owner, name, _no_memory)
        checkpoints.begin()
        checkpoints.go_on()
        kept.settle()
    assert (checkpoints.count, checkpoints.running) == (0, False)
    kept.clock.pass_(10)
    checkpoints.go_on()
    kept.settle()
    assert checkpoints.count == 1
    checkpoints.sweep()
    checkpoints.sweep()
    kept.kill()
    assert list(kept.broker.retained.topics()) == [b"a/b"]
    assert "pub" in kept.broker.sessions
    kept.kept.close()


def _no_memory(*_: object) -> None:
    raise MemoryError


def _no_room() -> None:
    raise OSError(28, "No space left on device")


def test_room_comes_back_when_nobody_needs_a_segment() -> None:
    kept = Kept("interval", 20_000)
    sub = kept.subscriber("sub")
    sub.drop()
    pub = kept.device("pub")
    for number in range(1, 201):
        pub.publish("a/b", b"x" * 1000, 1, number)
        kept.settle()
    assert kept.kept.journal.log.files > 8
    sub = kept.device("sub")
    kept.settle()
    ids = [packet.packet_id for packet in [*sub.rest, *sub.read()] if isinstance(packet, p.Publish)]
    assert len(ids) == 200
    for packet_id in ids:
        sub.ack(Kind.PUBACK, packet_id)
    kept.settle()
    for number in range(1, 61):
        pub.publish("b", b"x" * 1000, 1, number, retain=True)
        kept.settle()
        kept.clock.pass_(6)
        kept.kept.journal.sync()
    assert kept.kept.journal.log.files < 8, kept.disk.list("data/journal")
    kept.kept.close()


def test_room_comes_back_when_nothing_happens_any_more() -> None:
    kept = Kept("none", 20_000)
    sub = kept.subscriber("sub")
    sub.drop()
    pub = kept.device("pub")
    for number in range(1, 201):
        pub.publish("a/b", b"x" * 1000, 1, number)
        kept.settle()
    sub = kept.device("sub")
    kept.settle()
    for packet in [*sub.rest, *sub.read()]:
        if isinstance(packet, p.Publish):
            sub.ack(Kind.PUBACK, packet.packet_id)
    kept.settle()
    assert kept.kept.journal.log.files > 8
    for _ in range(8):
        kept.clock.pass_(400)
        kept.loop.run(later=True)
        kept.settle()
    assert kept.kept.journal.log.files == 1, kept.disk.list("data/journal")
    kept.kept.close()


@pytest.mark.parametrize("jump", [-10 * 365 * 86400.0, 10 * 365 * 86400.0])
def test_a_calendar_that_jumps_neither_expires_nor_keeps(jump: float) -> None:
    kept = Kept()
    sub = kept.subscriber("sub")
    sub.drop()
    pub = kept.device("pub")
    pub.publish("a/b", b"waits", 1, 1, properties={"message_expiry": 500})
    pub.publish("a/r", b"stays", 1, 2, retain=True, properties={"message_expiry": 500})
    kept.settle()
    for how in ("kill", "restart"):
        kept.clock.jump(jump)
        getattr(kept, how)()
        kept.tick(1)
        assert kept.broker.sessions["sub"].queued_messages == 2
        assert kept.broker.retained.get(b"a/r") is not None
    kept.tick(500)
    assert kept.broker.retained.get(b"a/r") is None
    kept.tick(600)
    assert "sub" not in kept.broker.sessions
    kept.restart()
    assert "sub" not in kept.broker.sessions
    assert kept.broker.retained.get(b"a/r") is None
    kept.kept.close()


def test_time_away_counts_within_a_boot_and_stands_still_across_boots() -> None:
    kept = Kept()
    kept.subscriber("sub").drop()
    kept.settle()
    kept.kept.close()
    kept.clock.pass_(600)
    kept.open()
    kept.tick(1)
    assert "sub" in kept.broker.sessions
    kept.kept.close()
    kept.disk.cut_power(keep=1.0)  # another boot
    kept.clock.pass_(10_000)
    kept.open()
    kept.tick(1)
    assert "sub" in kept.broker.sessions
    kept.tick(400)
    assert "sub" not in kept.broker.sessions
    kept.kept.close()


def test_a_will_is_published_after_what_is_left_of_its_delay() -> None:
    kept = Kept()
    sub = kept.subscriber("sub")
    sub.drop()
    will = p.Will("a/will", b"gone", 1, False, p.Properties(will_delay=100))
    kept.device("w", will=will).drop()
    kept.settle()
    kept.clock.pass_(60)
    kept.kill()
    kept.tick(1)
    assert kept.broker.sessions["sub"].queued_messages == 0
    kept.tick(40)
    assert kept.broker.sessions["sub"].queued_messages == 1
    kept.kept.close()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError()])
def test_what_cannot_be_read_now_is_delivered_when_it_can(error: Exception) -> None:
    kept = Kept()
    sub, pub = kept.subscriber("sub"), kept.device("pub")
    sub.drop()
    for number in range(1, 4):
        pub.publish("a", b"%d" % number, 1, number)
        kept.settle()
    for _ in range(3):
        sub = Device(kept.broker)
        kept.disk.fail("read_at", error, path=".turns")
        with pytest.raises(type(error)):  # what ends a connection, and no other
            sub.send(p.Connect("sub", 5, False, properties=p.Properties(session_expiry=1000)))
        sub.drop()
        kept.settle()
    kept.tick(10)
    sub = kept.device("sub")
    assert [each.payload for each in sub.rest if isinstance(each, p.Publish)] == [b"1", b"2", b"3"]  # type: ignore[attr-defined]
    kept.kept.close()


def test_a_checkpoint_that_cannot_begin_takes_nobodys_acknowledgement() -> None:
    kept = Kept()
    pub = kept.device("pub")
    kept.clock.pass_(kept.persistence.checkpoint_seconds + 1)
    kept.disk.fail("create", MemoryError(), path=".turns")
    pub.publish("a", b"x", 1, 1)
    kept.settle()
    assert pub.read() == [p.Ack(Kind.PUBACK, 1, Reason.NO_MATCHING_SUBSCRIBERS)]
    assert kept.kept.gate.trouble == ""
    kept.kept.close()


def test_a_subscription_that_ended_does_not_come_back_with_the_next_session_of_its_client() -> None:
    kept = Kept()
    kept.subscriber("dev", "jobs").drop()
    kept.restart()
    dev = kept.device("dev", expiry=0, will=p.Will("gone", b"x"))  # kept for its will only
    dev.send(p.Unsubscribe(1, ("jobs",)))
    dev.bye()
    kept.subscriber("dev", "others").drop()
    kept.restart()
    assert kept.broker.sessions["dev"].subscriptions.keys() == {"others"}
    kept.kept.close()


def test_a_store_that_cannot_be_written_for_long_makes_no_file_with_each_try() -> None:
    kept = Kept()
    sub, pub = kept.subscriber("sub"), kept.device("pub")
    sub.drop()

    def fails(operation: str, path: str) -> None:
        if operation.startswith("write") and "state.snap" in path:
            raise OSError(5, "Input/output error")

    kept.disk.on_call = fails
    kept.tick(kept.persistence.checkpoint_seconds + 1)
    for number in range(1, 31):
        pub.publish("a", b"%d" % number, 1, number)
        kept.tick(AGAIN_SECONDS + 1)
    assert kept.kept.checkpoints.count == 0
    assert kept.kept.journal.log.files <= 3
    kept.disk.on_call = None
    pub.publish("a", b"31", 1, 31)
    kept.tick(AGAIN_SECONDS + 1)
    assert kept.kept.checkpoints.count == 1
    pub.publish("a", b"32", 1, 32)
    kept.settle()
    kept.kill()
    sub = kept.device("sub")
    assert [each.payload for each in sub.rest if isinstance(each, p.Publish)] == [b"%d" % n for n in range(1, 33)]  # type: ignore[attr-defined]
    assert kept.kept.problems == []
    kept.kept.close()


async def test_a_store_that_cannot_be_written_is_told_by_the_health_of_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ServerOptions(port=0, persistence=PersistenceOptions(path=str(tmp_path / "data")))
    server = MqttServer(options)
    await server.start()
    try:
        assert server.kept is not None
        checkpoints, gate = server.kept.checkpoints, server.kept.gate

        async def look_until(state: State) -> None:
            while server.health().state is not state:
                checkpoints._not_before = 0.0  # as if the pause between two tries were over
                gate.changed()
                await asyncio.sleep(0.01)

        def fails(*_: Any) -> None:
            raise OSError(5, "Input/output error")

        assert server.health().state is State.READY
        with monkeypatch.context() as broken:
            broken.setattr(AppendLogStore, "apply", fails)
            server.broker.publish_message("a", b"x", retain=True)
            checkpoints._began_at = -1e9
            async with asyncio.timeout(30):
                await look_until(State.DEGRADED)
            assert "the store cannot be written, so the journal grows: [Errno 5]" in server.health().reason
            assert "[Errno 5]" in server.kept.describe()["trouble"]
        async with asyncio.timeout(30):
            await look_until(State.READY)
        assert server.kept.describe()["trouble"] is None
    finally:
        await server.stop()


def test_a_session_ends_though_what_waits_for_it_cannot_be_read() -> None:
    kept = Kept()
    away, other = kept.device("away", expiry=60), kept.subscriber("other", "$share/g/#")
    away.subscribe("$share/g/#", qos=1)
    away.drop()
    other.link.congested()
    pub = kept.device("pub")
    for number in range(1, 5):
        pub.publish("a", b"%d" % number, 1, number)
        kept.settle()
    kept.disk.fail("read_at", OSError(5, "Input/output error"), path=".turns")
    kept.tick(61)
    assert "away" not in kept.broker.sessions
    totals = kept.kept.journal.deliveries.totals
    assert (totals.came, totals.lost, totals.owed) == (5, {"handed on": 1, "session ended": 1}, 3)
    kept.kept.close()


def test_a_will_with_a_delay_is_not_published_because_the_broker_is_started_anew() -> None:
    kept = Kept()
    kept.subscriber("watch").drop()
    for name in ("back", "away"):
        kept.device(name, will=p.Will("a/will", name.encode(), 1, properties=p.Properties(will_delay=60)))
    kept.broker.shut_down()
    kept.settle()
    kept.restart()
    kept.device("back")
    kept.tick(61)
    kept.settle()
    watch = kept.device("watch")
    kept.settle()
    found = [packet.payload for packet in [*watch.rest, *watch.read()] if isinstance(packet, p.Publish)]
    assert found == [b"away"]
    kept.kept.close()


def test_a_will_of_a_client_without_a_session_is_published_after_a_kill() -> None:
    kept = Kept()
    kept.subscriber("sub").drop()
    kept.device("brief", expiry=0, will=p.Will("a/will", b"gone", 1))
    kept.kill()
    assert kept.broker.sessions["sub"].queued_messages == 1
    assert "brief" not in kept.broker.sessions
    kept.kept.close()


def test_what_is_under_way_to_a_client_without_a_session_is_no_damage_when_it_is_gone() -> None:
    """A checkpoint knows of such a client for its will only."""
    kept = Kept()
    brief = kept.device("brief", expiry=0, will=p.Will("a/will", b"gone", 1))
    brief.subscribe("a/#", qos=1)
    pub = kept.device("pub")
    pub.publish("a/b", b"1", 1, 1)
    kept.settle()
    assert [packet.payload for packet in brief.messages()] == [b"1"]
    kept.kept.checkpoints.begin()
    kept.kept.checkpoints._some(100)
    kept.settle()
    assert kept.kept.checkpoints.count == 1
    asyncio.run(back_up(kept.kept, "backup", kept.disk))
    assert verify("backup", kept.disk).queued == 0
    kept.kill()
    assert kept.kept.problems == []
    kept.kept.close()


def test_what_waits_for_too_long_is_dropped_and_counted() -> None:
    kept = Kept(max_queued_seconds=100)
    kept.subscriber("sub").drop()
    pub = kept.device("pub")
    pub.publish("a/b", b"old", 1, 1)
    kept.settle()
    kept.clock.pass_(60)
    kept.kill()
    pub = kept.device("pub")
    pub.publish("a/b", b"new", 1, 2)
    kept.clock.pass_(50)
    kept.broker.drop_late()
    kept.settle()
    assert kept.broker.counts.dropped == {"too old": 1}
    kept.kill()
    sub = kept.device("sub")
    kept.settle()
    assert [packet.payload for packet in [*sub.rest, *sub.read()] if isinstance(packet, p.Publish)] == [b"new"]
    kept.kept.close()


def test_the_bound_of_all_messages_together_holds() -> None:
    kept = Kept(max_total_queued_messages=10)
    kept.subscriber("sub").drop()
    pub = kept.device("pub")
    for number in range(1, 21):
        pub.publish("a/b", b"x", 1, number)
    kept.settle()
    assert [packet.reason for packet in pub.read() if isinstance(packet, p.Ack)] == [0] * 10 + [0x97] * 10
    assert kept.broker.counts.dropped == {"queue full": 10}
    kept.kept.close()


def test_a_broker_that_is_ended_asks_the_device_however_long_its_interval_is() -> None:
    kept = Kept(sync="interval")
    kept.subscriber("sub").drop()
    pub = kept.device("pub")
    pub.publish("a/b", b"kept", 1, 1, retain=True)
    kept.settle()
    kept.kept.close()
    kept.disk.cut_power(keep=0.0)
    kept.open()
    assert list(kept.broker.retained.topics()) == [b"a/b"]
    assert kept.broker.sessions["sub"].queued_messages == 1
    assert kept.kept.problems == []
    kept.kept.close()


def test_what_is_older_than_the_interval_survives_a_power_cut() -> None:
    kept = Kept(sync="interval", interval=0.01)
    kept.subscriber("sub").drop()
    pub = kept.device("pub")
    pub.publish("a/b", b"kept", 1, 1, retain=True)
    kept.settle()
    log = kept.kept.journal.log
    until = time.monotonic() + 20
    while log.synced < log.end:
        assert time.monotonic() < until
        time.sleep(0.001)
    kept.disk.cut_power(keep=0.0)
    kept.leave()
    kept.open()
    assert list(kept.broker.retained.topics()) == [b"a/b"]
    assert kept.broker.sessions["sub"].queued_messages == 1
    kept.kept.close()


def test_sync_none_never_asks_the_device_for_a_turn() -> None:
    kept = Kept()
    pub = kept.subscriber("pub")
    kept.disk.calls.clear()
    for number in range(1, 20):
        pub.publish("a/b", b"x", 1, number)
        kept.settle()
    assert {call for call, _ in kept.disk.calls} <= {"write_many_at", "read_at"}
    kept.kept.close()


def test_what_the_store_cannot_hold_is_not_retained_whoever_says_it() -> None:
    """It would be in the way of every checkpoint from then on, or come back under another topic."""
    kept = Kept()
    kept.broker.publish_message("large", bytes(17 << 20), retain=True)
    will = p.Will("t" * 60_500, b"gone", 1, True)
    device = Device(kept.broker)
    answers = device.send(p.Connect("brief", 5, will=will))
    kept.settle()
    assert [each.reason for each in answers] == [Reason.TOPIC_NAME_INVALID]  # type: ignore[union-attr]
    pub = kept.device("pub")
    user = tuple((str(number), "v" * 60_000) for number in range(280))
    pub.publish("properties", b"x", retain=True, properties={"user": user})
    kept.settle()
    assert [each.reason for each in pub.read()] == [Reason.PACKET_TOO_LARGE]  # type: ignore[union-attr]
    kept.broker.publish_message("small", b"on", retain=True)
    kept.settle()
    assert kept.broker.counts.dropped == {"too large to be retained": 1}
    kept.restart()
    assert kept.broker.retained.topics() == [b"small"]
    assert kept.kept.problems == []
    kept.kept.close()


def test_a_client_with_endless_overlapping_subscriptions_is_in_nobodys_way() -> None:
    """Each message carries the identifiers of all of them, in the journal and in the store as well."""
    kept = Kept(segment_bytes=64 << 20)
    sub = kept.device("sub")
    filters = ["/".join("a+"[number >> bit & 1] for bit in range(14)) for number in range(1 << 14)]
    for at in range(0, len(filters), 2048):
        wanted = tuple(p.Filter(each, 1) for each in filters[at : at + 2048])
        sub.send(p.Subscribe(1, wanted, p.Properties(subscription_ids=(200_000_000,))))
    kept.settle()
    sub.read()
    pub = kept.device("pub")
    for number in range(1, 301):
        pub.publish("/".join("a" * 14), b"%d" % number, 1, number)
        kept.settle()
        assert pub.read() == [p.Ack(Kind.PUBACK, number)]
    assert len(sub.wire.out) > 300 * 65_000
    kept.kept.checkpoints.begin()
    while kept.kept.checkpoints.running:
        kept.kept.checkpoints._some(10_000)
        kept.settle()
    assert kept.kept.checkpoints.count == 1
    kept.kill()
    assert kept.kept.problems == []
    flights = kept.broker.sessions["sub"].exchange.flights
    assert [flight.number for flight in flights] == list(range(300))
    assert {len(flight.identifiers) for flight in flights} == {65_535}
    kept.kept.close()
