"""Promises about CONNECT and CONNACK: who gets in, with which session, and what is said to who does not."""

from __future__ import annotations

from typing import Any

import pytest
from mqtt_statements import statement
from mqtt_use import Device, World

from penstock.mqtt import packets as p
from penstock.mqtt.access import Verdict
from penstock.mqtt.codec import encode
from penstock.mqtt.packets import Kind, Properties
from penstock.mqtt.reasons import Reason

BOTH = pytest.mark.parametrize("version", [4, 5])


@statement("3.1.0-1", v3="3.1.0-1")
@BOTH
@pytest.mark.parametrize("packet", [p.Ping(), p.Publish("a"), p.Disconnect(), p.Subscribe(1, (p.Filter("a"),))])
def test_the_first_packet_is_connect(version: int, packet: p.Packet) -> None:
    device = Device(World().broker, version)
    assert device.send(packet) == []
    assert device.closed


@statement("3.1.0-2", v3="3.1.0-2")
@BOTH
def test_a_second_connect_closes(version: int) -> None:
    device = World().device(version=version)
    answers = device.send(p.Connect("dev", version))
    assert device.closed
    assert [type(a) for a in answers] == ([p.Disconnect] if version == 5 else [])
    if version == 5:
        assert answers[0].reason == Reason.PROTOCOL_ERROR  # type: ignore[union-attr]


@statement("3.1.2-1", v3="3.1.2-1")
def test_another_protocol_name_closes_without_a_word() -> None:
    device = Device(World().broker)
    assert device.send_raw(bytes.fromhex("100e00044d515458040200 3c00026162")) == []
    assert device.closed


@statement("3.1.2-2", v3="3.1.2-2")
@pytest.mark.parametrize(
    ("level", "answer"), [(1, "20020001"), (2, "20020001"), (6, "2003008400"), (200, "2003008400")]
)
def test_an_unknown_level_is_refused_in_its_own_words(level: int, answer: str) -> None:
    device = Device(World().broker)
    device.link.received(bytes.fromhex(f"100e00044d515454{level:02x}02003c00026162"))
    assert bytes(device.wire.out).hex() == answer
    assert device.closed


@statement("3.1.2-3", v3="3.1.2-3")
def test_the_reserved_connect_flag_closes() -> None:
    device = Device(World().broker, 4)
    assert device.send_raw(bytes.fromhex("100e00044d5154540403003c00026162")) == []
    assert device.closed


@statement("3.1.2-11", "3.1.2-12", "3.1.2-13", v3=("3.1.2-11", "3.1.2-13", "3.1.2-14", "3.1.2-15"))
@pytest.mark.parametrize("flags", ["0a", "22", "12"])
def test_flags_of_a_will_without_a_will_close(flags: str) -> None:
    device = Device(World().broker, 4)
    assert device.send_raw(bytes.fromhex(f"100e00044d51545404{flags}003c00026162")) == []
    assert device.closed


@statement(v3="3.1.2-22")
def test_a_password_without_a_user_name_is_malformed_in_version_3() -> None:
    device = Device(World().broker, 4)
    assert device.send(p.Connect("dev", 4, password=b"x")) == []
    assert device.closed


def test_a_password_without_a_user_name_is_fine_in_version_5() -> None:
    assert World().device(password=b"x").connack.reason == 0  # type: ignore[attr-defined]


@statement("3.1.2-4", "3.2.2-2", v3=("3.1.2-6", "3.2.2-1"))
@BOTH
def test_a_clean_start_drops_the_old_session(version: int) -> None:
    world = World()
    keep = {"properties": {"session_expiry": 100}} if version == 5 else {}
    first = world.device("dev", version, clean=False, **keep)
    first.subscribe("a", qos=1)
    first.drop()
    second = world.device("dev", version, clean=True, **keep)
    assert second.connack.session_present is False  # type: ignore[attr-defined]
    world.device("pub").publish("a")
    assert second.messages() == []


@statement("3.1.2-5", "3.1.2-6", "3.2.2-3", v3=("3.1.2-4", "3.1.2-5", "3.2.2-2", "3.2.2-3", "4.1.0-1", "4.1.0-2"))
@BOTH
def test_a_session_is_resumed_and_the_flag_says_so(version: int) -> None:
    world = World()
    keep = {"properties": {"session_expiry": 100}} if version == 5 else {}
    first = world.device("dev", version, clean=False, **keep)
    assert first.connack.session_present is False  # type: ignore[attr-defined]
    first.subscribe("a", qos=1)
    first.bye()
    world.device("pub").publish("a", b"while away", 1, 1)
    second = world.device("dev", version, clean=False, **keep)
    assert second.connack.session_present is True  # type: ignore[attr-defined]
    assert [m.payload for m in second.rest] == [b"while away"]


@statement("3.1.2-23", "4.1.0-2", "4.1.0-1")
def test_a_session_ends_when_its_expiry_has_passed_and_never_while_connected() -> None:
    world = World()
    device = world.device("dev", properties={"session_expiry": 10})
    world.pass_(1000)
    assert "dev" in world.broker.sessions
    device.drop()
    world.pass_(9)
    assert "dev" in world.broker.sessions
    world.pass_(2)
    assert "dev" not in world.broker.sessions
    world.device("gone").drop()
    assert "gone" not in world.broker.sessions


def test_a_session_that_never_expires_is_kept() -> None:
    world = World()
    world.device("dev", properties={"session_expiry": 0xFFFFFFFF}).drop()
    world.device("old", 4, clean=False).drop()
    world.pass_(10**9)
    assert set(world.broker.sessions) == {"dev", "old"}


def test_a_session_expiry_above_the_bound_is_cut_and_told() -> None:
    world = World(max_session_expiry=60)
    device = world.device(properties={"session_expiry": 100})
    assert device.connack.properties.session_expiry == 60  # type: ignore[attr-defined]


def test_disconnect_may_shorten_or_lengthen_the_expiry_but_not_begin_one() -> None:
    world = World()
    device = world.device("a", properties={"session_expiry": 5})
    device.bye(session_expiry=50)
    world.pass_(20)
    assert "a" in world.broker.sessions
    device = world.device("b")
    answers = device.send(p.Disconnect(0, Properties(session_expiry=5)))
    assert answers[0].reason == Reason.PROTOCOL_ERROR  # type: ignore[union-attr]
    device.link.closed("")
    assert "b" not in world.broker.sessions


@statement("3.2.2-6", "3.2.2-7", "3.1.4-6", "3.1.4-2", v3=("3.2.2-4", "3.2.2-5", "3.1.4-5"))
@BOTH
def test_nothing_behind_a_refused_connect_is_looked_at(version: int) -> None:
    world = World(anonymous=False)
    device = Device(world.broker, version)
    raw = encode(p.Connect("dev", version), version) + encode(p.Publish("a", b"x", retain=True), version)
    answers = device.send_raw(raw)
    code = Reason.NOT_AUTHORIZED if version == 5 else 5
    assert answers == [p.Connack(False, code)]
    assert device.closed
    assert len(world.broker.retained) == 0


@statement("3.2.0-1", "3.2.0-2", "3.1.4-5", v3=("3.2.0-1", "3.1.4-4"))
@BOTH
def test_connack_comes_first_and_what_was_sent_before_it_is_served_after(version: int) -> None:
    world = World()
    device = Device(world.broker, version)
    packets = [p.Connect("dev", version), p.Subscribe(1, (p.Filter("a"),)), p.Publish("a", b"x"), p.Ping()]
    answers = device.send_raw(b"".join(encode(packet, version) for packet in packets))
    assert [type(answer) for answer in answers] == [p.Connack, p.Suback, p.Publish, p.Pong]


@statement("3.1.3-6", "3.1.3-7", "3.2.2-16")
def test_an_empty_client_id_is_assigned_and_told() -> None:
    world = World()
    first, second = world.device(""), world.device("")
    names = {first.connack.properties.assigned_client_id, second.connack.properties.assigned_client_id}  # type: ignore[attr-defined]
    assert len(names) == 2
    assert names == set(world.broker.sessions)


@statement(v3=("3.1.3-6", "3.1.3-7"))
def test_an_empty_client_id_is_assigned_in_silence_in_version_3() -> None:
    world = World()
    assert world.device("", 4).connack == p.Connack()  # type: ignore[attr-defined]
    assert len(world.broker.sessions) == 1


@statement(v3=("3.1.3-8", "3.1.3-9"))
def test_an_empty_client_id_without_a_clean_session_is_refused_in_version_3() -> None:
    device = Device(World().broker, 4)
    assert device.connect("", clean=False) == p.Connack(False, 2)
    assert device.closed


@statement("3.1.3-5", "3.1.3-3", "3.1.3-4", v3=("3.1.3-5", "3.1.3-3", "3.1.3-4"))
@BOTH
def test_client_ids_of_letters_digits_and_more_are_accepted(version: int) -> None:
    world = World()
    for name in ("a", "0123456789abcdefABCDEFZ", "ä/#+ \ufeff", "x" * 65535):
        assert world.device(name, version).connack.reason == 0  # type: ignore[attr-defined]


@statement("3.1.3-4", v3="3.1.3-4")
def test_a_client_id_that_is_not_utf8_closes() -> None:
    device = Device(World().broker, 4)
    assert device.send_raw(bytes.fromhex("100e00044d5154540402003c0002c328")) == []
    assert device.closed


@statement("3.1.4-3", v3="3.1.4-2")
@BOTH
def test_a_second_connection_takes_over(version: int) -> None:
    world = World()
    old = world.device("dev", version, clean=False, **({"properties": {"session_expiry": 9}} if version == 5 else {}))
    old.subscribe("a", qos=1)
    world.device("pub").publish("a", b"1", 1, 1)
    assert [m.packet_id for m in old.messages()] == [1]
    new = world.device("dev", 5, clean=False, properties={"session_expiry": 9})
    assert old.closed
    assert [answer.reason for answer in old.read()] == ([Reason.SESSION_TAKEN_OVER] if version == 5 else [])  # type: ignore[union-attr]
    assert new.connack.session_present  # type: ignore[attr-defined]
    assert [(m.packet_id, m.dup) for m in new.rest] == [(1, True)]
    old.link.closed("late")
    assert world.broker.sessions["dev"].link is new.link
    assert new.ack(Kind.PUBACK, 1) == []
    assert not world.broker.sessions["dev"].exchange.flights


@statement("3.1.2-22", v3="3.1.2-24")
@BOTH
def test_a_silent_client_is_closed_after_one_and_a_half_keep_alives(version: int) -> None:
    world = World()
    device = world.device("dev", version, keep_alive=10, will=p.Will("w", b"gone"))
    watcher = world.device("watcher")
    watcher.subscribe("w")
    assert device.wire.deadline == 15
    device.link.expired()
    assert device.closed
    answers = device.read()
    assert [a.reason for a in answers] == ([Reason.KEEP_ALIVE_TIMEOUT] if version == 5 else [])  # type: ignore[union-attr]
    assert watcher.payloads() == [b"gone"]


def test_keep_alive_0_has_no_deadline_and_a_missing_connect_has_one() -> None:
    world = World()
    assert world.device(keep_alive=0).wire.deadline is None
    device = Device(world.broker)
    assert device.wire.deadline == 10
    device.link.expired()
    assert device.closed
    assert device.read() == []


@statement("3.2.2-21", "3.2.2-22")
def test_a_server_keep_alive_is_told_and_used() -> None:
    world = World(max_keep_alive=60)
    device = world.device(keep_alive=120)
    assert device.connack.properties.server_keep_alive == 60  # type: ignore[attr-defined]
    assert device.wire.deadline == 90
    device = world.device("b", keep_alive=30)
    assert device.connack.properties.server_keep_alive is None  # type: ignore[attr-defined]
    assert device.wire.deadline == 45


@statement("3.2.2-9", "3.2.2-10", "3.2.2-11", "3.2.2-12")
def test_a_maximum_qos_is_told_and_a_will_above_it_refused() -> None:
    world = World(maximum_qos=0)
    device = world.device("a")
    assert device.connack.properties.maximum_qos == 0  # type: ignore[attr-defined]
    assert device.subscribe("x", qos=2) == [p.Suback(1, (2,))]
    other = Device(world.broker)
    assert other.connect("b", will=p.Will("w", b"", 1)).reason == Reason.QOS_NOT_SUPPORTED
    assert other.closed
    answers = device.publish("x", qos=1, packet_id=1)
    assert answers[0].reason == Reason.QOS_NOT_SUPPORTED  # type: ignore[union-attr]


@statement("3.2.2-13", "3.2.2-14")
def test_without_retained_messages_retain_is_refused() -> None:
    world = World(retain_available=False)
    device = world.device("a")
    assert device.connack.properties.retain_available == 0  # type: ignore[attr-defined]
    assert Device(world.broker).connect("b", will=p.Will("w", retain=True)).reason == Reason.RETAIN_NOT_SUPPORTED
    answers = device.publish("x", retain=True)
    assert answers[0].reason == Reason.RETAIN_NOT_SUPPORTED  # type: ignore[union-attr]
    assert device.closed


@statement("3.1.2-28")
def test_response_information_is_given_only_on_request() -> None:
    world = World(response_information="answers/")
    assert world.device("a").connack.properties.response_information is None  # type: ignore[attr-defined]
    device = world.device("b", properties={"request_response": 1})
    assert device.connack.properties.response_information == "answers/"  # type: ignore[attr-defined]


@statement("3.1.2-29", "3.14.2-3")
def test_words_are_left_out_where_they_are_not_wanted_or_do_not_fit() -> None:
    world = World()
    for given, words in (({}, True), ({"request_problem": 0}, False), ({"maximum_packet_size": 20}, False)):
        device = world.device("dev", properties=given)
        answer = device.send(p.Connect("dev", 5))[0]
        assert isinstance(answer, p.Disconnect)
        assert (answer.properties.reason_string is not None) == words


def test_capabilities_are_told_only_where_they_are_missing() -> None:
    properties = World(topic_alias_maximum=0).device().connack.properties  # type: ignore[attr-defined]
    assert properties == Properties()
    world = World(
        receive_maximum=20,
        max_packet_bytes=1000,
        wildcard_subscriptions=False,
        shared_subscriptions=False,
        subscription_identifiers=False,
    )
    device = world.device()
    properties = device.connack.properties  # type: ignore[attr-defined]
    assert (properties.receive_maximum, properties.maximum_packet_size) == (20, 1000)
    assert (properties.wildcard_available, properties.shared_available) == (0, 0)
    assert properties.subscription_ids_available == 0
    assert device.subscribe("a/#", packet_id=2) == [p.Suback(2, (0xA2,))]
    assert device.subscribe("$share/g/a", packet_id=3) == [p.Suback(3, (0x9E,))]
    assert device.subscribe("a", packet_id=4, identifier=3) == [p.Suback(4, (0xA1,))]


class Later:
    """An authenticator that answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[p.Connect, Any]] = []

    def check(self, connect: p.Connect, address: str, identity: str | None, answer: Any) -> None:
        self.asked.append((connect, answer))


@statement("3.1.4-2", "3.1.4-4", v3="3.1.4-3")
@BOTH
def test_credentials_are_checked_before_anything_else_happens(version: int) -> None:
    checks = Later()
    world = World(authenticator=checks)
    device = Device(world.broker, version)
    device.link.received(encode(p.Connect("dev", version, username="ann", password=b"pw"), version))
    device.link.received(encode(p.Publish("a", b"x", retain=True), version))
    assert device.read() == []
    assert world.broker.sessions == {}
    assert len(world.broker.retained) == 0
    connect, answer = checks.asked[0]
    assert (connect.username, connect.password) == ("ann", b"pw")
    answer(Verdict(username="ann"))
    assert [type(each) for each in device.read()] == [p.Connack]
    assert world.broker.sessions["dev"].username == "ann"
    assert len(world.broker.retained) == 1


def test_a_fault_when_credentials_were_checked_ends_that_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Later()
    world = World(authenticator=checks)
    device = Device(world.broker)
    device.send(p.Connect("dev", 5, username="ann", password=b"pw"))

    def fails(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(world.broker, "attach", fails)
    checks.asked[0][1](Verdict(username="ann"))
    assert (device.closed, world.broker.sessions) == (True, {})


@BOTH
def test_a_wrong_password_is_said_and_a_late_answer_to_a_lost_connection_does_nothing(version: int) -> None:
    checks = Later()
    world = World(authenticator=checks)
    device, other = Device(world.broker, version), Device(world.broker, version)
    for each in (device, other):
        each.link.received(encode(p.Connect("dev", version, username="ann", password=b"pw"), version))
    checks.asked[0][1](Verdict(Reason.BAD_USER_NAME_OR_PASSWORD))
    assert device.read() == [p.Connack(False, Reason.BAD_USER_NAME_OR_PASSWORD if version == 5 else 4)]
    other.drop()
    checks.asked[1][1](Verdict())
    assert world.broker.sessions == {}


@statement("4.12.0-1", "3.1.2-30")
def test_an_unknown_authentication_method_is_refused() -> None:
    device = Device(World().broker)
    assert device.connect(properties={"authentication_method": "KERBEROS"}).reason == Reason.BAD_AUTHENTICATION_METHOD
    assert device.closed


@statement("4.12.0-6", "4.12.0-7")
def test_auth_of_a_client_that_named_no_method_is_an_error() -> None:
    device = World().device()
    answers = device.send(p.Auth(0x19, Properties(authentication_method="SCRAM-SHA-256")))
    assert answers[0].reason == Reason.PROTOCOL_ERROR  # type: ignore[union-attr]
    assert device.closed


def test_mqtt_3_1_is_served() -> None:
    world = World()
    for _ in range(2):  # no session present flag: that byte is reserved
        device = Device(world.broker, 3)
        assert device.connect("dev", clean=False) == p.Connack()
        device.drop()
    assert Device(world.broker, 3).connect("") == p.Connack(False, 2)


def test_a_broker_that_stops_says_so_and_lets_nobody_in() -> None:
    world = World()
    new, old = world.device("a"), world.device("b", 4)
    world.broker.shut_down()
    assert [each.reason for each in new.read()] == [Reason.SERVER_SHUTTING_DOWN]  # type: ignore[union-attr]
    assert old.closed
    assert old.read() == []
    assert Device(world.broker).connect("c").reason == Reason.SERVER_SHUTTING_DOWN


def test_a_kicked_client_is_told_and_its_session_kept_or_ended() -> None:
    world = World()
    device = world.device("a", properties={"session_expiry": 100})
    assert world.broker.kick("a")
    assert [each.reason for each in device.read()] == [Reason.ADMINISTRATIVE_ACTION]  # type: ignore[union-attr]
    assert "a" in world.broker.sessions
    assert world.broker.kick("a", end=True)
    assert "a" not in world.broker.sessions
    assert not world.broker.kick("a")


@statement("3.1.2-24", "3.2.2-19", "3.2.2-20")
def test_no_answer_is_larger_than_the_client_takes() -> None:
    world = World(topic_alias_maximum=0, max_packet_bytes=268_435_460)
    tiny = Device(world.broker)
    assert tiny.send(p.Connect("tiny", 5, properties=p.Properties(maximum_packet_size=4))) == []
    assert tiny.closed
    assert "tiny" not in world.broker.sessions
    small = world.device("small", properties={"maximum_packet_size": 30, "session_expiry": 100})
    filters = [f"f{number}" for number in range(26)]
    (suback,) = small.subscribe(*filters[:25])
    assert isinstance(suback, p.Suback)
    assert small.send(p.Unsubscribe(2, tuple(filters))) == [p.Disconnect(Reason.PACKET_TOO_LARGE)]
    assert len(world.broker.sessions["small"].subscriptions) == 25  # nothing was done


def test_a_retained_will_with_too_many_levels_is_refused() -> None:
    device = Device(World(max_topic_levels=3).broker)
    (connack,) = device.send(p.Connect("a", 5, will=p.Will("1/2/3/4", b"x", retain=True)))
    assert isinstance(connack, p.Connack)
    assert connack.reason == Reason.TOPIC_NAME_INVALID


@pytest.mark.parametrize("version", [4, 5])
def test_a_name_that_nobody_can_check_lets_nobody_in(version: int) -> None:
    world = World(anonymous=False)
    for given in ({}, {"username": "admin"}, {"username": "admin", "password": b"x"}):
        device = Device(world.broker, version)
        (connack,) = device.send(p.Connect("a", version, **given))
        assert isinstance(connack, p.Connack)
        assert connack.reason == (Reason.NOT_AUTHORIZED if version == 5 else 5)
        assert device.closed
