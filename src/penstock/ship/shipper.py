"""Shipping one log: sealed segments go up as they are, oldest first, and then the head says so.

    start   probe the store, read the head, refuse another log or a restored backup, take over
    step    put the files of the next segments under names made of their bytes, then swap the head; then the cursor
    again   whatever a crash left undone is done over: puts are idempotent, and only the head counts

The cursor ``ship-…`` beside the log follows the head: retention keeps what is behind it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.disk import ClosingHandle, Disk, ObjectStore, ReadFile, Threads, disk_for
from penstock.disk.failpoint import fail_point
from penstock.disk.objectstore import check_conditions
from penstock.disk.sparse import holes
from penstock.errors import (
    ClosedError,
    CorruptionError,
    ExpiredError,
    NotFoundError,
    OptionsError,
    ReplacedError,
    RetryError,
)
from penstock.log.detect import open_log
from penstock.log.face import LogReader
from penstock.log.fingerprint import Fingerprint, check_fingerprint, last_fingerprint
from penstock.log.sidecar import identity_of, sidecar_of
from penstock.metrics import REGISTRY
from penstock.ship.erased import differs_by_erasure
from penstock.ship.fence import Fence, read_head
from penstock.ship.local import drop_shipped, ship_cursor
from penstock.ship.manifest import (
    PAGE_ENTRIES,
    Entry,
    Extra,
    Head,
    PageRef,
    Trash,
    check_channel,
    encode_page,
    object_key,
    page_key,
)
from penstock.ship.segments import (
    LocalSegment,
    check_format,
    log_files,
    oldest_time_ns,
    sealed_segments,
    survey,
    sync_segment,
)

__all__ = ["Shipper", "ShipOptions", "ShipStatus"]

_bytes = REGISTRY.counter("ship_bytes", "bytes of segments sent up", labels=("channel",))
_lag = REGISTRY.gauge("ship_lag_bytes", "bytes of the log that are not shipped yet", labels=("channel",))
_age = REGISTRY.gauge("ship_lag_seconds", "age of the oldest record that is not shipped", labels=("channel",))
_backlog = REGISTRY.gauge("ship_backlog_segments", "sealed segments that wait to be shipped", labels=("channel",))

CHUNK_BYTES: Final = 256 << 10
HASH_BYTES: Final = 1 << 20
SMALL_BYTES: Final = 5 << 20
BATCH_SEGMENTS: Final = 64
BATCH_SECONDS: Final = 10.0
"""Where a rate is set, the head is swapped about so often: who looks at it sees what is up."""
HOLLOW_BYTES: Final = 4 << 30
"""Room that a writer made and never used takes less of a file than this: a region of a channel at most."""

Sent = tuple[str, int, str]
"""The key, size and hash of a file that is up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShipOptions:
    """How a log is shipped.

    >>> ShipOptions(bytes_per_second=-1)
    Traceback (most recent call last):
    penstock.errors.OptionsError: bytes_per_second=-1: must not be negative
    """

    # --- What is promised

    delete_local: bool = False
    """Whether sealed segments go from this machine once the head names them and every named cursor has passed them."""

    # --- How fast it is

    bytes_per_second: float = 0.0
    """The most that goes up on average; 0 sets no bound."""

    batch_bytes: int = 64 << 20
    """When far behind, the head is swapped once for about this much."""

    page_entries: int = PAGE_ENTRIES
    """How many entries the head holds before it turns them into a page."""

    def __post_init__(self) -> None:
        if not self.bytes_per_second >= 0:
            raise OptionsError(f"bytes_per_second={self.bytes_per_second}: must not be negative")
        if self.batch_bytes < 1 or self.page_entries < 1:
            raise OptionsError("batch_bytes and page_entries must be at least 1")


class ShipStatus(msgspec.Struct, frozen=True):
    """How far a shipper is.

    >>> ShipStatus("ticks", 80, 80, 0, 0, None, 0, 0, False).lag_bytes
    0
    """

    channel: str
    shipped_to: int
    """Everything below is shipped."""
    local_end: int
    lag_bytes: int
    """Bytes of local files that are not shipped, the open segment included."""
    backlog_segments: int
    """Sealed segments that wait."""
    lag_seconds: float | None
    """Age of the oldest record that is not shipped; None when there is none or the format keeps no time."""
    shipped_bytes: int
    """Bytes this shipper has sent."""
    generation: int
    paused: bool


class Pace:
    """Lets bytes through at a rate, by sleeping; whoever sleeps is woken by ``stop`` and told with ClosedError."""

    def __init__(self, bytes_per_second: float, clock: Clock, sleep: Callable[[float], object] | None) -> None:
        self._stopped = threading.Event()
        self._rate, self._clock, self._sleep = bytes_per_second, clock, sleep or self._stopped.wait
        self._free_at = clock.monotonic()

    def stop(self) -> None:
        """Let nothing more through."""
        self._stopped.set()

    def wait(self, size: int) -> None:
        """Return when ``size`` more bytes may go."""
        if not self._rate:
            return
        now = self._clock.monotonic()
        self._free_at = max(self._free_at, now) + size / self._rate
        if self._free_at - now > 0:
            self._sleep(self._free_at - now)
        if self._stopped.is_set():
            raise ClosedError("the shipper was closed while it was sending")


class Shipper(ClosingHandle):
    """Ships one log to one place.  ``step`` does the next piece of work; one thread at a time.

    >>> import tempfile
    >>> from penstock.log.xchannel import Writer
    >>> from penstock.disk import object_store_for
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Writer.open(folder.name + "/ticks") as writer:
    ...     position = writer.append(b"hello"); writer.roll()
    >>> with Shipper(folder.name + "/ticks", object_store_for(folder.name + "/up"), node="edge-1") as shipper:
    ...     shipper.step(), shipper.step()
    (1, 0)
    >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        store: ObjectStore,
        *,
        node: str = "",
        channel: str | None = None,
        options: ShipOptions | None = None,
        clock: Clock = SYSTEM_CLOCK,
        sleep: Callable[[float], object] | None = None,
        progress: Callable[[int], None] = lambda _: None,
        disk: Disk | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Take the log over; ClosedError, and nothing is taken, if it is not ``wanted`` any more by then."""
        super().__init__()
        self.path, self.store = os.fspath(path).rstrip("/"), store
        self.channel = channel or os.path.basename(self.path)
        check_channel(self.channel)
        self.options, self._clock, self._progress = options or ShipOptions(), clock, progress
        self._disk = disk or disk_for(self.path)
        self._pace = Pace(self.options.bytes_per_second, clock, sleep)
        self._node, self._sent, self._paused, self._closed = node, 0, False, False
        self._pool: Threads | None = None
        self._sent_lock = threading.Lock()
        self._log: LogReader = open_log(self.path, disk=self._disk, on_damage="skip")
        try:
            check_format(self._log.format)
            self._fence = Fence(store, self.channel, clock)
            self._sidecar = sidecar_of(self._disk, self.path)
            self._cursor = ship_cursor(store.url, self.channel)
            self.head = self._start(wanted)
        except BaseException:
            self._log.close()
            raise

    # --- Starting

    def _start(self, wanted: Callable[[], bool]) -> Head:
        check_conditions(self.store, f"{self.channel}.probe-{uuid.uuid4().hex}")
        log_id = identity_of(self._disk, self.path)
        found = read_head(self.store, self.channel)
        if found is not None:
            self._check_same(found[0], log_id)
        if not wanted():
            raise ClosedError(f"{self.path}: the shipper was stopped before it began")
        first = self._log.first_position
        head = self._fence.take_over(
            Head(
                log_id=log_id,
                format=self._log.format,
                content=self._log.content,
                node=self._node,
                channel=self.channel,
                first=first,
                next=first,
                region_bytes=self._log.stat().get("region_bytes") or 0,
            )
        )
        self._check_same(head, log_id)
        self._move_cursor(head)
        return head

    def _check_same(self, head: Head, log_id: str) -> None:
        """Refuse to go on where another log, or a later state of this one, was shipped."""
        where = f"{self.store.url}/{self.channel}"
        if (head.format, head.log_id) != (self._log.format, log_id):
            raise ReplacedError(where, f"it holds {head.format} {head.log_id or '-'}, not {self._log.format} {log_id}")
        end = self._log.next_position
        if head.next > end and not self._ends_with(head, end):
            raise ReplacedError(
                self.path, f"it ends at {end}, but {head.next} was shipped: a backup that was restored?"
            )
        if self._log.first_position > head.next:
            raise ReplacedError(
                self.path,
                f"it begins at {self._log.first_position}, but only {head.next} was shipped: records are lost",
            )
        self._check_last(head)
        if head.seen:
            check_fingerprint(self._log, Fingerprint.parse(head.seen))

    def _ends_with(self, head: Head, end: int) -> bool:
        """Whether nothing is missing though the log ends before: positions behind the last record may be skipped."""
        for segment in sealed_segments(self._disk, self._log, head.next - 1):
            return segment.next == head.next
        return end == self._log.first_position == head.next

    def _check_last(self, head: Head) -> None:
        if not head.segments:
            return
        last = head.segments[-1]
        for segment in sealed_segments(self._disk, self._log, last.first):
            same = segment.first == last.first and self._remote_name(segment) == last.name
            if same and not self._holds(segment, last, head):
                raise ReplacedError(self.path, f"{segment.path} is not what was shipped under its positions")
            return

    def _holds(self, segment: LocalSegment, entry: Entry, head: Head) -> bool:
        """Whether a segment begins with what was shipped of it, but for what was erased here since."""
        same = self._hash(segment.path, entry.bytes) == entry.blake3
        return same or differs_by_erasure(self._log, self.store, head, entry)

    # --- Working

    def step(self) -> int:
        """Ship the next segments and return how many; 0 when nothing is sealed behind what is shipped."""
        if self._closed:
            raise ClosedError(f"{self.path}: the shipper is closed")
        if self._paused:
            return 0
        try:
            return self._step()
        except (CorruptionError, ExpiredError, ReplacedError) as exc:
            # Of a shipper that another one has shut out, that one may have shipped and removed what is missing here.
            self._fence.look_again(exc)
            raise
        except (CancelledError, RuntimeError):
            self._check_open()  # its threads are gone when it was closed meanwhile
            raise

    def _step(self) -> int:
        self._check_still_here()
        chosen, grown = self._choose()
        if chosen:
            self._check_seen()
        entries = self._put_all(chosen)
        if entries:
            self._check_still_here()  # they may have gone up for hours
            self._name(entries, grown)
        self._delete_shipped()
        return len(entries)

    def _check_still_here(self) -> None:
        """Raise if the log was removed while this went on, or is another one under the same name by now."""
        log_id = identity_of(self._disk, self.path)
        if log_id == self.head.log_id:
            return
        if not log_id:
            raise NotFoundError(f"{self.path}: the log is gone")
        raise ReplacedError(self.path, f"its log id changed from {self.head.log_id or '-'} to {log_id}")

    def _check_seen(self) -> None:
        """Raise if the last record that was shipped is another one by now, as in a backup that was put back."""
        if self.head.seen:
            with open_log(self.path, disk=self._disk, on_damage="skip") as log:  # what is there now
                check_fingerprint(log, Fingerprint.parse(self.head.seen))

    def _choose(self) -> tuple[list[LocalSegment], Entry | None]:
        """Return the segments that come next, and the shipped one which the first of them is a longer state of."""
        chosen: list[LocalSegment] = []
        size, last = 0, self.head.segments[-1] if self.head.segments else None
        grown: Entry | None = None
        at, most, rate = self.head.next, self.options.batch_bytes, self.options.bytes_per_second
        if rate:
            most = min(most, int(rate * BATCH_SECONDS))
        for segment in sealed_segments(self._disk, self._log, at):
            if segment.first < at:  # its log went on in a segment that was shipped
                if chosen or last is None or segment.first != last.first:
                    raise ReplacedError(self.path, f"{segment.path} begins at {segment.first}, and {at} was shipped")
                if not self._holds(segment, last, self.head):
                    raise ReplacedError(self.path, f"{segment.path} is not what was shipped under its positions")
                grown = last
            elif segment.first > at:
                raise ReplacedError(self.path, f"records from {at} to {segment.first} are gone and were not shipped")
            found = self._disk.stat(segment.path)
            if found is None:
                break  # compressed or collected meanwhile: the next step looks again
            if (hollow := self._hole_in(segment)) is not None:
                if not chosen:
                    raise hollow
                break  # said by the next step, when what comes before it is up
            chosen.append(segment)
            at, size = segment.next, size + found.size
            if size >= most or len(chosen) >= BATCH_SEGMENTS:
                break
        return chosen, grown

    def _hole_in(self, segment: LocalSegment) -> CorruptionError | None:
        """Return what is wrong with a file that claims far more than it holds, and would be sent as it claims to be."""
        for path in segment.paths():
            with contextlib.suppress(FileNotFoundError), self._disk.open(path) as file:
                missing, first = holes(file, HOLLOW_BYTES)
                if missing > HOLLOW_BYTES:
                    size = file.stat().size
                    reason = f"a hole: {missing:,} of its {size:,} bytes are not on the disk, and it is not shipped"
                    return CorruptionError(path, first, reason)
        return None

    def _put_all(self, segments: list[LocalSegment]) -> list[Entry]:
        """Send segments up while the next is read, as many at once as pays, and return their entries in order.

        One that is gone when it is opened ends the row: the next step looks again.
        """
        entries: list[Entry] = []
        if len(segments) < 2 or self.options.bytes_per_second:
            with contextlib.suppress(FileNotFoundError):
                for segment in segments:
                    if entries and self._paused:
                        break
                    fail_point("ship.put.before")
                    sync_segment(self._disk, segment, folder=segment is segments[0])
                    about = survey(self._disk, self._log, segment)
                    sent = [self._send(segment, path, digest) for path, digest in self._digests(segment)]
                    entries.append(self._entry(segment, about, sent))
            return entries
        if self._pool is None:
            self._pool = Threads(self.store.puts_at_once, "penstock-ship")
        under_way: list[tuple[LocalSegment, dict[str, Any], Future[None], list[Future[Sent]]]] = []
        left: list[Future[Any]] = []
        try:
            with contextlib.suppress(FileNotFoundError):
                for segment in segments:
                    if under_way and self._paused:
                        break
                    fail_point("ship.put.before")
                    first = segment is segments[0]
                    synced = self._pool.submit(sync_segment, self._disk, segment, folder=first)
                    left.append(synced)
                    about = survey(self._disk, self._log, segment)  # while it is synced, and those before it go up
                    files = self._digests(segment)
                    going = [self._pool.submit(self._send, segment, path, digest) for path, digest in files]
                    left += going
                    under_way.append((segment, about, synced, going))
            with contextlib.suppress(FileNotFoundError):
                for segment, about, synced, going in under_way:
                    synced.result()  # nothing is named that a power cut could take here
                    entries.append(self._entry(segment, about, [file.result() for file in going]))
        finally:
            for file in left:
                file.cancel()
            wait(left)
        return entries

    def _entry(self, segment: LocalSegment, about: dict[str, Any], sent: list[Sent]) -> Entry:
        fail_point("ship.put.after")
        extra = tuple(Extra(name, *file) for name, file in zip(segment.names[1:], sent[1:], strict=True))
        key, size, digest = sent[0]
        return Entry(
            self._remote_name(segment), key, segment.first, segment.next, about["records"], size, digest,
            about["min_time_ns"], about["max_time_ns"], about["cuts"], extra,
        )  # fmt: skip

    def _remote_name(self, segment: LocalSegment) -> str:
        """Return what the file is called in the shipped log, whose base name is the channel's."""
        name = segment.names[0]
        if self._log.format != "xchannel":
            return name
        return self.channel + name.removeprefix(os.path.basename(self.path))

    def _digests(self, segment: LocalSegment) -> list[tuple[str, str]]:
        """Return the hash of each file of a segment: its object is named after it."""
        found = []
        for path in segment.paths():
            with self._disk.open(path) as file:
                found.append((path, self._hash(path, file.stat().size)))
        return found

    def _send(self, segment: LocalSegment, path: str, digest: str) -> Sent:
        """Send one file up, unless it is there."""
        ending = segment.ending if path == segment.path else path.rpartition(".")[2]
        with self._disk.open(path) as file:
            size = file.stat().size
            key = object_key(self.channel, segment.first, digest, ending)
            there = self.store.head(key)
            if there is None or there.size != size:
                pieces = self._pieces(path, file, size)
                try:
                    self.store.put(key, b"".join(pieces) if size <= SMALL_BYTES else pieces)
                except FileNotFoundError as exc:  # not a segment that is gone here
                    raise RetryError(str(exc)) from exc
                _bytes.add(size, channel=self.channel)
        return key, size, digest

    def _pieces(self, path: str, file: ReadFile, size: int) -> Iterator[bytes]:
        at = 0
        while at < size:
            data = file.read_at(at, min(CHUNK_BYTES, size - at))
            if not data:
                raise ReplacedError(path, f"it became shorter while it was sent: {at} of {size} bytes")
            self._pace.wait(len(data))
            self._check_open()
            at += len(data)
            self._count_sent(len(data))
            yield data

    def _count_sent(self, size: int) -> None:
        with self._sent_lock:
            self._sent += size
            self._progress(size)

    def _hash(self, path: str, size: int) -> str:
        from blake3 import blake3

        hasher, room = blake3(), memoryview(bytearray(min(HASH_BYTES, max(size, 1))))
        with self._disk.open(path) as file:
            at = 0
            while at < size and (count := file.read_into(at, room[: size - at])):
                hasher.update(room[:count])
                self._check_open()
                at += count
        return hasher.hexdigest()

    def _check_open(self) -> None:
        """Raise ClosedError when it was closed meanwhile: a long file is not read to its end for nothing."""
        if self._closed:
            raise ClosedError(f"{self.path}: the shipper is closed")

    def _name(self, entries: list[Entry], grown: Entry | None) -> None:
        """Let the head name what is up."""
        seen = last_fingerprint(self._log, entries[-1].first, entries[-1].next)
        self.head = self._fence.swap(
            lambda head: {**self._with(head, entries, grown), "seen": "" if seen is None else str(seen)}
        )
        self._move_cursor(self.head)

    def _with(self, head: Head, entries: list[Entry], grown: Entry | None) -> dict[str, Any]:
        """Return what becomes of a head when these entries are added to it."""
        kept = head.segments[:-1] if grown is not None else head.segments
        segments, pages, trash = (*kept, *entries), head.pages, head.trash
        if grown is not None and grown.key != entries[0].key:
            gone = [grown.key, *(file.key for file in grown.extra)]
            named = {entries[0].key, *(file.key for file in entries[0].extra)}
            trash += tuple(Trash(key, self._clock.now_ns()) for key in gone if key not in named)
        while len(segments) > self.options.page_entries:
            # The last entry may still grow, so it stays in the head.
            page, segments = segments[: self.options.page_entries], segments[self.options.page_entries :]
            data = encode_page(page)
            key = page_key(self.channel, data, page[0].first)
            self.store.put(key, data)
            fail_point("ship.page.after")
            times = [time for entry in page for time in (entry.min_time_ns, entry.max_time_ns) if time is not None]
            size = sum(entry.bytes for entry in page)
            span = (page[0].first, page[-1].next, len(page), size, min(times, default=None), max(times, default=None))
            pages += (PageRef(key, *span),)
        return {
            "next": entries[-1].next,
            "segments": segments,
            "pages": pages,
            "trash": trash,
            "records": head.records + sum(e.records for e in entries) - (0 if grown is None else grown.records),
            "bytes": head.bytes + sum(e.bytes for e in entries) - (0 if grown is None else grown.bytes),
        }

    def _move_cursor(self, head: Head) -> None:
        fail_point("ship.cursor.before")
        seen = Fingerprint.parse(head.seen) if head.seen else None
        self._sidecar.write_cursor(self._cursor, head.next, seen=seen)
        fail_point("ship.cursor.after")

    def _delete_shipped(self) -> None:
        if self.options.delete_local:
            drop_shipped(self._disk, self._log, self._sidecar, self.head, self.store, self._check_before_removal)

    def _check_before_removal(self) -> None:
        self._check_still_here()
        self._check_seen()

    # --- Looking on

    def go_on_by(self, store: ObjectStore) -> None:
        """Reach the same place by another way; between two steps."""
        self.store = self._fence.store = store
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def pause(self) -> None:
        """Send nothing more until ``resume``; a segment that is going up is finished."""
        self._paused = True

    def resume(self) -> None:
        """Go on."""
        self._paused = False

    @property
    def sent_bytes(self) -> int:
        """How many bytes it sent."""
        return self._sent

    def status(self) -> ShipStatus:
        """Return how far it is."""
        waiting = list(sealed_segments(self._disk, self._log, self.head.next))
        shipped = {entry.name for entry in self.head.segments}
        sizes = dict(log_files(self._disk, self._log))
        newest = max(sizes, key=self._order, default="")
        lag = sum(sizes.get(segment.path, 0) for segment in waiting)
        end = waiting[-1].next if waiting else self.head.next
        if newest and os.path.basename(newest) not in shipped and self._log.next_position > end:
            lag += sizes[newest]  # an open segment without a record is room and no lag
        age = self._age()
        _lag.set(lag, channel=self.channel)
        _age.set(age or 0.0, channel=self.channel)
        _backlog.set(len(waiting), channel=self.channel)
        return ShipStatus(
            self.channel, self.head.next, self._log.next_position, lag, len(waiting), age, self._sent,
            self.head.generation, self._paused,
        )  # fmt: skip

    def _order(self, path: str) -> tuple[int, str]:
        found = self._disk.stat(path)
        return (0 if found is None else found.modified_ns, path)

    def _age(self) -> float | None:
        oldest = oldest_time_ns(self._log, self.head.next)
        return None if oldest is None else max(0.0, (self._clock.now_ns() - oldest) / 1e9)

    def close(self) -> None:
        """Let go of the log; the head stays as it is, and the next shipper takes over."""
        self._closed = True
        self._pace.stop()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)  # a store that does not answer holds nobody up
        with contextlib.suppress(Exception):
            self._sidecar.close()
        self._log.close()

    def describe(self) -> dict[str, Any]:
        """Return the status, ready for JSON."""
        return msgspec.structs.asdict(self.status())
