"""The twin of natswire.pyx."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.kernel.twin.maps import view_of

LINE_MAX = 65536
BODY_MAX = 134217728
PUT, DELETE, PURGE, OTHER, CONTROL, FOREIGN = range(6)

_NUMBER = re.compile(rb"\+?[0-9]+\Z")
_MESSAGE = re.compile(rb"(h?)msg[ \t]", re.IGNORECASE)
_WORD = re.compile(rb"[^ \t\r]+")


class Frame(NamedTuple):
    """Where one message and its parts are; a line that is no message has sid 0."""

    end: int
    sid: int = 0
    subject: tuple[int, int] = (0, 0)
    reply: tuple[int, int] = (0, 0)
    body: int = 0
    headers_len: int = 0
    body_len: int = 0


class BrokenFrame(Exception):
    """The bytes are not the protocol."""


def cut_run(data: Any, start: int) -> tuple[int, int, int]:
    """Return (end, subscription id, frames) of the run of one subscription at start."""
    view = bytes(view_of(data))
    if not 0 <= start <= len(view):
        raise ValueError(f"start {start} is outside of {len(view)} bytes")
    at, sid, count = start, 0, 0
    while at < len(view):
        try:
            cut = _frame(view, at)
        except BrokenFrame:
            return at, sid, count or -1
        if cut is None or (count and cut.sid != sid):
            break
        at, sid, count = cut.end, cut.sid, count + 1
    return at, sid, count


def count_frames(data: Any, limit: int) -> tuple[int, int]:
    """Return (frames, end): how many whole messages are at the start, no more than limit."""
    view = bytes(view_of(data))
    at = count = 0
    while at < len(view) and count < limit:
        cut = _whole(view, at)
        if cut is None:
            break
        at, count = cut.end, count + 1
    return count, at


def decode(
    data: Any,
    prefix: Any,
    ops: NDArray[np.uint8],
    spans: NDArray[np.int64],
    sequences: NDArray[np.uint64],
    counts: NDArray[np.int64],
) -> int:
    """Fill one row a message; return how many there were."""
    view, head = bytes(view_of(data)), bytes(view_of(prefix))
    at = row = 0
    while at < len(view) and row < len(ops):
        cut = _whole(view, at)
        if cut is None or cut.sid == 0:
            break
        at = cut.end
        op, length = PUT, cut.body_len - cut.headers_len
        if cut.headers_len:
            op, length = _headers(view[cut.body : cut.body + cut.headers_len], length)
        reply_at, reply_len = cut.reply
        known, stream_seq, consumer_seq, pending = ack_fields(view[reply_at : reply_at + reply_len])
        subject_at, subject_len = cut.subject
        if op == CONTROL:
            spans[row] = (reply_at, reply_len, cut.body, cut.headers_len)
        else:
            if subject_len <= len(head) or not view.startswith(head, subject_at):
                op, key = FOREIGN, cut.subject
            else:
                key = (subject_at + len(head), subject_len - len(head))
            spans[row] = (*key, cut.body + cut.headers_len, cut.body_len - cut.headers_len)
        ops[row] = op
        sequences[row] = (stream_seq, consumer_seq)
        counts[row] = (pending, length, known)
        row += 1
    return row


def parse_acks(
    data: Any,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    sequences: NDArray[np.uint64],
    known: NDArray[np.uint8],
) -> None:
    """Read the stream sequence out of many ACK subjects; known is 0 where there is none."""
    view = bytes(view_of(data))
    for index, (at, length) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=True)):
        if at < 0 or length < 0 or at > len(view) - length:
            raise ValueError(f"subject {index} is outside of {len(view)} bytes")
        known[index], sequences[index], _, _ = ack_fields(view[at : at + length])


def ack_fields(subject: bytes) -> tuple[bool, int, int, int]:
    """Return (known, stream sequence, consumer sequence, pending) of an ACK subject."""
    tokens = subject.split(b".")
    if len(tokens) < 9 or tokens[:2] != [b"$JS", b"ACK"]:
        return False, 0, 0, -1
    at = 5 if len(tokens) == 9 else 7
    stream_seq = _number(tokens[at])
    if stream_seq is None:
        return False, 0, 0, -1
    pending = _number(tokens[at + 3]) if at + 3 < len(tokens) else None
    if pending is None or pending >= 1 << 63:
        pending = -1
    return True, stream_seq, _number(tokens[at + 1]) or 0, pending


def _number(text: bytes) -> int | None:
    if not _NUMBER.match(text):
        return None
    value = int(text)
    return value if value < 1 << 64 else None


def _whole(view: bytes, at: int) -> Frame | None:
    try:
        return _frame(view, at)
    except BrokenFrame:
        return None


def _frame(view: bytes, at: int) -> Frame | None:
    end = view.find(b"\n", at, at + LINE_MAX)
    if end < 0:
        if len(view) - at >= LINE_MAX:
            raise BrokenFrame
        return None
    found = _MESSAGE.match(view, at, end)
    if not found:
        return Frame(end + 1)
    tokens = [word.span() for word in _WORD.finditer(view, found.end(), end)][:6]
    plain = 4 if found[1] else 3
    if len(tokens) not in (plain, plain + 1):
        raise BrokenFrame
    words = [view[start:stop] for start, stop in tokens]
    sid, total = _number(words[1]), _number(words[-1])
    headers = _number(words[-2]) if found[1] else 0
    if not sid or sid >= 1 << 63 or total is None or total > BODY_MAX or headers is None or headers > total:
        raise BrokenFrame
    body, stop = end + 1, end + 1 + total + 2
    if len(view) < stop:
        return None
    if view[stop - 2 : stop] != b"\r\n":
        raise BrokenFrame
    reply = _span(tokens[2]) if len(tokens) > plain else (tokens[0][0], 0)
    return Frame(stop, sid, _span(tokens[0]), reply, body, headers, total)


def _span(token: tuple[int, int]) -> tuple[int, int]:
    return token[0], token[1] - token[0]


def _headers(block: bytes, length: int) -> tuple[int, int]:
    if len(block) >= 12 and block[8:9] == b" ":
        return CONTROL, length
    op, marker = None, PUT
    for line in block.split(b"\n")[1:]:
        name, colon, value = line.removesuffix(b"\r").partition(b":")
        name, value = name.lower(), value.strip(b" \t")
        if not colon:
            continue
        if name == b"kv-operation":
            op = {b"DEL": DELETE, b"PURGE": PURGE}.get(value, OTHER)
        elif name == b"nats-marker-reason":
            marker = {b"Remove": DELETE, b"MaxAge": PURGE, b"Purge": PURGE}.get(value, marker)
        elif name == b"nats-msg-size":
            size = _number(value)
            if size is not None and size < 1 << 63:
                length = size
    return (marker if op is None else op), length
