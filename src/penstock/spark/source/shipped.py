"""Shipped logs for Spark: found by URL or folder, planned from their manifests alone, read by whole segments.

    s3://bucket/fleet                every log that was shipped below
    s3://bucket/fleet/*/ticks        the log ticks of every node; * stands for one part of the path, or for some of it
    s3://bucket/fleet/edge-1/ticks   one log

Who plans lists folders and gets one head a log, never a segment; what it has found it keeps, and looks again for what
changed.  A task gets the entries of its segments with its span, so it asks for those and for nothing else: a segment
that was forgotten since, but is still in its grace, is read.  No credentials are in anything that Spark carries or
prints: each process takes those of its environment.
"""

from __future__ import annotations

import fnmatch
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, cast

import msgspec

from penstock.disk import Threads, is_url, object_store_for
from penstock.errors import NotFoundError, OptionsError
from penstock.log.envelope import CONTENT
from penstock.log.face import LogReader, OnDamage
from penstock.ship import Entry, Head, ShippedLog, find_shipped, read_compacted
from penstock.ship.compact import Compacted
from penstock.ship.compacted import CompactedLog, CompactedPart, parts_of
from penstock.ship.manifest import HEAD_SUFFIX, head_key
from penstock.ship.remote import split_place
from penstock.spark.source.columns import ENVELOPE, NODE, NUMBERED, Column
from penstock.spark.source.filters import TOP, Filters

__all__ = ["Piece", "ShippedName", "advance", "columns_of", "cut", "find", "holds_shipped", "kept", "open_piece"]

AT_ONCE: Final = 16
"""So many requests are under way at once where many logs are looked at."""
LISTING_SHARE: Final = 10
"""A place is listed again after so many times as long as listing it took."""
TASK_CACHE_BYTES: Final = 192 << 20
AHEAD_BYTES: Final = 64 << 20
LOOKED_INTO: Final = 16
"""So many folders of a local one are looked into for manifests: it may as well hold ten thousand logs."""
DEEPEST: Final = 6
"""So many folders above a log are looked at for compacted files."""


class ShippedName(msgspec.Struct, frozen=True, order=True):
    """A shipped log: where it is, whose it is, and what it is called there.

    >>> ShippedName("s3://bucket/edge-1/ticks", "edge-1", "ticks", "xchannel", "ab").node
    'edge-1'
    """

    path: str
    node: str
    channel: str
    format: str
    identity: str


class Piece(msgspec.Struct, frozen=True):
    """Some segments of a log, and what of them is read.

    >>> head = Head(log_id="ab", format="xchannel", content="raw", node="", channel="t", first=80, next=96)
    >>> Piece(80, 96, 4096, head).end
    96
    """

    start: int
    end: int
    bytes: int
    head: Head | CompactedPart
    """The log's head, with the entries of these segments and no others; or where a compacted file has them."""


class _Kept(ShippedLog):
    """A log that stays open while its place is known; who is done with it closes nothing."""

    older: tuple[CompactedPart, ...] = ()
    """What compacted files hold of it in front of its first segment."""

    @property
    def first_position(self) -> int:
        """Where the oldest record is that can be read."""
        return self.older[0].first if self.older else self.head.first

    def close(self) -> None:
        """Leave it open for the next one."""


class _Known:
    """What this process has found so far: logs by URL, and which logs are at a place."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Know nothing, as a process does that was forked from one with threads."""
        self.logs: dict[str, _Kept] = {}
        self.compacted: dict[str, Compacted] = {}
        self.listed: dict[str, tuple[float, list[str]]] = {}
        self.lock = threading.RLock()


_known: Final = _Known()
os.register_at_fork(after_in_child=_known.forget)


def holds_shipped(path: str) -> bool:
    """Whether a path is read as shipped logs: a URL is, and a folder with a manifest in it or right below it.

    >>> holds_shipped("s3://bucket/fleet"), holds_shipped("/nowhere/at/all")
    (True, False)
    """
    if is_url(path):
        return True
    if "*" in path and not os.path.lexists(path):
        path = path[: path.index("*")].rpartition("/")[0] or "."
    if os.path.exists(path + HEAD_SUFFIX):
        return True
    if not os.path.isdir(path):
        return False
    with os.scandir(path) as names:
        folders = []
        for item in names:
            if item.name.endswith(HEAD_SUFFIX):
                return True
            if item.is_dir() and not item.name.startswith("."):
                folders.append(item.path)
    some = sorted(folders)[:LOOKED_INTO]
    return any(name.endswith(HEAD_SUFFIX) for folder in some for name in os.listdir(folder))


def find(path: str, *, fresh: bool = True) -> list[ShippedName]:
    """Return the shipped logs at a path, by name; unless ``fresh``, as they were when this process looked last."""
    with _known.lock:
        since, found = _known.listed.get(path, (-math.inf, []))
        if not found or (fresh and time.monotonic() >= since):
            begin = time.monotonic()
            found = _matching(path)
            now = time.monotonic()
            _known.listed[path] = now + LISTING_SHARE * (now - begin), found
        missing = [url for url in found if fresh or url not in _known.logs]
        gone = set(_look(missing)) if missing else set()
        if missing:
            _known.compacted.clear()
            for url in missing:
                if url not in gone:
                    _known.logs[url].older = tuple(_older(_known.logs[url]))
        names = [_name_of(_known.logs[url]) for url in found if url not in gone]
    return sorted(names)


def kept(path: str) -> ShippedLog | None:
    """Return the log at a URL as it was when this process looked last; None if it never did."""
    with _known.lock:
        return _known.logs.get(path)


def _look(urls: list[str]) -> list[str]:
    """Get the heads of these logs, many at once; return those that are gone."""

    def look(url: str) -> str | None:
        known = _known.logs.get(url)
        try:
            if known is None:
                _known.logs[url] = _Kept(url, cache_bytes=1)
            else:
                known.refresh()
        except (FileNotFoundError, NotFoundError):
            _known.logs.pop(url, None)
            return url
        return None

    if len(urls) == 1:
        gone = [look(urls[0])]
    else:
        with Threads(min(AT_ONCE, len(urls)), "penstock-fleet") as pool:
            gone = list(pool.map(look, urls))
    return [url for url in gone if url is not None]


def _older(log: ShippedLog) -> list[CompactedPart]:
    """Return what compacted files above a log hold of it, if it has lost its beginning."""
    if log.head.first <= log.origin:
        return []
    above, name = split_place(log.path)
    for _ in range(DEEPEST):
        known = _known.compacted.get(above)
        if known is None:
            known = _known.compacted[above] = read_compacted(object_store_for(above))[0]
        if parts := parts_of(known, above, name, log.head):
            return parts
        try:
            above, below = split_place(above)
        except OptionsError:
            break  # the root of a bucket
        name = f"{below}/{name}"
    return []


def _name_of(log: ShippedLog) -> ShippedName:
    above, channel = split_place(log.path)
    node = log.head.node or above.rpartition("/")[2]
    return ShippedName(log.path, node, channel, log.format, log.head.log_id)


def _matching(path: str) -> list[str]:
    """Return the URLs of the shipped logs at a path, whose parts may be patterns."""
    root, mark, rest = path.partition("://")
    parts = (rest if mark else path).split("/")
    if mark and "*" in parts[0]:
        raise OptionsError(f"{path}: a bucket is named, not matched")
    places = [root + mark + parts[0] if mark else parts[0]]
    for depth, part in enumerate(parts[1:], 1):
        if "*" not in part:
            places = [f"{place}/{part}" for place in places]
            continue
        last = depth == len(parts) - 1
        places = [f"{place}/{name}" for place, names in _each(places, last) for name in fnmatch.filter(names, part)]
    found: list[str] = []
    for place, logs in _map(lambda place: [place] if _is_log(place) else find_shipped(place), places):
        found += logs if place else []
    return sorted(set(found))


def _is_log(place: str) -> bool:
    try:
        above, channel = split_place(place)
    except OptionsError:
        return False  # the root of a bucket
    return object_store_for(above or "/").head(head_key(channel)) is not None


def _each(places: list[str], last: bool) -> Iterable[tuple[str, list[str]]]:
    def names(place: str) -> list[str]:
        folders, objects = object_store_for(place or "/").folder("")
        below = [name for name in folders if not name.endswith((".segments", ".pages"))]
        if last:
            below += [info.key.removesuffix(HEAD_SUFFIX) for info in objects if info.key.endswith(HEAD_SUFFIX)]
        return below

    return _map(names, places)


def _map(call: Callable[[str], list[str]], places: list[str]) -> list[tuple[str, list[str]]]:
    if len(places) < 2:
        return [(place, call(place)) for place in places]
    with Threads(min(AT_ONCE, len(places)), "penstock-fleet") as pool:
        return list(zip(places, pool.map(call, places), strict=True))


# --- Planning


def columns_of(log: ShippedLog) -> tuple[Column, ...]:
    """Return what a shipped log adds to the columns every channel has; no segment is fetched for that."""
    added = list(ENVELOPE) if log.content == CONTENT else []
    return (NODE, *added, *(NUMBERED if log.format == "messagelog" else ()))


def cut(log: ShippedLog, start: int, end: int, span_bytes: int, filters: Filters | None = None) -> list[Piece]:
    """Cut a span of a log into pieces of about ``span_bytes``, whole segments where they are not larger than that.

    Segments no record of which can pass are left out.
    """
    chosen = filters or Filters()
    if chosen.kinds and not log.has_kinds:
        return []
    low, high = max(start, chosen.low), min(end, chosen.high + 1 if chosen.high < TOP else end)
    until = None if chosen.until_ns is None else chosen.until_ns - 1
    pieces = [
        Piece(max(part.first, low), min(part.next, high), part.bytes, part)
        for part in (log.older if isinstance(log, _Kept) else ())
        if part.first < high and part.next > low and _in_time(part, chosen.since_ns, until)
    ]
    held: list[Entry] = []
    size = 0

    def done() -> None:
        nonlocal held, size
        if held:
            begin, stop = max(held[0].first, low), min(held[-1].next, high)
            pieces.append(Piece(begin, stop, size, _part(log.head, held)))
        held, size = [], 0

    for entry in log.entries(low, high, chosen.since_ns, until) if low < high else ():
        if held and (held[-1].next != entry.first or size + entry.bytes > span_bytes * 5 // 4):
            done()
        if entry.bytes > span_bytes * 3 // 2 and len(entry.cuts) > 1:
            done()
            pieces += _inside(log.head, entry, low, high, span_bytes)
            continue
        held.append(entry)
        size += entry.bytes
    done()
    return pieces


def _in_time(part: CompactedPart, since: int | None, until: int | None) -> bool:
    early = since is not None and part.max_time_ns is not None and part.max_time_ns < since
    return not early and not (until is not None and part.min_time_ns is not None and part.min_time_ns > until)


def _inside(head: Head, entry: Entry, low: int, high: int, span_bytes: int) -> list[Piece]:
    """Cut one large segment where its manifest says it can be."""
    part = _part(head, [entry])
    ends = [position for position, _ in entry.cuts[1:]] + [entry.next]
    pieces: list[Piece] = []
    begin, size = entry.first, 0
    for (_, weight), stop in zip(entry.cuts, ends, strict=True):
        size += weight
        if size >= span_bytes or stop == entry.next:
            if stop > low and begin < high:
                pieces.append(Piece(max(begin, low), min(stop, high), size, part))
            begin, size = stop, 0
    return pieces


def _part(head: Head, entries: list[Entry]) -> Head:
    """Return a head of these entries alone, which follow one another."""
    return msgspec.structs.replace(
        head, first=entries[0].first, next=entries[-1].next, segments=tuple(entries), pages=(), trash=()
    )


def advance(
    log: ShippedLog, start: int, end: int, max_records: int | None, max_bytes: int | None
) -> tuple[int, int, int]:
    """Go from ``start`` towards ``end`` by whole segments until a limit is reached; the first one is passed anyway.

    Returned are (position, records, bytes), from the manifest: what is in a segment is known without fetching it.
    """
    at, records, size = start, 0, 0
    older = [part for part in log.older if part.next > start] if isinstance(log, _Kept) else []
    steps = [(part.next, part.rows, part.bytes) for part in older if part.first < end]
    for following, count, weight in [*steps, *((e.next, e.records, e.bytes) for e in log.entries(start, end))]:
        over = (max_records is not None and records + count > max_records) or (
            max_bytes is not None and size + weight > max_bytes
        )
        if at > start and over:
            break
        at, records, size = min(following, end), records + count, size + weight
    return at, records, size


# --- Reading


def open_piece(path: str, head: Head | CompactedPart, on_damage: OnDamage | None = None) -> LogReader:
    """Open the segments of a task; the next ones are fetched while one is read."""
    if isinstance(head, CompactedPart):
        return cast("LogReader", CompactedLog(head))  # reading asks for no more than it has
    return ShippedLog(path, head=head, on_damage=on_damage, cache_bytes=TASK_CACHE_BYTES, ahead_bytes=AHEAD_BYTES)
