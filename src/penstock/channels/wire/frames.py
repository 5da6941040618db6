r"""One header line of the channel protocol, both ways.

    frame   := header LF [ payload LF ]
    header  := NAME *( SP name[":" count] "=" value *( SP value ) )
    value   := bytes without white space, or \" … \" with one of " ' : * after both backslashes

The decoder takes what the original takes and complains in its words; the encoder writes what it writes, byte for byte
(worked examples: docs/formats/channel-wire.md).  Runs of broadcasts do not come here: see kernel/channelwire.pyx.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from penstock import kernel
from penstock.channels.wire.catalogue import CATALOGUE, KINDS, LIMITS, REASONS, Field, Layout
from penstock.errors import OptionsError

__all__ = ["Frame", "BadLine", "decode_line", "encode_checked", "encode_error", "encode_frame", "encode_value"]

MALFORMED: Final = "malformed message"
SPACES: Final = frozenset(" \t\v\f\r")
QUOTES: Final = "\"':*"


class BadLine(Exception):
    """A line that breaks the protocol; the text goes into the detail of the answer.

    >>> str(BadLine("unknown message"))
    'unknown message'
    """


class Frame(msgspec.Struct):
    """One message as it came: its name, all its fields by name, and its payload.

    >>> decode_line(b"JOIN id=1 channel=!ops@localhost")
    Frame(name='JOIN', fields={'id': 1, 'channel': '!ops@localhost', 'on_behalf': None}, payload=None, size=0)
    """

    name: str
    fields: dict[str, Any]
    payload: bytes | None = None
    size: int = 0
    """What limits count: the bytes of its line and of its payload."""

    @property
    def id(self) -> int | None:
        """The number that the answer repeats."""
        return self.fields.get("id")

    @property
    def payload_bytes(self) -> int | None:
        """How long the payload that follows is, None when none does."""
        if CATALOGUE[self.name].has_payload:
            return int(self.fields["length"])
        if self.name == "S2M_FORWARD_BROADCAST_PAYLOAD_ACK" and self.fields["altered_payload"]:
            return int(self.fields["altered_payload_length"])
        return None


def decode_line(line: bytes) -> Frame:
    r"""Return what a header line (without its LF) says; BadLine if it breaks the protocol.

    >>> decode_line(b"PING  id=+7 \r").fields
    {'id': 7}
    >>> decode_line(b"PING id=x")
    Traceback (most recent call last):
    penstock.channels.wire.frames.BadLine: invalid digit found in string
    """
    name, pairs, whole = kernel.channelwire.tokenize(line)
    if name is None:
        raise BadLine(MALFORMED)
    layout = CATALOGUE.get(name.decode("ascii", "replace"))
    if layout is None:
        raise BadLine("unknown message")
    known, fields = layout.fields, layout.defaults.copy()
    for label, value in pairs:
        field = known.get(label.decode())
        if field is None:
            continue
        typed = _typed(field, value)
        if field.kind == "list" and fields[field.name]:
            fields[field.name].append(typed)
        else:
            fields[field.name] = [typed] if field.kind == "list" else typed
    if not whole:
        raise BadLine(MALFORMED)
    _check(layout, fields)
    return Frame(layout.name, fields)


def _typed(field: Field, value: bytes) -> Any:
    try:
        text = value.decode()
    except UnicodeDecodeError as exc:
        if exc.reason == "unexpected end of data":
            raise BadLine(f"incomplete utf-8 byte sequence from index {exc.start}") from None
        raise BadLine(f"invalid utf-8 sequence of {exc.end - exc.start} bytes from index {exc.start}") from None
    if field.kind in ("str", "list"):
        return text
    if field.kind == "bool":
        if text not in ("true", "false"):
            raise BadLine("provided string was not `true` or `false`")
        return text == "true"
    return _number(text, LIMITS[field.kind])


def _number(text: str, limit: int) -> int:
    if len(text) < 20 and text.isascii() and text.isdecimal():  # the common case, in one go
        if (total := int(text)) > limit:
            raise BadLine("number too large to fit in target type")
        return total
    digits = text.removeprefix("+")
    if not digits:
        raise BadLine("invalid digit found in string")
    total = 0
    for digit in digits:
        if not "0" <= digit <= "9":
            raise BadLine("invalid digit found in string")
        total = total * 10 + ord(digit) - 48
        if total > limit:
            raise BadLine("number too large to fit in target type")
    return total


def _check(layout: Layout, fields: dict[str, Any]) -> None:
    for field in layout.required:
        if not fields[field.name]:
            kind = "zero" if field.kind in LIMITS else "empty"
            raise BadLine(f"{field.label} field must be non-{kind}")
    name = layout.name
    if name == "BROADCAST" and fields["qos"] not in (None, 0, 1):
        raise BadLine(f"invalid QoS value: {fields['qos']} (must be 0 or 1)")
    if name in ("GET_CHAN_ACL", "CHAN_ACL", "SET_CHAN_ACL") and fields["type"] not in ("join", "publish", "read"):
        raise BadLine(f"invalid ACL type: {fields['type']}")
    if name == "SET_CHAN_ACL" and fields["action"] not in ("add", "remove"):
        raise BadLine(f"invalid ACL action: {fields['action']}")
    if name == "ERROR" and fields["reason"] not in REASONS:
        raise BadLine(f"unknown error reason: {fields['reason']}")
    if name == "EVENT" and fields["kind"] not in KINDS:
        raise BadLine(f"unknown event kind: {fields['kind']}")


def encode_frame(name: str, fields: dict[str, Any], payload: bytes | None = None) -> bytes:
    r"""Return the bytes of one message; fields that are absent, None or an empty list are left out.

    >>> encode_frame("ERROR", {"id": 3, "reason": "BAD_REQUEST", "detail": "no good"})
    b'ERROR id=3 detail=\\"no good\\" reason=BAD_REQUEST\n'
    >>> encode_frame("POP_ACK", {"id": 8, "timestamp": 1767225600000}, b"job-1")
    b'POP_ACK id=8 length=5 timestamp=1767225600000\njob-1\n'
    """
    layout = CATALOGUE[name]
    words = [name]
    for label, field in layout.fields.items():
        value = fields.get(label, field.default)
        if label == "length" and payload is not None:
            value = len(payload)
        if value is None:
            continue
        if field.kind == "list":
            if value:
                words.append(f"{label}:{len(value)}={' '.join(map(encode_value, value))}")
        elif field.kind == "bool":
            words.append(f"{label}={'true' if value else 'false'}")
        elif field.kind == "str":
            words.append(f"{label}={encode_value(value)}")
        else:
            words.append(f"{label}={value}")
    head = " ".join(words).encode() + b"\n"
    return head if payload is None else head + payload + b"\n"


def encode_checked(name: str, fields: dict[str, Any], payload: bytes | None = None) -> bytes:
    r"""Return the bytes of one message; OptionsError if whoever reads them would understand anything else.

    For values that a caller gives: a line end in one of them would be a message of its own.

    >>> encode_checked("JOIN", {"id": 1, "channel": "!a@localhost", "on_behalf": "bob@localhost\nDELETE"})
    Traceback (most recent call last):
    penstock.errors.OptionsError: JOIN: on_behalf='bob@localhost\nDELETE' cannot be sent
    """
    try:
        data = encode_frame(name, fields, payload)
        found = decode_line(data[: data.index(b"\n")]).fields
    except (BadLine, UnicodeError) as exc:
        raise OptionsError(f"{name}: {exc}") from None
    for label, value in fields.items():
        if value is not None and found[label] != value:
            raise OptionsError(f"{name}: {label}={value!r:.80} cannot be sent")
    return data


def encode_error(reason: str, detail: str | None = None, id: int | None = None) -> bytes:
    r"""Return an ERROR that every client can read: a detail may repeat what a peer sent, which may be anything.

    A quoted value cannot end in a backslash, nor hold all four quotes.

    >>> encode_error("BAD_REQUEST", "invalid ACL type: read\\")
    b'ERROR detail=\\"invalid ACL type: read\\" reason=BAD_REQUEST\n'
    """
    if detail is not None:
        detail = detail.rstrip("\\")
        if all(quote in detail for quote in QUOTES):
            detail = detail.replace(QUOTES[0], "")
    return encode_frame("ERROR", {"id": id, "detail": detail, "reason": reason})


def encode_value(text: str) -> str:
    r"""Return a string as it is written: bare, or quoted when it has white space in it.

    >>> print(encode_value("ann"), encode_value("two words"), encode_value('a "b"'))
    ann \"two words\" \'a "b"\'
    """
    if text and SPACES.isdisjoint(text):
        return text
    for quote in QUOTES:
        if quote not in text:
            return f"\\{quote}{text}\\{quote}"
    raise OptionsError(f"unable to escape parameter value: {text[:80]!r}")
