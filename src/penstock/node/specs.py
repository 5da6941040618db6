"""Which parts a configuration asks for: one Spec each, together with the options that make it what it is."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import msgspec

from penstock.artifact import ExportPart
from penstock.channels.wire import ChannelServer
from penstock.disk import in_disk_thread
from penstock.fold import Follow
from penstock.lifecycle import Part
from penstock.mqtt.server import MqttServer
from penstock.mqtt.tap import Tap
from penstock.node.folding import FoldPart
from penstock.node.ingest.server import IngestPart
from penstock.node.meeting import Meeting, MeetingSpec
from penstock.node.options import ChannelsOptions, ExportOptions, NodeConfig, ShipPartOptions
from penstock.node.supervisor import Spec
from penstock.node.telemetry import Telemetry
from penstock.ship import ShipOptions, ShipPart
from penstock.ship.roll import end_segment

__all__ = ["Asked", "parts_of"]


class Asked(msgspec.Struct, frozen=True):
    """A part that is asked for; one whose options differ after a reload is made again.

    >>> Asked(Spec("mqtt", lambda: None), None).spec.name
    'mqtt'
    """

    spec: Spec
    options: object
    """None: it takes what changes over by itself, or not without a restart."""


def parts_of(
    config: NodeConfig,
    part: Callable[[str], Part | None] = lambda _: None,
    telemetry: Telemetry | None = None,
    ports: dict[str, int] | None = None,
) -> list[Asked]:
    """Return the parts that a configuration names, those of the node itself apart; ``part`` finds one that runs.

    ``ports`` remembers where they listened, for a part that is started again.

    >>> [asked.spec.name for asked in parts_of(NodeConfig())]
    ['mqtt', 'channels', 'ingest']
    """
    asked = []
    if config.mqtt.enabled:
        asked.append(_ask("mqtt", functools.partial(_mqtt_server, config, telemetry, ports)))
    if config.channels.enabled:
        asked.append(_ask("channels", functools.partial(_channel_server, config.channels, config.data, ports)))
    if config.ingest.enabled:
        asked.append(_ask("ingest", functools.partial(IngestPart, config, ports)))
    asked += [_ask(f"fold:{fold.name}", functools.partial(FoldPart, fold), fold) for fold in config.fold]
    for ship in config.ship:
        name = f"ship:{os.path.basename(ship.log.rstrip('/'))}"
        asked.append(_ask(name, functools.partial(_ship_part, ship, part), ship))
    for export in config.export:
        made = functools.partial(_export_part, export, config.data, part)
        asked.append(_ask(f"export:{export.key or export.fold}", made, export, needs=(f"fold:{export.fold}",)))
    for spec in config.meeting:
        make = functools.partial(_meeting, spec, part)
        asked.append(_ask(f"meeting:{spec.channel}", make, spec, needs=("mqtt", "channels")))
    return asked


def _ask(name: str, make: Callable[[], Part], options: object = None, needs: tuple[str, ...] = ()) -> Asked:
    return Asked(Spec(name, make, needs), options)


def _mqtt_server(config: NodeConfig, telemetry: Telemetry | None, ports: dict[str, int] | None) -> MqttServer:
    return MqttServer(
        config.mqtt,
        data=os.path.join(config.data, "mqtt"),
        holds=bool(config.meeting),
        on_tapped=None if telemetry is None else telemetry.tapped,
        ports=ports,
    )


def _channel_server(options: ChannelsOptions, data: str, ports: dict[str, int] | None) -> ChannelServer:
    named = options.modulator or None
    return ChannelServer(os.path.join(data, "channels"), options.server(), modulator=named, ports=ports)


def _meeting(spec: MeetingSpec, part: Callable[[str], Part | None]) -> Meeting:
    broker, channels = part("mqtt"), part("channels")
    assert isinstance(broker, MqttServer)
    assert isinstance(channels, ChannelServer)
    return Meeting(spec, lambda: broker.broker, lambda: channels.manager)


def _export_part(options: ExportOptions, data: str, part: Callable[[str], Part | None]) -> ExportPart:
    def fold() -> Follow | None:
        found = part(f"fold:{options.fold}")
        return found.fold if isinstance(found, FoldPart) else None

    return ExportPart(
        fold, options.url, options.key or options.fold, every_seconds=options.every_seconds, scratch=data
    )  # fmt: skip


def _ship_part(options: ShipPartOptions, part: Callable[[str], Part | None]) -> ShipPart:
    return ShipPart(
        options.log,
        options.url,
        node=options.node,
        options=ShipOptions(delete_local=options.delete_local, bytes_per_second=options.bytes_per_second),
        roll_seconds=options.roll_seconds,
        paused=options.paused,
        roll=functools.partial(_roll_own, os.path.realpath(options.log.rstrip("/")), part),
    )


async def _roll_own(path: str, part: Callable[[str], Part | None]) -> bool:
    """End the open segment of a log that a tap or ingest of this node writes; False for a log of others."""
    broker, ingest = part("mqtt"), part("ingest")
    if isinstance(broker, MqttServer) and broker.attached is not None:
        for tap in broker.attached.parts:
            if isinstance(tap, Tap) and tap.writer is not None and os.path.realpath(tap.spec.path) == path:
                end_segment(tap.writer)  # here on the loop, where it is written
                return True
    if isinstance(ingest, IngestPart):
        for channel in list(ingest.channels.values()):
            if channel.failure is None and os.path.realpath(channel.writer_path) == path:
                await in_disk_thread(end_segment, channel.writer)
                return True
    return False
