"""Promise: damage of what a broker keeps, a torn tail and a power cut are told apart, and nothing synced is lost."""

from __future__ import annotations

import time
import zlib
from typing import Any

import pytest
from mqtt_state_use import Kept
from mqtt_use import Device

from penstock.disk.failpoint import arm
from penstock.mqtt import packets as p, state_log
from penstock.mqtt.packets import Kind


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
    while not pub.closed:
        assert time.monotonic() < until
        kept.loop.run()
    while kept.kept.gate.busy:
        assert time.monotonic() < until
        kept.loop.run(later=True)
    assert not kept.kept.journal.trouble
    kept.kill()
    assert kept.kept.problems == []
    for name in ("s1", "s2", "s3"):
        sub = kept.device(name)
        kept.settle()
        assert [packet.payload for packet in [*sub.rest, *sub.read()] if isinstance(packet, p.Publish)] == [b"1", b"2"]
    kept.kept.close()
