"""A shipped log behind the face of logs: the readers of the formats, over a disk that the manifest describes.

Names, sizes and spans come from the manifest, so nothing is listed.  A segment is fetched when it is first read, or a
few ahead where that is asked for (shippeddisk.py).  Positions are those the log has on its machine.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from penstock.batch import Batch
from penstock.disk import ClosingHandle, LoopWait, ObjectStore, is_url, object_store_for
from penstock.disk.objectstore import Tag
from penstock.disk.posix import folder_of
from penstock.errors import (
    ClosedError,
    CorruptionError,
    ExpiredError,
    NotFoundError,
    OptionsError,
    PenstockError,
    ReplacedError,
)
from penstock.log.detect import gaps_in, open_log
from penstock.log.face import LogReader, OnDamage
from penstock.log.options import DEFAULT_LIMIT
from penstock.ship.fence import read_head
from penstock.ship.manifest import HEAD_SUFFIX, MANIFEST_BYTES, Entry, Head, PageRef, decode_head, decode_page, head_key
from penstock.ship.shippeddisk import AHEAD_SEGMENTS, CACHE_BYTES, ShippedDisk
from penstock.types import Problem

__all__ = ["ShippedLog", "find_shipped", "is_shipped", "open_shipped", "split_place"]

AHEAD_BYTES: Final = 32 << 20
SHOWN_SEGMENTS: Final = 64
"""So many segments a reader of the format sees at once."""


def split_place(place: str | os.PathLike[str]) -> tuple[str, str]:
    """Return where a shipped log is: the place below which its objects are, and its channel.

    >>> split_place("s3://bucket/fleet/edge-1/ticks")
    ('s3://bucket/fleet/edge-1', 'ticks')
    """
    text = os.fspath(place).rstrip("/").removesuffix(HEAD_SUFFIX)
    above, _, channel = text.rpartition("/")
    if not channel or (is_url(text) and above.endswith(":/")):
        raise OptionsError(f"{text}: this names no shipped log; its channel is the last part")
    return above or ".", channel


def is_shipped(place: str | os.PathLike[str]) -> bool:
    """Whether the head of a shipped log is there.

    >>> is_shipped("/nowhere/ticks")
    False
    """
    try:
        above, channel = split_place(place)
    except OptionsError:
        return False
    return object_store_for(above).head(head_key(channel)) is not None


def find_shipped(place: str | os.PathLike[str]) -> list[str]:
    """Return every shipped log below a place, by name.

    >>> find_shipped("/nowhere")
    []
    """
    store, text = object_store_for(place), os.fspath(place).rstrip("/")
    found: list[str] = []
    folders = [""]
    while folders:
        prefix = folders.pop()
        below, objects = store.folder(prefix)
        found += [info.key.removesuffix(HEAD_SUFFIX) for info in objects if info.key.endswith(HEAD_SUFFIX)]
        # Segments and pages are not looked at: a million objects are a thousand requests.
        folders += [f"{prefix}/{name}".strip("/") for name in below if not name.endswith((".segments", ".pages"))]
    return [f"{text}/{name}" for name in sorted(found)]


class ShippedLog(ClosingHandle):
    """A shipped log, read through the face that all logs have.

    ``refresh`` looks whether more was shipped; ``tail`` does so by itself.

    >>> import tempfile
    >>> from penstock.log.xchannel import Writer
    >>> from penstock.ship import Shipper
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Writer.open(folder.name + "/ticks") as writer:
    ...     position = writer.append(b"hello"); writer.roll()
    >>> with Shipper(folder.name + "/ticks", object_store_for(folder.name + "/up")) as shipper:
    ...     done = shipper.step()
    >>> with open_shipped(folder.name + "/up/ticks") as log:
    ...     log.read(log.first_position).to_payloads(), log.first_position == position
    ([b'hello'], True)
    >>> folder.cleanup()
    """

    MANIFEST_LOOK_SECONDS = 1.0

    def __init__(
        self,
        place: str | os.PathLike[str],
        store: ObjectStore | None = None,
        *,
        cache_bytes: int = CACHE_BYTES,
        on_damage: OnDamage | None = None,
        head: Head | None = None,
        ahead_bytes: int = 0,
        ahead_after: int = 0,
    ) -> None:
        super().__init__()
        self.path = os.fspath(place).rstrip("/").removesuffix(HEAD_SUFFIX)
        above, self.channel = split_place(self.path)
        self._store, self._ahead_bytes = store or object_store_for(above), ahead_bytes
        self._tag: Tag | None = None
        if head is None:
            found = read_head(self._store, self.channel)
            if found is None:
                raise NotFoundError(f"{self.path}: nothing was shipped here")
            head, self._tag = found
        self.head = head
        self.format, self.origin = self.head.format, _origin(self.head.format)
        self.has_kinds = self.format == "xchannel"
        self.on_damage: OnDamage = on_damage or ("skip" if self.format == "messagelog" else "raise")
        self._damage: list[Problem] = []
        self._pages: dict[str, tuple[Entry, ...]] = {}
        self._disk = ShippedDisk(self._store, self.path, cache_bytes=cache_bytes)
        self._inner: LogReader | None = None
        self._shown: tuple[int, int] = (-1, -1)
        self._ahead_to = -1  # up to where looking ahead again would find the same
        self._ahead_after, self._in_order = ahead_after, 0
        self._lock = threading.RLock()
        self._closed = False

    # --- What the manifest says

    @property
    def content(self) -> str:
        """``raw``, or ``envelope/1`` if its writer said so."""
        return self.head.content

    @property
    def node(self) -> str:
        """Which node shipped it."""
        return self.head.node

    @property
    def first_position(self) -> int:
        """Where the oldest record is that is kept."""
        return self.head.first

    @property
    def next_position(self) -> int:
        """Behind the newest record that was shipped, as of the last look."""
        return self.head.next

    @property
    def durable_position(self) -> int | None:
        """The same: what is shipped stays."""
        return self.head.next

    def refresh(self) -> bool:
        """Look whether more was shipped."""
        data, info = self._store.get(head_key(self.channel), most=MANIFEST_BYTES)
        if info.tag == self._tag:
            return False
        head = decode_head(data, self.path, self.channel)
        if head.log_id != self.head.log_id:
            raise ReplacedError(self.path, "another log was shipped here")
        with self._lock:
            self.head, self._tag = head, info.tag
        return True

    def entries(
        self, start: int, end: int, min_time_ns: int | None = None, max_time_ns: int | None = None
    ) -> list[Entry]:
        """Return the segments with positions of a span, and if times are given, with records of that time.

        Only pages that the span and the times touch are fetched: this is what planning needs.
        """
        return list(self._entries(start, end, min_time_ns, max_time_ns))

    def _entries(
        self, start: int, end: int, min_time_ns: int | None = None, max_time_ns: int | None = None
    ) -> Iterator[Entry]:
        """Yield the same; a page is fetched when its turn comes."""
        head = self.head
        for page in head.pages:
            if _touches(page, start, end, min_time_ns, max_time_ns):
                for entry in self._page(page):
                    if _touches(entry, start, end, min_time_ns, max_time_ns):
                        yield entry
        for entry in head.segments:
            if _touches(entry, start, end, min_time_ns, max_time_ns):
                yield entry

    def start_of_newest(self, count: int) -> int:
        """Return where the newest segments begin that hold so many records; only their pages are fetched."""
        start, found = self.head.next, 0
        pages = (reversed(self._page(page)) for page in reversed(self.head.pages))
        for entry in itertools.chain(reversed(self.head.segments), itertools.chain.from_iterable(pages)):
            if found >= count:
                break
            start, found = entry.first, found + entry.records
        return start

    def _page(self, page: PageRef) -> tuple[Entry, ...]:
        entries = self._pages.get(page.key)
        if entries is None:
            where = f"{self._store.url}/{page.key}"
            try:
                data, _ = self._store.get(page.key, most=MANIFEST_BYTES)
            except FileNotFoundError:
                now = read_head(self._store, self.channel)
                if now is not None and now[0].first >= page.next:  # pruned since the manifest was read
                    raise ExpiredError(self.path, page.first, now[0].first) from None
                raise CorruptionError(where, 0, "gone, though the manifest names it") from None
            entries = decode_page(data, where, self.channel)
            if not entries or (entries[0].first, entries[-1].next) != (page.first, page.next):
                raise CorruptionError(where, 0, f"its segments are not those from {page.first} to {page.next}")
            self._pages[page.key] = entries
        return entries

    def cut(self, start: int, end: int, span_bytes: int) -> list[tuple[int, int]]:
        """Return spans of about ``span_bytes``, from what the manifest says of each segment: nothing is fetched."""
        spans: list[tuple[int, int]] = []
        begin, held = start, 0
        for entry in self.entries(start, end):
            cuts = entry.cuts or ((entry.first, entry.bytes),)
            for index, (position, size) in enumerate(cuts):
                following = cuts[index + 1][0] if index + 1 < len(cuts) else entry.next
                if following <= start or position >= end:
                    continue
                at = max(position, start)
                if held and at > begin and held + size > span_bytes * 5 // 4:
                    spans.append((begin, held))
                    begin, held = at, 0
                held += size or entry.bytes
        return [*spans, (begin, held)] if begin < end else spans

    @property
    def damage(self) -> list[Problem]:
        """What reading has stepped over so far: damage that was there when it was shipped."""
        with self._lock:
            return [*self._damage, *(self._inner.damage if self._inner is not None else [])][:1000]

    @property
    def damage_count(self) -> int:
        """How many places reading has stepped over so far."""
        with self._lock:
            return len(self._damage) + (self._inner.damage_count if self._inner is not None else 0)

    def skip_damage(self, position: int) -> tuple[int, Problem] | None:
        """Return where reading goes on behind damage at ``position``, and what it is; None if there is none."""
        with self._lock:
            self._check_open()
            return self._open_at(position).skip_damage(position) if position < self.head.next else None

    def keeps(self, position: int) -> bool:
        """Whether nothing at or behind ``position`` was removed."""
        return position >= self.first_position

    def gaps(self, expected: int | None, batch: Batch) -> int:
        """Return at how many places records are missing in a batch and in front of it."""
        return gaps_in(self.format, expected, batch)

    # --- Reading

    def read(self, position: int, limit: int = DEFAULT_LIMIT) -> Batch:
        """Return records from ``position`` on; ExpiredError below what is kept."""
        with self._lock:
            self._check_open()
            head = self.head
            if position < head.first:
                raise ExpiredError(self.path, position, head.first)
            while position < head.next:
                inner = self._open_at(position)
                self._look_ahead(position)
                batch = inner.read(max(position, inner.first_position), limit)
                inside = int(batch.positions.searchsorted(self._shown[1]))
                if inside:
                    return batch if inside == len(batch) else batch[:inside]
                if position >= self._shown[1]:
                    raise CorruptionError(self.path, 0, f"no segment holds position {position}")
                self._check_rest(position)
                position = self._shown[1]  # nothing more in these segments
            return self._nothing(position)

    def _open_at(self, position: int) -> LogReader:
        """Return a reader of the segments around a position: a few, not all there are."""
        if self._inner is not None and self._shown[0] <= position < self._shown[1]:
            return self._inner
        entries = list(itertools.islice(self._entries(position, self.head.next), SHOWN_SEGMENTS))
        if not entries:
            raise CorruptionError(self.path, 0, f"the manifest names no segment for position {position}")
        if self._inner is not None:
            self._damage += self._inner.damage
            self._inner.close()
        self._disk.show(self.head, tuple(entries))
        self._inner = open_log(self.path, format=self.format, disk=self._disk, on_damage=self.on_damage)
        self._shown = (entries[0].first, entries[-1].next)
        return self._inner

    def _check_rest(self, position: int) -> None:
        """Make sure that segments in which no record was found are what was shipped: a bad one has an end, too."""
        folder = folder_of(self.path) if self.format == "xchannel" else self.path
        for entry in self._entries(position, self._shown[1]):
            try:
                self._disk.open(f"{folder}/{entry.name}").close()
            except CorruptionError as exc:
                if self.on_damage != "skip":
                    raise
                self._damage.append(Problem(exc.file, exc.byte, exc.reason))

    def _look_ahead(self, position: int) -> None:
        """Have what comes behind a position fetched meanwhile, as far as that was asked for."""
        if not self._ahead_bytes or position < self._ahead_to:
            return
        folder = folder_of(self.path) if self.format == "xchannel" else self.path
        names: list[str] = []
        held = 0
        entries = list(itertools.islice(self._entries(position, self._shown[1]), AHEAD_SEGMENTS + 1))
        self._in_order = self._in_order + 1 if entries and entries[0].first == self._ahead_to else 0
        self._ahead_to = entries[0].next if entries else position
        if self._in_order < self._ahead_after:
            return  # who looks at one place needs nothing behind it
        for entry in entries:
            if names and held + entry.bytes > self._ahead_bytes:
                break
            names += [f"{folder}/{name}" for name in (entry.name, *(extra.name for extra in entry.extra))]
            held += entry.bytes
        self._disk.fetch_ahead(names)

    def _nothing(self, position: int) -> Batch:
        empty = Batch.of([])
        return Batch(b"", np.empty(0, np.int64), empty.payloads, next_position=position)

    def tail(
        self, position: int | None = None, *, limit: int = DEFAULT_LIMIT, timeout: float | None = None
    ) -> Iterator[Batch]:
        """Yield batches from ``position`` (or from the end) on, and look every second for more."""
        at = self.next_position if position is None else position
        since = time.monotonic()
        while True:
            batch = self.read(at, limit)
            at = batch.next_position
            if len(batch):
                yield batch
                since = time.monotonic()
                continue
            at = max(at, self.head.next)
            remaining = None if timeout is None else since + timeout - time.monotonic()
            if not self.refresh():
                if remaining is not None and remaining <= 0:
                    return
                time.sleep(
                    self.MANIFEST_LOOK_SECONDS if remaining is None else min(self.MANIFEST_LOOK_SECONDS, remaining)
                )

    def waiter(self) -> LoopWait:
        """Return what waits for more records on an event loop: a pause of a second."""
        return LoopWait(last=self.MANIFEST_LOOK_SECONDS)

    # --- About the log

    def verify(self) -> Iterator[Problem]:
        """Yield every problem: objects that are gone or changed, spans that do not fit, damage inside of segments."""
        at = self.head.first
        for entry in self.entries(self.head.first, self.head.next):
            if entry.first > at:
                yield Problem(f"{self._store.url}/{entry.key}", 0, f"begins at {entry.first}, where {at} is next")
            at = entry.next
            yield from self._verify_entry(entry)
        if at != self.head.next:
            yield Problem(f"{self.path}{HEAD_SUFFIX}", 0, f"the segments end at {at}, and next is {self.head.next}")

    def _verify_entry(self, entry: Entry) -> Iterator[Problem]:
        disk = ShippedDisk(self._store, self.path)
        disk.show(self.head, (entry,))
        folder = folder_of(self.path) if self.format == "xchannel" else self.path
        try:
            for name in (entry.name, *(extra.name for extra in entry.extra)):
                disk.open(f"{folder}/{name}").close()  # fetched, and its hash compared
            with open_log(self.path, format=self.format, disk=disk) as log:
                count, position = 0, entry.first
                while len(batch := log.read(position)):
                    count, position = count + len(batch), batch.next_position
                if count != entry.records:
                    reason = f"{count} records, where the manifest says {entry.records}"
                    yield Problem(f"{self._store.url}/{entry.key}", 0, reason)
                for problem in log.verify():
                    if problem.file.rpartition("/")[2] not in (entry.name, *(extra.name for extra in entry.extra)):
                        continue  # what stands behind it here is another entry
                    yield Problem(f"{self._store.url}/{entry.key}", problem.byte, problem.reason)
        except CorruptionError as exc:
            yield Problem(exc.file, exc.byte, exc.reason)
        except ExpiredError as exc:
            yield Problem(exc.log, 0, "the object is gone, though the manifest names it")
        except (PenstockError, OSError) as exc:
            yield Problem(f"{self._store.url}/{entry.key}", 0, f"cannot be read: {exc}")
        finally:
            disk.close()

    def stat(self) -> dict[str, Any]:
        """Return what there is to say about the log, from the manifest alone."""
        head = self.head
        return {
            "format": head.format,
            "path": self.path,
            "log_id": head.log_id or None,
            "content": head.content,
            "node": head.node,
            "channel": head.channel,
            "first_position": head.first,
            "next_position": head.next,
            "durable_position": head.next,
            "records": head.records,
            "bytes": head.bytes,
            "segments": len(head.segments) + sum(page.segments for page in head.pages),
            "pages": len(head.pages),
            "generation": head.generation,
            "epoch": head.epoch,
            "written_ns": head.written_ns,
            "cursors": {},
            "files": [{"file": entry.key, "bytes": entry.bytes, "first": entry.first} for entry in head.segments],
        }

    def close(self) -> None:
        """Let go of what was fetched."""
        with self._lock:
            self._closed = True
            if self._inner is not None:
                self._inner.close()
            self._inner = None
            self._disk.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.path}: the reader is closed")


def _touches(part: Any, start: int, end: int, min_time_ns: int | None, max_time_ns: int | None) -> bool:
    if part.next <= start or part.first >= end:
        return False
    if min_time_ns is not None and part.max_time_ns is not None and part.max_time_ns < min_time_ns:
        return False
    return not (max_time_ns is not None and part.min_time_ns is not None and part.min_time_ns > max_time_ns)


def _origin(format: str) -> int:
    return {"xchannel": 80, "messagelog": 1, "filechannel": 0}.get(format, 0)


def open_shipped(
    place: str | os.PathLike[str], *, cache_bytes: int = CACHE_BYTES, on_damage: OnDamage | None = None
) -> ShippedLog:
    """Open a shipped log by the URL, or the folder, of its channel; who reads on gets segments ahead of need.

    >>> open_shipped("/nowhere/ticks")
    Traceback (most recent call last):
    penstock.errors.NotFoundError: /nowhere/ticks: nothing was shipped here
    """
    return ShippedLog(place, cache_bytes=cache_bytes, on_damage=on_damage, ahead_bytes=AHEAD_BYTES, ahead_after=1)
