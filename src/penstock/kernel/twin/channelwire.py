"""The lines of the channel protocol in plain Python: what kernel/channelwire.pyx must agree with."""

from __future__ import annotations

import re
import struct
from typing import Final

__all__ = [
    "tokenize",
    "cut_broadcasts",
    "cut_messages",
    "cut_acks",
    "encode_acks",
    "encode_messages",
    "encode_broadcasts",
]

SPACES: Final = b" \t\v\f\r"
QUOTES: Final = b"\"':*"
NAME: Final = re.compile(rb"[A-Za-z0-9_]*")
PLAIN: Final = re.compile(rb" ([a-z]{2,9})=([!-\[\]-~][!-~]*)")
U32: Final = (1 << 32) - 1
U64: Final = (1 << 64) - 1


def tokenize(line: bytes) -> tuple[bytes | None, list[tuple[bytes, bytes]], bool]:
    """Return the name of a message (None if there is none), its parameters in order, and whether the line is whole."""
    pairs: list[tuple[bytes, bytes]] = []
    at = _skip(line, 0)
    if _ended(line, at):
        return None, pairs, False
    end = _token_end(line, at)
    name, at = line[at:end], end + 1
    while True:
        at = _skip(line, at)
        if _ended(line, at):
            return name, pairs, True
        equals = line.find(b"=", at)
        if equals < 0:
            return name, pairs, False
        label, colon, count_text = line[at:equals].partition(b":")
        if not NAME.fullmatch(label) or (colon and not re.fullmatch(rb"\+?[0-9]+", count_text)):
            return name, pairs, False
        count = int(count_text) if colon else 1
        if count > U64:
            return name, pairs, False
        at = equals + 1
        while True:  # a count of 0 takes all that follows, and then misses one
            found = _value(line, at)
            if found is None:
                return name, pairs, False
            value, at = found
            pairs.append((label, value))
            count -= 1
            if count == 0:
                break


def _skip(line: bytes, at: int) -> int:
    while at < len(line) and line[at] in SPACES:
        at += 1
    return at


def _ended(line: bytes, at: int) -> bool:
    return at >= len(line) or line[at] == 0


def _token_end(line: bytes, at: int) -> int:
    while not _ended(line, at) and line[at] not in SPACES:
        at += 1
    return at


def _value(line: bytes, at: int) -> tuple[bytes, int] | None:
    """Return one value and where reading goes on; None when there is none."""
    at = _skip(line, at)
    if _ended(line, at):
        return None
    if line[at] == 92 and at + 1 < len(line) and line[at + 1] in QUOTES:
        return _quoted(line, at + 2, line[at + 1])
    start = at
    if line[at] == 92 and at + 1 == len(line) and line[at - 1] not in SPACES:
        start = at - 1  # a lone backslash at the end takes the byte before it along
    end = _token_end(line, at)
    return line[start:end], end + 1


def _quoted(line: bytes, start: int, quote: int) -> tuple[bytes, int] | None:
    back = -1
    for at in range(start, len(line)):
        byte = line[at]
        if byte == 0:
            return None
        if byte == 92 and back < 0:
            back = at if at != start else -1  # one that comes first is not seen: an empty value never ends
        elif byte == quote and back >= 0:
            return line[start:back], at + 1
        else:
            back = -1
    return None


def _plain(data: bytes, at: int, name: bytes, max_line: int) -> tuple[dict[bytes, bytes], int] | None:
    """Return the parameters of a line that has each once and plain, and where its LF is."""
    head = name + b" "
    end = data.find(b"\n", at, min(at + max_line, len(data)))
    if end < 0 or not data.startswith(head, at):
        return None
    found: dict[bytes, bytes] = {}
    place = at + len(name)
    while place < end:
        match = PLAIN.match(data, place, end)
        if match is None or match[1] in found:
            return None
        found[match[1]] = match[2]
        place = match.end()
    return found, end


def _number(text: bytes | None, most: int) -> int:
    """Return a plain number, 0 when it is none or not to be had as such."""
    if text is None or not text.isdigit() or len(text) > 20:
        return 0
    return int(text) if int(text) <= most else 0


def _frame(
    data: bytes, at: int, name: bytes, fields: set[bytes], extra: set[bytes], max_line: int, max_payload: int
) -> tuple[dict[bytes, bytes], int, int, int] | None:
    """Return the parameters of a whole frame, where its line and its payload end, and where the next one begins."""
    found = _plain(data, at, name, max_line)
    if found is None:
        return None
    values, end = found
    if not fields <= values.keys() <= fields | extra:
        return None
    length = _number(values[b"length"], U32)
    if not 0 < length <= max_payload or len(data) - end < length + 2 or data[end + 1 + length] != 10:
        return None
    return values, end, end + 1 + length, end + 2 + length


def cut_broadcasts(
    data: bytes, at: int, max_line: int, max_payload: int
) -> tuple[bytes, int, bytes, list[bytes], bytes, int] | None:
    """Cut a run of BROADCASTs on one channel with one QoS; None when the next frame is not one."""
    channel: bytes | None = None
    qos: bytes | None = None
    ids, payloads, sizes = [], [], []
    while True:
        found = _frame(data, at, b"BROADCAST", {b"id", b"channel", b"length"}, {b"qos"}, max_line, max_payload)
        if found is None:
            break
        values, line_end, payload_end, end = found
        number = _number(values[b"id"], U32)
        if not number or values.get(b"qos", b"1") not in (b"0", b"1"):
            break
        if channel is None:
            channel, qos = values[b"channel"], values.get(b"qos")
        elif (values[b"channel"], values.get(b"qos")) != (channel, qos):
            break
        ids.append(number)
        payloads.append(data[line_end + 1 : payload_end])
        sizes.append(line_end - at + len(payloads[-1]))
        at = end
    if channel is None:
        return None
    return (
        channel,
        int(qos or b"1"),
        struct.pack(f"<{len(ids)}I", *ids),
        payloads,
        struct.pack(f"<{len(sizes)}I", *sizes),
        at,
    )


def cut_messages(
    data: bytes, at: int, max_line: int, max_payload: int
) -> tuple[bytes, bytes, int, int, list[bytes], int] | None:
    """Cut a run of MESSAGEs of one sender on one channel, numbered in a row; None when the next frame is not one."""
    wanted = {b"channel", b"from", b"length", b"seq", b"timestamp"}
    first: tuple[bytes, bytes, int, int] | None = None
    payloads: list[bytes] = []
    while True:
        found = _frame(data, at, b"MESSAGE", wanted, set(), max_line, max_payload)
        if found is None:
            break
        values, line_end, payload_end, end = found
        seq, time = _number(values[b"seq"], U64), _number(values[b"timestamp"], U64)
        if not seq or not time:
            break
        if first is None:
            first = values[b"channel"], values[b"from"], seq, time
        elif (values[b"channel"], values[b"from"], seq - len(payloads), time) != first:
            break
        payloads.append(data[line_end + 1 : payload_end])
        at = end
    return None if first is None else (*first, payloads, at)


def cut_acks(data: bytes, at: int, max_line: int) -> tuple[list[int], list[int], int] | None:
    """Cut a run of BROADCAST_ACKs into ids and numbers; None when the next frame is not one."""
    ids, seqs = [], []
    while True:
        found = _plain(data, at, b"BROADCAST_ACK", max_line)
        if found is None or found[0].keys() != {b"id", b"seq"}:
            break
        number, seq = _number(found[0][b"id"], U32), _number(found[0][b"seq"], U64)
        if not number or not seq:
            break
        ids.append(number)
        seqs.append(seq)
        at = found[1] + 1
    return (ids, seqs, at) if ids else None


def encode_acks(ids: bytes, first_seq: int) -> bytes:
    """Return BROADCAST_ACKs for these ids (32 bits each), with numbers in a row."""
    numbers = struct.unpack(f"<{len(ids) // 4}I", ids)
    return b"".join(b"BROADCAST_ACK id=%d seq=%d\n" % (number, seq) for seq, number in enumerate(numbers, first_seq))


def encode_messages(head: bytes, first_seq: int, timestamp: int, payloads: tuple[bytes, ...]) -> bytes:
    """Return MESSAGEs with numbers in a row; ``head`` is the line up to and with ``length=``."""
    return b"".join(
        b"%s%d seq=%d timestamp=%d\n%s\n" % (head, len(payload), seq, timestamp, payload)
        for seq, payload in enumerate(payloads, first_seq)
    )


def encode_broadcasts(first_id: int, head: bytes, tail: bytes, payloads: tuple[bytes, ...]) -> bytes:
    """Return BROADCASTs with ids in a row; ``head`` is `` channel=… length=`` and ``tail`` what follows the length."""
    return b"".join(
        b"BROADCAST id=%d%s%d%s%s\n" % (number, head, len(payload), tail, payload)
        for number, payload in enumerate(payloads, first_id)
    )
