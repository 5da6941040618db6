"""The twin of messagelog.pyx."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernel.twin.maps import view_of

HEAD = struct.Struct("<QQHI")  # seq, milliseconds, sender length, payload length
CRC = struct.Struct("<I")
INDEX = struct.Struct("<IQ")
LEAST = HEAD.size + CRC.size
INDEX_EVERY = 4096
MAX_SENDER = 65535
LIMIT, END, SHORT, BAD_CRC = range(4)
LAST_MS = ((1 << 64) - 1) // 1_000_000
NO_TIME = (1 << 64) - 1

Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]
Encoded = tuple[bytes, int, int, int]


def entry_at(view: memoryview, at: int) -> tuple[int, int]:
    """Return (length, 0) of the entry at ``at``, or (0, why there is none)."""
    if at >= len(view):
        return 0, END
    if len(view) - at < LEAST:
        return 0, SHORT
    _, _, sender, payload = HEAD.unpack_from(view, at)
    length = LEAST + sender + payload
    if length > len(view) - at:
        return 0, SHORT
    end = at + length - CRC.size
    if zlib.crc32(view[at:end]) != CRC.unpack_from(view, end)[0]:
        return 0, BAD_CRC
    return length, LIMIT


def scan(data: Any, at: int, want: int, ordered: bool, columns: Int64) -> tuple[int, int, int, int]:
    """Fill the columns with entries from ``at`` on whose seq is at least ``want``."""
    view, count, skipped, stop = view_of(data), 0, 0, LIMIT
    if columns.shape[0] != 6:
        raise ValueError("an entry has six columns")
    unsigned = columns.view(np.uint64)
    if at < 0:
        raise ValueError(f"offset {at} is before the data")
    if at >= len(view):
        return 0, at, END, 0
    while count < columns.shape[1]:
        length, stop = entry_at(view, at)
        if not length:
            break
        seq, ms, sender, payload = HEAD.unpack_from(view, at)
        if seq < want:
            skipped += count > 0
        else:
            body = at + HEAD.size
            unsigned[:, count] = (
                seq, ms * 1_000_000 if ms <= LAST_MS else NO_TIME, body, sender, body + sender, payload,
            )  # fmt: skip
            count += 1
            if ordered:
                if seq == NO_TIME:
                    at += length
                    break
                want = seq + 1
        at += length
    return count, at, stop, skipped


def walk(data: Any, name: int, index: NDArray[np.uint8]) -> tuple[int, int, int, int, int, int, int, int, int, int]:
    """Walk a whole segment and build its index."""
    view = view_of(data)
    at = since = sound = count = unordered = indexed = seq = first = highest = 0
    room = len(index) // INDEX.size
    if not len(view):
        return 0, END, 0, 0, 0, 0, 0, 0, 0, 0
    while True:
        length, stop = entry_at(view, at)
        if not length:
            break
        (seq,) = struct.unpack_from("<Q", view, at)
        if count == 0:
            first = seq
        elif seq <= highest:
            unordered += 1
        highest = max(highest, seq)
        if at == 0 or since >= INDEX_EVERY:
            if indexed < room:
                INDEX.pack_into(index.data, indexed * INDEX.size, (seq - name) & 0xFFFFFFFF, at)
                indexed += 1
            since = 0
        since += length
        at += length
        count += 1
        if seq:
            sound = at
    return at, stop, count, first, seq, highest, unordered, sound, since, indexed


def find_entry(data: Any, at: int, low: int, high: int, budget: int) -> tuple[int, int]:
    """Return (the first offset from ``at`` on where an intact entry with low < seq <= high begins, bytes summed up)."""
    view, spent = view_of(data), 0
    if at < 0:
        return -1, 0
    while at <= len(view) - LEAST:
        seq, _, sender, payload = HEAD.unpack_from(view, at)
        length = LEAST + sender + payload
        if low < seq <= high and length <= len(view) - at:
            if length > budget - spent:
                return -2, spent
            spent += length
            if entry_at(view, at)[0]:
                return at, spent
        at += 1
    return -1, spent


def encode_one(seq: int, ms: int, sender: Any, payload: Any) -> bytes:
    """Return the bytes of one entry."""
    who, body = view_of(sender), view_of(payload)
    if len(who) > MAX_SENDER or len(body) > 0xFFFFFFFF:
        raise ValueError("sender or payload is too long for an entry")
    entry = HEAD.pack(seq, ms, len(who), len(body)) + who.tobytes() + body.tobytes()
    return entry + CRC.pack(zlib.crc32(entry))


class _Run:
    """Entries for one file, and the index entries that go with them."""

    def __init__(self, chunk: int, offset: int, since: int, limit: int, name: int, index: NDArray[np.uint8]) -> None:
        self.chunk, self.offset, self.since, self.limit, self.name = chunk, offset, since, limit, name
        self.index, self.indexed = index, 0
        self.parts: list[bytes] = []
        self.total = 0

    def add(self, seq: int, ms: int, sender: Any, payload: Any) -> bool:
        """Add an entry; False when it has to wait for the next run."""
        entry = encode_one(seq, ms, sender, payload)
        if self.parts and self.total + len(entry) > self.chunk:
            return False
        if self.offset == 0 or self.since >= INDEX_EVERY:
            if self.indexed < len(self.index) // INDEX.size:
                at = self.indexed * INDEX.size
                INDEX.pack_into(self.index.data, at, (seq - self.name) & 0xFFFFFFFF, self.offset)
                self.indexed += 1
            self.since = 0
        self.since += len(entry)
        self.offset += len(entry)
        self.total += len(entry)
        self.parts.append(entry)
        return True

    @property
    def full(self) -> bool:
        """Whether the file takes no more."""
        return self.offset > self.limit


def longest(payloads: list[Any]) -> int:
    """Return the length of the longest of these bytes objects, or -1 when one of them is something else."""
    return max(map(len, payloads), default=0) if all(type(payload) is bytes for payload in payloads) else -1


def encode_list(
    payloads: list[Any], start: int, sender: bytes, seq: int, ms: int, largest: int, chunk: int, offset: int,
    since: int, limit: int, name: int, index: NDArray[np.uint8],
) -> Encoded:  # fmt: skip
    """Encode payloads[start:], numbered from ``seq``, until the file is full or ``chunk`` bytes are there."""
    if not 0 <= start <= len(payloads):
        raise ValueError(f"start {start} is outside of the list")
    if len(sender) > MAX_SENDER:
        raise ValueError("the sender is too long for an entry")
    run, at = _Run(chunk, offset, since, limit, name, index), start
    for payload in payloads[start:]:
        if type(payload) is not bytes or len(payload) > largest:
            break
        if not run.add(seq + at - start, ms, sender, payload):
            break
        at += 1
        if run.full:
            break
    return b"".join(run.parts), at, run.since, run.indexed


def encode_spans(
    data: Any, offsets: Int64, lengths: Int64, sender_data: Any, sender_offsets: Int64, sender_lengths: Int64,
    seqs: UInt64, times: UInt64, start: int, largest: int, chunk: int, offset: int, since: int, limit: int, name: int,
    index: NDArray[np.uint8],
) -> Encoded:  # fmt: skip
    """Do the same for columns; senders and times (ms) may be one for all."""
    count = len(offsets)
    if (
        not len(lengths) == len(seqs) == count
        or len(sender_offsets) != len(sender_lengths)
        or len(sender_offsets) not in (1, count)
        or len(times) not in (1, count)
    ):
        raise ValueError("the columns differ in length")
    if not 0 <= start <= count:
        raise ValueError(f"start {start} is outside of the columns")
    view, names = view_of(data), view_of(sender_data)
    run, at = _Run(chunk, offset, since, limit, name, index), start
    while at < count:
        who = 0 if len(sender_offsets) == 1 else at
        part = _part(view, int(offsets[at]), int(lengths[at]), largest)
        sender = _part(names, int(sender_offsets[who]), int(sender_lengths[who]), MAX_SENDER)
        if part is None or sender is None:
            break
        if not run.add(int(seqs[at]), int(times[0 if len(times) == 1 else at]), sender, part):
            break
        at += 1
        if run.full:
            break
    return b"".join(run.parts), at, run.since, run.indexed


def _part(view: memoryview, start: int, length: int, largest: int) -> memoryview | None:
    if length < 0 or length > largest or start < 0 or start > len(view) - length:
        return None
    return view[start : start + length]
