"""What is data and is shown to people: payloads, keys, ids and file names are never commands to a terminal.

Whatever prints or logs goes through here: commands, and what a node, a broker or a server of channels logs.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import msgspec

__all__ = ["SURROGATE", "UNSAFE", "PlainFormatter", "as_utf8", "json_line", "visible"]

UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal would act upon instead of showing it: control characters, C1, and those that turn the direction."""
UNSAFE_JSON = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
SURROGATE = re.compile("[\ud800-\udfff]")
"""What stands in a text for a byte that is not UTF-8."""
NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def visible(text: str | bytes) -> str:
    r"""Return text for a terminal: what it would act upon is escaped.

    >>> visible("two\nlines \x1b[2J\u202e"), visible(b"\xff\x9b")
    ('two\\nlines \\x1b[2J\\u202e', '\\xff\\x9b')
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    return UNSAFE.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    code = ord(character)
    return NAMED.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def as_utf8(text: str) -> str:
    r"""Return text that can be kept as UTF-8: of a name that is not, the odd bytes are escaped.

    >>> as_utf8("pump"), as_utf8("p\udcfcmp")
    ('pump', 'p\\udcfcmp')
    """
    return SURROGATE.sub(_escaped, text)


def json_line(value: Any) -> bytes:
    r"""Return a value as one line of JSON in which no character can turn a terminal upside down.

    A name that is not UTF-8 is shown as it is elsewhere, with its odd bytes as text.

    >>> json_line({"key": "a\u202eb\x9b"})
    b'{"key":"a\\u202eb\\u009b"}\n'
    >>> json_line({"path": "a\udcff"})
    b'{"path":"a\\\\udcff"}\n'
    """
    try:
        encoded = msgspec.json.encode(value)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False, separators=(",", ":"))
        encoded = SURROGATE.sub(lambda found: f"\\\\u{ord(found[0]):04x}", text).encode()
    if not encoded.isascii() or b"\x7f" in encoded:
        encoded = UNSAFE_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", encoded.decode()).encode()
    return encoded + b"\n"


class PlainFormatter(logging.Formatter):
    r"""Formats log records: a message is one line, a traceback as many as it has, all of them escaped.

    >>> PlainFormatter().format(logging.makeLogRecord({"msg": "jobs\x1b[2J: cut\n2026 INFO all is well"}))
    'jobs\\x1b[2J: cut\\n2026 INFO all is well'
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging names it
        """Return the line of a record, without its traceback."""
        return visible(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as text."""
        return "\n".join(map(visible, super().format(record).split("\n")))
