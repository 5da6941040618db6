"""The face of a log: what the CLI, the Spark source, taps, folds and tests are written against, once.

What a format adds (ack and compression, a sequence index, reserve and commit) stays in its folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Literal, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from penstock.batch import Batch
from penstock.disk import LoopWait
from penstock.log.options import DEFAULT_LIMIT
from penstock.types import Problem

__all__ = ["LogReader", "LogWriter", "Cuttable", "OnDamage", "WritesInPlace"]

OnDamage = Literal["raise", "skip"]
"""What reading does at a damaged place:

``raise``  CorruptionError names file and byte; reading stays there until ``skip_damage`` is asked where it goes on
``skip``   go on at the next record that is whole; what was stepped over is logged, and listed in ``damage``
"""


class LogReader(Protocol):
    """A log to read from, at any position, by any number of readers.

    Invariants:

    1. Positions grow from record to record and are stable across restarts, rolls and retention.
    2. What ``read`` returns for a position is the same every time, until retention takes it.
    3. Reading changes no file.
    4. Which records are read does not depend on where reading begins or in which pieces it is done, damage or not.
    """

    format: str
    """The name of the format: xchannel, filechannel, messagelog."""
    origin: int
    """The position of the very first record of such a log: one whose ``first_position`` is behind it was shortened."""
    has_kinds: bool
    """Whether records have kinds; in a format without them every record is of none."""
    path: str
    on_damage: OnDamage
    """What reading does at a damaged place; given when the log is opened."""

    @property
    def content(self) -> str:
        """What the records are: ``raw``, or ``envelope/1`` where they have keys."""

    @property
    def damage(self) -> list[Problem]:
        """What reading has stepped over so far, each place once; of very many the first thousand."""

    @property
    def damage_count(self) -> int:
        """How many places reading has stepped over so far."""

    @property
    def first_position(self) -> int:
        """Where the oldest record is, or will be."""

    @property
    def next_position(self) -> int:
        """The exclusive bound: behind the newest record that is visible now."""

    @property
    def durable_position(self) -> int | None:
        """The exclusive bound of what survives a power cut, or None where nobody here can know."""

    def read(self, position: int, limit: int = DEFAULT_LIMIT) -> Batch:
        """Return records from ``position`` on: over one buffer, at most ``limit``, maybe fewer.

        Empty only when there is nothing at or behind ``position`` yet.  Reading goes on at the
        batch's ``next_position``.  ExpiredError below ``first_position``, naming both.  At a damaged place it does what
        ``on_damage`` says; whole records before that are returned first.
        """

    def keeps(self, position: int) -> bool:
        """Whether nothing at or behind ``position`` was removed: a reader that stands there has missed no record.

        So at ``first_position`` and behind it, and where it stands at the end of a file that has gone since.
        """

    def skip_damage(self, position: int) -> tuple[int, Problem] | None:
        """Return where reading goes on behind damage at ``position``, and what it is; None if there is none.

        After a CorruptionError of ``read``; it does not count into ``damage``.
        """

    def gaps(self, expected: int | None, batch: Batch) -> int:
        """Return at how many places records are missing in a batch and in front of it.

        ``expected`` is where reading went on before, None where nothing was read yet.
        """

    def tail(
        self,
        position: int | None = None,
        *,
        limit: int = DEFAULT_LIMIT,
        timeout: float | None = None,
    ) -> Iterator[Batch]:
        """Yield batches from ``position`` (or from the end) on and wait for more.

        With a ``timeout`` it ends when that many seconds brought nothing.
        """

    def waiter(self) -> LoopWait:
        """Return what waits for more records on an event loop; look before each ``pause``, and close it at last."""

    def verify(self) -> Iterator[Problem]:
        """Yield every problem the log has."""

    def stat(self) -> dict[str, Any]:
        """Return what there is to say about the log, ready for JSON."""

    def close(self) -> None:
        """Let go of the files."""

    def __enter__(self) -> Self:
        """Return the log."""

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        """Close the log."""


class LogWriter(Protocol):
    """The one writer of a log; a second one is refused with LockedError."""

    has_times: bool
    """Whether records keep a time; a format without them refuses one that is given."""

    @property
    def largest_message(self) -> int:
        """The largest record it takes."""

    def append(self, payload: Any, *, kind: int = 0, timestamp_ns: int | None = None) -> int:
        """Append one record, now unless a time is given, and return its position."""

    def append_many(self, payloads: Any, *, kind: Any = 0, timestamp_ns: Any = None) -> NDArray[np.int64]:
        """Append many records (a list, an Arrow array, a Batch) and return their positions."""

    def sync(self) -> int:
        """Return when everything appended so far survives a power cut, with that position."""

    def close(self) -> None:
        """Let go of the log and of its lock."""


@runtime_checkable
class WritesInPlace(Protocol):
    """A writer whose log is mapped: code of the kernel makes records where they will lie."""

    def append_in_place(self, source: Any) -> None:
        """Have ``source.fill`` publish records while there is room, until it has no more."""


@runtime_checkable
class Cuttable(Protocol):
    """A LogReader that can be cut into spans without reading it, for those who read it in parallel."""

    def cut(self, start: int, end: int, span_bytes: int) -> list[tuple[int, int]]:
        """Return spans of about ``span_bytes``: where each begins, and how many bytes of the log it takes.

        The first begins at ``start``, all below ``end``, ascending.  Reading can begin at each of them.  What is
        appended behind ``end`` changes nothing; a segment that was compressed meanwhile, or whose index has caught
        up, may be cut elsewhere, and the spans together hold the same records.
        """
