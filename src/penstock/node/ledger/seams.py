"""Which seams a node has: written beside its data at each start, so that the ledger can be read while it is down."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Final

import msgspec

from penstock.disk import disk_for, is_url, save_atomically
from penstock.disk.plain import read_whole
from penstock.errors import CorruptionError
from penstock.mqtt.attached import merged
from penstock.mqtt.places import TapPlace
from penstock.node.options import NodeConfig

__all__ = [
    "DeliverySeam",
    "FeedSeam",
    "FoldSeam",
    "IngestSeam",
    "LakeSeam",
    "Seam",
    "ShipSeam",
    "TapSeam",
    "read_seams",
    "seams_of",
    "write_seams",
]

FOLDER: Final = "ledger"
FILE: Final = "seams.json"
PATHS: Final = ("log", "memory", "store", "folder")
"""Fields of seams that are paths."""


class IngestSeam(msgspec.Struct, frozen=True, tag="ingest"):
    """Producers → log: what was accepted is in the log.

    >>> IngestSeam("readings", "data/logs/readings", "data/ingest/readings.snap").name
    'ingest:readings'
    """

    channel: str
    log: str
    memory: str

    @property
    def name(self) -> str:
        """How it is called."""
        return f"ingest:{self.channel}"


class FoldSeam(msgspec.Struct, frozen=True, tag="fold"):
    """Log → store.

    >>> FoldSeam("latest", "readings", "latest.snap", "append-log").name
    'fold:latest'
    """

    fold: str
    log: str
    store: str
    backend: str

    @property
    def name(self) -> str:
        """How it is called."""
        return f"fold:{self.fold}"


class ShipSeam(msgspec.Struct, frozen=True, tag="ship"):
    """Log → object store.

    >>> ShipSeam("data/readings", "s3://bucket/edge").name
    'ship:readings'
    """

    log: str
    url: str

    @property
    def channel(self) -> str:
        """What the log is called there."""
        return os.path.basename(self.log.rstrip("/"))

    @property
    def name(self) -> str:
        """How it is called."""
        return f"ship:{self.channel}"


class LakeSeam(msgspec.Struct, frozen=True, tag="lake"):
    """Log → table: the last audit on Spark says how much the table has.

    >>> LakeSeam("readings", "data/readings").name
    'lake:readings'
    """

    channel: str
    log: str

    @property
    def name(self) -> str:
        """How it is called."""
        return f"lake:{self.channel}"


class TapSeam(msgspec.Struct, frozen=True, tag="tap"):
    """Broker → log: what matched a tap is in its log, waits for it, or was dropped by its rule.

    >>> TapSeam("readings", "data/readings").name
    'tap:readings'
    """

    tap: str
    log: str

    @property
    def name(self) -> str:
        """How it is called."""
        return f"tap:{self.tap}"


class DeliverySeam(msgspec.Struct, frozen=True, tag="deliveries"):
    """Broker → sessions: what was acknowledged to a publisher is delivered, queued, or lost for a reason.

    >>> DeliverySeam("data/mqtt").name
    'mqtt:deliveries'
    """

    folder: str

    @property
    def name(self) -> str:
        """How it is called."""
        return "mqtt:deliveries"


class FeedSeam(msgspec.Struct, frozen=True, tag="feed"):
    """Log → broker, through a named cursor.

    >>> FeedSeam("alerts", "data/alerts", "mqtt-feed").name
    'feed:alerts'
    """

    feed: str
    log: str
    cursor: str

    @property
    def name(self) -> str:
        """How it is called."""
        return f"feed:{self.feed}"


Seam = IngestSeam | TapSeam | DeliverySeam | FoldSeam | ShipSeam | FeedSeam | LakeSeam


def seams_of(config: NodeConfig, channels: list[str]) -> list[Seam]:
    """Return the seams of a configuration; ``channels`` are those that ingest has been writing.

    >>> [seam.name for seam in seams_of(NodeConfig(), ["readings"])]
    ['ingest:readings', 'mqtt:deliveries']
    """
    from penstock.node.ingest.channel import memory_path

    seams: list[Seam] = []
    for name in sorted({*channels, *(channel.name for channel in config.channel)}):
        options = config.channel_of(name)
        if options is not None and config.ingest.enabled:
            seams.append(IngestSeam(name, options.path(config.data), memory_path(config.data, name)))
    if config.mqtt.enabled:
        if config.mqtt.persistence.enabled is not False:
            seams.append(DeliverySeam(os.path.join(config.data, "mqtt")))
        fixed = [tap for tap in merged(config.mqtt.taps) if TapPlace(tap.path).fixed]
        seams += [TapSeam(tap.name or tap.path, tap.path) for tap in fixed]
        seams += [FeedSeam(feed.name or feed.log, feed.log, feed.cursor) for feed in config.mqtt.feeds]
    seams += [FoldSeam(fold.name, fold.log, fold.store, fold.backend) for fold in config.fold]
    seams += [ShipSeam(ship.log.rstrip("/"), ship.url) for ship in config.ship]
    return seams


def path_in(data: str, path: str) -> str:
    """Return a path as it is kept: from the data directory where it is below it, so that the whole may be moved.

    >>> path_in("./data", "./data/logs/a"), path_in("/data", "/data/logs/a"), path_in("d", "s3://bucket/a")
    ('logs/a', 'logs/a', 's3://bucket/a')
    """
    if is_url(path):
        return path
    root, whole = os.path.abspath(data), os.path.abspath(path)
    return os.path.relpath(whole, root) if whole.startswith(root.rstrip("/") + "/") else whole


def _with_paths(seam: Seam, change: Callable[[str], str]) -> Seam:
    paths = {name: change(getattr(seam, name)) for name in PATHS if name in seam.__struct_fields__}
    return msgspec.structs.replace(seam, **paths)


def write_seams(data: str, seams: list[Seam]) -> None:
    """Keep the seams of a node beside its data."""
    seams = [_with_paths(seam, functools.partial(path_in, data)) for seam in seams]
    folder = os.path.join(data, FOLDER)
    disk = disk_for(folder)
    disk.make_folder(folder)
    save_atomically(disk, os.path.join(folder, FILE), msgspec.json.format(msgspec.json.encode(seams), indent=1) + b"\n")


def read_seams(data: str) -> list[Seam]:
    """Return the seams of the node that served this data last; none where there was no node."""
    path = os.path.join(data, FOLDER, FILE)
    disk = disk_for(path)
    found = disk.stat(path)
    if found is None:
        return []
    text = read_whole(disk, path)
    try:
        seams = msgspec.json.decode(text, type=list[Seam])
        return [_with_paths(seam, lambda kept: kept if is_url(kept) else os.path.join(data, kept)) for seam in seams]
    except msgspec.MsgspecError as exc:
        raise CorruptionError(path, 0, f"not the seams of a node: {exc}") from None
