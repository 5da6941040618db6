"""Modulators in processes of their own, over the original's S2M and M2S links, both ways.

RemoteModulator     our server asks a modulator of the original's kind
ModulatorServer     a modulator of ours serves any server of that kind, the original among them
direct_service      what our server offers to modulators that send payloads to clients
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

from penstock.channels import commands as c
from penstock.channels.ids import ChannelId, Nid
from penstock.channels.wire import counts
from penstock.channels.wire.dialogue import Dialogue
from penstock.channels.wire.frames import Frame, encode_frame
from penstock.channels.wire.modulator import Challenge, Moderation, ModulatorFailed
from penstock.channels.wire.options import ModulatorLink
from penstock.channels.wire.peer import PeerShell, Service
from penstock.channels.wire.settings import WireSettings
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import ClosedError, NotConnected, OptionsError, PenstockError, Refused
from penstock.lifecycle import Health, State
from penstock.net import Endpoint, Listeners, Target, dial, listen

__all__ = ["RemoteModulator", "ModulatorServer", "direct_service", "endpoint_of", "send_direct"]

_log = logging.getLogger(__name__)

BITS: Final = {"authenticate": 1, "transform": 2, "on_event": 4, "direct": 8}
RECEIVES: Final = 16
"""The bit of a modulator that sends payloads to clients."""
NEEDED: Final = {
    "S2M_AUTH": BITS["authenticate"], "S2M_FORWARD_EVENT": BITS["on_event"],
    "S2M_FORWARD_BROADCAST_PAYLOAD": BITS["transform"], "S2M_MOD_DIRECT": BITS["direct"],
}  # fmt: skip
"""What a modulator must offer to be sent a message."""


def _target(link: ModulatorLink) -> Target:
    if link.socket_path:
        return Target(path=link.socket_path)
    if not link.address:
        raise OptionsError("modulator.s2m-client: give address or socket_path")
    return Target.parse(link.address, {"tcp": 22_623})


class RemoteModulator:
    """A modulator at the other end of an S2M link; use it where a modulator is wanted, after ``start``."""

    def __init__(self, link: ModulatorLink) -> None:
        self._link, self._place = link, _target(link)
        self.protocol = ""
        self.operations: tuple[str, ...] = ()
        self.limits: dict[str, int] = {}
        self._dialogue: Dialogue | None = None
        self._dialling = asyncio.Lock()

    async def start(self) -> None:
        """Connect, trying a few times; NotConnected if nobody answers."""
        await self._connected()

    async def close(self) -> None:
        """End the link."""
        dialogue, self._dialogue = self._dialogue, None
        if dialogue is not None:
            dialogue._connection.close("the server stops")
            await dialogue.gone.wait()

    # --- What a modulator does

    async def authenticate(self, token: str) -> str | Challenge | None:
        """Ask who is behind a token."""
        answer = (await self._ask("authenticate", "S2M_AUTH", token=token)).fields
        if answer["succeeded"]:
            if not answer["username"]:
                raise ModulatorFailed("authenticate", "it named nobody")
            return str(answer["username"])
        return Challenge(answer["challenge"]) if answer["challenge"] else None

    async def transform(self, nid: Nid, channel: ChannelId, payload: bytes) -> bytes | None:
        """Show a payload."""
        answer = await self._ask(
            "transform", "S2M_FORWARD_BROADCAST_PAYLOAD", payload, channel=channel.handler, **{"from": str(nid)}
        )
        if not answer.fields["valid"]:
            return None
        return answer.payload if answer.fields["altered_payload"] else payload

    async def transform_many(
        self, nid: Nid, channel: ChannelId, payloads: Sequence[bytes]
    ) -> list[bytes | ModulatorFailed | None]:
        """Show many payloads, as many at a time as the modulator takes."""
        asked = [self.transform(nid, channel, payload) for payload in payloads]
        found = await asyncio.gather(*asked, return_exceptions=True)
        return [
            ModulatorFailed("transform", repr(one))
            if isinstance(one, BaseException) and not isinstance(one, ModulatorFailed)
            else one
            for one in found
        ]

    async def on_event(self, event: c.Event) -> None:
        """Tell an event."""
        nid = None if event.nid is None else str(event.nid)
        fields: dict[str, Any] = {"channel": str(event.channel), "kind": event.kind, "nid": nid, "owner": event.owner}
        await self._ask("on_event", "S2M_FORWARD_EVENT", **fields)

    async def direct(self, nid: Nid, payload: bytes) -> bool:
        """Hand over a payload of a client."""
        return bool((await self._ask("direct", "S2M_MOD_DIRECT", payload, **{"from": nid.username})).fields["valid"])

    # --- The link

    async def _ask(self, method: str, name: str, payload: bytes | None = None, **fields: Any) -> Frame:
        try:
            dialogue = await self._connected()
            return await dialogue.ask(name, payload, **fields)
        except Refused as exc:
            raise ModulatorFailed(method, str(exc), exc.reason) from exc
        except PenstockError as exc:
            raise ModulatorFailed(method, str(exc)) from exc

    async def _connected(self) -> Dialogue:
        async with self._dialling:
            if self._dialogue is not None:
                return self._dialogue
            pause, tries = self._link.backoff_initial_delay, max(1, self._link.backoff_max_retries)
            for attempt in range(tries):
                try:
                    async with asyncio.timeout(self._link.connect_timeout):
                        self._dialogue = await self._dial()
                    return self._dialogue
                except (PenstockError, OSError, TimeoutError) as exc:
                    if attempt == tries - 1 or isinstance(exc, Refused):
                        raise NotConnected(f"modulator at {self._place}: {exc or 'no answer'}") from exc
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 1.5, self._link.backoff_max_delay)
            raise AssertionError

    async def _dial(self) -> Dialogue:
        dialogue = Dialogue(f"modulator at {self._place}", lambda _: None, self._lost)
        await dial(self._place, dialogue)
        try:
            secret = self._link.shared_secret or None
            interval = round(self._link.heartbeat_interval * 1000)
            answer = await dialogue.shake_hands("S2M_CONNECT", heartbeat_interval=interval, secret=secret, version=1)
        except BaseException:
            dialogue._connection.abort("given up")
            raise
        f = answer.fields
        dialogue.set_limits(f)
        if not self.operations:  # they are believed once: what a server offers does not change under its clients
            self.protocol = f["application_protocol"]
            self.limits = {name: f[name] for name in ("max_message_size", "max_payload_size")}
            self.operations = tuple(name for name, bit in BITS.items() if f["operation_mask"] & bit)
        return dialogue

    def _lost(self, dialogue: Dialogue, reason: str) -> None:
        if dialogue is self._dialogue:
            _log.warning("the link to the modulator at %s was lost: %s", self._place, reason)
            self._dialogue = None


class ModulatorServer:
    """Serves a modulator to channel servers that dial it: any object with methods as in modulator.py.  It is a part.

    >>> class Door:
    ...     def authenticate(self, token): return token
    >>> async def demo():
    ...     async with ModulatorServer(Door(), "127.0.0.1:0", secret="s") as server:
    ...         return server.address.split(":")[0], server.operation_mask
    >>> asyncio.run(demo())
    ('127.0.0.1', 1)
    """

    name = "modulator"

    def __init__(
        self,
        modulator: object,
        address: str = "",
        *,
        socket_path: str = "",
        secret: str = "",
        settings: WireSettings | None = None,
        sends_direct: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if address and not secret:
            raise OptionsError("a TCP listener for servers needs a shared secret")
        settings = settings or WireSettings(keep_alive_interval=30.0)
        self._moderation = Moderation(modulator, settings.request_timeout)
        self.operation_mask = sum(bit for name, bit in BITS.items() if self._moderation.has(name))
        self.operation_mask |= BITS["transform"] if self._moderation.sees_broadcasts else 0
        self.operation_mask |= RECEIVES if sends_direct else 0
        self._endpoint, self._clock = endpoint_of("s2m", address, socket_path), clock
        self._service = Service(
            connect="S2M_CONNECT",
            ack={"application_protocol": self._moderation.protocol, "operation_mask": self.operation_mask},
            takes=frozenset(NEEDED),
            answer=self._answer,
            settings=settings,
            secret=secret,
            failures=counts.S2M_FAILURES,
        )
        self._listeners: Listeners | None = None
        self._state, self._reason = State.NEW, ""
        self._stopped = asyncio.Event()

    @property
    def address(self) -> str:
        """Where it listens."""
        assert self._listeners is not None
        return self._listeners.addresses["s2m"]

    async def start(self) -> None:
        """Listen."""
        self._state = State.STARTING
        try:
            self._listeners = await listen([self._endpoint], lambda: PeerShell(self._service, self._clock))
        except BaseException as exc:
            self._state, self._reason = State.FAILED, str(exc)
            raise
        self._state = State.READY

    async def ready(self) -> None:
        """Return when it serves."""
        if not self._state.serves:
            raise ClosedError(f"the modulator is {self._state}: {self._reason}")

    async def drain(self, seconds: float) -> None:
        """Let no further server in, and take leave of those that are there."""
        if self._listeners is None or self._state is State.STOPPED:
            return
        self._state = State.DRAINING
        self._listeners.stop_accepting()
        for peer in list(self._service.peers):
            peer.shut_down()
        await self._listeners.close("the modulator stops", seconds)

    async def stop(self) -> None:
        """End everything."""
        if self._state is State.STOPPED:
            return
        for peer in list(self._service.peers):
            peer.shut_down()
        if self._listeners is not None:
            await self._listeners.close()
        self._moderation.close()
        self._state = State.STOPPED
        self._stopped.set()

    async def wait(self) -> None:
        """Return when it has stopped."""
        await self._stopped.wait()

    def health(self) -> Health:
        """Return how it is."""
        return Health(self._state, self._reason)

    def describe(self) -> dict[str, Any]:
        """Return where it listens, and how many servers are there."""
        addresses = {} if self._listeners is None else dict(self._listeners.addresses)
        return {"protocol": self._moderation.protocol, "addresses": addresses, "servers": len(self._service.peers)}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _answer(self, frame: Frame) -> bytes:
        f, moderation = frame.fields, self._moderation
        number = {"id": frame.id}
        if not self.operation_mask & NEEDED[frame.name]:
            raise Refused("UNEXPECTED_MESSAGE")
        match frame.name:
            case "S2M_AUTH":
                found = await moderation.authenticate(f["token"])
                if isinstance(found, Challenge):
                    counts.S2M_AUTH.add(result="challenge")
                    return encode_frame("S2M_AUTH_ACK", {**number, "challenge": found.text, "succeeded": False})
                counts.S2M_AUTH.add(result="failure" if found is None else "success")
                return encode_frame("S2M_AUTH_ACK", {**number, "succeeded": found is not None, "username": found})
            case "S2M_FORWARD_EVENT":
                counts.S2M_EVENTS.add()
                nid = None if f["nid"] is None else Nid.parse(f["nid"])
                await moderation.tell(c.Event(f["kind"], ChannelId.parse(f["channel"]), nid, f["owner"], ()))
                return encode_frame("S2M_FORWARD_EVENT_ACK", number)
            case "S2M_FORWARD_BROADCAST_PAYLOAD":
                return await self._forward(frame)
            case _:
                nid = Nid(f["from"], "localhost")
                taken = await moderation.direct(nid, frame.payload or b"")
                counts.S2M_DIRECT.add(result="success" if taken else "failure")
                return encode_frame("S2M_MOD_DIRECT_ACK", {**number, "valid": taken})

    async def _forward(self, frame: Frame) -> bytes:
        nid, payload = Nid.parse(frame.fields["from"]), frame.payload or b""
        channel = ChannelId(frame.fields["channel"], nid.domain)
        fields: dict[str, Any] = {"id": frame.id, "valid": False}
        if not await self._moderation.may_broadcast(nid, channel):
            counts.S2M_PAYLOADS.add(result="invalid")
            return encode_frame("S2M_FORWARD_BROADCAST_PAYLOAD_ACK", fields)
        answers, failed = await self._moderation.transform(nid, channel, [payload])
        if failed is not None:
            raise failed
        found = answers[0]
        if found is None:
            counts.S2M_PAYLOADS.add(result="invalid")
            return encode_frame("S2M_FORWARD_BROADCAST_PAYLOAD_ACK", fields)
        fields["valid"] = True
        counts.S2M_PAYLOADS.add(result="valid" if found == payload else "valid_altered")
        if found == payload:
            return encode_frame("S2M_FORWARD_BROADCAST_PAYLOAD_ACK", fields)
        fields |= {"altered_payload": True, "altered_payload_length": len(found)}
        return encode_frame("S2M_FORWARD_BROADCAST_PAYLOAD_ACK", fields, found)


def endpoint_of(name: str, address: str, socket_path: str) -> Endpoint:
    """Return where to listen for such links.

    >>> endpoint_of("m2s", "127.0.0.1:22624", "").port
    22624
    """
    if socket_path:
        return Endpoint(name=name, path=socket_path)
    host, _, port = address.rpartition(":")
    if not re.fullmatch("[0-9]{1,18}", port):
        raise OptionsError(f"{name}: {address!r} is no host:port")
    return Endpoint(name=name, host=host.strip("[]") or "127.0.0.1", port=int(port))


def direct_service(link: ModulatorLink, send: Callable[[list[str], bytes], int]) -> Service:
    """Return what a server offers to modulators: to hand payloads to clients by their bare usernames."""

    async def answer(frame: Frame) -> bytes:
        counts.M2S_DIRECT.add()
        if not send(list(frame.fields["targets"]), frame.payload or b""):
            counts.M2S_DROPPED.add()
        return encode_frame("M2S_MOD_DIRECT_ACK", {"id": frame.id})

    return Service(
        connect="M2S_CONNECT",
        ack={},
        takes=frozenset({"M2S_MOD_DIRECT"}),
        answer=answer,
        settings=link.m2s,
        secret=link.m2s_secret,
        failures=counts.M2S_FAILURES,
        rejected=counts.M2S_REJECTED,
        accepted=counts.M2S_ACCEPTED,
        active=counts.M2S_CONNECTIONS,
        queue_full=counts.M2S_QUEUE_FULL,
    )


async def send_direct(target: Target, secret: str, usernames: list[str], payload: bytes) -> None:
    """Hand a payload to clients of a server, as a modulator does; returns when the server has taken it."""
    dialogue = Dialogue(str(target), lambda _: None, lambda _dialogue, _reason: None)
    await dial(target, dialogue)
    try:
        await dialogue.shake_hands("M2S_CONNECT", heartbeat_interval=0, secret=secret or None, version=1)
        await dialogue.ask("M2S_MOD_DIRECT", payload, targets=usernames)
    finally:
        dialogue._connection.close("done")
        await dialogue.gone.wait()
