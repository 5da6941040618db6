"""What ``penstock mqtt sub -F`` prints: the signs of mosquitto_sub."""

from __future__ import annotations

import json
import re

import pytest

from penstock.cli.mqtt_format import parse_format
from penstock.cli.mqtt_work import Printer
from penstock.errors import OptionsError
from penstock.mqtt.client import Message
from penstock.mqtt.packets import Properties

GIVEN = Properties(
    payload_format=1, message_expiry=7, content_type="t", response_topic="r", correlation_data=b"c",
    user=(("k", "v"), ("l", "w")), subscription_ids=(3, 4),
)  # fmt: skip
MESSAGE = Message("plant/7", b"12.5", 1, True, False, GIVEN, 9)


def printed(format: str, message: Message = MESSAGE) -> str:
    return b"".join(part(message) for part in parse_format(format)).decode()


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("%t %p %q %r %l %m %%", "plant/7 12.5 1 1 4 9 %"),
        ("%x %X", "31322e35 31322E35"),
        ("%C %R %D %E %F %P %S", "t r c 7 1 k:v l:w 3 4"),
        ("%10t|%-10t|%.5t|%5q|%05m|%-4q|", "   plant/7|plant/7   |plant|    1|00009|1   |"),
        ("%7p|%-7p|%.2p", "   12.5|12.5   |12.5"),
        ("\\t\\n\\\\\\0\\a\\e\\v\\r", "\t\n\\\0\a\x1b\v\r"),
        ("@@|a@", "@|a@"),
    ],
)
def test_a_sign_prints_what_it_does_in_mosquitto_sub(format: str, text: str) -> None:
    assert printed(format) == text


def test_at_signs_are_the_time_of_arrival() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d [+-]\d{4} \d{9}", printed("@Y-@m-@dT@H:@M:@S @z @N"))


def test_json_has_mosquittos_names() -> None:
    found = json.loads(printed("%j"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z[+-]\d{4}", found.pop("tst"))
    assert {name: found[name] for name in ("topic", "qos", "retain", "payloadlen", "mid", "payload")} == {
        "topic": "plant/7", "qos": 1, "retain": 1, "payloadlen": 4, "mid": 9, "payload": "12.5",
    }  # fmt: skip
    assert found["properties"]["content-type"] == "t"
    assert found["properties"]["user-properties"] == [{"k": "v"}, {"l": "w"}]
    assert json.loads(printed("%J"))["payload"] == 12.5  # as JSON, where it is some
    assert json.loads(printed("%J", Message("a", b"no json")))["payload"] == "no json"
    assert json.loads(printed("%j", Message("a", b"\xff")))["payload_base64"] == "/w=="
    assert "mid" not in json.loads(printed("%j", Message("a", b"")))


@pytest.mark.parametrize("format", ["%y", "%", "%5", "%-", "%.", "%99999999999t"])
def test_what_means_nothing_is_said(format: str) -> None:
    with pytest.raises(OptionsError, match="-F"):
        parse_format(format)


def test_an_empty_message_is_null_with_its_topic() -> None:
    verbose = Printer(json=False, verbose=True, format=None, newline=True, live=False)
    assert verbose.line(Message("a", b"")) == b"a (null)\n"
    assert verbose.line(Message("a", b"x")) == b"a x\n"
