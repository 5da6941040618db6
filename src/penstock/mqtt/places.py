"""Where a tap writes a message: a path, or a template that chooses a channel by client or topic.

    data/readings             one channel
    data/{client}             a channel for each client
    data/{1}/{3}              by levels of the topic, counted from 1

What a client or a topic says becomes one name of a file: what is not a letter, digit, dash, underscore or dot is
written as %XX, so no name leaves its folder and two names never become one.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from penstock.errors import OptionsError

__all__ = ["TapPlace", "safe_name"]

LONGEST: Final = 200
_FIELD: Final = re.compile(r"\{([^{}]*)\}")
_SAFE: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")


def safe_name(text: str) -> str:
    """Return a name of a file for any text: the same for the same text, another for another.

    >>> safe_name("pump-7"), safe_name("../x"), safe_name(""), safe_name("a b")
    ('pump-7', '%2E.%2Fx', '%', 'a%20b')
    """
    raw = text.encode()
    name = "".join(chr(byte) if byte in _SAFE else f"%{byte:02X}" for byte in raw) or "%"
    if name.startswith("."):
        name = "%2E" + name[1:]
    if ".penstock-" in name:  # names of sidecars
        name = name.replace(".penstock-", "%2Epenstock-")
    tail = name.rpartition(".")[2]
    if tail.isdigit() and "." in name:  # "ticks.7" would be a later file of the channel "ticks"
        name = name[: -len(tail) - 1] + "%2E" + tail
    if len(name) > LONGEST:
        name = name[: LONGEST - 33] + "%" + hashlib.sha256(raw).hexdigest()[:32]
    return name


class TapPlace:
    """The path of a tap, which may have fields.

    >>> place = TapPlace("data/{1}/{client}")
    >>> place.path(b"plant/7", "ann"), place.path(b"plant", "bob"), place.root
    ('data/plant/ann', 'data/plant/bob', 'data')
    >>> TapPlace("data/{topic}")
    Traceback (most recent call last):
    penstock.errors.OptionsError: data/{topic}: {topic} is no field; there are {client} and {1}, {2}, … for topic levels
    """

    def __init__(self, template: str) -> None:
        self.template = template
        parts = _FIELD.split(template)
        self._literal, self._fields = parts[0::2], parts[1::2]
        for field in self._fields:
            if field != "client" and not (field.isdigit() and int(field) >= 1):
                raise OptionsError(
                    f"{template}: {{{field}}} is no field; there are {{client}} and {{1}}, {{2}}, … for topic levels"
                )
        if any("{" in part or "}" in part for part in self._literal):
            raise OptionsError(f"{template}: a brace without its other half")
        if not template:
            raise OptionsError("a tap without a path")

    @property
    def fixed(self) -> bool:
        """Whether everything goes to one channel."""
        return not self._fields

    @property
    def root(self) -> str:
        """The folder below which all channels of a template are."""
        return self._literal[0].rpartition("/")[0] or "."

    def may_be(self, path: str) -> bool:
        """Whether a path can come from this template.

        >>> TapPlace("data/{1}-{client}").may_be("data/a-b"), TapPlace("data/{client}").may_be("data/a/b")
        (True, False)
        """
        return re.fullmatch("[^/]+".join(map(re.escape, self._literal)), path) is not None

    def path(self, topic: bytes, client: str) -> str:
        """Return where a message of a topic and a client goes."""
        if not self._fields:
            return self.template
        levels = topic.decode().split("/")
        out = [self._literal[0]]
        for field, literal in zip(self._fields, self._literal[1:], strict=True):
            if field == "client":
                out.append(safe_name(client))
            else:
                number = int(field)
                out.append(safe_name(levels[number - 1] if number <= len(levels) else ""))
            out.append(literal)
        return "".join(out)
