"""What the server writes: the bytes of its answers, and that it writes nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from mqtt_statements import statement
from mqtt_use import Device, World

from penstock.mqtt import packets as p
from penstock.mqtt.access import Verdict
from penstock.mqtt.codec import encode
from penstock.mqtt.packets import Kind, Properties
from penstock.mqtt.properties import encode_varint
from penstock.mqtt.reasons import Reason
from penstock.mqtt.scram import SCRAM, ScramSha256


def connect(flags: int, payload: bytes, properties: bytes = b"\x00", version: int = 5) -> bytes:
    body = b"\x00\x04MQTT" + bytes([version, flags]) + b"\x00\x3c" + (properties if version == 5 else b"") + payload
    return bytes([0x10, len(body)]) + body


# --- CONNECT


@statement("1.5.7-1")
@pytest.mark.parametrize("pair", [b"\x00\x01\xff\x00\x01v", b"\x00\x01k\x00\x01\xff", b"\x00\x01k\x00\x01\x00"])
def test_both_strings_of_a_pair_are_utf8(pair: bytes) -> None:
    device = World().device()
    body = b"\x00\x01t" + bytes([1 + len(pair)]) + b"\x26" + pair
    (goodbye,) = device.send_raw(bytes([0x30, len(body)]) + body)
    assert isinstance(goodbye, p.Disconnect)
    assert goodbye.reason == Reason.MALFORMED_PACKET


@statement(
    "3.1.2-16",
    "3.1.2-17",
    "3.1.2-18",
    "3.1.2-19",
    "3.1.3-1",
    "3.1.4-1",
    v3=("3.1.2-18", "3.1.2-19", "3.1.2-20", "3.1.2-21", "3.1.3-1", "3.1.4-1"),
)
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize(
    ("flags", "payload"),
    [
        (0x02, b"\x00\x01a\x00\x01u"),  # a user name that no flag announces
        (0x82, b"\x00\x01a"),  # one that is announced and missing
        (0x82, b"\x00\x01a\x00\x01u\x00\x01p"),  # a password that no flag announces
        (0xC2, b"\x00\x01a\x00\x01u"),  # one that is announced and missing
        (0x06, b"\x00\x01a\x00\x01t"),  # a will without a payload
        (0x02, b""),  # no client id
    ],
)
def test_flags_and_payload_of_a_connect_belong_together(version: int, flags: int, payload: bytes) -> None:
    world = World()
    device = Device(world.broker, version)
    answers = device.send_raw(connect(flags, payload, version=version))
    assert device.closed
    assert world.broker.sessions == {}
    assert all(isinstance(each, p.Connack) and each.reason == Reason.MALFORMED_PACKET for each in answers)


@statement("3.1.3-1", v3="3.1.3-1")
def test_fields_of_a_connect_come_in_their_order() -> None:
    device = Device(World().broker)
    payload = b"\x00\x02id" + b"\x00" + b"\x00\x02wt" + b"\x00\x02wp" + b"\x00\x01u" + b"\x00\x01p"
    (connack,) = device.send_raw(connect(0xC6, payload))
    assert isinstance(connack, p.Connack)
    session = device.broker.sessions["id"]
    assert session.will is not None
    assert (session.will.topic, session.will.payload, session.username) == ("wt", b"wp", "u")


@statement("3.1.3-11", "3.1.3-12", v3=("3.1.3-10", "3.1.3-11"))
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize(
    ("flags", "payload"), [(0x06, b"\x00\x01a%s\x00\x02\xc3\x28\x00\x00"), (0x82, b"\x00\x01a%s\x00\x02\xc3\x28")]
)
def test_the_topic_of_a_will_and_a_user_name_are_utf8(version: int, flags: int, payload: bytes) -> None:
    device = Device(World().broker, version)
    device.send_raw(connect(flags, payload % (b"\x00" if version == 5 and flags == 0x06 else b""), version=version))
    assert device.closed
    assert device.broker.sessions == {}


@statement(v3="3.1.2-7")
def test_retained_messages_outlive_the_session_they_came_with() -> None:
    world = World()
    device = world.device("a", 4)
    device.publish("t", b"kept", retain=True)
    device.bye()
    assert world.broker.sessions == {}
    sub = world.device("b", 4)
    assert [each.payload for each in sub.subscribe("t") if isinstance(each, p.Publish)] == [b"kept"]


@statement("3.1.3-2", v3="3.1.3-2")
def test_the_client_id_is_what_a_session_is_known_by() -> None:
    world = World()
    one, two = (world.device(name, clean=False, properties={"session_expiry": 9}) for name in ("one", "two"))
    one.subscribe("a")
    one.drop()
    two.drop()
    assert world.device("two", clean=False, properties={"session_expiry": 9}).connack.session_present  # type: ignore[attr-defined]
    assert list(world.broker.sessions["one"].subscriptions) == ["a"]
    assert not world.broker.sessions["two"].subscriptions


@statement("3.1.3-8", "3.2.2-8")
def test_a_client_id_that_is_refused_gets_its_code_and_the_connection_ends() -> None:
    device = Device(World(max_client_id_bytes=23).broker)
    (connack,) = device.send(p.Connect("x" * 24, 5))
    assert connack == p.Connack(False, Reason.CLIENT_ID_NOT_VALID)
    assert device.closed


# --- CONNACK, and reason codes of everything


CODES = {
    Kind.CONNACK: {0, *range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, 0x99, 0x9A, 0x9B, 0x9C, 0x9D, 0x9F},
    Kind.PUBACK: {0, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99},
    Kind.PUBREL: {0, 0x92},
    Kind.SUBACK: {0, 1, 2, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2},
    Kind.UNSUBACK: {0, 0x11, 0x80, 0x83, 0x87, 0x8F, 0x91},
    Kind.DISCONNECT: {0, *range(0x80, 0x84), 0x87, 0x89, 0x8B, *range(0x8D, 0x91), *range(0x93, 0xA3)},
    Kind.AUTH: {0, 0x18},
}  # fmt: skip


class Denying:
    def allows(self, who: object, action: str, topic: str) -> bool:
        return topic != "denied"

    def rule(self, who: object, action: str, topic: str) -> str:
        return "denied"


class Refusing:
    def __init__(self, reason: Reason) -> None:
        self.reason = reason

    def check(self, connect: p.Connect, address: str, identity: str | None, answer: Any) -> None:
        answer(Verdict(self.reason))


@statement("3.2.2-1", "3.2.2-8", v3="3.2.2-6")
@pytest.mark.parametrize(
    "reason",
    [Reason.SUCCESS, Reason.NOT_AUTHORIZED, Reason.BAD_USER_NAME_OR_PASSWORD, Reason.SERVER_BUSY, Reason.BANNED],
)
@pytest.mark.parametrize("version", [4, 5])
def test_a_connack_has_a_code_of_its_own_and_no_reserved_flags(version: int, reason: Reason) -> None:
    device = Device(World(authenticator=Refusing(reason)).broker, version)
    device.link.received(encode(p.Connect("a", version), version))
    answer = bytes(device.wire.out)
    assert answer[0] == 0x20
    assert answer[2] in (0, 1)
    assert answer[3] in (CODES[Kind.CONNACK] if version == 5 else range(6))
    assert bool(answer[3]) == bool(reason)


@statement("3.4.2-1", "3.5.2-1", v3="2.3.1-6")
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize(("topic", "reason"), [("t", 0), ("nobody", 0x10), ("denied", 0x87), ("full", 0x97)])
def test_an_acknowledgement_of_a_publish_has_one_of_its_codes(qos: int, topic: str, reason: int) -> None:
    world = World(access=Denying(), max_queued_messages=0)
    world.device("sub").subscribe("t", "denied", qos=qos)
    gone = world.device("gone", properties={"session_expiry": 9})
    gone.subscribe("full", qos=2)
    gone.drop()
    (answer,) = world.device("pub").publish(topic, b"x", qos, 7)
    assert isinstance(answer, p.Ack)
    assert (answer.kind, answer.packet_id, answer.reason) == (Kind.PUBACK if qos == 1 else Kind.PUBREC, 7, reason)
    assert answer.reason in CODES[Kind.PUBACK]


@statement("3.6.2-1", "3.7.2-1")
def test_pubrel_and_pubcomp_say_success_or_that_the_id_is_unknown() -> None:
    world = World()
    sub, pub = world.device("sub"), world.device("pub")
    sub.subscribe("t", qos=2)
    pub.publish("t", b"x", 2, 7)
    (message,) = sub.messages()
    assert sub.ack(Kind.PUBREC, message.packet_id) == [p.Ack(Kind.PUBREL, message.packet_id)]
    assert sub.ack(Kind.PUBREC, 99) == [p.Ack(Kind.PUBREL, 99, Reason.PACKET_ID_NOT_FOUND)]
    assert pub.ack(Kind.PUBREL, 7) == [p.Ack(Kind.PUBCOMP, 7)]
    assert pub.ack(Kind.PUBREL, 7) == [p.Ack(Kind.PUBCOMP, 7, Reason.PACKET_ID_NOT_FOUND)]


@statement(
    "3.4.2-2", "3.4.2-3", "3.5.2-2", "3.5.2-3", "3.6.2-2", "3.6.2-3", "3.7.2-2", "3.7.2-3",
    "3.9.2-1", "3.9.2-2", "3.11.2-1", "3.11.2-2", "3.14.2-1", "3.14.2-2", "3.14.2-4",
)  # fmt: skip
def test_no_answer_has_words_that_would_make_it_too_large_nor_a_session_expiry() -> None:
    """Acknowledgements have no properties at all; DISCONNECT has words only where there is room for them."""
    world = World(access=Denying())
    device = world.device("dev", properties={"maximum_packet_size": 14, "session_expiry": 9})
    answers = [
        *device.subscribe("t", "denied", "a/#/b", qos=2),
        *device.publish("t", b"x", 1, 5),
        *device.publish("denied", b"x", 2, 6),
        *device.ack(Kind.PUBREL, 99),
        *device.ack(Kind.PUBREC, 99),
        *device.send(p.Unsubscribe(2, ("t", "nothing"))),
        *device.send(p.Publish("", b"x")),
    ]
    kinds = [type(each) for each in answers]
    assert kinds == [p.Suback, p.Publish, p.Ack, p.Ack, p.Ack, p.Ack, p.Unsuback, p.Disconnect]
    for each in answers:
        assert len(encode(each, 5)) <= 14
        if isinstance(each, p.Suback):
            assert set(each.reasons) <= CODES[Kind.SUBACK]
        elif isinstance(each, p.Unsuback):
            assert set(each.reasons) <= CODES[Kind.UNSUBACK]
        if not isinstance(each, p.Publish):
            assert each.properties == Properties()  # type: ignore[union-attr]
    goodbye = answers[-1]
    assert isinstance(goodbye, p.Disconnect)
    assert goodbye.reason in CODES[Kind.DISCONNECT]


@statement("3.14.1-1", "3.15.1-1", v3="3.14.1-1")
@pytest.mark.parametrize("first", [0xE1, 0xE8, 0xF1, 0xF8])
def test_reserved_flags_of_disconnect_and_auth_are_malformed(first: int) -> None:
    (goodbye,) = World().device().send_raw(bytes([first, 0]))
    assert isinstance(goodbye, p.Disconnect)
    assert goodbye.reason == Reason.MALFORMED_PACKET


@statement("3.15.2-1", "3.15.2-2", "3.15.2-3")
def test_auth_goes_on_and_has_no_words() -> None:
    world = World(methods={SCRAM: ScramSha256({})})
    device = Device(world.broker)
    properties = Properties(authentication_method=SCRAM, authentication_data=b"n,,n=ann,r=abc")
    (answer,) = device.send(p.Connect("a", 5, properties=properties))
    assert isinstance(answer, p.Auth)
    assert answer.reason in CODES[Kind.AUTH]
    assert (answer.properties.reason_string, answer.properties.user) == (None, ())
    small = Device(world.broker)
    properties = Properties(authentication_method=SCRAM, authentication_data=b"n,,n=ann,r=abc", maximum_packet_size=20)
    assert small.send(p.Connect("b", 5, properties=properties)) == [p.Connack(False, Reason.PACKET_TOO_LARGE)]


# --- PUBLISH


@statement("2.2.1-2", "4.3.1-1", v3=("2.3.1-5", "4.3.1-1"))
@pytest.mark.parametrize(("version", "wanted"), [(4, b"\x30\x04\x00\x01tx"), (5, b"\x30\x05\x00\x01t\x00x")])
def test_qos_0_has_no_packet_id(version: int, wanted: bytes) -> None:
    world = World()
    sub = world.device("sub", version)
    sub.subscribe("t", qos=2)
    world.device("pub").publish("t", b"x")
    assert bytes(sub.wire.out) == wanted


@statement("3.3.2-3", v3="3.3.2-3")
def test_what_arrives_has_a_topic_that_the_filter_matches() -> None:
    world = World()
    sub, pub = world.device("sub"), world.device("pub")
    sub.subscribe("a/+/c")
    for topic in ("a/b/c", "a/b", "a/b/c/d", "b/b/c", "a//c"):
        pub.publish(topic)
    assert [message.topic for message in sub.messages()] == ["a/b/c", "a//c"]


@statement("3.3.2-13", "3.3.2-19")
@pytest.mark.parametrize("identifier", [0x03, 0x08])
def test_content_type_and_response_topic_are_utf8(identifier: int) -> None:
    body = b"\x00\x01t\x05" + bytes([identifier]) + b"\x00\x02\xc3\x28"
    (goodbye,) = World().device().send_raw(bytes([0x30, len(body)]) + body)
    assert isinstance(goodbye, p.Disconnect)
    assert goodbye.reason == Reason.MALFORMED_PACKET


@statement(
    "3.3.4-1", "4.3.2-1", "4.3.2-2", "4.3.2-3", "4.3.3-1", "4.3.3-2", v3=("3.3.4-1", "4.3.2-1", "4.3.2-2", "4.3.3-1")
)
@pytest.mark.parametrize("version", [4, 5])
def test_each_qos_has_its_own_answer_and_a_first_copy_has_no_dup(version: int) -> None:
    world = World()
    sub, pub = world.device("sub", version, clean=False), world.device("pub", version)
    sub.subscribe("t", qos=2)
    assert pub.publish("t", b"0") == []
    assert pub.publish("t", b"1", 1, 1) == [p.Ack(Kind.PUBACK, 1)]
    assert pub.publish("t", b"2", 2, 2) == [p.Ack(Kind.PUBREC, 2)]
    zero, one, two = sub.messages()
    assert [(each.qos, each.dup) for each in (zero, one, two)] == [(0, False), (1, False), (2, False)]
    assert 0 < one.packet_id != two.packet_id > 0
    exchange = world.broker.sessions["sub"].exchange
    assert exchange.messages == 2
    sub.ack(Kind.PUBACK, one.packet_id)
    assert exchange.messages == 1
    sub.ack(Kind.PUBREC, two.packet_id)
    sub.ack(Kind.PUBCOMP, two.packet_id)
    assert exchange.messages == 0


@statement("4.3.3-7", "4.3.3-13")
def test_a_message_that_was_sent_does_not_expire_and_its_exchange_is_finished() -> None:
    world = World()
    sub, pub = world.device("sub", properties={"session_expiry": 100}), world.device("pub")
    sub.subscribe("t", qos=2)
    pub.publish("t", b"x", 2, 7, properties={"message_expiry": 5})
    (message,) = sub.messages()
    world.pass_(10)
    sub.drop()
    sub = world.device("sub", clean=False, properties={"session_expiry": 100})
    (again,) = sub.rest
    assert isinstance(again, p.Publish)
    assert (again.payload, again.dup, again.packet_id) == (b"x", True, message.packet_id)
    assert sub.ack(Kind.PUBREC, again.packet_id) == [p.Ack(Kind.PUBREL, again.packet_id)]
    world.pass_(10)
    sub.ack(Kind.PUBCOMP, again.packet_id)
    assert world.broker.sessions["sub"].exchange.messages == 0
    assert pub.ack(Kind.PUBREL, 7) == [p.Ack(Kind.PUBCOMP, 7)]


@statement("4.8.2-6")
@pytest.mark.parametrize(("qos", "kind"), [(1, Kind.PUBACK), (2, Kind.PUBREC)])
def test_what_a_member_of_a_group_refuses_goes_to_nobody_else(qos: int, kind: Kind) -> None:
    world = World()
    members = [world.device(name) for name in "ab"]
    for member in members:
        member.subscribe("$share/g/t", qos=qos)
    world.device("pub").publish("t", b"x", qos, 1)
    (message,) = members[0].messages()
    assert members[0].ack(kind, message.packet_id, Reason.UNSPECIFIED) == []
    assert members[1].messages() == []
    assert world.broker.sessions["a"].exchange.messages == 0


@statement("4.2.0-1", v3="4.2.0-1")
def test_a_conversation_means_the_same_wherever_the_wire_cuts_it() -> None:
    talk = b"".join(
        encode(each, 5)
        for each in (
            p.Connect("a", 5),
            p.Subscribe(1, (p.Filter("t", 1),)),
            p.Publish("t", b"x" * 200, 1, packet_id=2),
            p.Ping(),
        )
    )
    whole = World()
    device = Device(whole.broker)
    wanted = device.send_raw(talk)
    assert len(wanted) == 5
    for size in itertools.chain(range(1, 40), (100, len(talk) - 1)):
        device = Device(World().broker)
        got = [each for at in range(0, len(talk), size) for each in device.send_raw(talk[at : at + size])]
        assert got == wanted, size


def test_an_endless_packet_that_is_no_publish_is_not_gathered() -> None:
    """It would be taken apart piece by piece while everybody waits, and cost many times its size."""
    device = World().device()
    device.send_raw(b"\x82" + encode_varint(5 << 20) + b"\x00\x01")
    assert device.closed
    device = World().device()
    assert device.send_raw(b"\x30" + encode_varint(5 << 20) + b"\x00\x01a") == []
    assert not device.closed
