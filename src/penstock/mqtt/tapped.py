"""The log that a tap writes: opened with the format's options, with a note of how far the journal knows of it.

The note is a register beside the log (log/sidecar.py), ``…penstock-tap``: boot id and the position of the last record
whose packet ids are in the journal.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Mapping
from typing import Any, Final

from penstock.disk import disk_for
from penstock.disk.failpoint import fail_point
from penstock.disk.plain import make_folders
from penstock.errors import CorruptionError, OptionsError
from penstock.kernel.mqtt import Run
from penstock.log.detect import detect, open_log
from penstock.log.envelope import CONTENT
from penstock.log.face import LogWriter, WritesInPlace
from penstock.log.find import find_logs
from penstock.log.options import SyncMode
from penstock.log.sidecar import Register, sidecar_of
from penstock.mqtt.carried import carrier_of, encode_in_pieces, ids_of, open_headers, open_rows
from penstock.mqtt.places import TapPlace
from penstock.mqtt.session import Session

__all__ = ["Doubt", "TappedLog", "lost_records", "open_log_writer"]

_log = logging.getLogger(__name__)

NOTE_EVERY: Final = 65_536
"""Records between two notes where no QoS 2 message makes one due sooner."""

REGION_BYTES: Final = 4 << 20
ROLL_BYTES: Final = 256 << 20
LARGEST_PAYLOAD: Final = 268_435_456


def open_log_writer(
    path: str, format: str | None, sync: SyncMode, options: Mapping[str, Any], *, alone: bool
) -> LogWriter:
    """Open a log of envelopes for writing, created if it is not there; ``alone``: it takes everything of its tap."""
    disk = disk_for(path)
    new = disk.stat(path) is None
    kind = format if new else detect(path, disk)
    given: dict[str, Any] = {"sync": sync, "content": CONTENT, **options}
    make_folders(os.path.dirname(os.path.abspath(path)))
    try:
        if kind == "filechannel":
            from penstock.log.filechannel import ChannelOptions, FileChannel

            return FileChannel.open(path, ChannelOptions(**{"collect": False, **given}), disk=disk)
        if kind == "messagelog":
            from penstock.log.messagelog import MessageLog, MessageLogOptions

            whole = MessageLogOptions(**{"max_payload_bytes": LARGEST_PAYLOAD, **given})
            return MessageLog.open(path, whole, disk=disk)
        from penstock.log.xchannel import Writer

        if new and alone:  # fewer steps, and room for larger messages
            given = {"region_bytes": REGION_BYTES, **given}
        return Writer.open(path, disk=disk, **{"roll_bytes": ROLL_BYTES, **given})
    except TypeError as exc:
        raise OptionsError(f"{path}: {exc}") from None


class TappedLog:
    """One channel of a tap, open."""

    def __init__(self, path: str, writer: LogWriter, note: Register, boot_id: bytes) -> None:
        self.path, self.writer = path, writer
        self.last: int | None = None
        """The position of the last record appended here."""
        self._in_place = writer if isinstance(writer, WritesInPlace) else None
        self._note, self._boot_id = note, boot_id
        self._due = False
        self._unnoted = 0

    @classmethod
    def open(
        cls, path: str, format: str | None, sync: SyncMode, options: Mapping[str, Any], *, alone: bool
    ) -> TappedLog:
        """Open it, created if it is not there."""
        disk = disk_for(path)
        writer = open_log_writer(path, format, sync, options, alone=alone)
        log = cls(path, writer, _note_of(path), disk.boot_id())
        try:
            log.last = behind_note(path)[0]
        except BaseException:
            log.close()
            raise
        return log

    @classmethod
    def at(cls, place: TapPlace) -> set[str]:
        """Return the paths of the logs that are there: the one, or all below the folder of a template."""
        if place.fixed:
            return {place.template} if os.path.exists(place.template) else set()
        found = {log.path for log in find_logs(place.root)} if os.path.isdir(place.root) else set()
        return {path for path in found if place.may_be(path)}

    def append_runs(self, runs: list[Run], headers: list[bytes], times_ns: list[int]) -> None:
        """Append the messages of runs; ``last`` moves when all of them are there."""
        if not runs:
            return
        fail_point("mqtt.tap.before")
        if self._in_place is not None:
            carrier = carrier_of(runs, headers, times_ns)
            self._in_place.append_in_place(carrier)
            self.last = carrier.last
        else:
            for piece in encode_in_pieces(runs, headers, times_ns):
                last = int(self.writer.append_many(piece)[-1])
            self.last = last
        fail_point("mqtt.tap.written")  # the log has it, the journal not yet

    def append(self, records: list[bytes]) -> None:
        """Append records that were made before in one call."""
        fail_point("mqtt.tap.before")
        self.last = int(self.writer.append_many(records)[-1])
        fail_point("mqtt.tap.written")

    def sync(self) -> int:
        """Return when everything survives a power cut."""
        return self.writer.sync()

    def noted_later(self, count: int, due: bool) -> None:
        """Count records; a note is due when ids came with them, or many did."""
        self._unnoted += count
        self._due |= due or self._unnoted >= NOTE_EVERY

    def note(self, *, force: bool = False) -> None:
        """Write the note where it is due."""
        if (self._due or (force and self._unnoted)) and self.last is not None:
            fail_point("mqtt.tap.kept")  # the journal has it, the note not yet
            self._note.write(self._boot_id, self.last, sync=False)
            fail_point("mqtt.tap.noted")
            self._due, self._unnoted = False, 0

    def written_since(self, last: int | None, records: list[bytes]) -> list[int]:
        """Return the positions of those of these records, which were to be appended behind ``last``, that are there."""
        found: list[int] = []
        if not records:
            return found
        with open_log(self.path) as log:
            at = log.first_position if last is None else last
            while len(found) < len(records) and len(batch := log.read(at)):
                for position, record in zip(batch.positions.tolist(), batch.to_payloads(), strict=True):
                    if position == last:
                        continue
                    if len(found) == len(records) or record != records[len(found)]:
                        return found
                    found.append(position)
                at = batch.next_position
        return found

    def close(self) -> None:
        """Let go of it."""
        try:
            self.note(force=True)
        finally:
            self._note.close()
            self.writer.close()


def _note_of(path: str) -> Register:
    disk = disk_for(path)
    return Register(disk, sidecar_of(disk, path).prefix + "tap")


def behind_note(path: str) -> tuple[int | None, list[tuple[bytes, bytes, bytes]]]:
    """Return the position of the last record, and topic, headers and payload of those with ids behind the note."""
    found = _note_of(path).read()
    noted = None if found is None else found[1]
    last: int | None = None
    records: list[tuple[bytes, bytes, bytes]] = []
    with open_log(path, on_damage="skip") as log:
        if log.content != CONTENT:
            return None, records  # another's; a writer of ours is refused here
        position = log.first_position if noted is None else max(noted, log.first_position)
        if position >= log.next_position:
            return noted, records  # nothing, or a power cut took what the note is about
        while len(batch := log.read(position)):
            position, last = batch.next_position, int(batch.positions[-1])
            if log.damage_count:
                continue  # the writer may set aside what is behind damage: it is not known to be there
            rows = open_rows(batch, path, lambda exc: _log.error("%s", exc))
            records += [(key, head, payload) for at, key, head, _, _, payload in rows if at != noted and ids_of(head)]
    return last, records


def lost_records(paths: set[str]) -> bool:
    """Return whether a power cut has taken records from one of these logs that its note knows of."""
    for path in paths:
        disk = disk_for(path)
        note = _note_of(path)
        found = note.read()
        if found is None or found[0] == disk.boot_id():
            continue
        with open_log(path) as log:
            if log.next_position <= found[1]:
                return True
    return False


class Doubt:
    """QoS 2 messages that are in a log, while no session may know of them."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[bytes, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def learn(self, path: str, sessions: Mapping[str, Session]) -> None:
        """Take in what lies behind the note of a log, before anybody publishes."""
        for topic, headers, payload in behind_note(path)[1]:
            try:
                carried = open_headers(headers)
            except CorruptionError as exc:
                _log.error("%s: %s", path, exc)
                continue
            session = sessions.get(carried.client)
            if session is not None and carried.packet_id not in session.received:
                self._known[carried.client, carried.packet_id] = (topic, zlib.crc32(payload))

    def add(self, client: str, runs: list[Run]) -> None:
        """Remember single messages that were written and refused all the same."""
        for run in runs:
            self._known[client, run.first_id] = (run.topic, zlib.crc32(run.payload()))

    def has(self, client: str, run: Run) -> bool:
        """Return whether this message is in the log already; another one under its id ends the doubt."""
        key = (client, run.first_id)
        found = self._known.get(key)
        if found is None or (run.dup and found == (run.topic, zlib.crc32(run.payload()))):
            return found is not None
        del self._known[key]
        return False

    def settle(self, client: str, ids: list[int]) -> None:
        """Forget messages whose sessions know of them now."""
        for packet_id in ids:
            self._known.pop((client, packet_id), None)
