"""Promise: what a broker keeps comes back as it was: layouts, keys, time, bounds; damage is set aside and named."""

from __future__ import annotations

import struct
import time
import zlib
from typing import Any

import msgspec
import pytest
from mqtt_use import Device, ManualLoop

from penstock.disk import MemoryDisk
from penstock.disk.failpoint import arm
from penstock.errors import NotFoundError
from penstock.mqtt import packets as p, state_log
from penstock.mqtt.options import BrokerOptions
from penstock.mqtt.packets import Kind
from penstock.mqtt.retained_data import decode_retained
from penstock.mqtt.state_dump import dump
from penstock.mqtt.state_open import KeptBroker
from penstock.mqtt.state_options import PersistenceOptions
from penstock.store import AppendLogStore
from penstock.testing.clock import FakeClock
from penstock.testing.faulty import FaultyDisk


class Kept:
    """A kept broker without sockets, that can be closed or killed and opened again."""

    def __init__(self, sync: Any = "none", segment_bytes: int = 1 << 20, **options: Any) -> None:
        self.disk, self.clock = FaultyDisk(MemoryDisk()), FakeClock()
        self.persistence = PersistenceOptions(sync=sync, segment_bytes=segment_bytes)
        self.options = BrokerOptions(**options)
        self.open()

    def open(self) -> None:
        self.loop = ManualLoop()
        self.kept = KeptBroker("data", self.options, self.persistence, loop=self.loop, clock=self.clock, disk=self.disk)
        self.broker = self.kept.broker

    def settle(self) -> None:
        until = time.monotonic() + 20
        while True:
            self.loop.run()
            if not self.kept.gate.busy and self.kept.checkpoints._applying is None:
                return
            assert time.monotonic() < until
            time.sleep(0.0005)

    def kill(self) -> None:
        """Leave everything as it is, as kill -9 does, and open again."""
        self.leave()
        self.open()

    def leave(self) -> None:
        self.kept.checkpoints._thread.shutdown()
        log = self.kept.checkpoints.store._log
        assert log is not None
        log.close()
        self.kept.checkpoints.store._closed = True
        if self.kept.journal._committer is not None:
            self.kept.journal._committer.close()
        self.kept.journal.log.close()

    def restart(self) -> None:
        self.kept.close()
        self.open()

    def device(self, name: str, *, expiry: int = 1000, version: int = 5, **given: Any) -> Device:
        device = Device(self.broker, version)
        properties = p.Properties(session_expiry=expiry) if version == 5 else p.NONE
        device.send(p.Connect(name, version, False, properties=properties, **given))
        self.settle()
        found = device.read()
        assert isinstance(found[0], p.Connack)
        device.connack, device.rest = found[0], found[1:]  # type: ignore[attr-defined]
        return device

    def subscriber(self, name: str, filter: str = "a/#", qos: int = 1) -> Device:
        device = self.device(name)
        device.subscribe(filter, qos=qos)
        self.settle()
        device.read()
        return device

    def tick(self, seconds: float) -> None:
        self.clock.pass_(seconds)
        self.broker.tick()
        self.settle()


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


def test_a_will_of_a_client_without_a_session_is_published_after_a_kill() -> None:
    kept = Kept()
    kept.subscriber("sub").drop()
    kept.device("brief", expiry=0, will=p.Will("a/will", b"gone", 1))
    kept.kill()
    assert kept.broker.sessions["sub"].queued_messages == 1
    assert "brief" not in kept.broker.sessions
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


def damage(kept: Kept, path: str, at: int) -> None:
    with kept.disk.modify(path) as file:
        file.write_at(at, bytes((file.read_at(at, 1)[0] ^ 0xFF,)))


def test_damage_in_the_journal_is_set_aside_and_named_and_the_rest_is_there() -> None:
    kept = Kept()
    kept.subscriber("sub").drop()
    pub = kept.device("pub")
    places = []
    for number in range(1, 6):
        places.append(kept.kept.journal.log.end)
        pub.publish("a/b", b"%d" % number, 1, number)
        kept.settle()
    segment = kept.kept.journal.log.segments[-1]
    path, at = segment.path, places[2] - segment.start + 64 + 40
    damage(kept, path, at)
    kept.kill()
    (problem,) = kept.kept.problems
    assert problem.file == path
    assert problem.byte == at - 40
    assert [name for name in kept.disk.list("data/journal") if name.endswith(".bad")]
    sub = kept.device("sub")
    kept.settle()
    found = [packet.payload for packet in [*sub.rest, *sub.read()] if isinstance(packet, p.Publish)]
    assert found == [b"1", b"2", b"4", b"5"]
    kept.kept.close()


def queued(kept: Kept, name: str = "sub") -> list[bytes]:
    sub = kept.device(name)
    kept.settle()
    return [packet.payload for packet in [*sub.rest, *sub.read()] if isinstance(packet, p.Publish)]


def cut(kept: Kept, path: str, size: int) -> None:
    with kept.disk.modify(path) as file:
        file.truncate(size)


@pytest.mark.parametrize("how", ["flipped", "cut"])
@pytest.mark.parametrize("segment", ["sealed", "newest"])
def test_damage_at_the_end_of_a_segment_is_told_from_a_torn_tail(segment: str, how: str) -> None:
    kept = Kept("always")
    kept.subscriber("sub").drop()
    pub = kept.device("pub")
    for number in range(1, 4):
        place = kept.kept.journal.log.end
        pub.publish("a/b", b"%d" % number, 1, number)
        kept.settle()
    file = kept.kept.journal.log.segments[-1]
    path, at = file.path, place - file.start + 64
    if segment == "sealed":
        kept.kill()
        kept.device("other")
    if how == "flipped":
        damage(kept, path, at + 40)
    else:
        cut(kept, path, at + 40)
    kept.kill()
    problems = kept.kept.problems
    assert [(problem.file, problem.byte) for problem in problems] == [(path, at)]
    bad = [name for name in kept.disk.list("data/journal") if name.endswith(".bad")]
    assert len(bad) == 1
    assert queued(kept) == [b"1", b"2"]
    kept.kill()
    assert kept.kept.problems == [], "it is said once"
    kept.kept.close()


def test_a_tail_that_a_kill_tore_is_no_damage() -> None:
    kept = Kept()
    kept.subscriber("sub").drop()
    pub = kept.device("pub")
    for number in range(1, 4):
        place = kept.kept.journal.log.end
        pub.publish("a/b", b"%d" % number, 1, number)
        kept.settle()
    file = kept.kept.journal.log.segments[-1]
    kept.leave()
    cut(kept, file.path, place - file.start + 64 + 40)
    kept.open()
    assert kept.kept.problems == []
    kept.kill()
    assert kept.kept.problems == []
    assert queued(kept) == [b"1", b"2"]
    kept.kept.close()


def test_a_damaged_payload_is_dropped_and_counted_and_the_rest_comes() -> None:
    kept = Kept()
    kept.subscriber("sub").drop()
    pub = kept.device("pub")
    for number in range(1, 4):
        pub.publish("a/b", b"payload %d" % number, 1, number)
        kept.settle()
    segment = kept.kept.journal.log.segments[-1]
    with kept.disk.open(segment.path) as file:
        at = file.read_at(0, 1 << 20).index(b"payload 2")
    damage(kept, segment.path, at)
    kept.kill()
    sub = kept.device("sub")
    kept.settle()
    found = [packet.payload for packet in [*sub.rest, *sub.read()] if isinstance(packet, p.Publish)]
    assert found == [b"payload 1", b"payload 3"]
    assert kept.broker.counts.dropped == {"damaged": 1}
    assert [problem.file for problem in kept.kept.problems] == [segment.path]
    (bad,) = [name for name in kept.disk.list("data/journal") if name.endswith(".bad")]
    with kept.disk.open(f"data/journal/{bad}") as file:
        assert b"ayload 2" in file.read_at(0, 1 << 20)
    kept.kept.close()


def test_damage_in_the_store_is_set_aside_and_named_and_the_rest_is_there() -> None:
    kept = Kept()
    pub = kept.device("pub")
    for number in range(5):
        pub.publish(f"a/{number}", b"value %d" % number, 0, retain=True)
    kept.settle()
    kept.kept.close()
    with kept.disk.open("data/state.snap") as file:
        at = file.read_at(0, 1 << 20).index(b"value 2")
    damage(kept, "data/state.snap", at)
    kept.open()
    assert len(kept.kept.problems) == 1
    assert "state.snap.bad" in str(kept.kept.problems[0])
    assert sorted(kept.broker.retained.topics()) == [b"a/0", b"a/1", b"a/3", b"a/4"]
    assert kept.disk.stat("data/state.snap.bad") is not None
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


def test_a_power_cut_after_a_middle_segment_went_takes_nothing_that_was_synced() -> None:
    kept = Kept("always", 8_000)
    kept.subscriber("first", "a/1").drop()
    kept.subscriber("last", "a/3").drop()
    busy = kept.subscriber("busy", "a/2")
    pub = kept.device("pub")
    number = 0

    def publish(topic: str, count: int) -> None:
        nonlocal number
        for _ in range(count):
            number += 1
            pub.publish(topic, b"x" * 1000, 1, number)
            kept.settle()
            for packet in busy.messages():
                busy.ack(Kind.PUBACK, packet.packet_id)
            kept.settle()
            kept.clock.pass_(6)

    publish("a/1", 1)
    publish("a/2", 60)
    publish("a/3", 3)
    names = [int(name[:20]) for name in kept.disk.list("data/journal") if name.endswith(".turns")]
    assert names != list(range(names[0], names[-1] + 1)), "no segment went from the middle"
    kept.leave()
    kept.disk.cut_power(keep=0.0)
    kept.open()
    assert kept.kept.problems == []
    assert kept.broker.sessions["first"].queued_messages == 1
    assert kept.broker.sessions["last"].queued_messages == 3
    kept.kept.close()


def publish_unsynced(kept: Kept, pub: Device, payload: bytes, packet_id: int, qos: int = 1, **given: Any) -> str:
    """Have a turn written that no sync makes durable, and end the process; return the file it is in."""

    def off(operation: str, path: str) -> None:
        if operation in ("sync", "create"):
            raise OSError(5, "the machine is off", path)

    kept.disk.on_call = off
    pub.publish("a/b", payload, qos, packet_id, **given)
    until = time.monotonic() + 20
    while not kept.kept.gate.trouble and time.monotonic() < until:
        kept.loop.run()
    assert not [packet for packet in pub.read() if isinstance(packet, p.Ack) and packet.reason < 0x80]
    kept.leave()
    kept.disk.on_call = None
    return max(name for name in kept.disk.list("data/journal") if name.endswith(".turns"))


def zero_the_end(kept: Kept, name: str, count: int) -> None:
    """Leave zeros where the last bytes of a file were, as a page that was never written."""
    with kept.disk.modify(f"data/journal/{name}") as file:
        file.write_at(file.stat().size - count, bytes(count))


def test_a_turn_whose_messages_a_power_cut_took_is_not_taken_by_the_second_start_either() -> None:
    kept = Kept("always")
    kept.subscriber("sub").drop()
    pub = kept.device("pub")
    name = publish_unsynced(kept, pub, b"torn" * 100, 1, retain=True)
    kept.disk.cut_power(keep=1.0)
    zero_the_end(kept, name, 200)
    for start in range(3):
        kept.open()
        assert kept.kept.problems == []
        assert kept.broker.retained.get(b"a/b") is None
        assert kept.broker.sessions["sub"].queued_messages == 0, f"what was refused came with start {start}"
        kept.leave()
        kept.disk.cut_power(keep=1.0)
    kept.open()
    kept.kept.close()


def test_a_torn_tail_is_not_read_when_the_segment_behind_it_is_not_needed_any_more() -> None:
    kept = Kept("always", 8_000)
    kept.subscriber("first").drop()
    pub = kept.device("pub")
    pub.publish("a/b", b"kept", 1, 1)  # from here on a message in this segment waits
    kept.settle()
    name = publish_unsynced(kept, pub, b"torn" * 100, 2)
    kept.disk.cut_power(keep=1.0)
    zero_the_end(kept, name, 200)
    kept.open()
    assert kept.broker.sessions["first"].queued_messages == 1
    busy, pub = kept.subscriber("busy", "c/#"), kept.device("pub")
    for number in range(1, 60):
        pub.publish("c/d", b"x" * 1000, 1, number)
        kept.settle()
        for packet in busy.messages():
            busy.ack(Kind.PUBACK, packet.packet_id)
        kept.settle()
        kept.clock.pass_(6)
    names = [each for each in kept.disk.list("data/journal") if each.endswith(".turns")]
    assert name in names, "the segment with the message that waits"
    assert len(names) < 8, "no segment went"
    kept.kill()
    assert kept.broker.sessions["first"].queued_messages == 1
    assert queued(kept, "first") == [b"kept"]
    assert kept.kept.problems == []
    kept.kept.close()


def test_segments_that_a_power_cut_has_parted_from_the_rest_never_count_again() -> None:
    kept = Kept("always")
    kept.subscriber("sub").drop()
    pub = kept.device("pub")
    name = publish_unsynced(kept, pub, b"torn" * 100, 1)
    start = kept.kept.journal.log.end  # where a segment begins that is behind the turn which is lost
    kept.disk.cut_power(keep=1.0)
    zero_the_end(kept, name, 200)
    head = state_log.HEAD.pack(state_log.MAGIC, 1, 0, start, 1, 1, kept.disk.boot_id(), 0)
    with kept.disk.create(f"data/journal/{int(name[:20]) + 1:020}.turns") as file:
        file.write_at(0, head + zlib.crc32(head).to_bytes(4, "little"))
    for number in range(1, 5):
        kept.open()
        assert kept.kept.problems == []
        pub = kept.device("pub")
        pub.publish("a/b", b"%d" % number, 1, number)
        kept.settle()
        assert [packet.packet_id for packet in pub.read() if isinstance(packet, p.Ack)] == [number]
        kept.leave()
        kept.disk.cut_power(keep=0.0)
    kept.open()
    assert kept.kept.problems == []
    assert queued(kept) == [b"1", b"2", b"3", b"4"]
    kept.kept.close()


def test_what_a_killed_process_had_not_synced_is_synced_before_anyone_is_told_of_it() -> None:
    kept = Kept("always")
    kept.subscriber("sub", qos=2).drop()
    publish_unsynced(kept, kept.device("pub"), b"1", 1, 2)
    kept.open()  # after kill -9: the turn is there, and the id of its message is known
    pub = kept.device("pub")
    pub.publish("a/b", b"1", 2, 1, dup=True)
    kept.settle()
    assert [packet.kind for packet in pub.read() if isinstance(packet, p.Ack)] == [Kind.PUBREC]
    kept.leave()
    kept.disk.cut_power(keep=0.0)
    kept.open()
    assert kept.kept.problems == []
    assert queued(kept) == [b"1"]
    kept.kept.close()


@pytest.mark.parametrize("step", ["mqtt.segment.created", "mqtt.renew.copied", "mqtt.segment.headed"])
def test_a_kill_while_a_failed_sync_is_written_anew_loses_nothing(step: str) -> None:
    kept = Kept("interval")
    kept.subscriber("sub").drop()
    pub = kept.device("pub")
    for number in range(1, 4):
        pub.publish("a/b", b"%d" % number, 1, number)
        kept.settle()
        assert [packet.packet_id for packet in pub.read() if isinstance(packet, p.Ack)] == [number]
    kept.disk.fail("sync", OSError(5, "Input/output error"), path="turns")
    with pytest.raises(OSError, match="Input/output error"):
        kept.kept.journal.sync()

    def off() -> None:
        raise Killed

    with arm(step, off), pytest.raises(Killed):
        kept.kept.gate.end_turn()
    kept.kill()
    assert kept.kept.problems == []
    assert queued(kept) == [b"1", b"2", b"3"]
    kept.kept.close()


class Killed(BaseException):
    """The process ended here."""


def test_a_sync_that_failed_leaves_everything_readable_after_a_kill() -> None:
    kept = Kept("always")
    for name in ("s1", "s2", "s3"):
        kept.subscriber(name).drop()
    pub = kept.device("pub")
    pub.publish("a/b", b"1", 1, 1)  # from here on the three are a list with a number
    kept.settle()
    kept.disk.fail("sync", OSError(5, "Input/output error"), path="turns")
    pub.publish("a/b", b"2", 1, 2)
    until = time.monotonic() + 20
    while not kept.kept.gate.trouble and time.monotonic() < until:
        kept.loop.run()
    assert pub.closed
    while kept.kept.gate.busy and time.monotonic() < until:
        kept.loop.run(later=True)
    assert not kept.kept.journal.trouble
    kept.kill()
    assert kept.kept.problems == []
    for name in ("s1", "s2", "s3"):
        sub = kept.device(name)
        kept.settle()
        assert [packet.payload for packet in [*sub.rest, *sub.read()] if isinstance(packet, p.Publish)] == [b"1", b"2"]
    kept.kept.close()
