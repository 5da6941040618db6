"""Promises of access rules: deny wins, names are screened, mosquitto's files mean what they mean there."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, strategies as st

from penstock.errors import OptionsError
from penstock.mqtt.acl import covers
from penstock.mqtt.acl_files import AclFile, parse_mosquitto, parse_roles
from penstock.mqtt.topics import is_filter, matches


class Who(msgspec.Struct, frozen=True):
    client_id: str
    username: str | None = None


ANN, BOB, PUMP, NOBODY = Who("c-ann", "ann"), Who("c-bob", "bob"), Who("c-7", "pump-7"), Who("c-x")

ROLES = """
everyone = ["device"]
anonymous = ["guest"]
others = ["reader"]
[users]
ann = ["operator"]
pump-7 = []
[roles.operator]
allow = ["all plant/#", "subscribe $SYS/#"]
deny = ["publish plant/+/firmware", "subscribe plant/secret/#", "receive plant/+/noise"]
[roles.device]
allow = ["publish devices/%u/#", "subscribe commands/%c/+"]
deny = ["all locked/%u/#"]
[roles.guest]
allow = ["subscribe public/#"]
[roles.reader]
allow = ["subscribe plant/#"]
"""


@pytest.mark.parametrize(
    ("who", "action", "topic", "allowed"),
    [
        (ANN, "publish", "plant/7/rpm", True),
        (ANN, "publish", "plant/7/firmware", False),
        (ANN, "publish", "other", False),
        (ANN, "subscribe", "plant/#", True),
        (ANN, "subscribe", "plant/+/rpm", True),
        (ANN, "subscribe", "$share/workers/plant/#", True),
        (ANN, "subscribe", "#", False),
        (ANN, "subscribe", "plant/secret/+", False),
        (ANN, "subscribe", "$SYS/broker/uptime", True),
        (ANN, "receive", "plant/7/rpm", True),
        (ANN, "receive", "plant/secret/key", False),
        (ANN, "receive", "plant/7/noise", False),
        (ANN, "subscribe", "plant/7/noise", True),
        (BOB, "subscribe", "plant/#", True),
        (BOB, "publish", "plant/7/rpm", False),
        (BOB, "publish", "devices/bob/x", True),
        (BOB, "publish", "devices/ann/x", False),
        (PUMP, "subscribe", "plant/#", False),
        (PUMP, "publish", "devices/pump-7/rpm", True),
        (PUMP, "subscribe", "commands/c-7/+", True),
        (PUMP, "subscribe", "commands/+/+", False),
        (PUMP, "publish", "locked/pump-7/x", False),
        (NOBODY, "subscribe", "public/news", True),
        (NOBODY, "subscribe", "plant/#", False),
        (NOBODY, "publish", "devices//x", False),
    ],
)
def test_roles_decide(who: Who, action: str, topic: str, allowed: bool) -> None:
    acl = parse_roles(ROLES)
    assert acl.allows(who, action, topic) is allowed  # type: ignore[arg-type]
    said = acl.rule(who, action, topic)  # type: ignore[arg-type]
    assert said.startswith("allow" if allowed else ("deny", "no rule"))


@pytest.mark.parametrize("name", ["+", "#", "a/b", "+/+", "x/#", "u+", ""])
def test_a_name_with_wildcards_gains_nothing_and_escapes_nothing(name: str) -> None:
    acl = parse_roles(
        'default = "deny"\neveryone = ["r"]\n[roles.r]\nallow = ["all own/%u/#", "all id/%c"]\ndeny = ["all own/%u/x"]'
    )
    who = Who(name, name)
    for topic in ("own/ann/y", "own/a/b/y", "id/c", f"own/{name}/y", f"id/{name}", "own//y"):
        assert not acl.allows(who, "publish", topic)
        assert not acl.allows(who, "subscribe", topic)
        assert not acl.allows(who, "receive", topic)
    open_acl = parse_roles('default = "allow"\neveryone = ["r"]\n[roles.r]\ndeny = ["all own/%u/#"]')
    assert not open_acl.allows(who, "publish", "own/ann/x")  # a deny takes too much rather than too little


def test_the_default_may_be_allow_and_a_deny_still_wins() -> None:
    acl = parse_roles('default = "allow"\neveryone = ["r"]\n[roles.r]\ndeny = ["subscribe test/nosubscribe"]')
    assert not acl.allows(ANN, "subscribe", "test/nosubscribe")
    assert acl.allows(ANN, "publish", "test/nosubscribe")
    assert acl.allows(ANN, "subscribe", "test/#")
    assert not acl.allows(ANN, "receive", "test/nosubscribe")


MOSQUITTO = """
# anonymous
topic read public/#

user ann
topic plant/#
topic deny plant/secret
topic read $SYS/#
topic write in/%u

user bob smith
topic readwrite bob
topic write a topic with spaces

pattern write devices/%u/#
pattern read commands/%c
pattern deny devices/%u/locked
"""


@pytest.mark.parametrize(
    ("who", "action", "topic", "allowed"),
    [
        (NOBODY, "receive", "public/news", True),
        (NOBODY, "publish", "public/news", False),
        (ANN, "receive", "public/news", False),
        (ANN, "publish", "plant/7", True),
        (ANN, "receive", "plant/7", True),
        (ANN, "publish", "plant/secret", False),
        (ANN, "receive", "plant/secret", False),
        (ANN, "receive", "$SYS/broker/uptime", True),
        (ANN, "publish", "$SYS/broker/uptime", False),
        (ANN, "publish", "in/%u", True),
        (ANN, "publish", "in/ann", False),
        (ANN, "subscribe", "anything/#", True),
        (Who("c", "bob smith"), "receive", "bob", True),
        (Who("c", "bob smith"), "publish", "a topic with spaces", True),
        (PUMP, "publish", "devices/pump-7/rpm", True),
        (PUMP, "publish", "devices/pump-7/locked", False),
        (PUMP, "receive", "devices/pump-7/rpm", False),
        (PUMP, "receive", "commands/c-7", True),
        (Who("#", "#"), "publish", "devices/#/x", False),
    ],
)
def test_the_acl_file_of_mosquitto_is_read_as_it_is(who: Who, action: str, topic: str, allowed: bool) -> None:
    assert parse_mosquitto(MOSQUITTO).allows(who, action, topic) is allowed  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("topik read a", "line 1"),
        ("topic", "line 1"),
        ("user ann\ntopic read a/#/b", "line 2"),
        ("user", "line 1"),
    ],
)
def test_a_line_that_mosquitto_would_not_read_is_refused_with_its_number(text: str, words: str) -> None:
    with pytest.raises(OptionsError, match=words):
        parse_mosquitto(text)


@pytest.mark.parametrize(
    "text",
    [
        "default = 'maybe'",
        "roles = 3",
        "everyone = ['nobody']",
        "[roles.a]\nallow = ['publish']",
        "[roles.a]\nallow = ['publish a/#/b']",
        "[roles.a]\nalow = []",
        "not toml",
    ],
)
def test_roles_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(OptionsError, match="acl"):
        parse_roles(text)


@pytest.mark.parametrize("name", ["acl.toml", "acl"])
def test_a_bad_file_keeps_the_old_rules_loudly(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    good = ROLES if name.endswith("toml") else MOSQUITTO
    path = tmp_path / name
    path.write_text(good)
    file = AclFile(str(path))
    assert file.allows(ANN, "publish", "plant/7")
    path.write_text("nonsense")
    assert file.reload() is not None
    assert "NOT replaced" in caplog.text
    assert file.allows(ANN, "publish", "plant/7")
    path.unlink()
    assert "No such file" in str(file.reload())
    path.write_text(good.replace("plant", "works"))
    assert file.reload() is None
    assert not file.allows(ANN, "publish", "plant/7")
    assert "works" in file.rule(ANN, "publish", "works/7")


LEVELS = st.lists(st.sampled_from(["a", "b", "+", "#", "$x", ""]), min_size=1, max_size=4)
TOPICS = st.lists(st.sampled_from(["a", "b", "$x", ""]), min_size=1, max_size=5).map("/".join)


@given(LEVELS.map("/".join).filter(is_filter), LEVELS.map("/".join).filter(is_filter), st.lists(TOPICS, max_size=30))
def test_what_covers_a_filter_matches_all_it_matches(wide: str, narrow: str, topics: list[str]) -> None:
    if covers(wide.split("/"), narrow.split("/")):
        assert all(matches(wide, topic) for topic in topics if topic and matches(narrow, topic))


@given(LEVELS.map("/".join).filter(is_filter))
def test_a_filter_covers_itself(filter: str) -> None:
    assert covers(filter.split("/"), filter.split("/"))
