"""What ``penstock mqtt pub`` and ``sub`` do."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from penstock.cli.mqtt_format import parse_format
from penstock.cli.output import emit_lines, json_line
from penstock.errors import OptionsError
from penstock.mqtt.client import Client, ClientOptions, Message
from penstock.mqtt.packets import Filter
from penstock.net.dial import Target

__all__ = ["Printer", "Where", "publish", "subscribe"]


class Where(msgspec.Struct, kw_only=True):
    """What the options say about the broker."""

    host: str
    port: int | None
    unix: str | None
    client_id: str
    version: int
    keep_alive: int
    user: str | None
    password: str | None
    cafile: str | None
    cert: str | None
    key: str | None
    insecure: bool
    keep_session: bool = False
    session_expiry: int = 0

    def client(self) -> Client:
        """Return a client that has not connected yet."""
        target = self._target()
        options = ClientOptions(
            client_id=self.client_id,
            version=self.version,
            clean=not self.keep_session,
            session_expiry=self.session_expiry if self.version == 5 else 0,
            keep_alive=self.keep_alive,
            username=self.user,
            password=self.password,
            tls=self._context() if target.tls else None,
        )
        return Client(target, options)

    def _target(self) -> Target:
        if self.unix is not None:
            return Target(path=self.unix)
        if "://" in self.host:
            target = Target.parse(self.host)
            return target if self.port is None else msgspec.structs.replace(target, port=self.port)
        tls = self.cafile is not None or self.cert is not None
        return Target(host=self.host, port=self.port if self.port is not None else 8883 if tls else 1883, tls=tls)

    def _context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.cafile)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as exc:
            raise OptionsError(f"{self.cafile or self.cert}: {exc.strerror or exc}") from exc
        if self.insecure:
            context.check_hostname = False
        return context


async def publish(where: Where, topic: str, payloads: Sequence[bytes] | None, qos: int, retain: bool) -> int:
    """Send messages, or the lines of stdin where there are none; return how many."""
    async with where.client() as client:
        if payloads is not None:
            await client.publish_many(topic, payloads, qos=qos, retain=retain)
            return len(payloads)
        count, loop = 0, asyncio.get_running_loop()
        while lines := await loop.run_in_executor(None, _some_lines):
            await client.publish_many(topic, [line.removesuffix(b"\n") for line in lines], qos=qos, retain=retain)
            count += len(lines)
        return count


def _some_lines() -> list[bytes]:
    """Return the lines that are there, at least one; none at the end."""
    stdin: Any = sys.stdin.buffer
    first = stdin.readline()
    if not first:
        return []
    ready = stdin.peek(1) if not sys.stdin.isatty() else b""
    whole = ready.rfind(b"\n") + 1
    return [first, *stdin.read(whole).removesuffix(b"\n").split(b"\n")] if whole else [first]


class Printer:
    """How messages are printed."""

    def __init__(self, *, json: bool, verbose: bool, format: str | None, newline: bool, live: bool) -> None:
        self.live = live
        end = b"\n" if newline else b""
        if json:
            self.line: Callable[[Message], bytes] = lambda message: json_line(row(message))
        elif format is not None:
            parts = parse_format(format)
            self.line = lambda message: b"".join(part(message) for part in parts) + end
        elif verbose:
            self.line = lambda message: message.topic.encode() + b" " + (message.payload or b"(null)") + end
        else:
            self.line = lambda message: message.payload + end


async def subscribe(
    where: Where, topics: Sequence[str], qos: int, count: int | None, seconds: float | None, printer: Printer
) -> str | None:
    """Print what comes; return what went wrong, if anything did."""
    async with where.client() as client:
        handling = 2 if printer.live and where.version == 5 else 0
        filters = [Filter(topic, qos, retain_handling=handling) for topic in topics]
        refused = [topic for topic, code in zip(topics, await client.subscribe(*filters), strict=True) if code >= 0x80]
        if refused:
            return f"penstock: not subscribed to {', '.join(refused)}"
        left = count
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                async for message in client.messages():
                    if printer.live and message.retain:
                        continue
                    emit_lines([printer.line(message)])
                    if left is not None:
                        left -= 1
                        if not left:
                            return None
        if left and seconds is not None:
            return f"penstock: {left} of {count} messages did not come within {seconds:g} s"
    return None


def row(message: Message) -> dict[str, Any]:
    """Return a message as an object for JSON.

    >>> row(Message("plant/7", b"12", qos=1))
    {'topic': 'plant/7', 'qos': 1, 'retain': False, 'payload': '12'}
    """
    found: dict[str, Any] = {"topic": message.topic, "qos": message.qos, "retain": message.retain}
    properties: dict[str, Any] = {
        name: [list(pair) for pair in value] if name == "user" else value
        for name, value in msgspec.structs.asdict(message.properties).items()
        if value not in (None, ())
    }
    if properties:
        if "correlation_data" in properties:
            properties["correlation_data"] = base64.b64encode(properties["correlation_data"]).decode()
        found["properties"] = properties
    try:
        found["payload"] = message.payload.decode()
    except UnicodeDecodeError:
        found["payload_base64"] = base64.b64encode(message.payload).decode()
    return found
