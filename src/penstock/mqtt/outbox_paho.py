"""The outbox around a client of paho: one line in a program that is there already."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Self

from penstock.errors import RetryError
from penstock.log.options import SyncMode
from penstock.mqtt.outbox import POLL_SECONDS, Outbox
from penstock.mqtt.packets import NONE, Properties
from penstock.mqtt.reasons import Reason
from penstock.mqtt.remote import NEVER_TAKEN, TopicMessages

if TYPE_CHECKING:
    import paho.mqtt.client as paho

__all__ = ["DurableClient", "durable_client"]

NAMES: Final = {
    "payload_format": "PayloadFormatIndicator",
    "message_expiry": "MessageExpiryInterval",
    "content_type": "ContentType",
    "response_topic": "ResponseTopic",
    "correlation_data": "CorrelationData",
}


class _PahoTaker:
    """Sends through a client of paho, which keeps what it took while its connection is away."""

    def __init__(self, client: paho.Client) -> None:
        self._client = client
        self._refused: dict[int, int] = {}
        self._note_refusals(client)

    def _note_refusals(self, client: Any) -> None:
        """Note the reason codes of MQTT 5: paho tells them to ``on_publish`` only, which is its owner's."""
        inner = getattr(client, "_do_on_publish", None)
        if inner is None:
            return

        def noted(mid: int, *rest: Any) -> Any:
            if rest and getattr(rest[0], "is_failure", False):
                self._refused[mid] = rest[0].value
            return inner(mid, *rest)

        client._do_on_publish = noted

    async def take(self, messages: Sequence[TopicMessages]) -> dict[str, int]:
        """Return when the broker has acknowledged all of them."""
        client = self._client
        never: dict[str, int] = {}
        while not client.is_connected():
            await asyncio.sleep(POLL_SECONDS * 4)
        under_way = []
        self._refused.clear()
        for each in messages:
            properties = _paho_properties(each.properties) if client._protocol == 5 else None
            for payload in each.payloads:
                try:
                    under_way.append(client.publish(each.topic, payload, each.qos, each.retain, properties))
                except ValueError as exc:
                    never[str(exc)] = never.get(str(exc), 0) + 1
        for info in under_way:
            while not _published(info):
                await asyncio.sleep(POLL_SECONDS)
            if info.mid in self._refused:
                reason = Reason(self._refused[info.mid]).name
                if reason not in NEVER_TAKEN:
                    raise RetryError(f"the server refused a message: {reason}")
                never[reason] = never.get(reason, 0) + 1
        return never

    async def close(self) -> None:
        """Leave the client to its owner."""


def _published(info: Any) -> bool:
    try:
        return bool(info.is_published())
    except (ValueError, RuntimeError) as exc:  # paho's own queue was full, or it was told to stop
        raise RetryError(f"paho: {exc}") from None


def _paho_properties(given: Properties) -> Any:
    if given is NONE:
        return None
    from paho.mqtt.packettypes import PacketTypes
    from paho.mqtt.properties import Properties as Theirs

    made = Theirs(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    for ours, theirs in NAMES.items():
        value = getattr(given, ours)
        if value is not None:
            setattr(made, theirs, value)
    if given.user:
        made.UserProperty = list(given.user)
    return made


class KeptPublish:
    """What ``publish`` of a durable client returns: like paho's MQTTMessageInfo."""

    rc = 0

    def __init__(self, outbox: Outbox, position: int) -> None:
        self._outbox, self.mid = outbox, position

    def is_published(self) -> bool:
        """Return whether the broker has it."""
        return self._outbox.delivered(self.mid)

    def wait_for_publish(self, timeout: float | None = None) -> None:
        """Return when the broker has it, or the time is over."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.is_published() and (deadline is None or time.monotonic() < deadline):
            time.sleep(POLL_SECONDS)


class DurableClient:
    """A client of paho whose ``publish`` survives: everything else is the client's own."""

    _client: paho.Client
    outbox: Outbox

    def __init__(self, client: paho.Client, outbox: Outbox) -> None:
        self.__dict__.update(_client=client, outbox=outbox)
        outbox.__enter__()

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._client, name, value)  # its callbacks, for one

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def publish(
        self, topic: str, payload: Any = None, qos: int = 1, retain: bool = False, properties: Any = None
    ) -> KeptPublish:
        """Keep a message; it is sent when the broker is there.  QoS 0 is sent with QoS 1: the queue must know."""
        if isinstance(payload, str):
            payload = payload.encode()
        elif isinstance(payload, int | float):
            payload = str(payload).encode()
        ours = _our_properties(properties)
        position = self.outbox.publish(topic, payload or b"", qos=max(qos, 1), retain=retain, properties=ours)
        return KeptPublish(self.outbox, position)

    def close(self) -> None:
        """End the sending; what the broker does not have is sent next time.  The client itself stays as it is."""
        self.outbox.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _our_properties(given: Any) -> Properties:
    if given is None:
        return NONE
    values = {ours: getattr(given, theirs) for ours, theirs in NAMES.items() if hasattr(given, theirs)}
    user = tuple((str(name), str(value)) for name, value in getattr(given, "UserProperty", ()))
    return Properties(**values, user=user)


def durable_client(client: paho.Client, path: str, *, sync: SyncMode = "interval", max_bytes: int = 0) -> DurableClient:
    """Return a client of paho whose ``publish`` goes through a queue on disk: one line in a program that is there.

    The client is yours: connect it, run its loop and set its callbacks as ever, before or after.

    >>> import tempfile
    >>> from paho.mqtt.client import CallbackAPIVersion, Client
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     client = durable_client(Client(CallbackAPIVersion.VERSION2), f"{folder}/outbox")
    ...     said = client.publish("plant/7/temperature", "21.5", qos=1)  # nobody is connected: it waits on disk
    ...     client.close()
    >>> said.rc
    0
    """
    return DurableClient(client, Outbox(path, _PahoTaker(client), sync=sync, max_bytes=max_bytes, batch=20))
