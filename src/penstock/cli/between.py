"""``--from`` and ``--to``: positions, times, or how long ago."""

from __future__ import annotations

import datetime as dt
import re
import time
from typing import Final

import msgspec
import numpy as np

from penstock.batch import Batch
from penstock.errors import OptionsError
from penstock.log.options import Start

__all__ = ["TimesBetween", "Bound", "parse_bound"]

SECOND: Final = 1_000_000_000
UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class Bound(msgspec.Struct, frozen=True):
    """A position, or a time in nanoseconds since 1970.

    >>> Bound(position=80).time_ns is None
    True
    """

    position: int | None = None
    time_ns: int | None = None
    end: Start | None = None
    """An end of the log, whatever its position is."""


def parse_bound(text: str | None, option: str, now_ns: int | None = None) -> Bound:
    """Return what an option says: a whole number is a position, an age is that long ago, anything else a time.

    A time without a zone is UTC, as ``cat`` prints it.

    >>> parse_bound("80", "--from").position
    80
    >>> parse_bound("1970-01-01 00:01", "--to").time_ns
    60000000000
    >>> parse_bound("1970-01-01T00:00:00.000000007Z", "--to").time_ns
    7
    >>> parse_bound("15m", "--from", 1_000 * SECOND).time_ns
    100000000000
    """
    if text is None:
        return Bound()
    text = text.strip()
    if text in ("earliest", "latest"):
        return Bound(end="earliest" if text == "earliest" else "latest")
    if re.fullmatch(r"[0-9]{1,30}", text):
        return Bound(position=int(text))
    if age := re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)([smhd])", text):
        ago_ns = round(float(age[1]) * UNIT_SECONDS[age[2]] * SECOND)
        return Bound(time_ns=max((time.time_ns() if now_ns is None else now_ns) - ago_ns, 0))
    fraction = re.search(r":\d\d\.(\d{1,9})", text)
    try:
        moment = dt.datetime.fromisoformat(text.replace("." + fraction[1], "", 1) if fraction else text)
    except ValueError:
        raise OptionsError(
            f"{option} {text}: not earliest, latest, a position, a time (2026-11-16T08:30) or an age (90s, 15m, 2h, 7d)"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=dt.UTC)
    whole = (moment - dt.datetime.fromtimestamp(0, dt.UTC)) // dt.timedelta(seconds=1)
    return Bound(time_ns=max(whole * SECOND + int((fraction[1] if fraction else "0").ljust(9, "0")), 0))


class TimesBetween(msgspec.Struct, frozen=True):
    """What is asked for: from the first bound on, up to the second without it.

    >>> between = TimesBetween(Bound(time_ns=2), Bound(time_ns=4))
    >>> batch = Batch.of([b"a", b"b", b"c", b"d"], timestamps=[1, 2, 9, 3])
    >>> between.keep(batch, "log").to_payloads()
    [b'b', b'd']
    """

    start: Bound = Bound()
    end: Bound = Bound()

    def of(self, first: int, following: int) -> TimesBetween:
        """Return the same for a log that begins at ``first`` and ends before ``following``.

        >>> TimesBetween(Bound(end="earliest"), Bound(end="latest")).of(80, 176)
        TimesBetween(start=Bound(position=80, time_ns=None, end=None), end=Bound(position=176, time_ns=None, end=None))
        """
        places = {"earliest": first, "latest": following}
        start, end = (bound if bound.end is None else Bound(places[bound.end]) for bound in (self.start, self.end))
        return TimesBetween(start, end)

    @property
    def by_time(self) -> bool:
        """Whether times have to be looked at."""
        return self.start.time_ns is not None or self.end.time_ns is not None

    def keep(self, batch: Batch, path: str) -> Batch:
        """Return the records of a batch that are asked for; the times of a log need not ascend."""
        keep = np.ones(len(batch), np.bool_)
        if self.end.position is not None:
            keep &= batch.positions < min(self.end.position, np.iinfo(np.int64).max)
        if self.by_time:
            if batch.timestamps is None:
                raise OptionsError(f"{path}: its records have no times; give positions")
            times = batch.timestamps.astype(np.uint64)
            if self.start.time_ns is not None:
                keep &= times >= np.uint64(min(self.start.time_ns, (1 << 64) - 1))
            if self.end.time_ns is not None:
                keep &= times < np.uint64(min(self.end.time_ns, (1 << 64) - 1))
        return batch if keep.all() else batch.filter(keep)
