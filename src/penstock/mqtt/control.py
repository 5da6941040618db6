"""Questions to a running broker: one JSON object a line over a unix socket beside its data.

    {"do": "sessions"}   {"do": "session", "client": "pump-7"}   {"do": "kick", "client": "pump-7", "end": false}
    {"do": "explain", "topic": "a/b", "client": null}   {"do": "backup", "path": "/somewhere/else"}

Each is answered by one line: ``{"ok": …}`` or ``{"error": "…"}``.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.errors import NotConnected, OptionsError
from penstock.mqtt.explain import describe_session, explain
from penstock.mqtt.topics import is_topic
from penstock.net.unixpath import short_path

if TYPE_CHECKING:
    from penstock.mqtt.broker import Broker
    from penstock.net.connection import Connection

__all__ = ["Control", "Question", "ask", "SOCKET"]

SOCKET: Final = "mqtt.sock"
"""The name of the socket in the data directory."""

LONGEST: Final = 1 << 20


class Question(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One line to the broker."""

    do: str
    client: str | None = None
    topic: str | None = None
    path: str | None = None
    end: bool = False


class Control:
    """The core of one such connection."""

    def __init__(self, broker: Broker, later: Callable[[Question, Callable[[Any], None]], bool] | None = None) -> None:
        """``later`` takes questions that need time; it says whether it took one, and answers when it can."""
        self._broker, self._later = broker, later
        self._connection: Connection
        self._unread = b""

    def opened(self, connection: Connection) -> None:
        """Begin."""
        self._connection = connection

    def received(self, data: bytes) -> None:
        """Answer every whole line."""
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            if not self._takes_time(line):
                self._say(self.answer(line))
        if len(self._unread) > LONGEST:
            self._connection.abort(f"a line of more than {LONGEST} bytes")

    def _say(self, answer: Any) -> None:
        self._connection.write(msgspec.json.encode(answer) + b"\n")

    def _takes_time(self, line: bytes) -> bool:
        if self._later is None:
            return False
        try:
            question = msgspec.json.decode(line, type=Question)
        except msgspec.DecodeError:
            return False
        return self._later(question, self._say)

    def congested(self) -> None:
        """Read no further questions while answers wait."""
        self._connection.pause_reading()

    def writable(self) -> None:
        """Go on."""
        self._connection.resume_reading()

    def expired(self) -> None:
        """Nothing has a deadline here."""

    def closed(self, reason: str) -> None:
        """Nothing is left behind."""

    def answer(self, line: bytes) -> dict[str, Any]:
        """Return the answer to one line; whatever is wrong with it is said."""
        broker = self._broker
        try:
            question = msgspec.json.decode(line, type=Question)
        except msgspec.DecodeError as exc:
            return {"error": f"not a question: {exc}"}
        session = broker.sessions.get(question.client) if question.client is not None else None
        match question.do:
            case "sessions":
                return {"ok": [describe_session(broker, each) for each in broker.sessions.values()]}
            case "explain" if question.topic is not None:
                if not is_topic(question.topic):
                    return {"error": f"{question.topic[:100]!r} is no topic of a message"}
                return {"ok": explain(broker, question.topic, question.client)}
            case "session" if session is not None:
                return {"ok": describe_session(broker, session, full=True)}
            case "kick" if session is not None:
                broker.kick(session.client_id, end=question.end)
                return {"ok": True}
            case "session" | "kick":
                return {"error": f"there is no session {question.client!r}"}
        return {"error": f"{question.do!r} is no question"}


def ask(path: str, question: Question, seconds: float = 30.0) -> Any:
    """Ask the broker behind a socket and return its answer."""
    try:
        with socket.socket(socket.AF_UNIX) as sock, short_path(path) as short:
            sock.settimeout(seconds)
            sock.connect(short)
            sock.sendall(msgspec.json.encode(question) + b"\n")
            with sock.makefile("rb") as stream:
                line = stream.readline()
    except (FileNotFoundError, ConnectionRefusedError):
        raise NotConnected(f"{path}: no broker serves this data directory") from None
    if not line:
        raise NotConnected(f"{path}: the broker did not answer")
    answer = msgspec.json.decode(line)
    if "error" in answer:
        raise OptionsError(answer["error"])
    return answer["ok"]
