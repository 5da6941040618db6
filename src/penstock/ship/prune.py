"""Letting old shipped segments go: first nobody is pointed at them, later they are removed.

``forget_before`` moves ``first`` up and puts what is dropped into the trash of the head; ``empty_trash`` removes what
has been there longer than the grace, which is for jobs that read it, and only then takes it out of the head.  Objects
that were put and never named are found by a listing, rarely.

All of it may be done while a shipper runs, which goes on.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Final

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.disk import ObjectStore
from penstock.errors import CorruptionError, OptionsError
from penstock.ship.fence import change_head, read_head
from penstock.ship.manifest import MANIFEST_BYTES, Entry, Head, PageRef, Trash, decode_page

__all__ = ["empty_trash", "forget_before", "remove_orphans"]

_log = logging.getLogger("penstock.ship")

BEGIN: Final = re.compile(r"([0-9a-f]{16})-", re.ASCII)
"""The first position in the name of an object of ours."""


def forget_before(store: ObjectStore, channel: str, position: int, *, clock: Clock = SYSTEM_CLOCK) -> Head:
    """Drop whole segments and pages that end at or below ``position``.

    >>> from penstock.disk import object_store_for
    >>> forget_before(object_store_for("/nowhere"), "ticks", 5)
    Traceback (most recent call last):
    penstock.errors.OptionsError: /nowhere: nothing was shipped of ticks
    """

    def without(head: Head) -> dict[str, Any] | None:
        now = clock.now_ns()
        pages = [page for page in head.pages if page.next > position]
        dropped = [page for page in head.pages if page.next <= position]
        trash = [Trash(page.key, now, is_page=True) for page in dropped]
        segments = list(head.segments)
        records, size = head.records, head.bytes - sum(page.bytes for page in dropped)
        for page in dropped:
            if page.key not in counts:
                counts[page.key] = _records_in(store, channel, page)
            records -= counts[page.key]
        if not pages:
            while len(segments) > 1 and segments[0].next <= position:
                gone = segments.pop(0)
                records, size = records - gone.records, size - gone.bytes
                trash += [Trash(key, now) for key in _keys(gone)]
        if not trash:
            return None
        first = pages[0].first if pages else segments[0].first if segments else head.next
        return {
            "first": first,
            "pages": tuple(pages),
            "segments": tuple(segments),
            "trash": (*head.trash, *trash),
            "records": max(0, records),
            "bytes": max(0, size),
        }

    counts: dict[str, int] = {}
    return change_head(store, channel, without, clock)


def empty_trash(store: ObjectStore, channel: str, grace_seconds: float, *, clock: Clock = SYSTEM_CLOCK) -> list[str]:
    """Remove what has been in the trash longer than the grace; return the keys of the objects.

    >>> from penstock.disk import object_store_for
    >>> empty_trash(object_store_for("/nowhere"), "ticks", -1)
    Traceback (most recent call last):
    penstock.errors.OptionsError: grace_seconds=-1: must not be negative
    """
    if grace_seconds < 0:
        raise OptionsError(f"grace_seconds={grace_seconds}: must not be negative")
    found = read_head(store, channel)
    if found is None:
        raise OptionsError(f"{store.url}: nothing was shipped of {channel}")
    head, _ = found
    cutoff = clock.now_ns() - int(grace_seconds * 1e9)
    named = {key for entry in head.segments for key in _keys(entry)}
    due = [item for item in head.trash if item.at_ns <= cutoff]
    gone: list[str] = []
    for item in due:
        if item.is_page:
            try:
                data, _ = store.get(item.key, most=MANIFEST_BYTES)
                gone += [key for entry in decode_page(data, item.key, channel) for key in _keys(entry)]
            except FileNotFoundError:
                pass  # a crash came between
        gone.append(item.key)
    gone = [key for key in gone if key not in named]
    store.delete(gone)  # a page goes last, so that a crash in between leaves what names the rest
    if due:
        change_head(store, channel, lambda head: {"trash": tuple(t for t in head.trash if t not in due)}, clock)
    return gone


def remove_orphans(store: ObjectStore, channel: str, grace_seconds: float, *, clock: Clock = SYSTEM_CLOCK) -> list[str]:
    """Remove segments and pages that were put and never named, older than the grace, and that never will be.

    What lies at the newest entry, and pages of entries that are in the head, may be named by a shipper any moment: one
    that was killed before it named them finds them there when it starts again.

    >>> from penstock.disk import object_store_for
    >>> remove_orphans(object_store_for("/nowhere"), "ticks", 3600)
    []
    """
    found = read_head(store, channel)
    if found is None:
        return []
    head, _ = found
    named = {key for entry in head.segments for key in _keys(entry)} | {item.key for item in head.trash}
    dropped = {item.key for item in head.trash if item.is_page}
    for page in [*(page.key for page in head.pages), *dropped]:
        try:
            data, _ = store.get(page, most=MANIFEST_BYTES)
        except FileNotFoundError:
            if page in dropped:
                continue  # a crash came between its removal and the head's
            raise
        named |= {page} | {key for entry in decode_page(data, page, channel) for key in _keys(entry)}
    if not head.segments:
        return []
    cutoff = clock.now_ns() - int(grace_seconds * 1e9)
    gone = []
    for folder, floor in (("segments", head.segments[-1].first), ("pages", head.segments[0].first)):
        for info in store.objects(f"{channel}.{folder}"):
            position = BEGIN.match(info.key.rpartition("/")[2])
            below = position is not None and int(position[1], 16) < floor
            if info.key not in named and info.modified_ns <= cutoff and below:
                gone.append(info.key)
    store.delete(gone)
    return gone


def _records_in(store: ObjectStore, channel: str, page: PageRef) -> int:
    """Return how many records a page stands for; 0 for one that cannot be read, which goes all the same."""
    try:
        data, _ = store.get(page.key, most=MANIFEST_BYTES)
        return sum(entry.records for entry in decode_page(data, page.key, channel))
    except (FileNotFoundError, CorruptionError) as exc:
        _log.warning("%s: it is not known how many records go with this page: %s", page.key, exc)
        return 0


def _keys(entry: Entry) -> list[str]:
    return [entry.key, *(extra.key for extra in entry.extra)]
