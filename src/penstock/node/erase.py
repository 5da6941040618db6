"""Erasing what belongs to a key, wherever a node keeps it: folds, buckets, retained messages, logs, the lake.

A record of a message log keeps its number and loses its content: in its place stands a purge without key or payload,
so positions, cursors and counts stay right.  Segments are written aside and take their place in one step.  Nothing may
write the log meanwhile: the node has to be stopped.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from penstock import kernel
from penstock.disk import disk_for, is_url, object_store_for, save_atomically
from penstock.disk.plain import is_below
from penstock.errors import CorruptionError, OptionsError, PenstockError, UnsupportedError
from penstock.kv.embedded.bucket import Bucket
from penstock.kv.roles import StoreConfig
from penstock.log.detect import detect, open_log
from penstock.log.envelope import CONTENT, Envelope, decode_envelope, encode_envelope
from penstock.log.messagelog import MessageLog, MessageLogReader
from penstock.log.sidecar import sidecar_of
from penstock.mqtt.state_open import KeptBroker
from penstock.mqtt.state_restore import STORE
from penstock.node.ledger.seams import DeliverySeam, FoldSeam, LakeSeam, ShipSeam, read_seams
from penstock.ship.fence import read_head
from penstock.store import AppendLogStore, LmdbStore, RocksStore
from penstock.types import KvUpdate, Op

__all__ = [
    "Erased",
    "NotErased",
    "erase_in_bucket",
    "erase_in_fold",
    "erase_in_log",
    "erase_key",
    "erase_retained",
    "left_behind",
]

ENGINES: Final[dict[str, Any]] = {store.backend: store for store in (AppendLogStore, RocksStore, LmdbStore)}


class Erased(msgspec.Struct, frozen=True):
    """What was erased in one place.

    >>> Erased("data/logs/readings", "log", 3).count
    3
    """

    place: str
    kind: str
    count: int


class NotErased(msgspec.Struct, frozen=True):
    """A place that may still have data of a key.

    >>> NotErased("backups", "backup", "make new ones").kind
    'backup'
    """

    place: str
    kind: str
    left: str
    """Why, and what can be done."""


def erase_in_log(path: str, key: bytes) -> int:
    """Take the content of every record with this key out of a message log; return how many there were.

    A segment with damage is left as it is, and named by CorruptionError when the others are done.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with MessageLog.open(folder.name + "/log", content=CONTENT) as log:
    ...     numbers = log.append_many([encode_envelope(Envelope(key, b"x")) for key in (b"ann", b"bob", b"ann")])
    >>> erase_in_log(folder.name + "/log", b"ann")
    2
    >>> with open_log(folder.name + "/log") as log:
    ...     [decode_envelope(bytes(record.payload)).key for record in log.read(1)], list(log.verify())
    ([b'', b'bob', b''], [])
    >>> folder.cleanup()
    """
    disk = disk_for(path)
    if detect(path, disk) != "messagelog":
        raise UnsupportedError(f"{path}: records of this format cannot be taken out of a log; let retention take them")
    with open_log(path) as log:
        if log.content != CONTENT:
            raise OptionsError(f"{path}: its records have no keys")
    MessageLog.open(path).close()  # its end is whole
    try:
        return _rewrite_all(path, key, b"")
    finally:
        MessageLog.open(path).close()  # it makes the indexes again


def erase_in_bucket(folder: str, key: str) -> int:
    """Purge a key of a bucket and take its values out of the history; return how many there were.  Nobody has it open.

    Its records become purges of the key: whoever follows the bucket learns that it is gone, whatever it has read.
    """
    _purge(folder, key)
    count = _rewrite_all(os.path.join(folder, "log"), key.encode(), key.encode())
    _purge(folder, key)  # it opens as it is now, and makes the indexes again
    return count


def _purge(folder: str, key: str) -> None:
    config = StoreConfig(name=os.path.basename(folder))
    bucket = Bucket.open(folder, config, disk=disk_for(folder), make=False)
    try:
        bucket.purge(key)
    finally:
        bucket.close()


def find_buckets(data: str) -> list[str]:
    """Return the folders of buckets below a data directory."""
    return sorted(folder for folder, _, names in os.walk(data) if "bucket.json" in names)


def _rewrite_all(path: str, key: bytes, named: bytes) -> int:
    """Put a purge of the key ``named`` in the place of each record of a key; return how many were none yet."""
    disk = disk_for(path)
    held = sidecar_of(disk, path).lock(of=path)
    count, damage = 0, None
    try:
        for name in sorted(name for name in disk.list(path) if name.endswith(".log")):
            try:
                count += _rewrite(path, name, key, named)
            except CorruptionError as exc:
                damage = damage or exc
    finally:
        held.release()
    if damage is not None:
        raise damage
    return count


def _rewrite(path: str, name: str, key: bytes, named: bytes) -> int:
    """Write a segment again without what belongs to the key; its index is made again by whoever opens it."""
    disk = disk_for(path)
    first = int(name.removesuffix(".log"))
    pieces, count = [], 0
    with MessageLogReader(path) as reader:
        following = [int(other[:-4]) for other in disk.list(path) if other.endswith(".log") and int(other[:-4]) > first]
        end = min(following, default=reader.last_seq + 1)
        for entry in reader.entries(first, end - first):
            if entry.seq >= end:
                break
            payload = entry.payload
            found = decode_envelope(payload)
            purge = Envelope(named, b"", Op.PURGE, found.event_time_ns if named else 0)
            if found.key == key and found != purge:
                payload, count = encode_envelope(purge), count + 1
            pieces.append(kernel.messagelog.encode_one(entry.seq, entry.timestamp_ms, entry.sender, payload))
        for problem in reader.damage:
            if os.path.basename(problem.file) == name:  # what could not be read would be gone, and nobody would know
                raise CorruptionError(problem.file, problem.byte, problem.reason)
    if count:
        index = os.path.join(path, name.removesuffix(".log") + ".idx")
        save_atomically(disk, os.path.join(path, name), b"".join(pieces))
        if disk.stat(index) is not None:
            disk.remove(index)
        disk.sync_folder(path)
    return count


def erase_in_fold(path: str, backend: str, key: str) -> int:
    """Delete a key of a store and leave its cursor where it is; return whether it was there."""
    with ENGINES[backend].open(path) as store:
        if store.get(key) is None:
            return 0
        store.apply([KvUpdate.delete(key)], store.cursor())
        if isinstance(store, AppendLogStore):
            store.compact()  # the file keeps no older value
        store.settle()
        return 1


def erase_retained(data: str, topics: Sequence[str]) -> int:
    """Forget the retained messages of these topics, in the broker's store and its journal; return how many there were.

    Nobody is told: subscribers who have had one keep it.
    """
    folder = os.path.join(data, "mqtt")
    loop = asyncio.new_event_loop()
    try:
        kept = KeptBroker(folder, loop=loop)
        count = 0
        for topic in map(str.encode, topics):
            if kept.broker.retained.remove(topic):
                kept.journal.retained(topic, None)
                count += 1
        kept.close()
    finally:
        loop.close()
    path = os.path.join(folder, STORE)
    if count and disk_for(path).stat(path) is not None:
        with AppendLogStore.open(path) as store:
            store.compact()  # the file keeps no older value
    return count


def left_behind(data: str, *, logs: bool, outside: bool = False) -> list[NotErased]:
    """Return where data of a key may still be after ``erase_key``, and why they are not erased there."""
    ships = [seam for seam in read_seams(data) if isinstance(seam, ShipSeam)]
    found = [NotErased(f"{seam.url} {seam.channel}", "shipped", _shipped(seam)) for seam in ships]
    if not outside:
        places = [
            path for path in (*(fold.store for fold in _folds(data)), *_keyed_logs(data)) if not is_below(data, path)
        ]
        found += [
            NotErased(path, "outside", "it is outside of the data directory: --outside reaches it") for path in places
        ]
    for path in _keyed_logs(data):
        if not outside and not is_below(data, path):
            continue
        if not logs:
            found.append(NotErased(path, "log", "it is rewritten with --logs"))
        elif detect(path, disk_for(path)) != "messagelog":
            found.append(NotErased(path, "log", "records of this format cannot be taken out; retention takes them"))
    found.append(NotErased("backups", "backup", "they are compared with their digests: make new ones, remove the old"))
    return found


def _shipped(seam: ShipSeam) -> str:
    how = "segments that were shipped stay as they are; penstock ship prune lets old ones go"
    try:
        head = read_head(object_store_for(seam.url), seam.channel)
    except (PenstockError, OSError) as exc:
        return f"{how}; the store was not asked: {exc}"
    return "nothing was shipped" if head is None else f"{head[0].records} records are up; {how}"


def _keyed_logs(data: str) -> list[str]:
    """Return the logs of a node whose records have keys, without those of buckets."""
    from penstock.log.find import find_logs

    paths = {os.path.realpath(log.path): log.path for log in find_logs(data)}
    named = [seam.log for seam in read_seams(data) if not isinstance(seam, LakeSeam | DeliverySeam)]
    paths |= {os.path.realpath(path): path for path in named if not is_url(path)}
    inside = {os.path.realpath(os.path.join(bucket, "log")) for bucket in find_buckets(data)}
    found = []
    for real, path in sorted(paths.items()):
        if real in inside or disk_for(path).stat(path) is None:
            continue
        with open_log(path) as log:
            if log.content == CONTENT:
                found.append(path)
    return found


def _folds(data: str) -> list[FoldSeam]:
    seams = [seam for seam in read_seams(data) if isinstance(seam, FoldSeam)]
    return [seam for seam in seams if disk_for(seam.store).stat(seam.store) is not None]


def erase_key(
    data: str, key: str, *, logs: bool, topics: Sequence[str] = (), outside: bool = False
) -> list[Erased | NotErased]:
    """Erase a key in every fold and bucket of a node, and with ``logs`` in message logs of keyed records; node stopped.

    The retained message of the topic that is the key goes too, and those of ``topics``.  Folds and logs that the node
    was told to keep elsewhere, or that a link leads to, are reached with ``outside``.
    """
    folds = [fold for fold in _folds(data) if outside or is_below(data, fold.store)]
    found: list[Erased | NotErased] = [
        Erased(fold.store, "fold", erase_in_fold(fold.store, fold.backend, key)) for fold in folds
    ]
    broker = os.path.join(data, "mqtt")
    if is_below(data, broker) and disk_for(broker).stat(os.path.join(broker, "journal")) is not None:
        found.append(Erased(broker, "retained", erase_retained(data, [key, *topics])))
    found += [Erased(bucket, "bucket", erase_in_bucket(bucket, key)) for bucket in find_buckets(data)]
    for path in _keyed_logs(data) if logs else ():
        if (outside or is_below(data, path)) and detect(path, disk_for(path)) == "messagelog":
            try:
                found.append(Erased(path, "log", erase_in_log(path, key.encode())))
            except CorruptionError as exc:
                found.append(
                    NotErased(path, "log", f"{exc}: this segment was left as it is, the others were rewritten")
                )
    return found
