"""What a broker owes to sessions that outlive their connections, counted so that it adds up.

    came      messages of QoS 1 and 2 for such a session: each once for every session that is to get it
    went      the client has acknowledged it (PUBACK, PUBCOMP)
    lost      it never will, by reason: expired, queue full, session ended, …
    waiting   the rest: queued, or under way

The totals stand in the same frame of the journal as the changes they count (state_changes.py), so after a kill they are
exactly as old as the queues; each checkpoint writes them anew, behind its cursor.  What waits is not kept but measured,
which is what makes the sum a check.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.disk import Disk, disk_for
from penstock.errors import CorruptionError, NotFoundError
from penstock.mqtt import state_changes as c

if TYPE_CHECKING:
    from penstock.mqtt.session import Session

__all__ = ["Deliveries", "DeliveryTotals", "measure", "read_deliveries"]

DAMAGED: Final = "damaged"


class DeliveryTotals(msgspec.Struct, array_like=True, frozen=True):
    """Totals since the journal was made.

    >>> DeliveryTotals(10, 7, {"expired": 1}).owed
    2
    """

    came: int = 0
    went: int = 0
    lost: dict[str, int] = {}

    @property
    def owed(self) -> int:
        """What must be waiting."""
        return self.came - self.went - sum(self.lost.values())


class Deliveries:
    """Counts while the broker runs.

    >>> deliveries = Deliveries()
    >>> deliveries.totals.came
    0
    """

    __slots__ = ("_lost", "came", "changed", "went")

    def __init__(self) -> None:
        self.came = self.went = 0
        self._lost: dict[str, int] = {}
        self.changed = False

    @property
    def totals(self) -> DeliveryTotals:
        """The counts as they are now."""
        return DeliveryTotals(self.came, self.went, dict(self._lost))

    def begin(self, known: DeliveryTotals | None, waiting: int, damaged: bool) -> None:
        """Go on from what was kept; where it was ``damaged``, what does not wait any more was lost by that."""
        known = known or DeliveryTotals(waiting)
        self.came, self.went, self._lost = known.came, known.went, dict(known.lost)
        if damaged and waiting != known.owed:
            if waiting < known.owed:
                self._lost[DAMAGED] = self._lost.get(DAMAGED, 0) + known.owed - waiting
            else:
                self.came += waiting - known.owed
        self.changed = True

    def owe(self, session: Session, count: int) -> None:
        """Count messages that a session is to get."""
        self.came += count
        session.owed += count
        self.changed = True

    def done(self, session: Session, count: int) -> None:
        """Count messages that a client has acknowledged."""
        count = min(count, session.owed)
        self.went += count
        session.owed -= count
        self.changed = True

    def lose(self, session: Session, count: int, reason: str) -> None:
        """Count messages that a session was to get, and will not."""
        count = min(count, session.owed)
        if count:
            self._lost[reason] = self._lost.get(reason, 0) + count
            session.owed -= count
            self.changed = True

    def encode(self) -> bytes:
        """Return the totals as a change of the journal."""
        self.changed = False
        data = msgspec.msgpack.encode(self.totals)
        return c.COUNTS.pack(c.IS_COUNTS, len(data)) + data


def decode_totals(data: bytes) -> DeliveryTotals:
    """Return totals from the journal or the store."""
    return msgspec.msgpack.decode(data, type=DeliveryTotals)


def measure(sessions: Iterable[Session]) -> int:
    """Return how many messages wait for sessions that outlive their connections, or are under way to them."""
    return sum(each.queued_messages + each.exchange.messages for each in sessions if each.expiry > 0)


def read_deliveries(folder: str, disk: Disk | None = None) -> DeliveryTotals:
    """Return the totals of a broker's data directory, whether it runs or not; nothing is changed.

    >>> read_deliveries("nowhere")
    Traceback (most recent call last):
    penstock.errors.NotFoundError: nowhere: no broker has kept anything here
    """
    from penstock.mqtt.state_log import NAME

    disk = disk or disk_for(folder)
    journal = os.path.join(folder, "journal")
    if disk.stat(journal) is None:
        raise NotFoundError(f"{folder}: no broker has kept anything here")
    for name in sorted((name for name in disk.list(journal) if NAME.fullmatch(name)), reverse=True):
        try:
            found = _last_totals(disk, os.path.join(journal, name))
        except FileNotFoundError:
            continue  # it went meanwhile, because later ones have all that was in it
        if found is not None:
            return found
    return DeliveryTotals()


def _last_totals(disk: Disk, path: str) -> DeliveryTotals | None:
    """Return the last totals of a segment."""
    from penstock.mqtt.state_log import FRAME, FRAME_BYTES, HEAD, HEAD_BYTES, TURN
    from penstock.mqtt.state_restore import each_change

    with disk.open(path) as file:
        size, at = file.stat().size, HEAD_BYTES
        head = file.read_at(0, HEAD.size)
        if len(head) < HEAD.size:
            return None
        start = HEAD.unpack(head)[3]
        frames: list[tuple[int, int]] = []
        while at + FRAME_BYTES <= size:
            magic, changes_len, data_len, position, _ = FRAME.unpack(file.read_at(at, FRAME.size))
            end = at + FRAME_BYTES + changes_len + data_len
            if magic != TURN or position != start + at - HEAD_BYTES or end > size:
                break
            frames.append((at, changes_len))
            at = end
        for at, changes_len in reversed(frames):
            data = file.read_at(at, FRAME_BYTES + changes_len)
            changes, crc = data[FRAME_BYTES:], int.from_bytes(data[FRAME.size : FRAME_BYTES], "little")
            if zlib.crc32(changes, zlib.crc32(data[: FRAME.size])) != crc:
                continue
            try:
                for kind, where in reversed(each_change(changes)):
                    if kind == c.IS_COUNTS:
                        return decode_totals(changes[where + c.COUNTS.size :])
            except (ValueError, IndexError, msgspec.MsgspecError) as exc:
                raise CorruptionError(path, at, f"a turn is not understood: {exc}") from None
    return None
