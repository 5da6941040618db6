"""Promise: why a message was not delivered is answerable, session by session."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mqtt_use import World

from penstock.metrics import Registry
from penstock.mqtt import packets as p
from penstock.mqtt.acl_files import parse_mosquitto
from penstock.mqtt.codec import encode
from penstock.mqtt.control import Control
from penstock.mqtt.explain import describe_session, explain
from penstock.mqtt.sys import SysTopics


def fates(world: World, topic: str, client: str | None = None) -> dict[str, tuple[str, str]]:
    return {each["client"]: (each["now"], each["why"]) for each in explain(world.broker, topic, client)["sessions"]}


def test_each_fate_is_told_with_its_reason() -> None:
    world = World(max_queued_messages=1)
    keep = {"properties": {"session_expiry": 100}}
    for name in ("here", "away", "full", "slow", "zero"):
        device = world.device(name, **keep)
        device.subscribe("a/+", qos=0 if name == "zero" else 1)
        if name in ("away", "full", "zero"):
            device.drop()
        if name == "slow":
            device.link.congested()
    pub = world.device("pub")
    pub.publish("a/b", b"1", 1, 1)
    world.device("away", clean=False, **keep).drop()
    found = fates(world, "a/b")
    assert found["here"] == ("delivered", "QoS 1 at most")
    assert found["full"][0] == "dropped"
    assert "its queue is full: 1 of 1 messages" in found["full"][1]
    assert found["away"][0] == "queued"
    assert found["zero"] == ("dropped", "it is offline and QoS 0 does not wait")
    assert found["slow"][0] == "dropped"
    pub.publish("a/b", b"2", 1, 2)
    drops = {each["client"]: each["dropped"] for each in explain(world.broker, "a/b")["sessions"]}
    assert [(drop["count"], drop["reason"]) for drop in drops["full"]] == [(1, "queue full")]
    assert drops["here"] == []


def test_a_session_that_does_not_match_is_told_why_and_case_is_pointed_out() -> None:
    world = World()
    device = world.device("dev")
    device.subscribe("Plant/+")
    now, why = fates(world, "plant/7", "dev")["dev"]
    assert now == "filtered"
    assert "'Plant/+' differs in case only" in why
    assert fates(world, "plant/7") == {}
    assert fates(world, "plant/7", "nobody") == {}


def test_the_rule_that_filters_is_named() -> None:
    class Rules:
        def allows(self, who: Any, action: str, topic: str) -> bool:
            return action != "receive"

        def rule(self, who: Any, action: str, topic: str) -> str:
            return f"line 3 denies {who.client_id} to {action}"

    world = World(access=Rules())
    world.device("dev").subscribe("a")
    assert fates(world, "a")["dev"] == ("filtered", "the rules: line 3 denies dev to receive")


def test_a_session_is_described_for_people_and_programs() -> None:
    world = World()
    device = world.device("dev", will=p.Will("w", b""), properties={"session_expiry": 100})
    device.subscribe("a", qos=1, identifier=7)
    world.device("pub").publish("a", b"", 1, 1)
    session = world.broker.sessions["dev"]
    shown = describe_session(world.broker, session, full=True)
    assert shown["subscriptions"] == [{"filter": "a", "qos": 1, "no_local": False, "identifier": 7}]
    assert (shown["inflight"], shown["will"], shown["version"]) == (1, "w", "5.0")
    device.drop()
    assert describe_session(world.broker, session)["expires_in"] == 100
    json.dumps(shown)


@pytest.mark.parametrize("line", [b"", b"nonsense", b"{}", b'{"do": "dance"}', b'{"do": "explain"}', b'{"do": "kick"}'])
def test_a_question_that_makes_no_sense_is_answered(line: bytes) -> None:
    assert set(Control(World().broker).answer(line)) == {"error"}


def test_sys_topics_say_what_was_counted_and_only_what_changed() -> None:
    world = World()
    registry = Registry()
    topics = SysTopics(world.broker, "1.2", registry)
    topics.publish()
    watcher = world.device("watcher", 4)
    watcher.subscribe("$SYS/#")
    watcher.read()
    pub = world.device("pub")
    pub.publish("a", b"12345", 1, 1)
    world.pass_(10)
    topics.publish()
    said = {m.topic.removeprefix("$SYS/broker/"): m.payload for m in watcher.messages()}
    assert said["clients/connected"] == b"2"
    assert said["publish/messages/received"] == b"1"
    assert said["publish/bytes/received"] == b"5"
    assert said["subscriptions/count"] == b"1"
    assert said["uptime"] == b"10 seconds"
    assert float(said["load/publish/received/1min"]) > 0
    assert "version" not in said
    values = {sample.name: sample.value for sample in registry.samples()}
    assert values["penstock_mqtt_publish_received"] == 1
    assert values["penstock_mqtt_clients"] == 2


def test_single_clients_have_metrics_only_on_request_and_only_so_many() -> None:
    """Promise: what waits for whom is a bounded number of series, of those for which most waits."""
    for asked in (0, 2):
        world, registry = World(client_metrics=asked), Registry()
        for number, name in enumerate(("a", "b", "c")):
            device = world.device(name, properties={"session_expiry": 100})
            device.subscribe(f"to/{name}", qos=1)
            device.drop()
            for _ in range(number):
                world.broker.publish_message(f"to/{name}", b"12", qos=1)
        SysTopics(world.broker, "1.2", registry).publish()
        found = {
            sample.labels["client"]: sample.value
            for sample in registry.samples()
            if sample.name == "penstock_mqtt_client_queued_messages"
        }
        assert found == ({"b": 1.0, "c": 2.0} if asked else {})


def test_what_keeps_a_client_from_publishing_is_told() -> None:
    acl = parse_mosquitto("user ann\ntopic read plant/#\ntopic write out/#")
    world = World(access=acl)
    world.device("dev", username="ann")

    def told(topic: str) -> str:
        (session,) = explain(world.broker, topic, "dev")["sessions"]
        return str(session["publish"])

    assert told("plant/7") == "denied: no rule mentions it; the default is deny"
    assert told("out/1") == "allowed: allow by acl line 3: 'topic write out/#'"
    assert told("$SYS/x") == "denied: only the broker itself speaks there"


def test_bytes_of_every_packet_are_counted() -> None:
    world = World()
    device = world.device("a")
    device.subscribe("t")
    device.send(p.Ping())
    device.publish("t", b"12345", 1, 1)
    seen = len(encode(device.connack, 5)) + 6 + 2 + 4 + 11  # type: ignore[attr-defined]
    assert (world.broker.counts.bytes_sent, world.broker.counts.messages_sent) == (seen, 5)


def test_memory_has_mosquittos_names() -> None:
    values = SysTopics(World().broker, "1", memory=lambda: (5, 7)).values()
    assert (values["heap/current"], values["heap/maximum"]) == ("5", "7")


def test_a_client_that_owes_acknowledgements_is_said_to_wait() -> None:
    world = World()
    device = world.device("dev", properties={"receive_maximum": 1, "session_expiry": 100})
    device.subscribe("a", qos=1)
    world.device("pub").publish("a", b"1", 1, 1)
    assert fates(world, "a")["dev"] == ("queued", "1 are unacknowledged, 0 wait before it")


def test_what_is_no_topic_cannot_be_explained() -> None:
    control = Control(World().broker)
    for topic in ("a/#", "+", "", "a\0", "x" * 65536):
        question = json.dumps({"do": "explain", "topic": topic}).encode()
        assert "is no topic of a message" in control.answer(question)["error"], topic


def test_the_most_memory_is_never_less_than_what_is_used_now() -> None:
    from penstock.mqtt.server import _memory

    held = bytearray(b"x" * (8 << 20))
    now, most = _memory()
    assert len(held) < now <= most
