"""The names in a folder that begin alike, without reading a large folder again for everyone who asks.

A log that is a row of files (``ticks``, ``ticks.1``, …) is found by listing its folder, since only that shows a hole
in its numbers.  In a folder of n channels each of them would look at all names of all others: n × n in total.  So the
names of a large folder are remembered, and given out again

* as what they are, while the time of the folder's last change is the one from before they were read, and was then long
  enough ago for a later change to have another;
* as what they were a moment ago, for 20 times as long as reading them took.  Who gets these has to look at the names
  that matter to it, and asks again if they are not as remembered.
"""

from __future__ import annotations

import bisect
import time
from typing import Final, NamedTuple

from penstock.disk.face import ReadDisk
from penstock.disk.posix import PosixDisk

__all__ = ["names_from"]

FEW_NAMES: Final = 512
"""Up to so many names nothing is remembered: reading them takes a fraction of what opening a file of them does."""
SHARE: Final = 20
LONGEST_SECONDS: Final = 1.0
SETTLED_NS: Final = 2_000_000_000
"""The coarsest time of a change that a file system keeps: two changes that lie further apart have different ones."""
MOST_FOLDERS: Final = 8


class _Listing(NamedTuple):
    names: list[str]
    modified_ns: int
    settled: bool
    until: float


_listings: dict[tuple[int, int], _Listing] = {}


def names_from(disk: ReadDisk, folder: str, prefix: str, *, again: bool = False) -> tuple[list[str], bool]:
    """Return the names in a folder that begin with ``prefix``, sorted, and whether they are those of now.

    ``again`` reads the folder in any case.

    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name in ("ticks.1", "orders", "ticks"):
    ...         os.mkdir(f"{folder}/{name}")
    ...     names_from(PosixDisk(), folder, "ticks")
    (['ticks', 'ticks.1'], True)
    """
    if not isinstance(disk, PosixDisk):
        return _beginning(disk.list(folder), prefix), True
    found = disk.stat(folder)
    key, modified_ns = (found.identity, found.modified_ns) if found else ((0, 0), 0)
    known = _listings.get(key)
    if known is not None and not again:
        if known.settled and known.modified_ns == modified_ns:
            return _beginning(known.names, prefix), True
        if time.monotonic() < known.until:
            return _beginning(known.names, prefix), False
    begin, settled = time.monotonic(), time.time_ns() - modified_ns > SETTLED_NS
    names = disk.list(folder)
    _listings.pop(key, None)
    if len(names) > FEW_NAMES:
        for oldest in list(_listings)[: max(0, len(_listings) - MOST_FOLDERS + 1)]:
            _listings.pop(oldest, None)
        now = time.monotonic()
        _listings[key] = _Listing(names, modified_ns, settled, now + min(SHARE * (now - begin), LONGEST_SECONDS))
    return _beginning(names, prefix), True


def _beginning(names: list[str], prefix: str) -> list[str]:
    start = end = bisect.bisect_left(names, prefix)
    while end < len(names) and names[end].startswith(prefix):
        end += 1
    return names[start:end]
