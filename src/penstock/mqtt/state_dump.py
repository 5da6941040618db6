"""What a broker keeps as entries, under the names of the seed: store and journal together, read without changing them.

    retained/{topic}                   the seed's RetainedData
    sessions/{client}                  SessionData
    subscriptions/{client}/{filter}    SubscriptionData
    pending/{client}/{position}        JSON: messages of one publish that wait for a client or are under way to it

The files are copied into memory first, the journal before the store, so that a broker may go on meanwhile: the store is
never behind what is taken of the journal.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.disk import Disk, MemoryDisk, disk_for
from penstock.errors import NotFoundError
from penstock.mqtt import state_changes as c
from penstock.mqtt.journal import Stored
from penstock.mqtt.session import Session
from penstock.mqtt.state_backup import NoLoop, opened
from penstock.mqtt.state_checkpoint import Checkpoints
from penstock.mqtt.state_log import NAME
from penstock.mqtt.state_restore import STORE
from penstock.types import KvUpdate, Problem

__all__ = ["dump", "is_kept"]

CHUNK_BYTES = 1 << 20


def is_kept(data: str, disk: Disk | None = None) -> bool:
    """Whether a broker keeps its state in this folder."""
    disk = disk or disk_for(data)
    journal = os.path.join(data, "journal")
    return disk.stat(os.path.join(data, STORE)) is not None and disk.stat(journal) is not None


def dump(data: str, disk: Disk | None = None) -> tuple[list[KvUpdate], list[Problem]]:
    """Return everything a broker keeps in a folder, in the order of the keys, and what is damaged."""
    disk = disk or disk_for(data)
    if not is_kept(data, disk):
        raise NotFoundError(f"{data}: no broker keeps its state here")
    copy = MemoryDisk()
    for folder in ("state", "state/journal"):
        copy.make_folder(folder)
    journal = os.path.join(data, "journal")
    for name in disk.list(journal):
        if NAME.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):  # it went meanwhile: nobody needed it
                _copy(disk, os.path.join(journal, name), copy, f"state/journal/{name}")
    _copy(disk, os.path.join(data, STORE), copy, f"state/{STORE}")
    with opened("state", copy) as (restore, store, problems):
        checkpoints = Checkpoints(restore.journal, restore.broker, store, NoLoop(), lambda: store)
        try:
            found = checkpoints.everything()
            for session in restore.broker.sessions.values():
                found += [KvUpdate.put(key, value, 0) for key, value in _pending(session)]
        finally:
            checkpoints.close()
        problems = [Problem(each.file.replace("state", data, 1), each.byte, each.reason) for each in problems]
    return sorted(found, key=lambda update: update.key.encode()), problems


def _copy(disk: Disk, path: str, to: Disk, name: str) -> None:
    with disk.open(path) as source, to.create(name) as file:
        at = 0
        while data := source.read_at(at, CHUNK_BYTES):
            file.write_at(at, data)
            at += len(data)


def _pending(session: Session) -> Iterator[tuple[str, bytes]]:
    for flight in session.exchange.flights:
        about = {"phase": "sent", "packet_id": flight.first, "messages": flight.count, "qos": flight.qos}
        if flight.stored is None:
            about["phase"] = "released"
            yield c.key_of("pending", session.client_id, str(flight.first)), msgspec.json.encode(about)
        else:
            yield _entry(session, flight.stored, flight.start, {**about, "retain": flight.retain})
    for waiting in session.queue:
        about = {"phase": "waits", "packet_id": None, "messages": waiting.count, "qos": waiting.qos}
        assert waiting.stored is not None
        yield _entry(session, waiting.stored, waiting.start, {**about, "retain": waiting.retain})


def _entry(session: Session, stored: Stored, start: int, about: dict[str, Any]) -> tuple[str, bytes]:
    fields = c.MESSAGE.unpack(stored.segment.read(stored.head_at, c.MESSAGE.size))
    topic = stored.segment.read(stored.head_at + c.MESSAGE.size, fields[7]).decode(errors="replace")
    position = f"{stored.id:020}" + (f".{start}" if start else "")
    return c.key_of("pending", session.client_id, position), msgspec.json.encode({"topic": topic, **about})
