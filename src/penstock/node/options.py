"""The tables of a node's configuration; each part gets one."""

from __future__ import annotations

import math
import os
import re
from typing import Any, Final, Literal

import msgspec

from penstock.channels.model import Limits
from penstock.channels.wire.options import DEFAULT_PORT, ChannelServerOptions
from penstock.channels.wire.settings import WireSettings
from penstock.disk.objectstore import split_url
from penstock.disk.resolve import is_url
from penstock.errors import OptionsError, PenstockError
from penstock.log.messagelog.options import MessageLogOptions
from penstock.log.options import SyncMode
from penstock.log.xchannel.options import WriterOptions
from penstock.mqtt.server import ServerOptions
from penstock.net.hosts import check_address
from penstock.node.meeting import MeetingSpec
from penstock.node.mistakes import CrossedError

__all__ = [
    "NodeChannelOptions",
    "ChannelsOptions",
    "DiskOptions",
    "ExportOptions",
    "FoldOptions",
    "HttpOptions",
    "IngestOptions",
    "LedgerOptions",
    "MqttOptions",
    "NodeConfig",
    "ShipPartOptions",
    "TelemetryOptions",
    "CHANNEL_NAME",
]

CHANNEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SACRIFICE_AT: Final = 0.9
HOST: Final = re.compile(r"[A-Za-z0-9._:%-]+")
LISTENERS: Final = (
    "mqtt.port", "mqtt.ws_port", "mqtt.tls_port", "mqtt.wss_port", "channels.port", "channels.plain_port",
    "ingest.port", "http.port",
)  # fmt: skip


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the configuration: what it does not know is a mistake."""


def _check_port(name: str, port: int | None) -> None:
    if port is not None and not 0 <= port <= 65_535:
        raise OptionsError(f"{name}={port}: must be between 0 and 65535")


def _check_bind(bind: str) -> None:
    try:
        check_address(bind if HOST.fullmatch(bind) else "", 0)
    except OptionsError:
        raise OptionsError(f"bind={bind!r}: must be an address or the name of a host") from None


def _check_seconds(name: str, seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds < math.inf:
        raise OptionsError(f"{name}={seconds}: must be above 0, and a number of seconds")


def _check_given(table: object, *names: str) -> None:
    for name in names:
        if not getattr(table, name):
            raise OptionsError(f"{name}: must not be empty")


def _check_name(name: str) -> None:
    if not CHANNEL_NAME.fullmatch(name):
        raise OptionsError(
            f"name={name!r}: use 1 to 64 of letters, digits, dot, dash and underscore, beginning with a letter or digit"
        )


def _check_url(name: str, url: str) -> None:
    if is_url(url):
        try:
            split_url(url)
        except PenstockError as exc:
            raise OptionsError(f"{name}: {exc}") from None


class HttpOptions(_Table, frozen=True, kw_only=True):
    """Health, metrics and the read-only API.

    >>> HttpOptions().port
    8780
    """

    enabled: bool = True
    bind: str = "127.0.0.1"
    port: int = 8780
    token: str = ""
    """Asked for under ``/api`` when it is not empty: ``Authorization: Bearer …``."""

    def __post_init__(self) -> None:
        _check_port("port", self.port)
        _check_bind(self.bind)


class FoldOptions(_Table, frozen=True, kw_only=True):
    """A local table that follows a log whose records have keys.

    >>> FoldOptions(name="latest", log="data/readings", store="data/latest.snap").backend
    'append-log'
    """

    name: str
    log: str
    store: str
    backend: Literal["append-log", "rocksdb", "lmdb"] = "append-log"
    bootstrap: str = ""
    """An artifact to begin with where there is no store yet, or one whose records are gone: ``s3://bucket/folds/NAME``."""

    def __post_init__(self) -> None:
        if self.bootstrap and not os.path.basename(self.bootstrap):
            raise OptionsError(f"bootstrap={self.bootstrap!r}: must end in the name of the artifact")
        _check_url("bootstrap", self.bootstrap)
        _check_given(self, "log", "store")
        _check_url("log", self.log)
        _check_name(self.name)


class MqttOptions(ServerOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The broker; the keys are those of ``penstock mqtt serve``.

    >>> MqttOptions().enabled
    True
    """

    enabled: bool = True

    def __post_init__(self) -> None:
        for name in ("port", "ws_port", "tls_port", "wss_port"):
            _check_port(name, getattr(self, name))
        _check_bind(self.bind)
        for name, other in (("cert", "key"), ("key", "cert")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise OptionsError(f"{name}: needs {other}, too")
        super().__post_init__()


class ChannelsOptions(_Table, frozen=True, kw_only=True):
    """The channel server: channels with members, over narwhal's protocol.

    >>> ChannelsOptions().port
    22622
    """

    enabled: bool = True
    bind: str = "127.0.0.1"
    port: int | None = DEFAULT_PORT
    """TLS; without ``cert`` and ``key`` with a certificate for localhost that is made once."""
    plain_port: int | None = None
    unix: str | None = None
    cert: str = ""
    key: str = ""
    domain: str = "localhost"
    sync: SyncMode = "always"
    segment_bytes: int = 128 << 20
    modulator: str = ""
    """``module:Class`` in this process; empty for none."""
    tap: dict[str, str] = {}
    """Handler, or ``*``, → path of a message log that gets a copy."""
    limits: Limits = Limits()
    wire: WireSettings = WireSettings()

    def __post_init__(self) -> None:
        _check_port("port", self.port)
        _check_port("plain_port", self.plain_port)
        _check_bind(self.bind)
        for name, other in (("cert", "key"), ("key", "cert")):
            if getattr(self, name) and not getattr(self, other):
                raise OptionsError(f"{name}: needs {other}, too")
        if self.modulator and not all(self.modulator.partition(":")):
            raise OptionsError(f"modulator={self.modulator!r}: write it as module:Class")
        if self.enabled:
            self.server()

    def server(self) -> ChannelServerOptions:
        """Return the options of the server itself."""
        return ChannelServerOptions(
            domain=self.domain, bind_address=self.bind, port=self.port, plain_port=self.plain_port,
            socket_path=self.unix, cert_file=self.cert, key_file=self.key, limits=self.limits, wire=self.wire,
            segment_bytes=self.segment_bytes, sync=self.sync, tap=self.tap,
        )  # fmt: skip


class IngestOptions(_Table, frozen=True, kw_only=True):
    """Where other processes hand records to the node, which writes them.

    >>> IngestOptions().port is None
    True
    """

    enabled: bool = True
    unix: str | None = None
    """The socket; ``ingest.sock`` in the data directory unless said."""
    bind: str = "127.0.0.1"
    port: int | None = None
    """TCP, without TLS and without credentials: loopback only."""
    any_channel: bool = True
    """Whether a channel that no ``[[channel]]`` names is made when somebody writes to it."""
    queue_bytes: int = 16 << 20
    """What waits to be written to one channel before its producers are read no further."""

    def __post_init__(self) -> None:
        _check_port("port", self.port)
        if self.bind not in ("127.0.0.1", "::1", "localhost"):
            raise OptionsError(f"bind={self.bind!r}: ingest has no credentials and listens on loopback only")
        if self.queue_bytes < 1 << 16:
            raise OptionsError(f"queue_bytes={self.queue_bytes}: must be at least 65536")


class NodeChannelOptions(_Table, frozen=True, kw_only=True):
    """A channel that the node writes: one log, filled by ingest.

    >>> NodeChannelOptions(name="readings").format
    'messagelog'
    """

    name: str
    log: str = ""
    """Where it is kept; ``logs/NAME`` in the data directory unless said."""
    format: Literal["messagelog", "xchannel"] = "messagelog"
    content: Literal["raw", "envelope/1"] = "raw"
    sync: SyncMode = "interval"
    """When an append survives a power cut; ``always``: before it is acknowledged."""
    max_messages: int = 0
    """How many records a message log keeps at least; 0 keeps all."""
    max_payload_bytes: int = 1 << 20
    segment_bytes: int = 128 << 20
    sacrifice: int = 0
    """What may go when the disk budget is used up: 0 never, then the highest number first."""

    def __post_init__(self) -> None:
        for name in ("max_messages", "sacrifice"):
            if getattr(self, name) < 0:
                raise OptionsError(f"{name}={getattr(self, name)}: must not be negative")
        for name in ("max_payload_bytes", "segment_bytes"):
            if getattr(self, name) < 1:
                raise OptionsError(f"{name}={getattr(self, name)}: must be above 0")
        self.log_options()
        if self.format == "xchannel" and (self.max_messages or self.sacrifice):
            raise OptionsError(f"format={self.format!r}: max_messages and sacrifice are for message logs")
        _check_name(self.name)

    def path(self, data: str) -> str:
        """Return where it is kept."""
        return self.log or os.path.join(data, "logs", self.name)

    def log_options(self) -> MessageLogOptions | WriterOptions:
        """Return the options of its log; OptionsError for what that would refuse.

        >>> NodeChannelOptions(name="readings").log_options().segment_bytes
        134217728
        """
        if self.format == "xchannel":
            try:
                return WriterOptions(sync=self.sync, content=self.content, roll_bytes=self.segment_bytes)
            except OptionsError as exc:
                raise OptionsError(str(exc).replace("roll_bytes", "segment_bytes")) from None
        return MessageLogOptions(
            sync=self.sync,
            content=self.content,
            max_messages=self.max_messages,
            max_payload_bytes=self.max_payload_bytes,
            segment_bytes=self.segment_bytes,
        )


class ShipPartOptions(_Table, frozen=True, kw_only=True):
    """Ships the sealed segments of a log to an object store.

    >>> ShipPartOptions(log="data/readings", url="s3://bucket/edge-1").delete_local
    False
    """

    log: str
    url: str
    node: str = ""
    delete_local: bool = False
    bytes_per_second: float = 0.0
    roll_seconds: float | None = None
    """Seal the open segment of a log whose oldest record in it is older than this, so that it can go too."""
    paused: bool = False
    """Send nothing for now; what is not shipped is kept."""

    def __post_init__(self) -> None:
        if not self.bytes_per_second >= 0:
            raise OptionsError(f"bytes_per_second={self.bytes_per_second}: must not be negative")
        _check_seconds("roll_seconds", self.roll_seconds)
        _check_given(self, "log", "url")
        _check_url("url", self.url)


class ExportOptions(_Table, frozen=True, kw_only=True):
    """Publishes a fold as an artifact, again and again, for other nodes to begin with.

    >>> ExportOptions(fold="latest", url="s3://bucket/folds").every_seconds
    300.0
    """

    fold: str
    """The name of a ``[[fold]]``."""
    url: str
    key: str = ""
    """What the artifact is called there; the name of the fold unless given."""
    every_seconds: float = 300.0

    def __post_init__(self) -> None:
        _check_seconds("every_seconds", self.every_seconds)
        _check_given(self, "fold", "url")
        _check_url("url", self.url)


class DiskOptions(_Table, frozen=True, kw_only=True):
    """How much of the disk the node may use.

    >>> DiskOptions(budget_bytes=10 << 30).alarm_at
    0.8
    """

    budget_bytes: int = 0
    """For everything in the data directory; 0: what the disk has."""
    reserve_bytes: int = 64 << 20
    """What stays free on the disk whatever the budget says."""
    alarm_at: float = 0.8
    """From this part of the budget on there is an alarm."""
    sacrifice_at: float = SACRIFICE_AT
    """From this part on, channels with ``sacrifice`` lose their oldest segments."""
    look_seconds: float = 5.0

    def __post_init__(self) -> None:
        for name in ("budget_bytes", "reserve_bytes"):
            if getattr(self, name) < 0:
                raise OptionsError(f"{name}={getattr(self, name)}: must not be negative")
        for name in ("alarm_at", "sacrifice_at"):
            if not 0 < getattr(self, name) <= 1:
                raise OptionsError(f"{name}={getattr(self, name)}: must be above 0 and at most 1")
        if self.alarm_at > self.sacrifice_at:
            blamed = "alarm_at" if self.sacrifice_at == SACRIFICE_AT else "sacrifice_at"
            raise OptionsError(
                f"{blamed}={getattr(self, blamed)}: sacrifice_at ({self.sacrifice_at}) must not be below "
                f"alarm_at ({self.alarm_at})"
            )
        _check_seconds("look_seconds", self.look_seconds)


class LedgerOptions(_Table, frozen=True, kw_only=True):
    """How often the counts of the seams are looked at.

    >>> LedgerOptions().look_seconds
    10.0
    """

    enabled: bool = True
    look_seconds: float = 10.0
    keep_hours: int = 24 * 90
    """How long the counts of an hour are kept."""

    def __post_init__(self) -> None:
        _check_seconds("look_seconds", self.look_seconds)
        if self.keep_hours < 1:
            raise OptionsError(f"keep_hours={self.keep_hours}: must be at least 1")


class TelemetryOptions(_Table, frozen=True, kw_only=True):
    """Traces, sent to a collector of OpenTelemetry; needs the extra ``otel``.

    >>> TelemetryOptions().enabled
    False
    """

    enabled: bool = False
    endpoint: str = ""
    """``http://127.0.0.1:4318``; unless said what OTEL_EXPORTER_OTLP_ENDPOINT says."""

    def __post_init__(self) -> None:
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise OptionsError(f"endpoint={self.endpoint!r}: must begin with http:// or https://")


class NodeConfig(_Table, frozen=True, kw_only=True):
    """How a node is built.

    >>> NodeConfig().data
    './penstock-data'
    """

    data: str = "./penstock-data"
    """Where everything is kept; one node at a time."""
    on_failure: Literal["serve", "stop"] = "serve"
    """What happens when a part cannot start: the others serve and it is tried again, or nothing serves."""
    drain_seconds: float = 10.0
    """How long clients have to leave when the node stops."""
    log_format: Literal["text", "json"] = "text"
    http: HttpOptions = HttpOptions()
    mqtt: MqttOptions = MqttOptions()
    channels: ChannelsOptions = ChannelsOptions()
    ingest: IngestOptions = IngestOptions()
    disk: DiskOptions = DiskOptions()
    ledger: LedgerOptions = LedgerOptions()
    telemetry: TelemetryOptions = TelemetryOptions()
    channel: list[NodeChannelOptions] = []
    fold: list[FoldOptions] = []
    ship: list[ShipPartOptions] = []
    export: list[ExportOptions] = []
    meeting: list[MeetingSpec] = []
    """Channels and MQTT topics that say the same."""

    def __post_init__(self) -> None:
        if not 0 <= self.drain_seconds < math.inf:
            raise OptionsError(f"drain_seconds={self.drain_seconds}: must not be negative, and a number of seconds")
        _check_given(self, "data")
        _check_once("fold", "name", [fold.name for fold in self.fold])
        _check_once("fold", "store", [os.path.realpath(fold.store) for fold in self.fold])
        _check_once("channel", "name", [channel.name for channel in self.channel])
        _check_once("channel", "log", [os.path.realpath(channel.path(self.data)) for channel in self.channel])
        _check_once("meeting", "channel", [meeting.channel for meeting in self.meeting])
        if self.meeting and not (self.mqtt.enabled and self.channels.enabled):
            raise CrossedError(
                ("meeting",), ("meeting", "mqtt", "channels"), "needs mqtt and channels, and one of them is not enabled"
            )
        _check_once("export", "key", [export.key or export.fold for export in self.export])
        for number, export in enumerate(self.export):
            folds = [fold.name for fold in self.fold]
            if export.fold not in folds:
                raise CrossedError(
                    ("export", number, "fold"), ("export", "fold"),
                    f"there is no fold {export.fold}; there {_are(folds)}",
                )  # fmt: skip
        _check_once("ship", "log", [os.path.basename(ship.log.rstrip("/")) for ship in self.ship])
        self._check_stores()
        self._check_listeners()
        servers = ("mqtt", "channels", "ingest", "http")
        lists = ("fold", "ship", "export")
        if not any(getattr(self, name).enabled for name in servers) and not any(getattr(self, one) for one in lists):
            raise CrossedError(("http", "enabled"), (*servers, *lists), "no part is enabled: there is nothing to serve")

    def _check_stores(self) -> None:
        """Refuse a fold whose store is a log: neither would open what the other made."""
        logs = {os.path.realpath(fold.log): "its own log" for fold in self.fold if not is_url(fold.log)}
        logs |= {os.path.realpath(ship.log): f"the log of ship {ship.log}" for ship in self.ship}
        logs |= {os.path.realpath(one.path(self.data)): f"the log of channel {one.name}" for one in self.channel}
        for number, fold in enumerate(self.fold):
            taken = logs.get(os.path.realpath(fold.store))
            if taken is not None:
                raise CrossedError(
                    ("fold", number, "store"), ("fold", "ship", "channel"), f"{fold.store} is {taken}"
                )  # fmt: skip

    def _check_listeners(self) -> None:
        """Refuse two listeners on one port: only one of them would serve."""
        taken: dict[int, str] = {}
        for key in LISTENERS:
            table, _, name = key.partition(".")
            options = getattr(self, table)
            port = getattr(options, name) if options.enabled else None
            if not port:
                continue
            other = taken.setdefault(port, key)
            if other == key or getattr(self, other.partition(".")[0]).bind != options.bind:
                continue
            is_default = getattr(type(options)(), name) == port
            blamed, first = (other, key) if is_default else (key, other)
            raise CrossedError(
                tuple(blamed.split(".")), (table, other.partition(".")[0]), f"{port} is taken by {first}"
            )  # fmt: skip

    def channel_of(self, name: str) -> NodeChannelOptions | None:
        """Return how a channel is kept; None where it may not be made."""
        for channel in self.channel:
            if channel.name == name:
                return channel
        return NodeChannelOptions(name=name) if self.ingest.any_channel else None


def _check_once(table: str, key: str, found: list[Any]) -> None:
    for number, one in enumerate(found):
        if one in found[:number]:
            raise CrossedError((table, number, key), (table,), f"two have the {key} {one}")


def _are(names: list[str]) -> str:
    return f"are {', '.join(names)}" if names else "is none at all"
