"""Taps on a broker without a socket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mqtt_use import Device, ManualLoop, World

from penstock.errors import OptionsError
from penstock.kernel.mqtt import Run
from penstock.log import open_log
from penstock.log.envelope import decode_envelope
from penstock.log.xchannel import Writer
from penstock.mqtt import packets as p
from penstock.mqtt.carried import open_headers, open_rows
from penstock.mqtt.gate import TurnGate
from penstock.mqtt.packets import Kind
from penstock.mqtt.tap import Tap, TapSpec
from penstock.mqtt.tapped import TappedLog


class Tapped(World):
    """A broker with taps whose turns are ended by hand."""

    def __init__(self, *specs: TapSpec, **options: Any) -> None:
        self.loop = ManualLoop()
        super().__init__(gate=TurnGate(self.loop), **options)
        self.taps = [Tap(spec, self.broker) for spec in specs]
        for tap in self.taps:
            tap.attach()

    def device(self, client_id: str = "dev", version: int = 5, **given: Any) -> Device:
        device = Device(self.broker, version)
        properties = p.Properties(**given.pop("properties", {}))
        device.send(p.Connect(client_id, version, properties=properties, **given))
        self.turn(device)
        return device

    def turn(self, device: Device | None = None) -> list[p.Packet]:
        """End the turn; return what the device got."""
        self.loop.run()
        return device.read() if device is not None else []

    def close(self) -> None:
        for tap in self.taps:
            tap._detach()
            tap._close_logs()


def records(path: Path | str) -> list[Any]:
    with open_log(str(path)) as log:
        found, at = [], log.first_position
        while len(batch := log.read(at)):
            found += [decode_envelope(payload) for payload in batch.to_payloads()]
            at = batch.next_position
        return found


def payloads(path: Path | str) -> list[bytes]:
    return [record.payload for record in records(path)]


@pytest.mark.parametrize("format", ["xchannel", "filechannel", "messagelog"])
def test_a_tap_keeps_payload_topic_and_everything_that_came_with_it(tmp_path: Path, format: Any) -> None:
    world = Tapped(TapSpec(filter="plant/#", path=f"{tmp_path}/log", format=format))
    device = world.device("pump-7")
    before = world.clock.now_ns()
    user = (("unit", "C"), ("unit", "again"))
    given: dict[str, Any] = {
        "content_type": "text/plain",
        "user": user,
        "correlation_data": b"\0\xff",
        "message_expiry": 30,
    }
    device.publish("plant/7", b"\x00\xff", 1, packet_id=4, retain=True, properties=given)
    assert world.turn(device) == [p.Ack(Kind.PUBACK, 4)]
    device.publish("elsewhere", b"no")
    for number in range(40):  # a run long enough for the vectorised way
        device.link.received(b"")
        device.publish("plant/8", b"%d" % number)
    device.send_raw(b"".join(p_bytes("plant/9", b"%d" % n, 2, n + 1) for n in range(40)))
    assert world.turn(device) == [p.Ack(Kind.PUBREC, n + 1) for n in range(40)]
    found = records(f"{tmp_path}/log")
    assert [record.payload for record in found] == [b"\x00\xff", *([b"%d" % n for n in range(40)] * 2)]
    first, last = found[0], found[-1]
    assert (first.key, first.event_time_ns >= before) == (b"plant/7", True)
    raw = headers_raw(f"{tmp_path}/log", 0)
    carried = open_headers(raw)
    assert (carried.qos, carried.retain, carried.client) == (1, True, "pump-7")
    assert carried.properties == p.Properties(**given)
    assert last.headers["qos"] == b"2"
    assert int.from_bytes(last.headers["id"], "big") == 40
    world.close()


def p_bytes(topic: str, payload: bytes, qos: int, packet_id: int, **given: Any) -> bytes:
    from penstock.mqtt.codec import encode

    return encode(p.Publish(topic, payload, qos, packet_id=packet_id, **given), 5)


def headers_raw(path: str, index: int) -> bytes:
    from penstock.log.envelope import open_envelopes

    with open_log(path) as log:
        batch = open_envelopes(log.read(log.first_position))
        spans: Any = batch.extra["headers"]
        return bytes(spans.to_list(batch.buffer)[index])


def test_an_acknowledgement_leaves_after_the_log_has_the_message(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    world = Tapped(TapSpec(filter="#", path=path))
    device = world.device("dev", 5)
    assert device.publish("a", b"1", 1, packet_id=1) == []
    assert payloads(path) == []
    assert world.turn(device) == [p.Ack(Kind.PUBACK, 1)]
    assert payloads(path) == [b"1"]
    world.close()


def test_messages_of_all_clients_in_a_turn_are_one_append(tmp_path: Path) -> None:
    world = Tapped(TapSpec(filter="#", path=f"{tmp_path}/log"))
    log = world.taps[0]._logs[f"{tmp_path}/log"]
    calls: list[int] = []
    before_append(log, calls.append)
    devices = [world.device(f"dev-{n}") for n in range(5)]
    for number, device in enumerate(devices):
        device.publish(f"a/{number}", b"%d" % number, number % 3, packet_id=1 if number % 3 else 0)
    world.turn()
    assert calls == [5]
    assert payloads(f"{tmp_path}/log") == [b"0", b"1", b"2", b"3", b"4"]
    world.close()


def test_overlapping_filters_of_a_tap_write_once_and_a_reading_turn_keeps_the_order(tmp_path: Path) -> None:
    world = Tapped(
        TapSpec(filter=("a/#", "a/+", "#"), path=f"{tmp_path}/one"), TapSpec(filter="a/b", path=f"{tmp_path}/two")
    )
    device = world.device()
    for number in range(3):
        device.publish("a/b", b"%d" % number)
        device.publish("a/c", b"c%d" % number)
    world.turn()
    assert payloads(f"{tmp_path}/one") == [b"0", b"c0", b"1", b"c1", b"2", b"c2"]
    assert payloads(f"{tmp_path}/two") == [b"0", b"1", b"2"]
    world.close()


def test_a_template_chooses_the_channel_within_its_bound(tmp_path: Path) -> None:
    spec = TapSpec(filter="#", path=f"{tmp_path}/x/{{1}}-{{client}}", max_channels=3, max_open=2, on_failure="refuse")
    world = Tapped(spec)
    evil = world.device("../../etc/passwd")
    evil.publish("a/1", b"evil", 1, packet_id=1)
    assert world.turn(evil) == [p.Ack(Kind.PUBACK, 1)]
    device = world.device("ann")
    for number, topic in enumerate(["b/1", "c/1", "b/2"]):
        device.publish(topic, topic.encode(), 1, packet_id=number + 1)
    assert [ack.reason for ack in world.turn(device) if isinstance(ack, p.Ack)] == [0, 0, 0]
    assert len(world.taps[0]._logs) == 2
    device.publish("d/1", b"one too many", 1, packet_id=9)
    assert world.turn(device) == [p.Ack(Kind.PUBACK, 9, 0x97)]
    assert payloads(f"{tmp_path}/x/b-ann") == [b"b/1", b"b/2"]
    assert payloads(f"{tmp_path}/x/a-%2E.%2F..%2Fetc%2Fpasswd") == [b"evil"]
    assert {each.name for each in tmp_path.iterdir()} == {"x"}
    world.close()


def before_append(log: TappedLog, act: Callable[[int], Any]) -> Callable[[], None]:
    """Do something with the number of messages before each append; return what ends that."""
    append, append_runs = log.append, log.append_runs

    def of_records(records: list[bytes]) -> None:
        act(len(records))
        append(records)

    def of_runs(runs: list[Run], headers: list[bytes], times_ns: list[int]) -> None:
        act(sum(run.count for run in runs))
        append_runs(runs, headers, times_ns)

    def end() -> None:
        log.append, log.append_runs = append, append_runs  # type: ignore[method-assign]

    log.append, log.append_runs = of_records, of_runs  # type: ignore[method-assign]
    return end


def no_room(_: Any) -> None:
    raise OSError(28, "No space left on device")


def broken(world: Tapped, path: str) -> Any:
    """Make the tap's log fail; return what mends it."""
    tap = world.taps[0]
    log = tap._logs[path]
    whole = before_append(log, no_room)
    opened = tap._open

    tap._open = lambda where: log if where in tap._logs else no_room(where)  # type: ignore[method-assign,assignment]

    def mend() -> None:
        whole()
        tap._open = opened  # type: ignore[method-assign]

    return mend


def test_block_holds_that_publisher_and_nobody_else_until_the_log_takes_it(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    world = Tapped(TapSpec(filter="plant/#", path=path, on_failure="block"))
    device, other, listener = world.device("dev", 4), world.device("other"), world.device("listener")
    listener.subscribe("plant/#")
    world.turn(listener)
    mend = broken(world, path)
    device.publish("plant/1", b"1", 1, packet_id=1)
    device.publish("plant/1", b"2")
    other.publish("office/1", b"x", 1, packet_id=1)
    assert world.turn(other) == [p.Ack(Kind.PUBACK, 1, 0x10)]
    assert listener.payloads() == [b"1", b"2"]  # who subscribes gets it all the same
    assert (device.read(), device.wire.reading, other.wire.reading) == ([], False, True)
    assert world.taps[0].health().state.value == "degraded"
    world.pass_(0.3)
    assert (device.read(), payloads(path)) == ([], [])
    mend()
    world.pass_(5.0)
    assert device.read() == [p.Ack(Kind.PUBACK, 1)]
    assert (payloads(path), device.wire.reading) == ([b"1", b"2"], True)
    assert world.taps[0].health().state.value == "ready"
    world.close()


def test_what_waits_for_a_log_is_bounded(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    world = Tapped(TapSpec(filter="#", path=path, max_backlog_bytes=1000))
    device = world.device()
    broken(world, path)
    for number in range(10):
        device.publish("a", bytes(400), 1, packet_id=number + 1)
        device.publish("a", bytes(400))
    acks = [ack.packet_id for ack in world.turn(device) if isinstance(ack, p.Ack)]
    assert acks == []  # refusals come behind what is held, in order
    tap = world.taps[0]
    assert tap.describe()["waiting"] == 2
    assert sum(tap.lost.values()) == 9
    world.close()


def test_refuse_tells_version_5_and_closes_the_others(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    world = Tapped(TapSpec(filter="#", path=path, on_failure="refuse"))
    five, four = world.device("five", 5), world.device("four", 4)
    broken(world, path)
    five.publish("a", b"1", 1, packet_id=1)
    five.publish("a", b"1", 2, packet_id=2)
    four.publish("a", b"1", 1, packet_id=1)
    assert world.turn(five) == [p.Ack(Kind.PUBACK, 1, 0x97), p.Ack(Kind.PUBREC, 2, 0x97)]
    assert world.broker.sessions["five"].received == set()
    assert (four.read(), four.closed) == ([], True)
    world.close()


def test_drop_counts_and_goes_on(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    world = Tapped(TapSpec(filter="#", path=path, on_failure="drop"))
    device = world.device()
    mend = broken(world, path)
    device.publish("a", b"1", 1, packet_id=1)
    assert world.turn(device) == [p.Ack(Kind.PUBACK, 1)]
    assert world.taps[0].lost == {"[Errno 28] No space left on device": 1}
    mend()
    world.pass_(1.0)
    device.publish("a", b"2", 1, packet_id=2)
    world.turn(device)
    assert payloads(path) == [b"2"]
    world.close()


def test_without_waiting_the_broker_acknowledges_whatever_the_tap_does(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    world = Tapped(TapSpec(filter="#", path=path, ack="broker", on_failure="refuse"))
    device = world.device()
    broken(world, path)
    device.publish("a", b"1", 2, packet_id=1)
    assert world.turn(device) == [p.Ack(Kind.PUBREC, 1)]
    assert sum(world.taps[0].lost.values()) == 1
    world.close()


def test_a_message_the_log_can_never_take_is_refused_and_blocks_nobody(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    world = Tapped(TapSpec(filter="#", path=path))
    device = world.device()
    device.publish("a", bytes(5 << 20), 1, packet_id=1)
    device.publish("a", b"small", 1, packet_id=2)
    assert world.turn(device) == [p.Ack(Kind.PUBACK, 1, 0x97), p.Ack(Kind.PUBACK, 2)]
    assert payloads(path) == [b"small"]
    assert world.taps[0].health().state.value == "ready"
    world.close()


def test_a_qos_2_message_is_in_the_log_once_when_it_comes_again_after_a_kill(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    persistent: dict[str, Any] = {"clean": False, "properties": {"session_expiry": 1000}}
    world = Tapped(TapSpec(filter="#", path=path))
    device = world.device("dev", **persistent)
    device.publish("a", b"known", 2, packet_id=1)
    world.turn(device)
    device.publish("a", b"in doubt", 2, packet_id=2)
    device.publish("a", b"in doubt", 2, packet_id=3)
    world.taps[0].end_turn()  # the log has it; the process dies before the journal does
    world.taps[0]._logs[path].writer.close()
    assert payloads(path) == [b"known", b"in doubt", b"in doubt"]

    again = Tapped()
    device = again.device("dev", **persistent)
    again.broker.sessions["dev"].received.add(1)  # what the journal has
    again.taps = [Tap(TapSpec(filter="#", path=path), again.broker)]
    again.taps[0].attach()
    device.publish("a", b"known", 2, packet_id=1, dup=True)
    device.publish("a", b"in doubt", 2, packet_id=2, dup=True)
    device.publish("a", b"another", 2, packet_id=3)  # no repetition: a new message under that id
    assert again.turn(device) == [p.Ack(Kind.PUBREC, n) for n in (1, 2, 3)]
    assert payloads(path) == [b"known", b"in doubt", b"in doubt", b"another"]
    device.ack(Kind.PUBREL, 2)
    again.turn(device)
    device.publish("a", b"in doubt", 2, packet_id=2, dup=True)  # the next of this id, after the exchange
    again.turn(device)
    assert payloads(path)[-1] == b"in doubt"
    assert len(payloads(path)) == 5
    again.close()


def test_long_headers_are_written_and_not_remembered(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    world = Tapped(TapSpec(filter="#", path=path))
    device = world.device()
    for size in (10, 5000):
        device.publish("a", b"x", 1, packet_id=1, properties={"user": (("name", "v" * size),)})
    world.turn()
    assert [len(record.headers["user.name"]) for record in records(path)] == [10, 5000]
    assert len(world.taps[0]._headers) == 1
    world.close()


def test_specs_are_checked(tmp_path: Path) -> None:
    for text in ("plant/#", "plant/#=", "a#b=x", "plant/#=data/{nothing}"):
        with pytest.raises(OptionsError):
            TapSpec.parse(text)
    world = World()
    with pytest.raises(OptionsError, match="hold back"):
        Tap(TapSpec(filter="#", path=f"{tmp_path}/x"), world.broker).attach()


def test_many_topics_of_one_read_go_to_their_channels_in_order(tmp_path: Path) -> None:
    world = Tapped(TapSpec(filter="#", path=f"{tmp_path}/all"), TapSpec(filter="plant/#", path=f"{tmp_path}/by/{{2}}"))
    device = world.device()
    topics = [f"plant/{number % 3}/{number}" for number in range(30)]
    device.send_raw(b"".join(p_bytes(topic, b"%d" % number, 0, 0) for number, topic in enumerate(topics)))
    world.turn()
    found = records(f"{tmp_path}/all")
    assert [(record.key.decode(), int(record.payload)) for record in found] == [(t, n) for n, t in enumerate(topics)]
    assert {record.headers["client"] for record in found} == {b"dev"}
    for name in range(3):
        assert payloads(f"{tmp_path}/by/{name}") == [b"%d" % number for number in range(name, 30, 3)]
    assert [tap.records for tap in world.taps] == [30, 30]
    world.close()


def test_a_message_the_log_can_never_take_does_not_keep_it_from_being_written_again(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    world = Tapped(TapSpec(filter="#", path=path))
    device, other = world.device("dev"), world.device("other")
    mend = broken(world, path)
    device.publish("a", b"1", 1, packet_id=1)
    device.publish("a", bytes(5 << 20), 1, packet_id=2)
    other.publish("a", b"3", 1, packet_id=1)
    device.publish("a", bytes(5 << 20))
    assert (world.turn(device), world.turn(other)) == ([], [])
    mend()
    world.pass_(5.0)
    assert device.read() == [p.Ack(Kind.PUBACK, 1), p.Ack(Kind.PUBACK, 2, 0x97)]
    assert other.read() == [p.Ack(Kind.PUBACK, 1)]
    assert payloads(path) == [b"1", b"3"]
    assert (world.taps[0].health().state.value, sum(world.taps[0].lost.values())) == ("ready", 1)
    assert (device.wire.reading, other.wire.reading) == (True, True)
    world.close()


def test_what_was_refused_stays_so_when_the_log_fails_right_after(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    world = Tapped(TapSpec(filter="#", path=path))
    device, other = world.device("dev"), world.device("other")
    log = world.taps[0]._logs[path]
    calls = []

    def full_soon(count: int) -> None:
        calls.append(count)
        if len(calls) == 3:  # the turn as a whole, the first message, the second
            no_room(count)

    device.publish("a", bytes(5 << 20), 1, packet_id=1)
    other.publish("a", b"1", 1, packet_id=1)
    before_append(log, full_soon)
    assert world.turn(device) == [p.Ack(Kind.PUBACK, 1, 0x97)]
    assert other.read() == []
    world.pass_(5.0)
    assert other.read() == [p.Ack(Kind.PUBACK, 1)]
    assert payloads(path) == [b"1"]
    assert world.taps[0].waiting == 0
    world.close()


def test_a_run_partly_in_the_log_is_acknowledged_when_the_rest_is_there_too(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    persistent: dict[str, Any] = {"clean": False, "properties": {"session_expiry": 1000}}
    world = Tapped(TapSpec(filter="#", path=path))
    device = world.device("dev", **persistent)
    device.publish("a", b"1", 2, packet_id=1)
    world.taps[0].end_turn()  # the log has it; the process dies before the journal does
    world.taps[0]._logs[path].writer.close()

    again = Tapped()
    device = again.device("dev", **persistent)
    again.taps = [Tap(TapSpec(filter="#", path=path), again.broker)]
    again.taps[0].attach()
    mend = broken(again, path)
    device.send_raw(b"".join(p_bytes("a", b"%d" % n, 2, n, dup=True) for n in (1, 2)))
    acks = again.turn(device)
    assert acks == [p.Ack(Kind.PUBREC, 1, 0x97), p.Ack(Kind.PUBREC, 2, 0x97)]
    mend()
    again.pass_(5.0)
    device.send_raw(b"".join(p_bytes("a", b"%d" % n, 2, n, dup=True) for n in (1, 2)))
    assert again.turn(device) == [p.Ack(Kind.PUBREC, 1), p.Ack(Kind.PUBREC, 2)]
    assert payloads(path) == [b"1", b"2"]
    again.close()


def test_a_message_that_is_there_already_and_one_that_is_too_large_come_in_one_turn(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    persistent: dict[str, Any] = {"clean": False, "properties": {"session_expiry": 1000}}
    world = Tapped(TapSpec(filter="#", path=path))
    world.device("dev", **persistent).publish("a", b"1", 2, packet_id=1)
    world.taps[0].end_turn()  # the log has it; the process dies before the journal does
    world.taps[0]._logs[path].writer.close()

    again = Tapped()
    device, other = again.device("dev", **persistent), again.device("other")
    again.taps = [Tap(TapSpec(filter="#", path=path), again.broker)]
    again.taps[0].attach()
    device.publish("a", b"1", 2, packet_id=1, dup=True)
    other.publish("a", bytes(5 << 20), 1, packet_id=1)
    other.publish("a", b"2", 1, packet_id=2)
    assert again.turn(device) == [p.Ack(Kind.PUBREC, 1)]
    assert other.read() == [p.Ack(Kind.PUBACK, 1, 0x97), p.Ack(Kind.PUBACK, 2)]
    assert payloads(path) == [b"1", b"2"]
    again.close()


@pytest.mark.parametrize("format", ["xchannel", "filechannel", "messagelog"])
def test_damage_in_the_log_of_a_tap_keeps_no_broker_from_starting(tmp_path: Path, format: Any) -> None:
    path = tmp_path / "log"
    persistent: dict[str, Any] = {"clean": False, "properties": {"session_expiry": 1000}}
    world = Tapped(TapSpec(filter="#", path=str(path), format=format))
    device = world.device("dev", **persistent)
    for number in range(1, 4):
        device.publish("a", b"message %d" % number, 2, packet_id=number)
    world.taps[0].end_turn()  # the log has them; the process dies before the journal does
    world.taps[0]._logs[str(path)].writer.close()
    file = next(
        each for each in sorted([path, *path.glob("*")]) if each.is_file() and b"message 2" in each.read_bytes()
    )
    data = bytearray(file.read_bytes())
    at = data.index(b"message 2")
    data[data.rindex(b"\x01\0\0\0", 0, at)] = 9  # the version of its envelope
    file.write_bytes(data)

    again = Tapped()
    device = again.device("dev", **persistent)
    again.taps = [Tap(TapSpec(filter="#", path=str(path), format=format), again.broker)]
    again.taps[0].attach()
    for number in range(1, 4):
        device.publish("a", b"message %d" % number, 2, packet_id=number, dup=True)
    assert again.turn(device) == [p.Ack(Kind.PUBREC, number) for number in range(1, 4)]
    again.close()
    counts = path_counts(str(path))
    assert counts[b"message 1"] == 1
    assert 1 <= counts[b"message 2"] <= 2  # it is there again, whole, beside what is left of the first
    assert 1 <= counts[b"message 3"] <= 2  # what is behind damage may have been set aside by the log


def path_counts(path: str) -> Counter[bytes]:
    """Count the payloads of a log, whatever is wrong with some of its records."""
    found: Counter[bytes] = Counter()
    with open_log(path, on_damage="skip") as log:
        at = log.first_position
        while len(batch := log.read(at)):
            found.update(payload for *_, payload in open_rows(batch, path, lambda _: None))
            at = batch.next_position
    return found


def full_soon(log: TappedLog, after: int) -> None:
    """Let the disk have no room once, behind so many steps of an append: regions of an xchannel, pieces elsewhere."""
    writer: Any = log.writer
    owner, name = (writer._tip, "_skip") if isinstance(writer, Writer) else (writer, "append_many")
    real, left = getattr(owner, name), [after]

    def step(*what: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            setattr(owner, name, real)
            no_room(what)
        return real(*what)

    setattr(owner, name, step)


@pytest.mark.parametrize("format", ["xchannel", "filechannel", "messagelog"])
def test_a_turn_that_is_half_in_the_log_when_the_disk_is_full_is_written_on_from_there(
    tmp_path: Path, format: Any
) -> None:
    path = f"{tmp_path}/log"
    options = {"region_bytes": 65536} if format == "xchannel" else {}
    world = Tapped(TapSpec(filter="#", path=path, format=format, options=options))
    devices = [world.device(f"dev-{n}", 5) for n in range(3)]
    sent = []
    for device in devices:
        for number in range(60):
            sent.append(b"%d" % number * 1000)
            device.publish("a", sent[-1], 1, packet_id=number + 1)
    tap = world.taps[0]
    full_soon(tap._logs[path], 1)
    for device in devices:
        assert world.turn(device) == []
    there = len(payloads(path))
    assert 0 < there < len(sent)
    opened = tap._open
    tap._open = no_room  # type: ignore[method-assign]
    world.pass_(0.3)  # it cannot even be opened

    def opens(where: str) -> TappedLog:
        log = opened(where)
        full_soon(log, 1 if format == "xchannel" else 0)
        return log

    tap._open = opens  # type: ignore[method-assign]
    world.pass_(0.6)  # it takes some more
    assert there <= len(payloads(path)) < len(sent)
    tap._open = opened  # type: ignore[method-assign]
    world.pass_(5.0)
    for device in devices:
        assert device.read() == [p.Ack(Kind.PUBACK, number + 1) for number in range(60)]
    assert payloads(path) == sent
    world.close()


@pytest.mark.parametrize("format", ["xchannel", "filechannel", "messagelog"])
@pytest.mark.parametrize("version", [4, 5])
def test_a_qos_2_message_that_is_refused_and_in_the_log_is_not_written_again(
    tmp_path: Path, format: Any, version: int
) -> None:
    path = f"{tmp_path}/log"
    options = {"region_bytes": 65536} if format == "xchannel" else {}
    persistent: dict[str, Any] = {"clean": False}
    if version == 5:
        persistent["properties"] = {"session_expiry": 1000}
    world = Tapped(TapSpec(filter="#", path=path, format=format, options=options))
    sent = [b"%d" % number * 1000 for number in range(200)]
    device = world.device("dev", version, **persistent)
    full_soon(world.taps[0]._logs[path], 1)
    for number, payload in enumerate(sent, 1):
        device.publish("a", payload, 2, packet_id=number)
    answers = world.turn(device)
    there = len(payloads(path))
    assert 0 < there < len(sent)
    if version == 4:
        assert device.closed
    else:
        assert answers == [p.Ack(Kind.PUBREC, number, 0x97) for number in range(1, 201)]
    world.pass_(1.0)
    device = world.device("dev", version, **persistent)
    for number, payload in enumerate(sent, 1):
        device.publish("a", payload, 2, packet_id=number, dup=True)
    assert world.turn(device) == [p.Ack(Kind.PUBREC, number) for number in range(1, 201)]
    assert payloads(path) == sent
    world.close()
