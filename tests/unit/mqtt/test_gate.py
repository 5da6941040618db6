"""Promise: an answer leaves when what it promises is kept, in order; a publish that is not kept is not acknowledged."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from mqtt_use import Device, ManualLoop, World

from penstock.errors import RetryError
from penstock.kernel.mqtt import Run, make_run
from penstock.mqtt import MqttServer, ServerOptions, packets as p
from penstock.mqtt.gate import MOST_HELD, TurnGate
from penstock.mqtt.inlet import Inlet
from penstock.mqtt.packets import Kind
from penstock.mqtt.reasons import Reason
from penstock.mqtt.session import Session


class Disk:
    """A step that counts turns, fails on demand and gives out futures on demand."""

    def __init__(self) -> None:
        self.turns = 0
        self.error: Exception | None = None
        self.futures: list[Future[int]] | None = None

    def end_turn(self) -> Future[int] | None:
        if self.error is not None:
            raise self.error
        self.turns += 1
        if self.futures is None:
            return None
        self.futures.append(Future())
        return self.futures[-1]


class Gated(World):
    def __init__(self, **options: Any) -> None:
        self.loop = ManualLoop()
        self.gate = TurnGate(self.loop)
        self.disk = Disk()
        self.gate.steps.append(self.disk)
        super().__init__(gate=self.gate, **options)

    def device(self, client_id: str = "dev", version: int = 5, **given: Any) -> Device:
        device = Device(self.broker, version)
        device.send(p.Connect(client_id, version, **given))
        self.loop.run()
        assert isinstance(device.read()[0], p.Connack)
        return device


def acks(device: Device) -> list[tuple[int, int]]:
    return [(packet.packet_id, packet.reason) for packet in device.read() if isinstance(packet, p.Ack)]


def test_answers_of_many_connections_leave_with_one_write_of_the_turn() -> None:
    world = Gated()
    one, two = world.device("one"), world.device("two")
    world.disk.turns = 0
    for number in range(1, 4):
        assert one.publish("a", b"x", 1, number) == []
        assert two.publish("a", b"x", 2, number) == []
    world.loop.run()
    assert world.disk.turns == 1
    assert [number for number, _ in acks(one)] == [1, 2, 3] == [number for number, _ in acks(two)]
    assert world.gate.held_bytes == 0


def test_turns_wait_for_their_futures_in_order_while_the_next_is_decided() -> None:
    world = Gated()
    device = world.device()
    world.disk.futures = futures = []
    for number in (1, 2, 3):
        device.publish("a", b"x", 1, number)
        world.loop.run()
    assert acks(device) == []
    futures[1].set_result(0)
    world.loop.run()
    assert acks(device) == []  # the first turn has not left yet
    futures[0].set_result(0)
    world.loop.run()
    assert [number for number, _ in acks(device)] == [1, 2]


def test_a_disconnect_waits_for_the_answers_before_it() -> None:
    world = Gated()
    world.disk.futures = []
    device = Device(world.broker, 5)
    device.send(p.Connect("dev", 5))
    world.broker.shut_down()
    assert not device.closed
    world.loop.run()
    assert not device.closed
    for future in world.disk.futures:
        future.set_result(0)
    world.loop.run()
    assert [type(packet) for packet in device.read()] == [p.Connack, p.Disconnect]
    assert device.closed


def test_nothing_overtakes_connack() -> None:
    world = Gated()
    pub = world.device("pub")
    sub = Device(world.broker, 5)
    world.disk.futures = futures = []
    sub.send(p.Connect("sub", 5))
    sub.send(p.Subscribe(1, (p.Filter("a"),)))
    pub.publish("a", b"1")
    world.loop.run()
    pub.publish("a", b"2")  # of a turn that leaves later than CONNACK
    world.loop.run()
    assert sub.read() == []
    futures[0].set_result(0)
    world.loop.run()
    pub.publish("a", b"3")
    world.loop.run()
    while open_ones := [future for future in futures if not future.done()]:
        for future in open_ones:
            future.set_result(0)
        world.loop.run()
    pub.publish("a", b"4")
    found = sub.read()
    assert [type(packet) for packet in found[:2]] == [p.Connack, p.Suback]
    assert [packet.payload for packet in found[2:] if isinstance(packet, p.Publish)] == [b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), MemoryError("No space"), ValueError("No space, nobody expected")]
)
def test_a_publish_that_cannot_be_written_is_not_acknowledged_and_others_go_on_when_the_disk_does(
    version: int, error: Exception
) -> None:
    world = Gated()
    pub, sub = world.device("pub", version), world.device("sub", version)
    sub.subscribe("a", qos=1)
    world.loop.run()
    sub.read()
    world.disk.error = error
    pub.publish("a", b"x", 1, 1)
    world.loop.run()
    assert pub.closed
    told = [packet.reason for packet in pub.read() if isinstance(packet, p.Disconnect)]
    assert told == ([Reason.QUOTA_EXCEEDED] if version == 5 else [])
    assert not sub.closed
    assert sub.payloads() == []  # its packet id is not kept yet
    assert world.gate.trouble == (str(error) or "MemoryError")
    world.disk.error = None
    world.loop.run(later=True)
    assert sub.payloads() == [b"x"]
    assert world.gate.trouble == ""


def test_a_sync_that_fails_is_tried_again_and_cuts_off_only_who_published() -> None:
    world = Gated()
    pub, sub = world.device("pub"), world.device("sub")
    sub.subscribe("a", qos=1)
    world.loop.run()
    sub.read()
    world.disk.futures = futures = []
    pub.publish("a", b"x", 1, 1)
    world.loop.run()
    futures[0].set_exception(OSError(5, "Input/output error"))
    world.loop.run()
    assert pub.closed
    assert not sub.closed
    world.loop.run(later=True)
    futures[-1].set_result(0)
    world.loop.run()
    assert sub.payloads() == [b"x"]


def test_an_answer_that_cannot_leave_ends_its_connection_and_keeps_no_other_one_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Gated()
    one, two, three = (world.device(name) for name in ("one", "two", "three"))
    for device in (one, two, three):
        device.publish("a", b"x", 1, 1)

    def fails(_: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr(two.wire, "write", fails)
    world.loop.run()
    assert ([len(acks(one)), len(acks(three))], two.closed) == ([1, 1], True)
    assert not world.gate.busy


class Tap:
    """What a tap does: a ticket for each run of QoS 1 or 2, settled when the test says so."""

    def __init__(self, world: Gated) -> None:
        self.world = world
        self.tickets: list[Any] = []
        inner = world.broker.publish

        def publish(run: Run, publisher: Session | None, **given: Any) -> int:
            if run.qos:
                self.tickets.append(world.gate.ticket())
            return inner(run, publisher, **given)

        world.broker.publish = publish  # type: ignore[method-assign]


def test_a_ticket_holds_one_publisher_back_and_nobody_else() -> None:
    world = Gated()
    tap = Tap(world)
    one, two = world.device("one"), world.device("two")
    one.publish("a", b"x", 1, 1)
    one.publish("a", b"x", 1, 2)
    two.publish("a", b"x", 1, 9)
    world.loop.run()
    tap.tickets[2].done()
    assert [number for number, _ in acks(two)] == [9]
    tap.tickets[1].done()
    assert acks(one) == []  # in order
    tap.tickets[0].done()
    assert [number for number, _ in acks(one)] == [1, 2]
    assert world.gate.held_bytes == 0


@pytest.mark.parametrize("qos", [1, 2])
def test_a_ticket_that_is_refused_says_so_and_frees_the_packet_id(qos: int) -> None:
    world = Gated()
    tap = Tap(world)
    new, old = world.device("new"), world.device("old", 4)
    new.publish("a", b"x", qos, 5)
    old.publish("a", b"x", qos, 5)
    for ticket in tap.tickets:
        ticket.refuse(Reason.QUOTA_EXCEEDED)
    world.loop.run()
    assert acks(new) == [(5, 0x97)]
    assert world.broker.sessions["new"].received == set()
    assert old.closed
    assert acks(old) == []


@pytest.mark.parametrize("refused", [False, True])
def test_a_message_that_comes_again_waits_for_what_it_waited_for_the_first_time(refused: bool) -> None:
    world = Gated()
    tap = Tap(world)
    keep: Any = {"clean": False, "properties": p.Properties(session_expiry=1000)}
    pub = world.device("pub", **keep)
    for number in (4, 5, 6):
        pub.publish("a", b"%d" % number, 2, number)
    world.loop.run()
    tap.tickets[0].done()
    pub.drop()
    pub = world.device("pub", **keep)
    for number in (4, 5, 6):
        pub.publish("a", b"%d" % number, 2, number, dup=True)
    world.loop.run()
    assert acks(pub) == [(4, 0)]
    assert len(tap.tickets) == 3
    if refused:
        tap.tickets[1].refuse(Reason.QUOTA_EXCEEDED)
    tap.tickets[1].done()
    tap.tickets[2].done()
    assert acks(pub) == [(5, 0x97 if refused else 0), (6, 0)]
    assert world.broker.sessions["pub"].received == ({4, 6} if refused else {4, 5, 6})


@pytest.mark.parametrize("version", [4, 5])
def test_a_connection_that_was_taken_over_ends_though_a_ticket_is_open_and_what_it_held_is_let_go(version: int) -> None:
    world = Gated()
    tap = Tap(world)
    keep: Any = {"clean": False, "properties": p.Properties(session_expiry=1000) if version == 5 else p.NONE}
    old = world.device("pub", version, **keep)
    for number in (4, 5):
        old.publish("a", b"x", 2, number)
    world.loop.run()
    new = world.device("pub", version, **keep)
    assert old.closed
    assert [type(each) for each in old.read()] == ([p.Disconnect] if version == 5 else [])
    for number in (4, 5):
        new.publish("a", b"x", 2, number, dup=True)
    world.loop.run()
    tap.tickets[1].refuse(Reason.QUOTA_EXCEEDED)
    tap.tickets[0].done()
    assert acks(new) == ([(4, 0), (5, 0x97)] if version == 5 else [(4, 0)])
    world.loop.run()
    assert (new.closed, world.gate.held_bytes) == (version == 4, 0)
    assert world.broker.sessions["pub"].received == {4}


def test_however_many_messages_wait_each_one_that_comes_again_waits_for_its_ticket() -> None:
    world = Gated()
    tap = Tap(world)
    keep: Any = {"clean": False, "properties": p.Properties(session_expiry=1000)}
    pub = world.device("pub", **keep)
    for number in range(1, 1001):
        pub.publish("a", b"x", 2, number)
    world.loop.run()
    pub.drop()
    pub = world.device("pub", **keep)
    for number in range(1, 1001):
        pub.publish("a", b"x", 2, number, dup=True)
    world.loop.run()
    assert acks(pub) == []
    for ticket in tap.tickets:
        ticket.done()
    assert acks(pub) == [(number, 0) for number in range(1, 1001)]
    pub.publish("a", b"x", 2, 2000)
    world.loop.run()
    unsettled = world.broker.sessions["pub"].unsettled
    assert unsettled is not None
    assert unsettled.ids() == [range(2000, 2001)]  # what is settled is forgotten
    pub.ack(Kind.PUBREL, 2000)
    assert not unsettled


def test_what_was_refused_behind_a_message_that_waits_is_refused_when_it_comes_again() -> None:
    world = Gated()
    tap = Tap(world)
    keep: Any = {"clean": False, "properties": p.Properties(session_expiry=1000)}
    pub = world.device("pub", **keep)
    for number in (4, 5):
        pub.publish("a", b"%d" % number, 2, number)
    world.loop.run()
    tap.tickets[1].refuse(Reason.QUOTA_EXCEEDED)
    pub.drop()
    pub = world.device("pub", **keep)
    for number in (4, 5):
        pub.publish("a", b"%d" % number, 2, number, dup=True)
    world.loop.run()
    tap.tickets[0].done()
    assert acks(pub) == [(4, 0), (5, 0x97)]
    pub.publish("a", b"5", 2, 5)
    world.loop.run()
    tap.tickets[2].done()
    assert acks(pub) == [(5, Reason.NO_MATCHING_SUBSCRIBERS)]
    assert world.broker.sessions["pub"].received == {4, 5}


def test_a_late_refusal_does_not_free_the_id_of_what_has_come_anew_since() -> None:
    world = Gated()
    tap = Tap(world)
    keep: Any = {"clean": False, "properties": p.Properties(session_expiry=1000)}
    pub = world.device("pub", **keep)
    for number in (4, 5):
        pub.publish("a", b"%d" % number, 2, number)
    world.loop.run()
    session = world.broker.sessions["pub"]
    session.received.discard(5)  # as a tap does that refuses
    tap.tickets[1].refuse(Reason.QUOTA_EXCEEDED)
    pub.drop()
    pub = world.device("pub", **keep)
    pub.publish("a", b"5", 2, 5, dup=True)
    world.loop.run()
    tap.tickets[2].done()
    assert acks(pub) == [(5, Reason.NO_MATCHING_SUBSCRIBERS)]
    tap.tickets[0].done()
    assert session.received == {4, 5}


async def test_an_answer_that_cannot_be_given_to_a_bridge_or_a_feed_keeps_no_other_one_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Gated()
    device, inlet = world.device(), Inlet(world.broker, "feed:a")
    given = asyncio.create_task(inlet.publish([make_run(b"a", [b"x"], 1, False)]))
    await asyncio.sleep(0)
    device.publish("a", b"x", 1, 1)

    def fails(_: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr(inlet, "write", fails)
    world.loop.run()
    with pytest.raises(RetryError, match="feed:a"):
        await given
    assert acks(device) == [(1, Reason.NO_MATCHING_SUBSCRIBERS)]
    assert not world.gate.busy


def test_a_ticket_that_is_refused_when_its_client_is_gone_frees_the_packet_id() -> None:
    world = Gated()
    tap = Tap(world)
    keep: Any = {"clean": False, "properties": p.Properties(session_expiry=1000)}
    pub, sub = world.device("pub", **keep), world.device("sub")
    sub.subscribe("a", qos=2)
    pub.publish("a", b"x", 2, 5)
    world.loop.run()
    pub.drop()
    tap.tickets[0].refuse(Reason.QUOTA_EXCEEDED)
    assert world.broker.sessions["pub"].received == set()
    pub = world.device("pub", **keep)
    pub.publish("a", b"x", 2, 5, dup=True)  # it had no answer
    world.loop.run()
    assert acks(pub) == []
    tap.tickets[1].done()
    assert acks(pub) == [(5, 0)]


def test_who_has_too_much_waiting_is_not_read_from_until_it_left() -> None:
    world = Gated(max_queued_bytes=1 << 40)
    pub, sub = world.device("pub"), world.device("sub")
    sub.subscribe("a", qos=1)
    world.loop.run()
    world.disk.futures = futures = []
    for number in range(1, 4):
        pub.publish("a", bytes(MOST_HELD // 2), 1, number)
    world.loop.run()
    assert not sub.wire.reading
    for future in futures:
        future.set_result(0)
    world.loop.run()
    assert sub.wire.reading
    assert len(sub.payloads()) == 3
    sub.ack(Kind.PUBACK, 1)


@pytest.mark.parametrize("first", ["gate", "tap"])
def test_who_is_held_by_the_gate_and_by_a_tap_is_read_again_when_both_let_go(first: str) -> None:
    world = Gated(max_queued_bytes=1 << 40)
    pub, sub = world.device("pub"), world.device("sub")
    sub.subscribe("a", qos=1)
    world.loop.run()
    world.disk.futures = futures = []
    for number in range(1, 4):
        pub.publish("a", bytes(MOST_HELD // 2), 1, number)
    world.loop.run()
    sub.link.hold_reading()
    assert (sub.wire.reading, sub.wire.deadline) == (False, None)
    for turn in (first, "tap" if first == "gate" else "gate"):
        assert not sub.wire.reading
        if turn == "tap":
            sub.link.go_on_reading()
        else:
            for future in futures:
                future.set_result(0)
            world.loop.run()
    assert (sub.wire.reading, sub.wire.deadline) == (True, 90)


def test_what_waits_for_no_disk_leaves_before_the_steps_write() -> None:
    world = Gated()
    order: list[str] = []

    class Step:
        def end_turn(self) -> None:
            order.append("written")

    world.gate.steps.append(Step())
    world.gate.before_writing = lambda: order.append("flushed")
    world.gate.changed()
    world.loop.run()
    assert order == ["flushed", "written"]


async def test_a_server_sends_what_is_read_in_a_turn_before_it_writes_to_disk(tmp_path: Path) -> None:
    server = MqttServer(ServerOptions(port=0), data=str(tmp_path / "data"))
    await server.start()
    try:
        assert isinstance(server.broker.gate, TurnGate)
        assert server._listeners is not None
        assert server.broker.gate.before_writing == server._listeners.flush
    finally:
        await server.stop()
