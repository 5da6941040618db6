"""Erasing what belongs to a key, wherever a node keeps it: folds, retained messages, logs by rewriting them, the lake.

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
from penstock.disk import disk_for, save_atomically
from penstock.errors import OptionsError, UnsupportedError
from penstock.log.detect import detect, open_log
from penstock.log.envelope import CONTENT, Envelope, decode_envelope, encode_envelope
from penstock.log.messagelog import MessageLog, MessageLogReader
from penstock.log.sidecar import sidecar_of
from penstock.mqtt.state_open import KeptBroker
from penstock.mqtt.state_restore import STORE
from penstock.node.ledger.seams import DeliverySeam, FoldSeam, LakeSeam, read_seams
from penstock.store import AppendLogStore, LmdbStore, RocksStore
from penstock.types import KvUpdate, Op

__all__ = ["Erased", "erase_in_fold", "erase_in_log", "erase_key", "erase_retained"]

ENGINES: Final[dict[str, Any]] = {store.backend: store for store in (AppendLogStore, RocksStore, LmdbStore)}


class Erased(msgspec.Struct, frozen=True):
    """What was erased in one place.

    >>> Erased("data/logs/readings", "log", 3).count
    3
    """

    place: str
    kind: str
    count: int


def erase_in_log(path: str, key: bytes) -> int:
    """Take the content of every record with this key out of a message log; return how many there were.

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
    held = sidecar_of(disk, path).lock(of=path)
    try:
        names = sorted(name for name in disk.list(path) if name.endswith(".log"))
        count = sum(_rewrite(path, name, key) for name in names)
    finally:
        held.release()
    MessageLog.open(path).close()  # it makes the indexes again
    return count


def _rewrite(path: str, name: str, key: bytes) -> int:
    """Write a segment again without what belongs to the key; its index is made again by whoever opens it."""
    disk = disk_for(path)
    first = int(name.removesuffix(".log"))
    purged = encode_envelope(Envelope(b"", b"", Op.PURGE))
    pieces, count = [], 0
    with MessageLogReader(path) as reader:
        following = [int(other[:-4]) for other in disk.list(path) if other.endswith(".log") and int(other[:-4]) > first]
        end = min(following, default=reader.last_seq + 1)
        for entry in reader.entries(first, end - first):
            if entry.seq >= end:
                break
            payload = entry.payload
            if decode_envelope(payload).key == key:
                payload, count = purged, count + 1
            pieces.append(kernel.messagelog.encode_one(entry.seq, entry.timestamp_ms, entry.sender, payload))
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


def erase_key(data: str, key: str, *, logs: bool, topics: Sequence[str] = ()) -> list[Erased]:
    """Erase a key in every fold of a node, and with ``logs`` in every message log of keyed records; node stopped.

    The retained message of the topic that is the key goes too, and those of ``topics``.
    """
    seams = read_seams(data)
    folds = [seam for seam in seams if isinstance(seam, FoldSeam) and disk_for(seam.store).stat(seam.store) is not None]
    found = [Erased(fold.store, "fold", erase_in_fold(fold.store, fold.backend, key)) for fold in folds]
    broker = os.path.join(data, "mqtt")
    if disk_for(broker).stat(os.path.join(broker, "journal")) is not None:
        found.append(Erased(broker, "retained", erase_retained(data, [key, *topics])))
    if logs:
        from penstock.log.find import find_logs

        paths = {os.path.realpath(log.path): log.path for log in find_logs(data)}
        named = [seam.log for seam in seams if not isinstance(seam, LakeSeam | DeliverySeam)]
        paths |= {os.path.realpath(path): path for path in named}
        for path in sorted(paths.values()):
            if disk_for(path).stat(path) is None:
                continue
            with open_log(path) as log:
                if log.content != CONTENT:
                    continue
            found.append(Erased(path, "log", erase_in_log(path, key.encode())))
    return found
