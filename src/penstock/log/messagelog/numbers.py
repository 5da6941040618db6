"""Which numbers and times new entries get: what the caller gives, checked, or what comes next."""

from __future__ import annotations

import time
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import OptionsError, UnsupportedError
from penstock.log.messagelog.format import MAX_POSITION, MAX_SEQ

__all__ = ["next_number", "first_of", "number_column", "milliseconds"]


def next_number(path: str, floor: int, seq: int | None) -> int:
    """Return the number of the next entry of a log that goes on at ``floor``, or say why ``seq`` cannot be it.

    >>> next_number("ops", 7, None), next_number("ops", 7, 20)
    (7, 20)
    """
    if seq is None:
        seq = floor
        if seq > MAX_SEQ:
            raise UnsupportedError(f"{path}: the numbers of this log are used up")
    elif not 0 < seq <= MAX_SEQ:
        raise OptionsError(f"{path}: seq={seq}: numbers are between 1 and 2^64 - 1")
    elif seq < floor:
        raise OptionsError(f"{path}: seq={seq}: must be above {floor - 1}, which was given out already")
    return seq


def first_of(path: str, floor: int, seq: int | None, count: int) -> int:
    """Return the first of ``count`` numbers in a row.

    >>> first_of("ops", 7, None, 100)
    7
    """
    if not count:
        return floor
    first = next_number(path, floor, seq)
    if first + count - 1 > MAX_POSITION:
        raise UnsupportedError(f"{path}: numbers above 2^63 - 1 are no positions; append them one by one")
    return first


def number_column(path: str, floor: int, seq: Any, count: int) -> NDArray[np.uint64]:
    """Return the numbers of ``count`` entries: in a row, or as given if they grow.

    >>> number_column("ops", 7, None, 2).tolist(), number_column("ops", 7, [8, 12], 2).tolist()
    ([7, 8], [8, 12])
    """
    if seq is None or isinstance(seq, int | np.integer):
        first = first_of(path, floor, None if seq is None else int(seq), count)
        return np.arange(first, first + count, dtype=np.uint64)
    numbers = np.asarray(seq)
    if numbers.shape != (count,) or not np.issubdtype(numbers.dtype, np.integer):
        raise OptionsError(f"{path}: seq needs one number for each of {count} entries")
    if count:
        next_number(path, floor, int(numbers[0]))
        if int(numbers.max()) > MAX_POSITION:
            raise UnsupportedError(f"{path}: numbers above 2^63 - 1 are no positions; append them one by one")
        if not (numbers[1:] > numbers[:-1]).all():
            raise OptionsError(f"{path}: the numbers of seq must grow")
    return np.ascontiguousarray(numbers.astype(np.uint64))


def milliseconds(timestamp_ns: int | None, timestamp_ms: int | None = None) -> int:
    """Return the time of an entry as the format keeps it: now unless one is given.

    >>> milliseconds(7_900_000)
    7
    """
    given = "timestamp_ms" if timestamp_ms is not None else "timestamp_ns"
    if timestamp_ms is None:
        if timestamp_ns is None:
            given, timestamp_ns = "the clock of this machine", time.time_ns()
        timestamp_ms = index(timestamp_ns) // 1_000_000
    timestamp_ms = index(timestamp_ms)
    if not 0 <= timestamp_ms <= MAX_SEQ:
        reason = "no entry has a time before 1970" if timestamp_ms < 0 else "a time fits 64 bits"
        raise OptionsError(f"{given} says {timestamp_ms} ms since 1970: {reason}")
    return timestamp_ms
