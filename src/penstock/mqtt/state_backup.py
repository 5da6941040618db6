"""A copy of what a running broker keeps, taken at one turn; and putting it back, opened and compared.

    backup.json      when, up to where, what was there, and a digest of it
    state.snap       the store
    journal/         the segments, up to the turn

Checkpoints pause while files are copied; nothing else waits.  The digest is taken from the broker's memory at the turn
of the copy, and again from what a restored copy is read as.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from penstock.clock import SYSTEM_CLOCK, shown_ns
from penstock.disk import Disk, disk_for, save_atomically
from penstock.disk.plain import make_folders
from penstock.errors import CorruptionError, NotFoundError, OptionsError
from penstock.mqtt import state_changes as c
from penstock.mqtt.broker import Broker
from penstock.mqtt.gate import TurnGate
from penstock.mqtt.state import StateJournal
from penstock.mqtt.state_log import StateLog, TurnFile
from penstock.mqtt.state_open import RESTORING, KeptBroker, own_time
from penstock.mqtt.state_options import PersistenceOptions
from penstock.mqtt.state_reserve import Reserve
from penstock.mqtt.state_restore import STORE, Restore, open_store
from penstock.store import AppendLogStore
from penstock.types import Problem

__all__ = ["Backup", "NoLoop", "back_up", "opened", "put_back", "read_state", "verify"]

MANIFEST: Final = "backup.json"
CHUNK_BYTES: Final = 1 << 20


class Backup(msgspec.Struct, frozen=True):
    """What a copy holds."""

    made_ns: int
    position: int
    sessions: int
    subscriptions: int
    retained: int
    queued: int
    digest: str
    version: int = 1


def digest_of(broker: Broker) -> str:
    """Return a digest of all that is kept: sessions with their messages, and retained messages."""
    found = hashlib.sha256()
    for client_id in sorted(broker.sessions):
        session = broker.sessions[client_id]
        if not session.number:
            continue
        will = None if session.will is None else (session.will.topic, session.will.payload)
        facts: list[Any] = [client_id, session.username, session.expiry, will]
        if session.persistent:
            facts += [
                sorted((each.name, each.qos, each.identifier) for each in session.subscriptions.values()),
                c.ranges(session.received),
                session.exchange.next_number,
                _joined(
                    (each.number - each.start, 0 if each.stored is None else each.stored.id, each.start, each.count,
                     each.qos, each.retain, each.identifiers)
                    for each in session.exchange.flights
                ),
                _joined(
                    (0, 0 if each.stored is None else each.stored.id, each.start, each.count, each.qos, each.retain,
                     each.identifiers)
                    for each in session.queue
                ),
            ]  # fmt: skip
        found.update(c.encode(facts))
    for topic in sorted(broker.retained.topics()):
        run = broker.retained.get(topic)
        if run is not None and not topic.startswith(b"$SYS/"):
            found.update(c.encode([topic, run.qos, run.payload(), run.forward, run.expiry]))
    return found.hexdigest()


def _joined(parts: Iterable[tuple[int, int, int, int, int, bool, bytes]]) -> list[list[Any]]:
    """Return parts with those put together that follow each other: how a run was cut does not matter."""
    found: list[list[Any]] = []
    for number, stored, start, count, *form in parts:
        last = found[-1] if found else None
        if (
            last is not None
            and stored
            and last[:2] == [number, stored]
            and last[2] + last[3] == start
            and last[4:] == form
        ):
            last[3] += count
        else:
            found.append([number, stored, start, count, *form])
    return found


def facts_of(broker: Broker, position: int, made_ns: int) -> Backup:
    """Return what a broker holds now."""
    kept = [session for session in broker.sessions.values() if session.number]
    return Backup(
        made_ns,
        position,
        len(kept),
        sum(len(session.subscriptions) for session in kept if session.persistent),
        sum(not topic.startswith(b"$SYS/") for topic in broker.retained.topics()),
        sum(session.queued_messages for session in kept if session.persistent),
        digest_of(broker),
    )


def _disk_above(folder: str, disk: Disk | None) -> Disk:
    """Return the disk, or that of the folder, with the folders above that one made."""
    if disk is None:
        make_folders(os.path.dirname(os.path.abspath(folder)))
    return disk or disk_for(folder)


async def back_up(kept: KeptBroker, folder: str, disk: Disk | None = None) -> Backup:
    """Copy what a running broker keeps into a folder that is empty or not there."""
    disk = _disk_above(folder, disk)
    disk.make_folder(folder)
    if disk.list(folder):
        raise OptionsError(f"{folder}: it is not empty")
    with kept.checkpoints.paused():
        while kept.checkpoints.applying:
            await asyncio.sleep(0.005)
        kept.gate.end_turn()
        log = kept.journal.log
        backup = facts_of(kept.broker, log.end, shown_ns(kept.broker.clock))
        segments = log.alive()
        await asyncio.to_thread(_copy, disk, folder, kept, segments, backup)
    return backup


def _copy(disk: Disk, folder: str, kept: KeptBroker, segments: list[TurnFile], backup: Backup) -> None:
    kept.checkpoints.store.write_data(folder)
    disk.rename(os.path.join(folder, "data", "fold.snap"), os.path.join(folder, STORE))
    disk.remove_folder(os.path.join(folder, "data"))
    journal = os.path.join(folder, "journal")
    disk.make_folder(journal)
    for segment in segments:
        size = segment.bytes_until(backup.position)
        with disk.create(os.path.join(journal, os.path.basename(segment.path))) as file:
            for at in range(0, size, CHUNK_BYTES):
                file.write_at(at, segment.file.read_at(at, min(CHUNK_BYTES, size - at)))
            file.sync()
    for each in (journal, folder):
        disk.sync_folder(each)
    save_atomically(disk, os.path.join(folder, MANIFEST), msgspec.json.format(msgspec.json.encode(backup)))


def put_back(backup: str, data: str, disk: Disk | None = None) -> Backup:
    """Copy a backup into a data directory that holds no broker yet; open it, and refuse it where it differs.

    Until that is done no broker opens the directory; another call takes the place of one that was cut short.
    """
    wanted = _manifest(backup, disk or disk_for(backup))
    disk = _disk_above(data, disk)
    disk.make_folder(data)
    journal, mark = os.path.join(data, "journal"), os.path.join(data, RESTORING)
    if disk.stat(mark) is not None:
        _remove_state(data, disk)
    elif disk.stat(os.path.join(data, STORE)) is not None or disk.stat(journal) is not None:
        raise OptionsError(f"{data}: a broker keeps its state here already")
    else:
        disk.create(mark).close()
        disk.sync_folder(data)
    disk.make_folder(journal)
    names = [os.path.join("journal", name) for name in disk.list(os.path.join(backup, "journal")) if ".turns" in name]
    for name in [*names, STORE]:
        with disk.open(os.path.join(backup, name)) as source, disk.create(os.path.join(data, name)) as file:
            size = source.stat().size
            for at in range(0, size, CHUNK_BYTES):
                file.write_at(at, source.read_at(at, CHUNK_BYTES))
            file.sync()
    for each in (journal, data):
        disk.sync_folder(each)
    _compare(data, wanted, disk)
    disk.remove(mark)
    disk.sync_folder(data)
    return wanted


def _remove_state(data: str, disk: Disk) -> None:
    """Remove what a call that was cut short has left."""
    journal = os.path.join(data, "journal")
    if disk.stat(journal) is not None:
        for name in disk.list(journal):
            disk.remove(os.path.join(journal, name))
    for name in disk.list(data):
        if name.startswith(STORE):
            disk.remove(os.path.join(data, name))


def verify(backup: str, disk: Disk | None = None) -> Backup:
    """Read a backup as a start of the broker would; CorruptionError where it is not what the broker held."""
    disk = disk or disk_for(backup)
    wanted = _manifest(backup, disk)
    _compare(backup, wanted, disk)
    return wanted


def _manifest(backup: str, disk: Disk) -> Backup:
    try:
        with disk.open(os.path.join(backup, MANIFEST)) as file:
            return msgspec.json.decode(file.read_at(0, 1 << 20), type=Backup)
    except FileNotFoundError:
        raise NotFoundError(f"{backup}: there is no backup of a broker here") from None
    except msgspec.MsgspecError as exc:
        raise CorruptionError(os.path.join(backup, MANIFEST), 0, f"not a backup: {exc}") from None


def _compare(data: str, wanted: Backup, disk: Disk) -> None:
    found = read_state(data, disk)
    if msgspec.structs.replace(found, made_ns=wanted.made_ns, position=wanted.position) != wanted:
        raise CorruptionError(data, 0, f"it holds {found}, and the broker held {wanted}")


class NoLoop:
    """A loop for who only reads: nothing is ever called."""

    def call_soon(self, callback: Any, *args: Any) -> None: ...  # noqa: D102
    def call_later(self, delay: float, callback: Any, *args: Any) -> None: ...  # noqa: D102
    def call_soon_threadsafe(self, callback: Any, *args: Any) -> None: ...  # noqa: D102


@contextlib.contextmanager
def opened(data: str, disk: Disk) -> Iterator[tuple[Restore, AppendLogStore, list[Problem]]]:
    """Read what a data directory holds as a start of the broker would, and let no time pass in it."""
    log = StateLog(disk, os.path.join(data, "journal"))
    try:
        store, problems = open_store(disk, data)
        with store:
            own, never = own_time(log, SYSTEM_CLOCK, disk), PersistenceOptions(sync="none")
            journal = StateJournal(log, own, SYSTEM_CLOCK, never, Reserve(disk, "", 0))
            journal.gate = TurnGate(NoLoop())
            restore = Restore(Broker(journal=journal, gate=journal.gate), journal, log, store)
            restore.read()
            restore.into_broker(resume=False)
            yield restore, store, [*log.problems, *problems, *restore.problems]
    finally:
        log.close()


def read_state(data: str, disk: Disk | None = None) -> Backup:
    """Return what a data directory holds; CorruptionError where something of it is damaged."""
    with opened(data, disk or disk_for(data)) as (restore, _, problems):
        for problem in problems:
            raise CorruptionError(problem.file, problem.byte, problem.reason)
        return facts_of(restore.broker, restore.end, 0)
