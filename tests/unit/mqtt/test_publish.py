"""Promises about PUBLISH: who gets what, in which form."""

from __future__ import annotations

import pytest
from mqtt_statements import statement
from mqtt_use import Device, ManualLoop, World

from penstock.mqtt import packets as p
from penstock.mqtt.access import Who
from penstock.mqtt.codec import encode
from penstock.mqtt.gate import TurnGate
from penstock.mqtt.packets import Kind, Properties
from penstock.mqtt.reasons import Reason

BOTH = pytest.mark.parametrize("version", [4, 5])


@statement(
    "3.3.1-4",
    "3.3.1-2",
    "2.2.1-3",
    "1.5.4-1",
    "1.5.4-2",
    "3.3.2-1",
    v3=("3.3.1-4", "3.3.1-2", "2.3.1-1", "1.5.3-1", "1.5.3-2", "3.3.2-1"),
)
@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ("36 06 00 01 61 00 01 00", 0x81),
        ("38 04 00 01 61 00", 0x81),
        ("32 06 00 01 61 00 00 00", 0x82),
        ("30 05 00 02 c3 28 00", 0x81),
        ("30 06 00 03 ed a0 80 00", 0x81),
        ("30 05 00 02 61 00 00", 0x81),
    ],
)
def test_a_malformed_publish_closes_with_its_reason(raw: str, code: int) -> None:
    device = World().device()
    answers = device.send_raw(bytes.fromhex(raw))
    assert [each.reason for each in answers] == [code]  # type: ignore[union-attr]
    assert device.closed


@statement("3.3.2-2", "4.7.0-1", "4.7.1-1", v3=("3.3.2-2", "4.7.1-1"))
@BOTH
@pytest.mark.parametrize("topic", ["a/+", "#", "a/#/b", "x+"])
def test_a_topic_with_wildcards_closes(version: int, topic: str) -> None:
    device = World().device(version=version)
    answers = device.publish(topic)
    assert device.closed
    assert [each.reason for each in answers] == ([Reason.TOPIC_NAME_INVALID] if version == 5 else [])  # type: ignore[union-attr]


@statement("4.7.3-1", v3="4.7.3-1")
@BOTH
def test_an_empty_topic_closes(version: int) -> None:
    device = World().device(version=version)
    device.publish("")
    assert device.closed


@statement("1.5.4-3", v3="1.5.3-3")
def test_a_byte_order_mark_is_not_stripped() -> None:
    world = World()
    plain, marked, pub = world.device("a"), world.device("b"), world.device("c")
    plain.subscribe("t")
    marked.subscribe("\ufefft")
    pub.publish("\ufefft", b"x")
    assert plain.messages() == []
    assert [m.topic for m in marked.messages()] == ["\ufefft"]


@statement("3.3.5-1", "4.3.1-1", "4.5.0-1", "3.8.4-8", v3=("3.8.4-6", "4.3.1-1", "4.5.0-1"))
@pytest.mark.parametrize("granted", [0, 1, 2])
@pytest.mark.parametrize("published", [0, 1, 2])
@pytest.mark.parametrize("versions", [(4, 4), (4, 5), (5, 4), (5, 5)])
def test_a_message_comes_with_the_lower_qos(published: int, granted: int, versions: tuple[int, int]) -> None:
    world = World()
    pub, sub = world.device("pub", versions[0]), world.device("sub", versions[1])
    sub.subscribe("a/b", qos=granted)
    pub.publish("a/b", b"hello", published, 9 if published else 0)
    (message,) = sub.messages()
    qos = min(published, granted)
    assert message == p.Publish("a/b", b"hello", qos, packet_id=1 if qos else 0)


@pytest.mark.parametrize("versions", [(4, 4), (4, 5), (5, 4), (5, 5)])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_run_comes_out_whole_in_order_and_once(versions: tuple[int, int], qos: int) -> None:
    world = World()
    pub, sub = world.device("pub", versions[0]), world.device("sub", versions[1])
    sub.subscribe("t/#", qos=qos)
    wanted = [(f"t/{number // 100}", b"%d" % number) for number in range(1000)]
    raw = b"".join(
        encode(p.Publish(topic, payload, qos, packet_id=number + 1 if qos else 0), versions[0])
        for number, (topic, payload) in enumerate(wanted)
    )
    answers = []
    for at in range(0, len(raw), 997):
        answers += pub.send_raw(raw[at : at + 997])
    assert [(m.topic, m.payload) for m in sub.messages()] == wanted
    kind = [None, Kind.PUBACK, Kind.PUBREC][qos]
    assert [(a.kind, a.packet_id) for a in answers] == [(kind, n + 1) for n in range(1000) if qos]  # type: ignore[union-attr]


@statement("3.3.4-2", "3.3.4-3", "3.3.4-4", v3="3.3.5-1")
def test_overlapping_filters_give_one_copy_with_the_highest_qos_and_every_identifier() -> None:
    world = World()
    sub, pub = world.device("sub"), world.device("pub")
    sub.subscribe("a/#", qos=2, packet_id=1, identifier=1)
    sub.subscribe("a/+", qos=1, packet_id=2, identifier=300)
    sub.subscribe("a/b", qos=0, packet_id=3)
    pub.publish("a/b", b"x", 2, 1)
    (message,) = sub.messages()
    assert message.qos == 2
    assert sorted(message.properties.subscription_ids) == [1, 300]


@statement("3.3.4-6")
def test_a_subscription_identifier_from_a_client_is_an_error() -> None:
    device = World().device()
    answers = device.publish("a", properties={"subscription_ids": (1,)})
    assert answers[0].reason == Reason.PROTOCOL_ERROR  # type: ignore[union-attr]


@statement("3.8.3-3", "3.8.3-4")
def test_no_local_goes_by_the_client_id_and_not_on_shared_subscriptions() -> None:
    world = World()
    device, other = world.device("dev", properties={"session_expiry": 9}), world.device("other")
    device.subscribe(p.Filter("a", 0, no_local=True))
    device.publish("a", b"own")
    other.publish("a", b"foreign")
    assert device.payloads() == [b"foreign"]
    device.drop()
    device = world.device("dev", clean=False, properties={"session_expiry": 9})
    device.publish("a", b"own again")
    assert device.messages() == []
    answers = device.subscribe(p.Filter("$share/g/a", 0, no_local=True))
    assert answers[0].reason == Reason.PROTOCOL_ERROR  # type: ignore[union-attr]


def test_no_local_of_one_filter_does_not_silence_another() -> None:
    world = World()
    device = world.device("dev")
    device.subscribe(p.Filter("a", 2, no_local=True), packet_id=1)
    device.subscribe(p.Filter("+", 0), packet_id=2)
    answers = device.publish("a", b"own", 1, 1)
    assert [(m.payload, m.qos) for m in answers if isinstance(m, p.Publish)] == [(b"own", 0)]


@statement("3.3.2-4", "3.3.2-15", "3.3.2-16", "3.3.2-17", "3.3.2-18", "3.3.2-20")
def test_properties_travel_unchanged_and_in_order() -> None:
    world = World()
    new, old, pub = world.device("new"), world.device("old", 4), world.device("pub")
    for device in (new, old):
        device.subscribe("a", qos=1)
    given = {
        "payload_format": 1,
        "content_type": "text/plain",
        "response_topic": "answers/7",
        "correlation_data": b"\x00\xff",
        "user": (("b", "2"), ("a", "1"), ("b", "3")),
    }
    pub.publish("a", b"x", 1, 5, properties=given)
    assert new.messages()[0].properties == Properties(**given)  # type: ignore[arg-type]
    assert old.messages() == [p.Publish("a", b"x", 1, packet_id=1)]


@statement("3.3.2-14")
def test_a_response_topic_has_no_wildcards() -> None:
    device = World().device()
    answers = device.publish("a", properties={"response_topic": "x/#"})
    assert answers[0].reason == Reason.PROTOCOL_ERROR  # type: ignore[union-attr]


@statement("3.3.2-5", "3.3.2-6")
def test_a_message_that_waits_expires_and_what_is_left_is_told() -> None:
    world = World()
    sub, pub = world.device("sub", properties={"session_expiry": 1000}), world.device("pub")
    sub.subscribe("a", qos=1)
    sub.drop()
    pub.publish("a", b"short", 1, 1, properties={"message_expiry": 5})
    pub.publish("a", b"long", 1, 2, properties={"message_expiry": 100})
    world.pass_(10)
    sub = world.device("sub", clean=False, properties={"session_expiry": 1000})
    assert [(m.payload, m.properties.message_expiry) for m in sub.rest] == [(b"long", 90)]
    assert world.broker.counts.dropped == {"expired": 1}


@statement("3.3.2-7", "3.3.2-8", "3.3.2-9", "3.3.2-10")
@pytest.mark.parametrize(
    ("alias", "topic", "code"),
    [(0, "a", Reason.TOPIC_ALIAS_INVALID), (11, "a", Reason.TOPIC_ALIAS_INVALID), (3, "", Reason.PROTOCOL_ERROR)],
)
def test_a_bad_topic_alias_closes(alias: int, topic: str, code: Reason) -> None:
    device = World(topic_alias_maximum=10).device()
    assert device.connack.properties.topic_alias_maximum == 10  # type: ignore[attr-defined]
    answers = device.publish(topic, properties={"topic_alias": alias})
    assert [each.reason for each in answers] == [code]  # type: ignore[union-attr]


def test_a_topic_alias_stands_for_its_topic_may_change_and_ends_with_the_connection() -> None:
    world = World()
    pub, sub = world.device("pub"), world.device("sub", 4)
    sub.subscribe("#", qos=1)
    pub.publish("a", b"1", properties={"topic_alias": 3})
    pub.publish("", b"2", 1, 1, properties={"topic_alias": 3})
    pub.publish("b", b"3", properties={"topic_alias": 3})
    pub.publish("", b"4", properties={"topic_alias": 3})
    assert [(m.topic, m.payload) for m in sub.messages()] == [("a", b"1"), ("a", b"2"), ("b", b"3"), ("b", b"4")]
    pub.drop()
    pub = world.device("pub")
    answers = pub.publish("", b"5", properties={"topic_alias": 3})
    assert answers[0].reason == Reason.PROTOCOL_ERROR  # type: ignore[union-attr]


@statement("3.1.2-26", "3.1.2-27", "3.3.2-11", "3.3.2-12", "3.2.2-17", "3.2.2-18")
def test_aliases_towards_a_client_stay_within_what_it_allows() -> None:
    world = World()
    sub, pub = world.device("sub", properties={"topic_alias_maximum": 1}), world.device("pub")
    sub.subscribe("#")
    for topic in ("first", "first", "second", "first"):
        pub.publish(topic)
    assert [(m.topic, m.properties.topic_alias) for m in sub.messages()] == [
        ("first", 1),
        ("", 1),
        ("second", None),
        ("", 1),
    ]


def test_an_alias_is_never_used_before_the_packet_that_says_what_it_stands_for() -> None:
    """QoS 0 does not wait for the disk, and overtakes what does."""
    loop = ManualLoop()
    world = World(gate=TurnGate(loop))
    sub, pub = Device(world.broker), Device(world.broker)
    for name, device in (("sub", sub), ("pub", pub)):
        device.send(p.Connect(name, 5, properties=Properties(topic_alias_maximum=5)))
        loop.run()
    sub.send(p.Subscribe(1, (p.Filter("a", 1),)))
    loop.run()
    sub.read()
    known: dict[int | None, str] = {}
    got = []
    for qos in (1, 0, 1, 0):
        pub.publish("a", b"%d" % qos, qos, 1)
    for _ in range(2):
        for message in sub.messages():
            if message.topic:
                known[message.properties.topic_alias] = message.topic
            assert known[message.properties.topic_alias] == "a"
            got.append(message.payload)
        loop.run()
    assert got == [b"0", b"0", b"1", b"1"]


@statement("3.1.2-24", "3.1.2-25")
@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("size", range(40, 60))
def test_a_packet_is_never_larger_than_the_client_allows(qos: int, size: int) -> None:
    world = World()
    sub, pub = world.device("sub", properties={"maximum_packet_size": 50}), world.device("pub")
    sub.subscribe("a/b", qos=qos)
    sub.read()
    pub.publish("a/b", bytes(size), qos, 1 if qos else 0)
    pub.publish("a/b", b"small", qos, 2 if qos else 0)
    raw = bytes(sub.wire.out)
    messages = sub.messages()
    whole = len(encode(p.Publish("a/b", bytes(size), qos, packet_id=1 if qos else 0), 5))
    assert len(raw) - len(encode(messages[-1], 5)) == (whole if whole <= 50 else 0)
    assert messages[-1].payload == b"small"


def test_small_messages_of_a_run_pass_where_large_ones_do_not() -> None:
    world = World()
    sub, pub = world.device("sub", properties={"maximum_packet_size": 100}), world.device("pub")
    sub.subscribe("a")
    pub.send(*(p.Publish("a", bytes(size)) for size in (1, 200, 2, 300, 400, 3)))
    assert [len(each) for each in sub.payloads()] == [1, 2, 3]
    assert world.broker.sessions["sub"].dropped == {"packet too large": 3}


@statement("3.2.2-15", "4.13.1-1")
@BOTH
def test_a_packet_that_is_too_large_closes(version: int) -> None:
    world = World(max_packet_bytes=100)
    device = world.device(version=version)
    answers = device.send_raw(encode(p.Publish("a", bytes(200)), version)[:10])
    assert device.closed
    assert [each.reason for each in answers] == ([Reason.PACKET_TOO_LARGE] if version == 5 else [])  # type: ignore[union-attr]


class NoSecrets:
    def allows(self, who: object, action: str, topic: str) -> bool:
        return not topic.startswith(f"secret/{action}")

    def rule(self, who: object, action: str, topic: str) -> str:
        return "secrets are secret"


@statement(v3="3.3.5-2")
def test_a_publish_that_is_not_allowed_reaches_nobody_and_is_answered_as_the_version_can() -> None:
    world = World(access=NoSecrets())
    new, old, sub = world.device("new"), world.device("old", 4), world.device("sub")
    sub.subscribe("#", qos=2)
    assert new.publish("secret/publish", qos=1, packet_id=1) == [p.Ack(Kind.PUBACK, 1, Reason.NOT_AUTHORIZED)]
    assert new.publish("secret/publish", qos=2, packet_id=2) == [p.Ack(Kind.PUBREC, 2, Reason.NOT_AUTHORIZED)]
    assert old.publish("secret/publish", qos=1, packet_id=1) == [p.Ack(Kind.PUBACK, 1)]
    assert new.publish("secret/publish") == []
    assert sub.messages() == []
    assert new.publish("fine", qos=1, packet_id=1) == [p.Ack(Kind.PUBACK, 1)]
    assert len(sub.messages()) == 1


def test_what_a_client_may_not_receive_is_not_delivered_live_retained_or_shared() -> None:
    world = World(access=NoSecrets())
    pub, sub = world.device("pub"), world.device("sub")
    pub.publish("secret/receive", b"kept", retain=True)
    pub.publish("open", b"kept", retain=True)
    answers = sub.subscribe("#", packet_id=1)
    assert [m.topic for m in answers if isinstance(m, p.Publish)] == ["open"]
    sub.subscribe("$share/g/#", packet_id=2)
    pub.publish("secret/receive", b"live")
    pub.publish("secret/receive", b"live", qos=1, packet_id=1)
    assert sub.messages() == []
    assert sub.subscribe("secret/subscribe") == [p.Suback(1, (Reason.NOT_AUTHORIZED,))]


def test_rules_that_change_count_at_once_and_drop_nobody() -> None:
    world = World()
    pub, sub = world.device("pub"), world.device("sub")
    sub.subscribe("#")
    pub.publish("secret/receive", b"1")
    world.broker.rules_changed(NoSecrets())
    pub.publish("secret/receive", b"2")
    pub.publish("secret/publish", b"3")
    world.broker.rules_changed(None)
    pub.publish("secret/receive", b"4")
    assert sub.payloads() == [b"1", b"4"]
    assert not pub.closed


@statement("4.7.2-1", v3="4.7.2-1")
def test_wildcards_at_the_start_do_not_match_a_dollar_live_or_retained() -> None:
    world = World()
    pub, sub = world.device("pub"), world.device("sub")
    pub.publish("$own/x", b"kept", retain=True)
    world.broker.publish_message("$SYS/broker/x", b"sys", retain=True)
    answers = sub.subscribe("#", "+/x", "$own/#", "$SYS/#")
    assert [m.topic for m in answers if isinstance(m, p.Publish)] == ["$own/x", "$SYS/broker/x"]
    pub.publish("$own/x", b"live")
    assert sub.payloads() == [b"live"]


def test_clients_do_not_write_into_sys() -> None:
    world = World()
    pub, sub = world.device("pub"), world.device("sub")
    sub.subscribe("$SYS/#", qos=1)
    assert pub.publish("$SYS/broker/clients/total", b"lie") == []
    assert pub.publish("$SYS/broker/clients/total", b"lie", 1, 1) == [p.Ack(Kind.PUBACK, 1, Reason.NOT_AUTHORIZED)]
    assert sub.messages() == []


def test_a_publish_that_nobody_wants_says_so_in_version_5() -> None:
    world = World()
    assert world.device("a").publish("x", qos=1, packet_id=1) == [p.Ack(Kind.PUBACK, 1, 0x10)]
    assert world.device("b", 4).publish("x", qos=1, packet_id=1) == [p.Ack(Kind.PUBACK, 1)]


@statement("3.12.4-1", v3="3.12.4-1")
@BOTH
def test_a_ping_is_answered(version: int) -> None:
    assert World().device(version=version).send(p.Ping()) == [p.Pong()]


@statement("3.14.4-1", "3.14.4-2", "3.14.0-1", v3=("3.14.4-1", "3.14.4-2", "3.14.4-3"))
@BOTH
def test_nothing_after_disconnect_is_looked_at(version: int) -> None:
    world = World()
    device = world.device(version=version)
    device.send(p.Disconnect(), p.Publish("a", b"x", retain=True))
    assert device.closed
    assert len(world.broker.retained) == 0


@statement(
    "2.1.3-1",
    "3.6.1-1",
    "3.8.1-1",
    "3.10.1-1",
    "4.13.1-1",
    v3=("2.2.2-1", "2.2.2-2", "3.6.1-1", "3.8.1-1", "3.10.1-1", "4.8.0-1"),
)
@BOTH
@pytest.mark.parametrize(
    "raw", ["c1 00", "e1 00", "60 02 00 01", "80 06 00 01 00 01 61 00", "a0 05 00 01 00 01 61", "41 02 00 01"]
)
def test_reserved_flags_close(version: int, raw: str) -> None:
    device = World().device(version=version)
    answers = device.send_raw(bytes.fromhex(raw))
    assert device.closed
    assert [each.reason for each in answers] == ([Reason.MALFORMED_PACKET] if version == 5 else [])  # type: ignore[union-attr]


@statement("2.2.2-1", "1.5.5-1", "4.13.2-1")
@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ("82 06 00 01 00 01 61 00", 0x81),
        ("c0 80 00", 0x81),
        ("c0 80 80 80 80 01", 0x81),
        ("30 08 00 01 61 04 01 01 01 01", 0x82),
        ("20 03 00 00 00", 0x82),
        ("90 04 00 01 00 00", 0x82),
        ("d0 00", 0x82),
    ],
)
def test_whatever_breaks_the_protocol_gets_its_reason_and_the_connection_ends(raw: str, code: int) -> None:
    device = World().device()
    answers = device.send_raw(bytes.fromhex(raw))
    assert [each.reason for each in answers] == [code]  # type: ignore[union-attr]
    assert device.closed


def test_a_device_that_breaks_the_protocol_stops_no_other() -> None:
    world = World()
    good, bad = world.device("good"), world.device("bad")
    good.subscribe("a")
    bad.send_raw(b"\xff" * 100)
    assert bad.closed
    world.device("pub").publish("a", b"fine")
    assert good.payloads() == [b"fine"]


def test_a_packet_may_come_byte_by_byte() -> None:
    world = World()
    device = Device(world.broker, 5)
    raw = (
        encode(p.Connect("dev", 5), 5)
        + encode(p.Subscribe(1, (p.Filter("a"),)), 5)
        + encode(p.Publish("a", bytes(300)), 5)
    )
    answers = []
    for byte in raw:
        answers += device.send_raw(bytes([byte]))
    assert [type(answer) for answer in answers] == [p.Connack, p.Suback, p.Publish]


def test_a_topic_with_any_number_of_levels_is_delivered_and_not_retained_beyond_the_bound() -> None:
    world = World(max_topic_levels=3)
    sub, pub = world.device("sub"), world.device("pub")
    sub.subscribe("1/#", qos=1)
    topic = "1/" * 30_000 + "x"
    (answer,) = pub.publish(topic, b"deep", 1, 7)
    assert answer == p.Ack(Kind.PUBACK, 7)
    assert [(message.topic, message.payload) for message in sub.messages()] == [(topic, b"deep")]
    (goodbye,) = pub.publish("1/2/3/4", b"kept", 1, 8, retain=True)
    assert isinstance(goodbye, p.Disconnect)
    assert goodbye.reason == Reason.TOPIC_NAME_INVALID
    assert len(world.broker.retained) == 0
    world.broker.publish_message("1/2/3/4", b"x", retain=True)
    assert world.broker.counts.dropped == {"too many levels": 1}


def test_long_topics_are_not_remembered() -> None:
    world = World()
    pub = world.device("pub")
    for number in range(50):
        pub.publish(f"{number}" * 20_000, b"")
        pub.publish(f"{number}", b"")
    assert len(world.broker.routes._young) == 50


def test_topic_aliases_stand_for_a_bounded_number_of_bytes() -> None:
    pub = World().device("pub")
    for alias in range(1, 17):
        assert pub.publish("t" * 65_535, b"", properties={"topic_alias": alias}) == []
        assert pub.publish("t" * 65_535, b"", properties={"topic_alias": alias}) == []  # the same again costs nothing
    (goodbye,) = pub.publish("t" * 65_535, b"", properties={"topic_alias": 17})
    assert isinstance(goodbye, p.Disconnect)
    assert goodbye.reason == Reason.QUOTA_EXCEEDED


class OnlyAnn:
    """Ann may receive what is secret; everyone else may do the rest."""

    def __init__(self) -> None:
        self.users = {"ann"}

    def allows(self, who: Who, action: str, topic: str) -> bool:
        return action != "receive" or topic != "secret" or who.username in self.users

    def rule(self, who: Who, action: str, topic: str) -> str:
        return "only ann"


def test_who_takes_over_the_session_of_another_user_gets_nothing_that_its_own_rules_deny() -> None:
    world = World(access=OnlyAnn())
    ann = world.device("dev", username="ann", properties={"session_expiry": 100})
    ann.subscribe("#", qos=2)
    pub = world.device("pub")
    pub.publish("secret", b"sent", 1, 1)
    pub.publish("open", b"sent too", 1, 2)
    assert ann.payloads() == [b"sent", b"sent too"]
    ann.drop()
    pub.publish("secret", b"queued", 1, 3)
    pub.publish("open", b"queued too", 1, 4)
    bob = world.device("dev", username="bob", clean=False, properties={"session_expiry": 100})
    assert [each.payload for each in bob.rest if isinstance(each, p.Publish)] == [b"sent too", b"queued too"]
    pub.publish("secret", b"live", 1, 5)
    pub.publish("secret", b"live", 0)
    pub.publish("open", b"live too", 0)
    assert bob.payloads() == [b"live too"]
    session = world.broker.sessions["dev"]
    assert session.exchange.messages == 2
    assert world.broker.counts.dropped == {"not authorized": 2}
    bob.drop()
    ann = world.device("dev", username="ann", clean=False, properties={"session_expiry": 100})
    pub.publish("secret", b"again", 0)
    assert ann.payloads() == [b"again"]


def test_rules_that_change_count_for_what_waits() -> None:
    access = OnlyAnn()
    world = World(access=access)
    ann = world.device("dev", username="ann", properties={"session_expiry": 100})
    ann.subscribe("#", qos=1)
    ann.drop()
    pub = world.device("pub")
    pub.publish("secret", b"queued", 1, 3)
    access.users.clear()
    world.broker.rules_changed(access)
    ann = world.device("dev", username="ann", clean=False, properties={"session_expiry": 100})
    assert ann.rest == []
    assert world.broker.sessions["dev"].dropped == {"not authorized": 1}


def test_a_client_of_mqtt_3_1_may_mark_what_it_sends_again() -> None:
    """MQTT 3.1 has DUP for PUBREL, SUBSCRIBE and UNSUBSCRIBE as well; the later versions do not."""
    again = b"\x6a\x02\x00\x07" + b"\x8a\x06\x00\x08\x00\x01a\x00" + b"\xaa\x05\x00\x09\x00\x01a"
    old = World().device("old", 3)
    assert old.publish("t", b"x", 2, 7) == [p.Ack(Kind.PUBREC, 7)]
    assert old.send_raw(again + encode(p.Ping(), 3)) == [
        p.Ack(Kind.PUBCOMP, 7), p.Suback(8, (0,)), p.Unsuback(9), p.Pong(),
    ]  # fmt: skip
    for packet in (b"\x6a\x02\x00\x07", b"\x8a\x06\x00\x08\x00\x01a\x00", b"\x6b\x02\x00\x07"):
        later = World().device("later", 4)
        assert later.send_raw(packet) == []
        assert later.closed
