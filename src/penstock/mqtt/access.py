"""The seams to who may come in and who may do what.  No rule is in here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from penstock.mqtt.packets import Connect
from penstock.mqtt.reasons import Reason

__all__ = ["Who", "Access", "Verdict", "Authenticator", "Method", "Conversation", "Action"]

Action = Literal["publish", "subscribe", "receive"]


class Who(msgspec.Struct, frozen=True):
    """A client, as rules see it."""

    client_id: str
    username: str | None = None
    address: str = ""


class Access(Protocol):
    """Rules about topics.  Asked once for a client and a topic and remembered; ``Broker.rules_changed`` forgets."""

    def allows(self, who: Who, action: Action, topic: str) -> bool:
        """Whether it may publish to a topic, subscribe to a filter or receive a topic."""

    def rule(self, who: Who, action: Action, topic: str) -> str:
        """Return the rule that decides, for people."""


class Verdict(msgspec.Struct, frozen=True):
    """Whether a client is let in, and under which name."""

    reason: Reason = Reason.SUCCESS
    username: str | None = None
    detail: str = ""


class Authenticator(Protocol):
    """Checks the credentials of a CONNECT; may answer later, from the same loop."""

    def check(self, connect: Connect, address: str, identity: str | None, answer: Callable[[Verdict], None]) -> None:
        """Call ``answer`` once."""


class Conversation(Protocol):
    """One enhanced authentication; sans-IO."""

    username: str | None

    def step(self, data: bytes | None) -> tuple[bool, bytes | None]:
        """Return (whether it is done, what to send); raise Refused to let nobody in."""


class Method(Protocol):
    """A method of enhanced authentication, by the name that clients ask for."""

    def begin(self) -> Conversation:
        """Start a conversation."""
