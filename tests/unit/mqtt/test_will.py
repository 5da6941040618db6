"""Promises about wills: when they are published, when not, and what they carry."""

from __future__ import annotations

import pytest
from mqtt_statements import statement
from mqtt_use import Device, World

from penstock.mqtt import packets as p
from penstock.mqtt.packets import Properties
from penstock.mqtt.reasons import Reason

BOTH = pytest.mark.parametrize("version", [4, 5])


def watched(**options: object) -> tuple[World, Device]:
    world = World(**options)
    watcher = world.device("watcher")
    watcher.subscribe(p.Filter("w", 2, retain_as_published=True))
    return world, watcher


@statement("3.1.2-7", "3.1.2-8", "3.1.2-10", v3=("3.1.2-8", "3.1.2-10", "3.1.2-9", "3.1.2-12"))
@BOTH
def test_a_will_is_published_when_the_connection_is_lost_and_not_after_disconnect(version: int) -> None:
    world, watcher = watched()
    world.device("a", version, will=p.Will("w", b"lost")).drop()
    assert watcher.payloads() == [b"lost"]
    world.device("a", version, will=p.Will("w", b"lost")).bye()
    assert watcher.payloads() == []


@statement("3.14.4-3", "3.1.2-8")
@pytest.mark.parametrize(("reason", "fires"), [(0x00, False), (0x04, True), (0x80, True), (0x81, True)])
def test_the_reason_of_disconnect_says_what_becomes_of_the_will(reason: int, fires: bool) -> None:
    world, watcher = watched()
    world.device("a", will=p.Will("w", b"x")).bye(reason)
    assert bool(watcher.messages()) == fires


@statement("3.1.2-8", v3="3.1.2-8")
@BOTH
def test_a_will_is_published_when_the_server_closes(version: int) -> None:
    world, watcher = watched()
    device = world.device("a", version, will=p.Will("w", b"x"))
    device.send_raw(b"\x00\x00")
    assert watcher.payloads() == [b"x"]
    device.link.closed("")
    assert watcher.payloads() == []


@statement("3.1.2-14", "3.1.2-15", v3=("3.1.2-16", "3.1.2-17"))
@BOTH
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("retain", [False, True])
def test_qos_and_retain_of_the_will_are_honoured(version: int, qos: int, retain: bool) -> None:
    world, watcher = watched()
    world.device("a", version, will=p.Will("w", b"x", qos, retain)).drop()
    assert [(m.qos, m.retain) for m in watcher.messages()] == [(qos, retain)]
    assert len(world.broker.retained) == retain


@statement("3.1.3-10", "3.1.3-11", "3.1.3-12")
def test_the_properties_of_a_will_travel_in_order_and_its_expiry_begins_when_it_is_published() -> None:
    world, watcher = watched()
    properties = Properties(
        will_delay=5, message_expiry=60, content_type="text/plain", payload_format=1, user=(("b", "1"), ("a", "2"))
    )
    world.device("a", will=p.Will("w", b"x", properties=properties), properties={"session_expiry": 100}).drop()
    world.pass_(6)
    (message,) = watcher.messages()
    assert message.properties == Properties(
        message_expiry=60, content_type="text/plain", payload_format=1, user=(("b", "1"), ("a", "2"))
    )


@statement("3.1.3-9", "3.1.2-9")
def test_a_client_that_comes_back_in_time_cancels_its_will() -> None:
    world, watcher = watched()
    given = {"will": p.Will("w", b"x", properties=Properties(will_delay=10)), "properties": {"session_expiry": 100}}
    world.device("a", **given).drop()
    world.pass_(5)
    device = world.device("a", clean=False, **given)
    world.pass_(20)
    assert watcher.messages() == []
    device.drop()
    world.pass_(11)
    assert watcher.payloads() == [b"x"]


@pytest.mark.parametrize(("delay", "expiry", "due"), [(3, 5, 3), (5, 0, 0), (5, 2, 2), (0, 5, 0)])
def test_a_will_waits_for_its_delay_or_the_end_of_the_session_whichever_is_first(
    delay: int, expiry: int, due: int
) -> None:
    world, watcher = watched()
    given = {
        "will": p.Will("w", b"x", properties=Properties(will_delay=delay)),
        "properties": {"session_expiry": expiry},
    }
    world.device("a", **given).drop()
    if due:
        world.pass_(due - 0.5)
        assert watcher.messages() == []
        world.pass_(1)
    assert watcher.payloads() == [b"x"]
    world.pass_(100)
    assert watcher.messages() == []


def test_a_takeover_publishes_the_will_unless_its_delay_still_runs() -> None:
    world, watcher = watched()
    world.device("a", will=p.Will("w", b"no delay"), properties={"session_expiry": 100})
    world.device("a", clean=False)
    assert watcher.payloads() == [b"no delay"]
    delayed = {
        "will": p.Will("w", b"delay", properties=Properties(will_delay=50)),
        "properties": {"session_expiry": 100},
    }
    world.device("b", **delayed)
    world.device("b", clean=False)
    assert watcher.messages() == []
    world.device("c", **delayed)
    world.device("c", clean=True)
    assert watcher.payloads() == [b"delay"]


@statement("3.1.2-9", v3="3.1.2-9")
def test_a_will_needs_a_topic() -> None:
    for topic in ("", "a/#", "+"):
        device = Device(World().broker, 4)
        device.send(p.Connect("a", 4, will=p.Will(topic, b"")))
        assert device.closed


def test_a_will_that_is_not_allowed_is_not_published() -> None:
    class Never:
        def allows(self, who: object, action: str, topic: str) -> bool:
            return action != "publish"

        def rule(self, who: object, action: str, topic: str) -> str:
            return "never"

    world, watcher = watched(access=Never())
    world.device("a", will=p.Will("w", b"x")).drop()
    assert watcher.messages() == []


def test_a_broker_that_stops_publishes_wills() -> None:
    world, watcher = watched()
    world.device("a", will=p.Will("w", b"x"))
    world.broker.shut_down()
    payloads = [each.payload for each in watcher.read() if isinstance(each, p.Publish)]
    assert payloads in ([b"x"], [])  # the watcher may be disconnected first


def test_the_will_of_a_kicked_client_is_published() -> None:
    world, watcher = watched()
    world.device("a", will=p.Will("w", b"x"))
    world.broker.kick("a", Reason.ADMINISTRATIVE_ACTION)
    assert watcher.payloads() == [b"x"]


def test_a_will_about_the_broker_itself_is_not_published() -> None:
    world, watcher = watched()
    watcher.subscribe("$SYS/#")
    world.device("a", will=p.Will("$SYS/broker/version", b"mine", retain=True)).drop()
    assert watcher.messages() == []
    assert world.broker.retained.get(b"$SYS/broker/version") is None
    assert world.broker.counts.dropped == {"not authorized": 1}
