r"""The format of ``penstock mqtt sub -F``, which is mosquitto_sub's.

    format := ( "%" ["-" | "0"] [width] ["." precision] sign | "@" time | "\" escape | character )*

A width pads on the left, with ``-`` on the right; a precision cuts text, but not the payload.  ``@Y`` and its like are
the time of arrival as strftime has it, ``@N`` its nanoseconds.
"""

from __future__ import annotations

import base64
import datetime as dt
import re
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from penstock.errors import OptionsError
from penstock.mqtt.client import Message
from penstock.shown import json_line

__all__ = ["parse_format"]

Part = Callable[[Message], bytes]

LONGEST: Final = 10_000
_SIGN: Final = re.compile(r"%([-0]?)(\d*)(?:\.(\d+))?(.?)", re.DOTALL)
_ESCAPES: Final = {
    "0": b"\0", "a": b"\a", "e": b"\x1b", "n": b"\n", "r": b"\r", "t": b"\t", "v": b"\v", "\\": b"\\",
}  # fmt: skip
_TIMES: Final = frozenset("aAbBcCdDeFgGhHIjklmMnprRsStTuUVwWxXyYzZ")


def parse_format(text: str) -> list[Part]:
    r"""Return what prints each part of a format.

    >>> parts = parse_format("%t=%p (%q)\\n")
    >>> b"".join(part(Message("a", b"x", 1)) for part in parts)
    b'a=x (1)\n'
    """
    parts: list[Part] = []
    at = 0
    while at < len(text):
        sign, following = text[at], text[at + 1 : at + 2]
        if sign == "%":
            found = _SIGN.match(text, at)
            assert found is not None
            parts.append(_sized(*found.groups()))
            at = found.end()
        elif sign == "@" and (following == "@" or following == "N" or following in _TIMES) and following:
            parts.append(_at(following))
            at += 2
        elif sign == "\\" and following in _ESCAPES:
            parts.append(_plain(_ESCAPES[following]))
            at += 2
        else:
            parts.append(_plain(sign.encode()))
            at += 1
    return parts


def _plain(raw: bytes) -> Part:
    return lambda _: raw


def _at(sign: str) -> Part:
    if sign == "@":
        return _plain(b"@")
    if sign == "N":
        return lambda _: b"%09d" % (time.time_ns() % 1_000_000_000)
    return lambda _: _now().strftime(f"%{sign}").encode()


def _now() -> dt.datetime:
    return dt.datetime.now().astimezone()


def _sized(flag: str, width: str, precision: str | None, sign: str) -> Part:
    part = _SIGNS.get(sign)
    if part is None:
        raise OptionsError(f"-F: %{sign} means nothing; known are {' '.join('%' + name for name in _SIGNS)}")
    if not width and precision is None:
        return part
    size, most = int(width or 0), None if precision is None or sign == "p" else int(precision)
    if size > LONGEST:
        raise OptionsError(f"-F: a width of {size}; at most {LONGEST}")
    filled = b"0" if flag == "0" and sign in "AEFlmqrS" else b" "

    def sized(message: Message) -> bytes:
        raw = part(message)
        if most is not None:
            raw = raw.decode(errors="replace")[:most].encode()
        lack = size - len(raw.decode(errors="replace"))
        if lack <= 0:
            return raw
        return raw + b" " * lack if flag == "-" else filled * lack + raw

    return sized


def _optional(value: Any) -> bytes:
    return b"" if value is None else b"%d" % value


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.hex()


def _json(message: Message, *, parsed: bool) -> bytes:
    """Return a message as an object with mosquitto's names."""
    now = _now()
    found: dict[str, Any] = {
        "tst": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ%z"),
        "topic": message.topic,
        "qos": message.qos,
        "retain": int(message.retain),
        "payloadlen": len(message.payload),
    }
    if message.qos:
        found["mid"] = message.packet_id
    given = message.properties
    properties: dict[str, Any] = {
        "content-type": given.content_type,
        "response-topic": given.response_topic,
        "message-expiry-interval": given.message_expiry,
        "payload-format-indicator": given.payload_format,
        "correlation-data": None if given.correlation_data is None else _text(given.correlation_data),
        "user-properties": [{name: value} for name, value in given.user] or None,
        "subscription-identifier": list(given.subscription_ids) or None,
    }
    if properties := {name: value for name, value in properties.items() if value is not None}:
        found["properties"] = properties
    try:
        found["payload"] = message.payload.decode()
    except UnicodeDecodeError:
        found["payload_base64"] = base64.b64encode(message.payload).decode()
    else:
        if parsed:
            try:
                found["payload"] = msgspec.json.decode(message.payload)
            except (msgspec.DecodeError, RecursionError):
                pass  # it stays text
    return json_line(found)[:-1]


_SIGNS: Final[dict[str, Part]] = {
    "%": _plain(b"%"),
    "t": lambda m: m.topic.encode(),
    "p": lambda m: m.payload,
    "q": lambda m: b"%d" % m.qos,
    "r": lambda m: b"%d" % m.retain,
    "l": lambda m: b"%d" % len(m.payload),
    "m": lambda m: b"%d" % m.packet_id,
    "x": lambda m: m.payload.hex().encode(),
    "X": lambda m: m.payload.hex().upper().encode(),
    "j": lambda m: _json(m, parsed=False),
    "J": lambda m: _json(m, parsed=True),
    "I": lambda _: _now().strftime("%Y-%m-%dT%H:%M:%S%z").encode(),
    "U": lambda _: b"%.9f" % time.time(),
    "A": lambda m: _optional(m.properties.topic_alias),
    "C": lambda m: (m.properties.content_type or "").encode(),
    "D": lambda m: m.properties.correlation_data or b"",
    "E": lambda m: _optional(m.properties.message_expiry),
    "F": lambda m: _optional(m.properties.payload_format),
    "P": lambda m: " ".join(f"{name}:{value}" for name, value in m.properties.user).encode(),
    "R": lambda m: (m.properties.response_topic or "").encode(),
    "S": lambda m: b" ".join(b"%d" % number for number in m.properties.subscription_ids),
}
