"""What shipping means for the log on this machine: a cursor that holds retention, and deletion of what is elsewhere.

Nothing is deleted that the head, read back or acknowledged, does not name with this span and size, that is not there by
a look at the object itself, or that a named cursor still needs.  The newest segment and the one before it stay.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable
from itertools import pairwise
from typing import Final

from penstock.disk import Disk, ObjectStore, is_url
from penstock.disk.failpoint import fail_point
from penstock.disk.objectstore import split_url
from penstock.errors import CorruptionError
from penstock.log.face import LogReader
from penstock.log.sidecar import Sidecar
from penstock.metrics import REGISTRY
from penstock.ship.erased import differs_by_erasure
from penstock.ship.manifest import MANIFEST_BYTES, Entry, Head, decode_page
from penstock.ship.segments import LocalSegment, note_removal, sealed_segments

__all__ = ["drop_shipped", "ship_cursor"]

logger = logging.getLogger(__name__)
_dropped: Final = REGISTRY.counter("ship_dropped_segments", "local segments removed because they are shipped")


def ship_cursor(url: str, channel: str) -> str:
    """Return the name of the cursor for a log that is shipped to a place: the same however the place is written.

    >>> ship_cursor("s3://bucket/fleet/edge-1", "ticks")
    'ship-7a29439c'
    >>> ship_cursor("file:///up", "ticks") == ship_cursor("/up/", "ticks") == ship_cursor("/up/../up", "ticks")
    True
    """
    place = "/" + split_url(url)[1] if url.startswith("file://") else url
    place = place.rstrip("/") if is_url(place) else os.path.abspath(place)
    return "ship-" + hashlib.sha256(f"{place}/{channel}".encode()).hexdigest()[:8]


def drop_shipped(
    disk: Disk, log: LogReader, sidecar: Sidecar, head: Head, store: ObjectStore, sure: Callable[[], None]
) -> list[str]:
    """Remove sealed segments that are shipped and that nobody needs; return their paths.

    ``sure`` is called before the first of them goes, and raises if this is not the log that was shipped any more.
    """
    try:
        floor = min([head.next, *sidecar.cursors().values()])
    except CorruptionError as exc:
        logger.warning("%s; nothing is removed until it is repaired or removed", exc)
        return []
    gone: list[str] = []
    pages: dict[str, tuple[Entry, ...]] = {}
    # Each with the one behind it: a writer that finds only an empty segment goes on in the one before.
    for segment, _ in pairwise(sealed_segments(disk, log, 0)):
        if segment.next > floor or not _is_up(segment, disk, log, head, store, pages):
            break
        if not gone:
            sure()
        note_removal(disk, log, segment, sidecar)
        for path in reversed(segment.paths()):
            fail_point("ship.drop.before")
            with contextlib.suppress(FileNotFoundError):
                disk.remove(path)
            gone.append(path)
        _dropped.add()
    return gone


def _is_up(
    segment: LocalSegment,
    disk: Disk,
    log: LogReader,
    head: Head,
    store: ObjectStore,
    pages: dict[str, tuple[Entry, ...]],
) -> bool:
    """Whether a segment is verifiably there: named with its span, and its object has the size that was named."""
    first = segment.first
    entry = next((e for e in head.segments if e.first == first), None)
    if entry is None:
        page = next((p for p in head.pages if p.first <= first < p.next), None)
        if page is None:
            return first < head.first  # pruned there on purpose: it was shipped once
        if page.key not in pages:
            try:
                data, _ = store.get(page.key, most=MANIFEST_BYTES)
            except FileNotFoundError:
                return False  # pruned since this head was read: a later one says so
            pages[page.key] = decode_page(data, page.key, head.channel)
        entry = next((e for e in pages[page.key] if e.first == first), None)
    if entry is None or entry.next != segment.next:
        return False
    found, there = disk.stat(segment.path), store.head(entry.key)
    if found is None or there is None or there.size != entry.bytes:
        return False
    # A compressed file is another one than what was shipped plain; positions are the same.
    if os.path.basename(segment.path) != os.path.basename(entry.name) or found.size == entry.bytes:
        return True
    return differs_by_erasure(log, store, head, entry)
