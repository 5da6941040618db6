"""MQTT packets in plain Python: what penstock/kernel/mqtt.pyx does, as its oracle."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

__all__ = ["Run", "cut", "ack_run", "make_run", "properties"]

MALFORMED, PROTOCOL, BAD_TOPIC, BAD_ALIAS, TOO_LARGE = 0x81, 0x82, 0x90, 0x94, 0x95
LAYOUT = {
    **dict.fromkeys((1, 23, 25, 36, 37, 40, 41, 42), "byte"),
    **dict.fromkeys((19, 33, 34, 35), "two"),
    **dict.fromkeys((2, 17, 24, 39), "four"),
    **dict.fromkeys((3, 8, 18, 21, 26, 28, 31), "text"),
    **dict.fromkeys((9, 22), "binary"),
    11: "varint",
    38: "pair",
}
OF_PUBLISH = (1, 2, 3, 8, 9, 11, 35, 38)

Item = Any


class Short(Exception):
    """The bytes end before the number does."""


class Malformed(Exception):
    """Not the protocol."""


def varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return (value, where it ends)."""
    value = 0
    for used in range(4):
        if at + used >= end:
            raise Short
        byte = data[at + used]
        value |= (byte & 127) << 7 * used
        if byte < 128:
            if used and not byte:
                raise Malformed
            return value, at + used + 1
    raise Malformed


def encode_varint(value: int) -> bytes:
    """Return the shortest form."""
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def is_text(raw: bytes) -> bool:
    """Whether it is UTF-8 without U+0000 and surrogates."""
    try:
        return "\0" not in raw.decode()
    except UnicodeDecodeError:
        return False


def is_wild(raw: bytes) -> bool:
    """Whether there is a wildcard in it."""
    return b"+" in raw or b"#" in raw


def value_at(data: bytes, at: int, end: int, layout: str) -> tuple[Any, int]:
    """Return (value, where it ends) of one property."""
    if layout in ("byte", "two", "four"):
        size = {"byte": 1, "two": 2, "four": 4}[layout]
        if end - at < size:
            raise Malformed
        return int.from_bytes(data[at : at + size], "big"), at + size
    if layout == "varint":
        try:
            return varint(data, at, end)
        except Short:
            raise Malformed from None
    if layout == "pair":
        name, at = value_at(data, at, end, "text")
        value, at = value_at(data, at, end, "text")
        return (name, value), at
    if end - at < 2:
        raise Malformed
    size = int.from_bytes(data[at : at + 2], "big")
    raw = data[at + 2 : at + 2 + size]
    if at + 2 + size > end or (layout == "text" and not is_text(raw)):
        raise Malformed
    return raw if layout == "binary" else raw.decode(), at + 2 + size


def properties(data: bytes, start: int, end: int) -> list[tuple[int, Any]] | None:
    """Return [(identifier, value), …] in order, or None when the bytes are malformed."""
    if not 0 <= start <= end <= len(data):
        raise ValueError(f"{start} to {end} is outside of {len(data)} bytes")
    found, at = [], start
    try:
        while at < end:
            what = data[at]
            if what not in LAYOUT:
                return None
            value, at = value_at(data, at + 1, end, LAYOUT[what])
            found.append((what, value))
    except Malformed:
        return None
    return found


class Run:
    """PUBLISH packets that differ in payload and id only."""

    def __init__(self, data: bytes, topic: bytes, start: int, end: int, head: int) -> None:
        self.data, self.topic, self.start, self.end, self._head = data, topic, start, end, head
        self.forward = b""
        self.count = self.longest = self.payload_bytes = self.qos = self.first_id = self.alias = 0
        self.expiry = -1
        self.retain = self.dup = self.version5 = self.plain = False
        self.deadline = 0.0

    def wire(self, version5: bool) -> bytes | memoryview | None:
        """Return the packets as they came, or None when another form is needed."""
        if version5 != self.version5 or self.alias or self.expiry >= 0 or self.dup:
            return None
        return self.packets()

    def packets(self) -> bytes | memoryview:
        """Return the packets as they came."""
        return self.data[self.start : self.end]

    def frames(self, version5: bool, flags: int, topic: bytes, properties: bytes, first_id: int) -> bytes:
        """Return the packets in another form."""
        if len(topic) > 65535:
            raise ValueError(f"a topic of {len(topic)} bytes")
        if flags & 6 and not (first_id >= 1 and first_id + self.count <= 65536):
            raise ValueError(f"{self.count} ids from {first_id}")
        out = []
        for index, payload in enumerate(self.payloads()):
            body = struct.pack(">H", len(topic)) + topic
            if flags & 6:
                body += struct.pack(">H", first_id + index)
            if version5:
                body += encode_varint(len(properties)) + properties
            body += payload
            out.append(bytes([0x30 | flags]) + encode_varint(len(body)) + body)
        return b"".join(out)

    def split(self, count: int) -> tuple[Run, Run]:
        """Return the first packets and the rest."""
        if not 0 < count < self.count:
            raise ValueError(f"{count} packets of a run of {self.count}")
        at = self.start
        for _ in range(count):
            remaining, at = varint(self.data, at + 1, self.end)
            at += remaining
        head, tail = self._copy(), self._copy()
        head.end = tail.start = at
        head.count, tail.count = count, self.count - count
        if self.first_id:
            tail.first_id = self.first_id + count
        head._measure()
        tail._measure()
        return head, tail

    def deal(self, hands: int) -> list[Run]:
        """Return that many runs: packet i goes to run i % hands."""
        if hands < 1:
            raise ValueError(f"{hands} hands")
        if hands == 1 or self.count == 1:
            return [self]
        packets, at = [], self.start
        for _ in range(self.count):
            remaining, body = varint(self.data, at + 1, self.end)
            packets.append(self.data[at : body + remaining])
            at = body + remaining
        runs = []
        for hand in range(min(hands, self.count)):
            own = packets[hand::hands]
            other = self._copy()
            other.data, other.start, other.count, other.plain = b"".join(own), 0, len(own), False
            other.end = len(other.data)
            other._measure()
            runs.append(other)
        return runs

    def detached(self) -> Run:
        """Return a run that keeps no more bytes alive than its own."""
        if len(self.data) <= 2 * (self.end - self.start) + 256:
            return self
        other = self._copy()
        other.data, other.start, other.end = self.data[self.start : self.end], 0, self.end - self.start
        return other

    def payload(self, index: int = 0) -> bytes:
        """Return the payload of one packet."""
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.payloads()[index]

    def payloads(self) -> list[bytes]:
        """Return the payloads in order."""
        found, at = [], self.start
        for _ in range(self.count):
            remaining, at = varint(self.data, at + 1, self.end)
            found.append(self.data[at + self._head : at + remaining])
            at += remaining
        return found

    def spans(self, offsets: Any, lengths: Any) -> None:
        """Fill in where each payload is, and how long."""
        if not len(offsets) == len(lengths) == self.count:
            raise ValueError(f"{len(offsets)} spans for {self.count} packets")
        at = self.start
        for index in range(self.count):
            remaining, at = varint(self.data, at + 1, self.end)
            offsets[index], lengths[index] = at + self._head, remaining - self._head
            at += remaining

    def _copy(self) -> Run:
        other = Run(self.data, self.topic, self.start, self.end, self._head)
        other.__dict__.update(self.__dict__)
        return other

    def _measure(self) -> None:
        sizes = [len(payload) for payload in self.payloads()]
        self.longest, self.payload_bytes = max(sizes), sum(sizes)


class _Refused(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text


def _forwarded(data: bytes, at: int, end: int, from_server: bool) -> tuple[int, int, bytes]:
    alias, expiry, kept, seen = 0, -1, b"", set()
    while at < end:
        what = data[at]
        if what not in LAYOUT:
            raise _Refused(MALFORMED, f"property {what} does not exist")
        if what not in OF_PUBLISH:
            raise _Refused(MALFORMED, f"property {what} does not belong into it")
        try:
            value, stop = value_at(data, at + 1, end, LAYOUT[what])
        except Malformed:
            raise _Refused(MALFORMED, f"property {what} is malformed") from None
        if what == 11 and not from_server:
            raise _Refused(PROTOCOL, "a subscription identifier from a client")
        if what in seen and what not in (38, 11):
            raise _Refused(PROTOCOL, f"property {what} is there twice")
        seen.add(what)
        if what == 1 and value > 1:
            raise _Refused(PROTOCOL, "payload format indicator above 1")
        if what == 8 and is_wild(data[at + 3 : stop]):
            raise _Refused(PROTOCOL, "wildcards in the response topic")
        if what == 35:
            alias = value
            if alias == 0:
                raise _Refused(BAD_ALIAS, "topic alias 0")
        elif what == 2:
            expiry = value
        else:
            kept += data[at:stop]
        at = stop
    return alias, expiry, kept


def _publish(data: bytes, at: int, body: int, stop: int, version5: bool, from_server: bool) -> tuple[Run, bytes, bytes]:
    """Return the packet as a run of one, and its topic and properties as they are on the wire."""
    flags = data[at] & 15
    if stop - body < 2 or flags & 6 == 6 or flags & 14 == 8:
        raise _Refused(
            MALFORMED, "QoS 3" if flags & 6 == 6 else "DUP with QoS 0" if flags & 14 == 8 else "it is too short"
        )
    topic_len = int.from_bytes(data[body : body + 2], "big")
    rest = body + 2 + topic_len
    if rest + (2 if flags & 6 else 0) > stop:
        raise _Refused(MALFORMED, "it is too short")
    topic, packet_id = data[body + 2 : rest], 0
    if flags & 6:
        packet_id = int.from_bytes(data[rest : rest + 2], "big")
        rest += 2
        if not packet_id:
            raise _Refused(PROTOCOL, "packet id 0")
    raw = b""
    if version5:
        try:
            length, rest = varint(data, rest, stop)
        except (Short, Malformed):
            length = stop
        if rest + length > stop:
            raise _Refused(MALFORMED, "the length of its properties is malformed")
        raw = data[rest : rest + length]
        rest += length
    if not topic and not version5:
        raise _Refused(MALFORMED, "an empty topic")
    if not is_text(topic):
        raise _Refused(MALFORMED, "the topic is not UTF-8")
    if is_wild(topic):
        raise _Refused(BAD_TOPIC, "a wildcard in the topic")
    run = Run(data, topic, at, stop, rest - body)
    run.alias, run.expiry, run.forward = _forwarded(raw, 0, len(raw), from_server)
    run.count, run.qos, run.retain, run.dup = 1, flags >> 1 & 3, bool(flags & 1), bool(flags >> 3)
    run.longest = run.payload_bytes = stop - rest
    run.first_id, run.version5 = packet_id, version5
    run.plain = not flags and not run.alias and run.expiry < 0 and topic[:1] not in (b"", b"$")
    return run, topic, raw


def _check_flags(kind: int, flags: int, remaining: int, version5: bool) -> None:
    if 4 <= kind <= 7:
        if flags != (2 if kind == 6 else 0):
            raise _Refused(MALFORMED, f"flags {flags}")
        if remaining < 2 or (remaining > 2 and not version5):
            raise _Refused(MALFORMED, f"a body of {remaining} bytes")
    elif kind == 0 or (kind == 15 and not version5):
        raise _Refused(MALFORMED, f"there is no packet of kind {kind}")
    elif flags != (2 if kind in (8, 10) else 0):
        raise _Refused(MALFORMED, f"flags {flags}")


def cut(
    data: bytes, start: int, version5: bool, limit: int, most: int = 0, from_server: bool = False
) -> tuple[list[Item], int, int, tuple[int, int, str] | None]:
    """Cut the bytes from start into packets: return (items, end, need, problem)."""
    if not 0 <= start <= len(data):
        raise ValueError(f"start {start} is outside of {len(data)} bytes")
    items: list[Item] = []
    at, need, taken, last, open_ack = start, 0, 0, None, False
    while at < len(data) and (not most or taken < most):
        taken += 1
        kind, flags = data[at] >> 4, data[at] & 15
        try:
            remaining, body = varint(data, at + 1, len(data))
        except Short:
            break
        except Malformed:
            return items, at, need, (MALFORMED, kind, "its length is malformed")
        stop = body + remaining
        if stop - at > limit:
            text = f"{stop - at} bytes are more than the {limit} that are accepted"
            return items, at, need, (TOO_LARGE, kind, text)
        if stop > len(data):
            need = stop - at
            break
        try:
            if kind == 3:
                run, topic, raw = _publish(data, at, body, stop, version5, from_server)
                form: Any = (data[at], topic, raw)
                if last == form and (not run.qos or run.first_id == items[-1].first_id + items[-1].count):
                    _extend(items[-1], run)
                else:
                    items.append(run)
                last, open_ack, at = form, False, stop
                continue
            _check_flags(kind, flags, remaining, version5)
            if 4 <= kind <= 7:
                packet_id = int.from_bytes(data[body : body + 2], "big")
                if not packet_id:
                    raise _Refused(PROTOCOL, "packet id 0")
                if remaining == 2:
                    if open_ack and items[-1][0] == kind and packet_id == items[-1][2] + items[-1][3]:
                        items[-1] = (kind, -1, items[-1][2], items[-1][3] + 1)
                    else:
                        items.append((kind, -1, packet_id, 1))
                    last, open_ack, at = None, True, stop
                    continue
        except _Refused as exc:
            return items, at, need, (exc.code, kind, exc.text)
        items.append((kind, flags, body, stop))
        last, open_ack, at = None, False, stop
    return items, at, need, None


def _extend(run: Run, other: Run) -> None:
    run.count += 1
    run.end = other.end
    run.payload_bytes += other.payload_bytes
    run.longest = max(run.longest, other.longest)


def ack_run(first: int, first_id: int, count: int, reason: int = 0) -> bytes:
    """Return acknowledgements with ids that count up."""
    if count < 0 or first_id < 1 or first_id + count > 65536:
        raise ValueError(f"{count} ids from {first_id}")
    tail = bytes([reason]) if reason else b""
    head = bytes([first, 2 + len(tail)])
    return b"".join(head + struct.pack(">H", first_id + index) + tail for index in range(count))


def make_run(
    topic: bytes, payloads: Iterable[bytes], qos: int, retain: bool, forward: bytes = b"", expiry: int = -1
) -> Run:
    """Return a run that nobody sent."""
    if len(topic) > 65535 or not 0 <= qos <= 2:
        raise ValueError(f"a topic of {len(topic)} bytes with QoS {qos}")
    payloads = list(payloads)
    if not payloads or len(payloads) > 65535:
        raise ValueError(f"{len(payloads)} payloads")
    head = 2 + len(topic) + (2 if qos else 0)
    out = []
    for index, payload in enumerate(payloads):
        if head + len(payload) > 268435455:
            raise ValueError(f"a payload of {len(payload)} bytes")
        body = struct.pack(">H", len(topic)) + topic + (struct.pack(">H", 1 + index) if qos else b"") + payload
        out.append(bytes([0x30 | qos << 1 | retain]) + encode_varint(len(body)) + body)
    data = b"".join(out)
    run = Run(data, topic, 0, len(data), head)
    run.count, run.qos, run.retain, run.first_id = len(payloads), qos, retain, 1 if qos else 0
    run.forward, run.expiry = forward, expiry
    run._measure()
    return run
