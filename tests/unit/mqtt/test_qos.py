"""Promises about QoS 1 and 2, flow control and what is sent again."""

from __future__ import annotations

import random

import pytest
from mqtt_statements import statement
from mqtt_use import Device, World

from penstock.kernel.mqtt import make_run
from penstock.mqtt import packets as p
from penstock.mqtt.codec import encode
from penstock.mqtt.exchange import Answer, Exchange
from penstock.mqtt.packets import Kind
from penstock.mqtt.reasons import Reason

BOTH = pytest.mark.parametrize("version", [4, 5])


def keeping(version: int, **properties: int) -> dict[str, object]:
    """What a CONNECT needs so that its session is kept."""
    if version == 4:
        return {"clean": False}
    return {"clean": False, "properties": {"session_expiry": 1000, **properties}}


@statement("4.3.2-4", "4.3.2-5", "3.4.0-1", v3=("4.3.2-2",))
@BOTH
def test_a_puback_ends_the_exchange_so_that_the_id_is_new_again(version: int) -> None:
    world = World()
    pub, sub = world.device("pub", version), world.device("sub")
    sub.subscribe("a", qos=1)
    for payload in (b"1", b"2"):
        assert pub.publish("a", payload, 1, 7, dup=True) == [p.Ack(Kind.PUBACK, 7)]
    assert [(m.payload, m.dup) for m in sub.messages()] == [(b"1", False), (b"2", False)]


@statement("4.3.3-8", "4.3.3-10", "4.3.3-11", "4.3.3-12", v3=("4.3.3-2",))
@BOTH
def test_the_same_id_before_pubrel_is_the_same_message_also_after_a_reconnect(version: int) -> None:
    world = World()
    pub, sub = world.device("pub", version, **keeping(version)), world.device("sub")
    sub.subscribe("a", qos=2)
    assert pub.publish("a", b"1", 2, 7) == [p.Ack(Kind.PUBREC, 7)]
    assert pub.publish("a", b"1", 2, 7, dup=True) == [p.Ack(Kind.PUBREC, 7)]
    pub.drop()
    pub = world.device("pub", version, **keeping(version))
    assert pub.publish("a", b"1", 2, 7, dup=True) == [p.Ack(Kind.PUBREC, 7)]
    assert pub.ack(Kind.PUBREL, 7) == [p.Ack(Kind.PUBCOMP, 7)]
    assert pub.publish("a", b"2", 2, 7) == [p.Ack(Kind.PUBREC, 7)]
    assert sub.payloads() == [b"1", b"2"]


def test_a_run_with_old_and_new_ids_delivers_the_new_ones_only() -> None:
    world = World()
    pub, sub = world.device("pub"), world.device("sub")
    sub.subscribe("a", qos=2)
    pub.publish("a", b"3", 2, 3)
    answers = pub.send(*(p.Publish("a", b"%d" % n, 2, packet_id=n) for n in range(1, 6)))
    assert [a.packet_id for a in answers] == [1, 2, 3, 4, 5]  # type: ignore[union-attr]
    assert sub.payloads() == [b"3", b"1", b"2", b"4", b"5"]


@statement("4.3.3-11")
def test_a_pubrel_is_always_answered() -> None:
    world = World()
    assert world.device("a").ack(Kind.PUBREL, 9) == [p.Ack(Kind.PUBCOMP, 9, Reason.PACKET_ID_NOT_FOUND)]
    assert world.device("b", 4).ack(Kind.PUBREL, 9) == [p.Ack(Kind.PUBCOMP, 9)]


@statement("4.3.3-9", "4.4.0-2")
def test_a_refused_qos_2_message_frees_its_id() -> None:
    class Never:
        def allows(self, who: object, action: str, topic: str) -> bool:
            return action != "publish"

        def rule(self, who: object, action: str, topic: str) -> str:
            return "never"

    world = World(access=Never())
    pub = world.device("pub")
    assert pub.publish("a", b"", 2, 7) == [p.Ack(Kind.PUBREC, 7, Reason.NOT_AUTHORIZED)]
    assert world.broker.sessions["pub"].received == set()


@statement(
    "4.3.3-3",
    "4.3.3-4",
    "4.3.3-5",
    "4.3.3-6",
    "4.4.0-1",
    "3.3.1-1",
    "4.6.0-1",
    v3=("4.3.3-1", "4.4.0-1", "4.6.0-1", "3.3.1-1"),
)
@BOTH
def test_what_is_not_acknowledged_is_sent_again_on_a_resumed_session_in_its_phase(version: int) -> None:
    world = World()
    sub, pub = world.device("sub", version, **keeping(version)), world.device("pub")
    sub.subscribe("a", qos=2)
    for number, qos in ((1, 1), (2, 2), (3, 2), (4, 1)):
        pub.publish("a", b"%d" % number, qos, number)
    assert [(m.packet_id, m.dup) for m in sub.messages()] == [(1, False), (2, False), (3, False), (4, False)]
    assert sub.ack(Kind.PUBREC, 2) == [p.Ack(Kind.PUBREL, 2)]
    sub.drop()
    sub = world.device("sub", version, **keeping(version))
    assert [
        (each.packet_id, each.dup, each.payload) if isinstance(each, p.Publish) else (each.kind, each.packet_id)  # type: ignore[union-attr]
        for each in sub.rest
    ] == [(1, True, b"1"), (Kind.PUBREL, 2), (3, True, b"3"), (4, True, b"4")]
    assert sub.ack(Kind.PUBCOMP, 2) == []
    assert sub.ack(Kind.PUBREC, 3) == [p.Ack(Kind.PUBREL, 3)]
    assert sub.ack(Kind.PUBACK, 1) == []
    assert sub.ack(Kind.PUBACK, 4) == []
    assert sub.ack(Kind.PUBCOMP, 3) == []
    assert world.broker.sessions["sub"].exchange.flights == []
    assert sub.link.outstanding == 0


@statement("3.3.1-3", v3="3.3.1-3")
def test_dup_speaks_of_one_hop_only() -> None:
    world = World()
    sub, pub = world.device("sub"), world.device("pub")
    sub.subscribe("a", qos=1)
    pub.publish("a", b"", 1, 1, dup=True)
    assert [m.dup for m in sub.messages()] == [False]


@statement("4.4.0-2")
@pytest.mark.parametrize("kind", [Kind.PUBACK, Kind.PUBREC])
def test_an_error_from_the_receiver_ends_the_exchange(kind: Kind) -> None:
    world = World()
    sub, pub = world.device("sub"), world.device("pub")
    sub.subscribe("a", qos=2)
    pub.publish("a", b"", 1 if kind is Kind.PUBACK else 2, 1)
    assert sub.ack(kind, 1, 0x83) != [p.Ack(Kind.PUBREL, 1)]
    assert world.broker.sessions["sub"].exchange.flights == []
    assert sub.link.outstanding == 0


def test_a_pubrec_of_an_unknown_id_is_answered_and_a_puback_forgotten() -> None:
    world = World()
    new, old = world.device("a"), world.device("b", 4)
    assert new.ack(Kind.PUBREC, 5) == [p.Ack(Kind.PUBREL, 5, Reason.PACKET_ID_NOT_FOUND)]
    assert old.ack(Kind.PUBREC, 5) == [p.Ack(Kind.PUBREL, 5)]
    assert new.ack(Kind.PUBACK, 5) == []
    assert new.ack(Kind.PUBCOMP, 5) == []
    assert not new.closed


def test_an_acknowledgement_of_another_qos_breaks_the_protocol() -> None:
    world = World()
    sub, pub = world.device("sub"), world.device("pub")
    sub.subscribe("a", qos=2)
    pub.publish("a", b"", 2, 1)
    sub.read()
    assert sub.ack(Kind.PUBACK, 1)[0].reason == Reason.PROTOCOL_ERROR  # type: ignore[union-attr]
    assert sub.closed


@statement("3.3.4-9", "4.9.0-1", "4.9.0-2", "4.9.0-3", "3.3.4-10")
def test_no_more_is_under_way_than_the_client_takes_and_qos_0_is_not_held_back() -> None:
    world = World()
    sub, pub = world.device("sub", properties={"receive_maximum": 2}), world.device("pub")
    sub.subscribe("a", qos=2)
    pub.send(*(p.Publish("a", b"%d" % n, 1 + n % 2, packet_id=n) for n in range(1, 6)))
    pub.publish("a", b"zero")
    assert sub.payloads() == [b"1", b"2", b"zero"]
    assert sub.send(p.Ping()) == [p.Pong()]
    assert sub.ack(Kind.PUBREC, 1) == [p.Ack(Kind.PUBREL, 1)]  # a PUBREC gives no room back
    answers = sub.ack(Kind.PUBCOMP, 1)
    assert [m.payload for m in answers] == [b"3"]  # type: ignore[union-attr]
    answers = sub.ack(Kind.PUBACK, 2)
    assert [m.payload for m in answers] == [b"4"]  # type: ignore[union-attr]
    answers = sub.ack(Kind.PUBREC, 3, 0x80)
    assert [m.payload for m in answers] == [b"5"]  # type: ignore[union-attr]


def test_what_is_sent_again_stays_within_a_smaller_window_of_the_new_connection() -> None:
    world = World()
    sub, pub = world.device("sub", **keeping(5)), world.device("pub")
    sub.subscribe("a", qos=1)
    pub.send(*(p.Publish("a", b"%d" % n, 1, packet_id=n) for n in range(1, 6)))
    sub.drop()
    pub.publish("a", b"new", 1, 9)
    sub = world.device("sub", **keeping(5, receive_maximum=2))
    assert [m.packet_id for m in sub.rest] == [1, 2]
    seen = [1, 2]
    while len(seen) < 6:
        seen += [m.packet_id for m in sub.ack(Kind.PUBACK, seen[len(seen) - 2])]  # type: ignore[union-attr]
        assert len(seen) <= 6
    assert seen == [1, 2, 3, 4, 5, 6]


def test_what_is_acknowledged_before_it_was_sent_again_is_not_sent_and_leaves_the_window_as_it_is() -> None:
    """A client that acknowledges by hand may have had a message with the connection before."""
    world = World()
    sub, pub = world.device("sub", **keeping(5)), world.device("pub")
    sub.subscribe("a", qos=1)
    pub.send(*(p.Publish("a", b"%d" % n, 1, packet_id=n) for n in range(1, 11)))
    sub.drop()
    sub = world.device("sub", **keeping(5, receive_maximum=1))
    assert [m.packet_id for m in sub.rest] == [1]  # type: ignore[attr-defined]
    for early in (5, 10, 2):
        assert sub.ack(Kind.PUBACK, early) == []
    seen = [1]
    while answers := sub.ack(Kind.PUBACK, seen[-1]):
        seen += [m.packet_id for m in answers]  # type: ignore[union-attr]
    assert seen == [1, 3, 4, 6, 7, 8, 9]
    assert sub.link.outstanding == 0
    assert world.broker.sessions["sub"].exchange.flights == []
    pub.send(*(p.Publish("a", b"new", 1, packet_id=n) for n in (1, 2)))
    assert sub.payloads() == [b"new"]


@statement("3.1.2-24", "3.1.2-25")
@pytest.mark.parametrize("qos", [1, 2])
def test_what_is_sent_again_is_no_larger_than_the_client_takes_now(qos: int) -> None:
    world = World()
    sub, pub = world.device("sub", **keeping(5)), world.device("pub")
    sub.subscribe("a", qos=qos)
    sizes = [500, 1, 2, 500, 500, 3, 500]
    pub.send(*(p.Publish("a", bytes(size), qos, packet_id=n) for n, size in enumerate(sizes, 1)))
    sub.drop()
    sub = world.device("sub", **keeping(5, maximum_packet_size=100))
    assert [(m.packet_id, len(m.payload), m.dup) for m in sub.rest] == [  # type: ignore[attr-defined]
        (2, 1, True), (3, 2, True), (6, 3, True),
    ]  # fmt: skip
    session = world.broker.sessions["sub"]
    assert (session.exchange.messages, sub.link.outstanding) == (3, 3)
    assert world.broker.counts.dropped == session.dropped == {"packet too large": 4}


def test_what_a_full_window_makes_wait_has_waited_since_then() -> None:
    world = World(max_queued_seconds=100)
    world.pass_(1000)
    sub, pub = world.device("sub", **keeping(5, receive_maximum=1)), world.device("pub")
    sub.subscribe("a", qos=1)
    pub.send(*(p.Publish("a", b"%d" % n, 1, packet_id=n) for n in range(1, 4)))
    world.pass_(60)
    assert sub.payloads() == [b"1"]
    assert [m.payload for m in sub.ack(Kind.PUBACK, 1)] == [b"2"]  # type: ignore[union-attr]
    world.pass_(60)
    assert sub.ack(Kind.PUBACK, 2) == []
    assert world.broker.counts.dropped == {"too old": 1}


@statement("3.3.4-7", "3.3.4-8", "4.9.0-1")
def test_a_client_above_our_receive_maximum_is_told() -> None:
    world = World(receive_maximum=3)
    pub = world.device("pub")
    answers = pub.send(*(p.Publish("a", b"", 2, packet_id=n) for n in (1, 2, 3)))
    assert len(answers) == 3
    assert not pub.closed
    answers = pub.publish("a", b"", 2, 4)
    assert [each.reason for each in answers] == [Reason.RECEIVE_MAXIMUM_EXCEEDED]  # type: ignore[union-attr]
    assert pub.closed


@statement(
    "2.2.1-4",
    "4.6.0-2",
    "4.6.0-3",
    "4.6.0-4",
    "4.6.0-5",
    "4.6.0-6",
    "2.2.1-5",
    "2.2.1-6",
    v3=("2.3.1-4", "2.3.1-6", "2.3.1-7", "4.6.0-2", "4.6.0-3", "4.6.0-4", "4.6.0-5", "4.6.0-6"),
)
def test_ids_are_never_in_use_twice_and_the_order_is_kept_over_their_whole_circle() -> None:
    world = World()
    sub, pub = world.device("sub", 4), world.device("pub", 4)
    sub.subscribe("a", qos=1)
    total, got, stuck = 70_000, [], 0
    for start in range(0, total, 1000):
        pub.send_raw(
            b"".join(
                encode(p.Publish("a", b"%d" % n, 1, packet_id=n % 1000 + 1), 4) for n in range(start, start + 1000)
            )
        )
        messages = sub.messages()
        got += [int(m.payload) for m in messages]
        ids = [m.packet_id for m in messages]
        assert len(set(ids)) == len(ids)
        if not stuck:
            stuck, ids = ids[0], ids[1:]  # the first message is never acknowledged: its id stays in use
        assert stuck not in ids
        sub.send_raw(b"".join(encode(p.Ack(Kind.PUBACK, each), 4) for each in ids))
    assert got == list(range(total))
    assert [flight.first for flight in sub.link.session.exchange.flights] == [stuck]  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(8))
def test_acknowledgements_in_any_order_leave_exactly_what_is_unacknowledged(seed: int) -> None:
    """The exchange against a plain dictionary: runs of any length, acknowledgements of any part, in any order."""
    rng = random.Random(seed)
    exchange, model = Exchange(), dict[int, tuple[bytes, int, bool]]()
    count = 0
    for _ in range(200):
        if rng.random() < 0.4 and len(model) < 60_000:
            size, qos = rng.choice([1, 1, 2, 5, 400]), rng.choice([1, 2])
            run = make_run(b"t", [b"%d" % (count + n) for n in range(size)], qos, False)
            rest = run
            while rest is not None:
                flight, rest = exchange.begin(rest, qos, False, b"")  # type: ignore[assignment]
                for n in range(flight.count):
                    assert flight.first + n not in model
                    model[flight.first + n] = (flight.run.payload(n), qos, False)  # type: ignore[union-attr]
            count += size
        elif model:
            first = rng.choice(list(model))
            size = rng.choice([1, 1, 3, 300])
            size = min(size, 65536 - first)
            kind = rng.choice(["ack", "rec", "comp", "refuse"])
            if kind == "refuse":
                known = first in model and not model[first][2]
                assert (exchange.refused(first) is Answer.DONE) == known
                if known:
                    del model[first]
                continue
            call = {"ack": exchange.acked, "rec": exchange.received, "comp": exchange.completed}[kind]
            for answer, start, some in call(first, size):
                for packet_id in range(start, start + some):
                    known_as = model.get(packet_id)
                    if known_as is None:
                        assert answer is Answer.UNKNOWN
                    elif kind == "ack":
                        assert answer is (Answer.DONE if known_as[1] == 1 else Answer.WRONG)
                    elif known_as[1] == 1 or (kind == "comp" and not known_as[2]):
                        assert answer is Answer.WRONG
                    elif kind == "rec":
                        assert answer is Answer.RELEASE
                        model[packet_id] = (known_as[0], 2, True)
                    else:
                        assert answer is Answer.DONE
                    if answer is Answer.DONE:
                        del model[packet_id]
    state = {
        flight.first + n: (b"" if flight.run is None else flight.run.payload(n), flight.qos, flight.released)
        for flight in exchange.flights
        for n in range(flight.count)
    }
    assert state == {each: (b"" if known[2] else known[0], known[1], known[2]) for each, known in model.items()}
    assert exchange.messages == len(model)
    assert exchange.size == sum(flight.size for flight in exchange.flights)
    numbers = [flight.number for flight in exchange.flights]
    assert numbers == sorted(numbers)


def test_a_subscriber_that_is_slow_costs_bounded_memory_and_stalls_nobody() -> None:
    world = World(max_queued_messages=10)
    slow, fast, pub = world.device("slow"), world.device("fast"), world.device("pub")
    for device in (slow, fast):
        device.subscribe("a", qos=1)
    slow.link.congested()
    for number in range(30):
        pub.publish("a", b"%d" % number, 1, 1)
        pub.publish("a", b"zero")
    assert len(fast.payloads()) == 60
    session = world.broker.sessions["slow"]
    assert session.queued_messages == 10
    assert session.dropped == {"queue full": 20, "slow": 30}
    slow.link.writable()
    assert slow.payloads() == [b"%d" % number for number in range(10)]
    assert (session.queued_messages, session.queued_bytes, world.broker.budget.queued_bytes) == (0, 0, 0)


def test_the_bound_of_all_queues_together_holds() -> None:
    world = World(max_total_queued_bytes=1000)
    for number in range(5):
        device = world.device(f"d{number}", properties={"session_expiry": 100})
        device.subscribe("a", qos=1)
        device.drop()
    pub = world.device("pub")
    reasons = {pub.publish("a", bytes(50), 1, 1)[0].reason for _ in range(20)}  # type: ignore[union-attr]
    assert reasons == {0, Reason.QUOTA_EXCEEDED}
    assert world.broker.budget.queued_bytes < 1100
    for name in list(world.broker.sessions):
        world.broker.kick(name, end=True)
    assert world.broker.budget.queued_bytes == 0


def test_a_client_that_never_acknowledges_holds_a_bounded_number_of_bytes() -> None:
    world = World(max_queued_bytes=1 << 20)
    sub, pub = world.device("sub", 4), world.device("pub")
    sub.subscribe("a", qos=1)
    for _ in range(100):
        pub.publish("a", bytes(100_000), 1, 1)
        sub.read()
    session = world.broker.sessions["sub"]
    assert session.exchange.size + session.queued_bytes < 2 * (1 << 20) + 300_000


@pytest.mark.parametrize("bound", ["max_queued_messages", "max_queued_bytes"])
def test_a_broker_that_lets_nothing_wait_delivers_to_who_is_there(bound: str) -> None:
    world = World(**{bound: 0})
    sub, pub = world.device("sub", **keeping(5)), world.device("pub")
    sub.subscribe("a", qos=1)
    for number in (1, 2):
        assert pub.publish("a", b"%d" % number, 1, number) == [p.Ack(Kind.PUBACK, number)]
        assert sub.payloads() == [b"%d" % number]
        sub.ack(Kind.PUBACK, number)
    sub.drop()
    assert pub.publish("a", b"3", 1, 3) == [p.Ack(Kind.PUBACK, 3, Reason.QUOTA_EXCEEDED)]


def test_a_resumed_session_gets_its_queue_in_order_within_its_window() -> None:
    world = World()
    sub, pub = world.device("sub", **keeping(5)), world.device("pub")
    sub.subscribe("#", qos=1)
    sub.drop()
    for number in range(100):
        pub.publish(f"t/{number % 3}", b"%d" % number, 1, 1)
    sub = world.device("sub", **keeping(5, receive_maximum=7))
    got = [(m.packet_id, m.payload) for m in sub.rest]
    while got and len(got) < 100:
        got += [(m.packet_id, m.payload) for m in sub.ack(Kind.PUBACK, got[len(got) - 7][0])]  # type: ignore[union-attr]
    assert [payload for _, payload in got] == [b"%d" % number for number in range(100)]


def test_offline_sessions_get_no_qos_0_and_explain_why() -> None:
    world = World()
    sub, pub = world.device("sub", **keeping(5)), world.device("pub")
    sub.subscribe("a", qos=1)
    sub.drop()
    pub.publish("a", b"x")
    assert world.broker.sessions["sub"].dropped == {"offline": 1}


@pytest.mark.parametrize("version", [4, 5])
def test_a_connection_that_breaks_anywhere_in_the_exchange_loses_and_doubles_nothing(version: int) -> None:
    """QoS 2 from a publisher that loses its connection after every byte it sends, to a subscriber that does as well."""
    world = World()
    rng = random.Random(version)
    got: list[bytes] = []
    held: set[int] = set()
    device: list[Device] = [world.device("sub", version, **keeping(version))]
    device[0].subscribe("a", qos=2)

    def serve() -> None:
        """The subscriber's side: takes a message once, acknowledges, is cut off now and then."""
        while True:
            packets = device[0].rest + device[0].read()
            device[0].rest = []
            if not packets:
                return
            for each in packets:
                if rng.random() < 0.2:
                    device[0].drop()
                    device[0] = world.device("sub", version, **keeping(version))
                    break
                if isinstance(each, p.Publish):
                    if each.packet_id not in held:
                        held.add(each.packet_id)
                        got.append(each.payload)
                    device[0].rest += device[0].ack(Kind.PUBREC, each.packet_id)
                elif isinstance(each, p.Ack) and each.kind is Kind.PUBREL:
                    held.discard(each.packet_id)
                    device[0].rest += device[0].ack(Kind.PUBCOMP, each.packet_id)

    for number in range(60):
        phase = "publish"
        pub = world.device("pub", version, **keeping(version))
        while phase != "done":
            packet = (
                p.Publish("a", b"%d" % number, 2, packet_id=number % 5 + 1)
                if phase == "publish"
                else p.Ack(Kind.PUBREL, number % 5 + 1)
            )
            raw = encode(packet, version)
            whole = rng.random() < 0.5
            answers = pub.send_raw(raw if whole else raw[: rng.randrange(len(raw))])
            if answers and rng.random() < 0.7:
                phase = "release" if phase == "publish" else "done"
            elif phase != "done":
                pub.drop()
                pub = world.device("pub", version, **keeping(version))
            serve()
        pub.drop()
    for _ in range(100):
        serve()
    assert got == [b"%d" % number for number in range(60)]
