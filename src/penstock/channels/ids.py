"""Names: members (NIDs), channel handlers and channel ids.

    nid        := username "@" domain | domain        the second form is a server, its username is empty
    channel id := "!" handler "@" domain

Nothing is folded or normalised.  NIDs are ordered by (username, domain), each as bytes, and not by their joined
text: ``a@x.io`` comes before ``a.b@x.io``.  UTF-8 keeps the order of code points, so comparing the tuple of
strings gives that order.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from penstock.channels.username import is_username
from penstock.errors import OptionsError

__all__ = ["Nid", "ChannelId", "is_handler", "is_domain"]

HANDLER = re.compile(r"[A-Za-z0-9/]{1,256}", re.ASCII)
DOMAIN = re.compile(
    r"(?:(?:[a-zA-Z0-9-]{1,63}\.)+[a-zA-Z]{2,63}|\[[0-9a-fA-F:]+\]|\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3})(?::\d{1,5})?"
)
DOMAIN_MAX_BYTES = 253


def is_handler(text: str) -> bool:
    """Say whether ``text`` may name a channel.

    >>> is_handler("ops/east"), is_handler("ops east"), is_handler("")
    (True, False, False)
    """
    return HANDLER.fullmatch(text) is not None


@lru_cache(4096)
def is_domain(text: str) -> bool:
    """Say whether ``text`` is a domain: localhost, a name with a dot, or an address, maybe with a port.

    >>> is_domain("localhost"), is_domain("x.io:80"), is_domain("nodot")
    (True, True, False)
    """
    if text == "localhost":
        return True
    return len(text.encode(errors="replace")) <= DOMAIN_MAX_BYTES and DOMAIN.fullmatch(text) is not None


class Nid(NamedTuple):
    """A member: who, at which domain.  A server has an empty username.

    >>> Nid.parse("ann@localhost")
    Nid(username='ann', domain='localhost')
    >>> str(Nid.parse("example.com")), Nid.parse("a@x.io") < Nid.parse("a.b@x.io")
    ('example.com', True)
    """

    username: str
    domain: str

    @classmethod
    def parse(cls, text: str) -> Nid:
        """Return the NID that ``text`` spells; OptionsError if it is none."""
        found = _parse(text)
        if found is None:
            raise OptionsError(f"invalid NID format: {text[:80]!r}")
        return found

    def __str__(self) -> str:
        return f"{self.username}@{self.domain}" if self.username else self.domain


@lru_cache(65_536)
def _parse(text: str) -> Nid | None:
    username, at, domain = text.partition("@")
    if not at:
        return Nid("", text) if is_domain(text) else None
    return Nid(username, domain) if is_username(username) and is_domain(domain) else None


class ChannelId(NamedTuple):
    """A channel as clients name it: the handler and the domain that serves it.

    >>> ChannelId.parse("!ops/east@localhost")
    ChannelId(handler='ops/east', domain='localhost')
    >>> str(ChannelId("jobs", "x.io"))
    '!jobs@x.io'
    """

    handler: str
    domain: str

    @classmethod
    def parse(cls, text: str) -> ChannelId:
        """Return the channel id that ``text`` spells; OptionsError if it is none."""
        handler, at, domain = text[1:].partition("@")
        if text[:1] != "!" or not at or not is_handler(handler) or not is_domain(domain):
            raise OptionsError(f"invalid channel ID format: {text[:80]!r}")
        return cls(handler, domain)

    def __str__(self) -> str:
        return f"!{self.handler}@{self.domain}"
