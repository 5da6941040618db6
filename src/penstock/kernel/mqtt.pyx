# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""MQTT packets, many at a time: a read is cut into runs, a run becomes the bytes of another connection.

    packet := first:u8 (kind << 4 | flags)  remaining:varint  body
    PUBLISH body := topic_len:u16 topic  [id:u16 when QoS > 0]  [v5: length:varint properties]  payload

A run is PUBLISH packets in a row that differ in payload and packet id only; their ids count up by one.  It keeps no
table: its packets lie one behind the other in ``data`` and are walked.  No I/O and no policy; every length is checked
against the buffer before it is used.  The twin in penstock/kernel/twin/mqtt.py is the oracle.
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t
from libc.string cimport memcmp, memcpy

from penstock.kernel.mqttbytes cimport (
    BINARY, BYTE, FOUR, LAYOUT, NONE, PAIR, TEXT, TWO, VARINT, put_varint, text, value_end, varint, varint_size, wild,
)

cdef enum:
    PUBLISH = 3
    PUBACK = 4
    PUBREL = 6
    PUBCOMP = 7
    SUBSCRIBE = 8
    UNSUBSCRIBE = 10
    AUTH = 15
    MALFORMED = 0x81
    PROTOCOL = 0x82
    BAD_TOPIC = 0x90
    BAD_ALIAS = 0x94
    TOO_LARGE = 0x95


def properties(bytes data not None, Py_ssize_t start, Py_ssize_t end):
    """Return [(identifier, value), …] in order, or None when the bytes are malformed.

    A value is an int, a str, bytes or a pair of str.  Which identifiers may be there is for the caller to say.
    """
    cdef const unsigned char *p = <const unsigned char *>PyBytes_AS_STRING(data)
    cdef Py_ssize_t at = start, stop, size
    cdef uint32_t number
    cdef int layout, used
    if not 0 <= start <= end <= PyBytes_GET_SIZE(data):
        raise ValueError(f"{start} to {end} is outside of {PyBytes_GET_SIZE(data)} bytes")
    found = []
    while at < end:
        layout = LAYOUT[p[at]] if p[at] < 128 else NONE
        if layout == NONE:
            return None
        stop = value_end(p, at + 1, end, layout)
        if stop < 0:
            return None
        if layout == BYTE:
            value = p[at + 1]
        elif layout == TWO:
            value = (<uint32_t>p[at + 1] << 8) | p[at + 2]
        elif layout == FOUR:
            value = (<uint32_t>p[at + 1] << 24) | (<uint32_t>p[at + 2] << 16) | (<uint32_t>p[at + 3] << 8) | p[at + 4]
        elif layout == VARINT:
            varint(p, at + 1, end, &number)
            value = number
        elif layout == BINARY:
            value = data[at + 3:stop]
        elif layout == TEXT:
            value = data[at + 3:stop].decode()
        else:
            size = (<Py_ssize_t>p[at + 1] << 8) | p[at + 2]
            value = (data[at + 3:at + 3 + size].decode(), data[at + 5 + size:stop].decode())
        found.append((p[at], value))
        at = stop
    return found


@cython.final
@cython.freelist(256)
cdef class Run:
    """PUBLISH packets of one topic, QoS, retain flag and properties, as they came or as they were made.

    ``forward`` are the properties that travel on: without topic alias and expiry, which are ``alias`` (0: none) and
    ``expiry`` (seconds, -1: none).  ``topic`` may be set, once an alias is resolved, ``deadline`` by whoever has a
    clock.  ``first_id`` is the packet id of the first packet, 0 with QoS 0.  ``plain`` says that it was cut from a
    read, has QoS 0 and needs no further look: no retain, alias, expiry, and no ``$`` at the start of its topic.
    """

    def wire(self, bint version5):
        """Return the packets as they came, or None when another connection needs them in another form."""
        if version5 != self.version5 or self.alias or self.expiry >= 0 or self.dup:
            return None
        return self.packets()

    def packets(self):
        """Return the packets as they came: a view where copying would cost more."""
        if self.start == 0 and self.end == PyBytes_GET_SIZE(self.data):
            return self.data
        if self.end - self.start <= 16384:
            return PyBytes_FromStringAndSize(PyBytes_AS_STRING(self.data) + self.start, self.end - self.start)
        return memoryview(self.data)[self.start:self.end]

    def frames(self, bint version5, int flags, bytes topic not None, bytes properties not None, int first_id):
        """Return the packets with this topic, flags, properties (v5) and ids that count up from first_id (QoS > 0)."""
        cdef const unsigned char *p = <const unsigned char *>PyBytes_AS_STRING(self.data)
        cdef const unsigned char *t = <const unsigned char *>PyBytes_AS_STRING(topic)
        cdef const unsigned char *q = <const unsigned char *>PyBytes_AS_STRING(properties)
        cdef Py_ssize_t topic_len = PyBytes_GET_SIZE(topic), prop_len = PyBytes_GET_SIZE(properties)
        cdef Py_ssize_t at = self.start, to = 0, head, size, total = 0, i
        cdef uint32_t remaining = 0
        cdef int used, id = first_id
        cdef bint numbered = (flags & 6) != 0
        cdef unsigned char *o
        if topic_len > 65535:
            raise ValueError(f"a topic of {topic_len} bytes")
        if numbered and not (1 <= first_id and first_id + self.count <= 65536):
            raise ValueError(f"{self.count} ids from {first_id}")
        head = 2 + topic_len + (2 if numbered else 0)
        if version5:
            head += varint_size(prop_len) + prop_len
        for i in range(self.count):
            used = varint(p, at + 1, self.end, &remaining)
            at += 1 + used + remaining
            size = head + remaining - self.head
            total += 1 + varint_size(size) + size
        out = PyBytes_FromStringAndSize(NULL, total)
        o = <unsigned char *>PyBytes_AS_STRING(out)
        at = self.start
        for i in range(self.count):
            used = varint(p, at + 1, self.end, &remaining)
            size = remaining - self.head
            o[to] = 0x30 | flags
            to = put_varint(o, to + 1, head + size)
            o[to] = topic_len >> 8
            o[to + 1] = topic_len & 255
            memcpy(o + to + 2, t, topic_len)
            to += 2 + topic_len
            if numbered:
                o[to] = id >> 8
                o[to + 1] = id & 255
                to += 2
                id += 1
            if version5:
                to = put_varint(o, to, prop_len)
                memcpy(o + to, q, prop_len)
                to += prop_len
            at += 1 + used
            memcpy(o + to, p + at + self.head, size)
            to += size
            at += remaining
        return out

    def split(self, Py_ssize_t count):
        """Return two runs: the first ``count`` packets and the rest."""
        cdef const unsigned char *p = <const unsigned char *>PyBytes_AS_STRING(self.data)
        cdef Py_ssize_t at = self.start, i
        cdef uint32_t remaining = 0
        cdef int used
        cdef Run head, tail
        if not 0 < count < self.count:
            raise ValueError(f"{count} packets of a run of {self.count}")
        for i in range(count):
            used = varint(p, at + 1, self.end, &remaining)
            at += 1 + used + remaining
        head = self.copy()
        tail = self.copy()
        head.end = tail.start = at
        head.count = count
        tail.count = self.count - count
        if self.first_id:
            tail.first_id = self.first_id + <int>count
        head.measure()
        tail.measure()
        return head, tail

    def deal(self, Py_ssize_t hands):
        """Return that many runs, fewer where there are fewer packets: packet i goes to run i % hands, in order."""
        cdef const unsigned char *p = <const unsigned char *>PyBytes_AS_STRING(self.data)
        cdef Py_ssize_t at, end, i, hand, total, to
        cdef uint32_t remaining = 0
        cdef unsigned char *o
        cdef Run other
        if hands < 1:
            raise ValueError(f"{hands} hands")
        if hands == 1 or self.count == 1:
            return [self]
        runs = []
        for hand in range(min(hands, self.count)):
            total = to = 0
            at = self.start
            for i in range(self.count):
                end = at + 1 + varint(p, at + 1, self.end, &remaining) + remaining
                if i % hands == hand:
                    total += end - at
                at = end
            other = self.copy()
            other.data = PyBytes_FromStringAndSize(NULL, total)
            o = <unsigned char *>PyBytes_AS_STRING(other.data)
            at = self.start
            for i in range(self.count):
                end = at + 1 + varint(p, at + 1, self.end, &remaining) + remaining
                if i % hands == hand:
                    memcpy(o + to, p + at, end - at)
                    to += end - at
                at = end
            other.start = 0
            other.end = total
            other.count = (self.count - hand + hands - 1) // hands
            other.plain = False
            other.measure()
            runs.append(other)
        return runs

    def detached(self):
        """Return a run that keeps no more bytes alive than its own."""
        cdef Run other
        if PyBytes_GET_SIZE(self.data) <= 2 * (self.end - self.start) + 256:
            return self
        other = self.copy()
        other.data = self.data[self.start:self.end]
        other.start = 0
        other.end = self.end - self.start
        return other

    def payload(self, Py_ssize_t index=0):
        """Return the payload of one packet."""
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.payloads()[index]

    def payloads(self):
        """Return the payloads in order."""
        cdef const unsigned char *p = <const unsigned char *>PyBytes_AS_STRING(self.data)
        cdef Py_ssize_t at = self.start, i
        cdef uint32_t remaining = 0
        found = []
        for i in range(self.count):
            at += 1 + varint(p, at + 1, self.end, &remaining)
            found.append(PyBytes_FromStringAndSize(<const char *>p + at + self.head, remaining - self.head))
            at += remaining
        return found

    def spans(self, int64_t[::1] offsets not None, int64_t[::1] lengths not None):
        """Fill in where each payload is in ``data``, and how long: for who copies many without making objects."""
        cdef const unsigned char *p = <const unsigned char *>PyBytes_AS_STRING(self.data)
        cdef Py_ssize_t at = self.start, i
        cdef uint32_t remaining = 0
        if offsets.shape[0] != self.count or lengths.shape[0] != self.count:
            raise ValueError(f"{offsets.shape[0]} spans for {self.count} packets")
        for i in range(self.count):
            at += 1 + varint(p, at + 1, self.end, &remaining)
            offsets[i] = at + self.head
            lengths[i] = <Py_ssize_t>remaining - self.head
            at += remaining

    cdef Run copy(self):
        cdef Run other = Run.__new__(Run)
        other.data = self.data
        other.topic = self.topic
        other.forward = self.forward
        other.start = self.start
        other.end = self.end
        other.count = self.count
        other.longest = self.longest
        other.payload_bytes = self.payload_bytes
        other.qos = self.qos
        other.first_id = self.first_id
        other.alias = self.alias
        other.expiry = self.expiry
        other.retain = self.retain
        other.dup = self.dup
        other.version5 = self.version5
        other.plain = self.plain
        other.deadline = self.deadline
        other.head = self.head
        return other

    cdef void measure(self) noexcept:
        """Find the longest payload and the sum of all."""
        cdef const unsigned char *p = <const unsigned char *>PyBytes_AS_STRING(self.data)
        cdef Py_ssize_t at = self.start, i
        cdef uint32_t remaining = 0
        self.longest = 0
        for i in range(self.count):
            at += 1 + varint(p, at + 1, self.end, &remaining) + remaining
            if <Py_ssize_t>remaining - self.head > self.longest:
                self.longest = remaining - self.head
        self.payload_bytes = 0
        at = self.start
        for i in range(self.count):
            at += 1 + varint(p, at + 1, self.end, &remaining) + remaining
            self.payload_bytes += remaining - self.head


cdef tuple forwarded(bytes data, Py_ssize_t at, Py_ssize_t end, bint from_server):
    """Return (alias, expiry, properties that travel on) of a PUBLISH, or (reason code, text)."""
    cdef const unsigned char *p = <const unsigned char *>PyBytes_AS_STRING(data)
    cdef Py_ssize_t stop, kept = at
    cdef int alias = 0, what
    cdef long long expiry = -1
    cdef unsigned long long seen = 0
    parts = []
    while at < end:
        what = p[at]
        if what >= 64 or LAYOUT[what] == NONE:
            return MALFORMED, f"property {what} does not exist"
        if what != 1 and what != 2 and what != 3 and what != 8 and what != 9 and what != 11 and what != 35 and what != 38:
            return MALFORMED, f"property {what} does not belong into it"
        stop = value_end(p, at + 1, end, LAYOUT[what])
        if stop < 0:
            return MALFORMED, f"property {what} is malformed"
        if what == 11 and not from_server:
            return PROTOCOL, "a subscription identifier from a client"
        if what != 38 and what != 11:
            if seen & (1ULL << what):
                return PROTOCOL, f"property {what} is there twice"
            seen |= 1ULL << what
        if what == 1 and p[at + 1] > 1:
            return PROTOCOL, "payload format indicator above 1"
        if what == 8 and wild(p + at + 3, stop - at - 3):
            return PROTOCOL, "wildcards in the response topic"
        if what == 35:
            alias = (<int>p[at + 1] << 8) | p[at + 2]
            if alias == 0:
                return BAD_ALIAS, "topic alias 0"
        if what == 2:
            expiry = (<long long>p[at + 1] << 24) | (<long long>p[at + 2] << 16) | (<long long>p[at + 3] << 8) | p[at + 4]
        if what == 35 or what == 2:
            if at > kept:
                parts.append(data[kept:at])
            kept = stop
        at = stop
    if end > kept:
        parts.append(data[kept:end])
    return alias, expiry, parts[0] if len(parts) == 1 else b"".join(parts)


def cut(
    bytes data not None, Py_ssize_t start, bint version5, Py_ssize_t limit, Py_ssize_t most=0, bint from_server=False
):
    """Cut the bytes from start into packets: return (items, end, need, problem).

    An item is a Run, or (kind, -1, first id, count) for acknowledgements of success whose ids count up, or (kind, flags,
    start, end) with the body of any other packet.  ``end`` is behind the last of them.  ``need`` is how many bytes
    the packet that starts there has in all, 0 when that cannot be known yet.  ``problem`` is None or (reason code,
    kind, text): the packet at ``end`` is not to be accepted.  ``most`` bounds the packets; 0 is no bound.
    Only a server may put subscription identifiers into a PUBLISH; they stay among what travels on.
    """
    cdef const unsigned char *p = <const unsigned char *>PyBytes_AS_STRING(data)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(data), at = start, body, stop, topic_len, rest, length
    cdef Py_ssize_t prop_at = 0, prop_len = 0, last_topic = -1, last_props = -1, last_props_len = 0
    cdef uint32_t remaining = 0, number = 0
    cdef int used, kind, flags, id = 0, first = 0, last_first = -1, acks = 0, ack_first = 0, ack_next = 0
    cdef Py_ssize_t need = 0, taken = 0
    cdef Run run = None
    if not 0 <= start <= size:
        raise ValueError(f"start {start} is outside of {size} bytes")
    items = []
    problem = None
    while at < size and (most == 0 or taken < most):
        first = p[at]
        kind = first >> 4
        flags = first & 15
        used = varint(p, at + 1, size, &remaining)
        if used <= 0:
            if used < 0:
                problem = (MALFORMED, kind, "its length is malformed")
            break
        body = at + 1 + used
        stop = body + remaining
        if stop - at > limit:
            problem = (TOO_LARGE, kind, f"{stop - at} bytes are more than the {limit} that are accepted")
            break
        if stop > size:
            need = stop - at
            break
        if kind == PUBLISH:
            if remaining < 2 or (flags & 6) == 6 or (flags & 14) == 8:
                problem = (MALFORMED, kind, "QoS 3" if (flags & 6) == 6 else
                           "DUP with QoS 0" if (flags & 14) == 8 else "it is too short")
                break
            topic_len = (<Py_ssize_t>p[body] << 8) | p[body + 1]
            rest = body + 2 + topic_len
            if rest + (2 if flags & 6 else 0) > stop:
                problem = (MALFORMED, kind, "it is too short")
                break
            id = 0
            if flags & 6:
                id = (<int>p[rest] << 8) | p[rest + 1]
                rest += 2
                if id == 0:
                    problem = (PROTOCOL, kind, "packet id 0")
                    break
            prop_len = 0
            prop_at = rest
            if version5:
                used = varint(p, rest, stop, &number)
                if used <= 0 or rest + used + <Py_ssize_t>number > stop:
                    problem = (MALFORMED, kind, "the length of its properties is malformed")
                    break
                prop_len = number
                prop_at = rest + used
                rest = prop_at + prop_len
            length = stop - rest
            if run is not None and first == last_first and topic_len == PyBytes_GET_SIZE(run.topic) \
                    and prop_len == last_props_len and (id == 0 or id == run.first_id + run.count) \
                    and memcmp(p + body + 2, p + last_topic, topic_len) == 0 \
                    and (prop_len == 0 or memcmp(p + prop_at, p + last_props, prop_len) == 0):
                run.count += 1
                run.end = stop
                run.payload_bytes += length
                if length > run.longest:
                    run.longest = length
                taken += 1
                at = stop
                continue
            if topic_len == 0 and not version5:
                problem = (MALFORMED, kind, "an empty topic")
                break
            if not text(p + body + 2, topic_len):
                problem = (MALFORMED, kind, "the topic is not UTF-8")
                break
            if wild(p + body + 2, topic_len):
                problem = (BAD_TOPIC, kind, "a wildcard in the topic")
                break
            if acks:
                items.append((acks, -1, ack_first, ack_next - ack_first))
                acks = 0
            run = Run.__new__(Run)
            run.forward = b""
            run.expiry = -1
            if prop_len:
                facts = forwarded(data, prop_at, prop_at + prop_len, from_server)
                if len(facts) == 2:
                    problem = (facts[0], kind, facts[1])
                    run = None
                    break
                run.alias, run.expiry, run.forward = facts
            run.data = data
            run.topic = PyBytes_FromStringAndSize(<const char *>p + body + 2, topic_len)
            run.start = at
            run.end = stop
            run.count = 1
            run.longest = length
            run.payload_bytes = length
            run.qos = (flags >> 1) & 3
            run.retain = flags & 1
            run.dup = flags >> 3
            run.first_id = id
            run.version5 = version5
            run.head = rest - body
            run.plain = flags == 0 and run.alias == 0 and run.expiry < 0 and topic_len > 0 and p[body + 2] != 36
            last_first = first
            last_topic = body + 2
            last_props = prop_at
            last_props_len = prop_len
            items.append(run)
            taken += 1
            at = stop
            continue
        if PUBACK <= kind <= PUBCOMP:
            if flags != (2 if kind == PUBREL else 0):
                problem = (MALFORMED, kind, f"flags {flags}")
                break
            if remaining < 2 or (remaining > 2 and not version5):
                problem = (MALFORMED, kind, f"a body of {remaining} bytes")
                break
            id = (<int>p[body] << 8) | p[body + 1]
            if id == 0:
                problem = (PROTOCOL, kind, "packet id 0")
                break
            if remaining == 2:
                if acks == kind and id == ack_next:
                    ack_next += 1
                    taken += 1
                    at = stop
                    continue
                if acks:
                    items.append((acks, -1, ack_first, ack_next - ack_first))
                run = None
                acks = kind
                ack_first = id
                ack_next = id + 1
                taken += 1
                at = stop
                continue
        elif kind == 0 or (kind == AUTH and not version5):
            problem = (MALFORMED, kind, f"there is no packet of kind {kind}")
            break
        elif flags != (2 if kind == SUBSCRIBE or kind == UNSUBSCRIBE else 0):
            problem = (MALFORMED, kind, f"flags {flags}")
            break
        if acks:
            items.append((acks, -1, ack_first, ack_next - ack_first))
            acks = 0
        run = None
        items.append((kind, flags, body, stop))
        taken += 1
        at = stop
    if acks:
        items.append((acks, -1, ack_first, ack_next - ack_first))
    return items, at, need, problem


def ack_run(int first, int first_id, Py_ssize_t count, int reason=0):
    """Return ``count`` acknowledgements with ids from first_id; a reason other than 0 is for version 5."""
    cdef Py_ssize_t i
    cdef int size = 5 if reason else 4, id = first_id
    cdef unsigned char *o
    if count < 0 or first_id < 1 or first_id + count > 65536:
        raise ValueError(f"{count} ids from {first_id}")
    out = PyBytes_FromStringAndSize(NULL, count * size)
    o = <unsigned char *>PyBytes_AS_STRING(out)
    for i in range(count):
        o[0] = first
        o[1] = size - 2
        o[2] = id >> 8
        o[3] = id & 255
        if reason:
            o[4] = reason
        o += size
        id += 1
    return out


def make_run(bytes topic not None, payloads, int qos, bint retain, bytes forward=b"", long long expiry=-1):
    """Return a run that nobody sent: what a will, a store, the broker itself or a program publishes."""
    cdef Run run = Run.__new__(Run)
    cdef Py_ssize_t topic_len = PyBytes_GET_SIZE(topic), head = 2 + topic_len + (2 if qos else 0), total = 0, to = 0
    cdef Py_ssize_t size
    cdef unsigned char *o
    cdef int id = 1
    if topic_len > 65535 or not 0 <= qos <= 2:
        raise ValueError(f"a topic of {topic_len} bytes with QoS {qos}")
    payloads = list(payloads)
    if not payloads or len(payloads) > 65535:
        raise ValueError(f"{len(payloads)} payloads")
    for payload in payloads:
        size = head + PyBytes_GET_SIZE(<bytes?>payload)
        if size > 268435455:
            raise ValueError(f"a payload of {len(payload)} bytes")
        total += 1 + varint_size(size) + size
    run.data = PyBytes_FromStringAndSize(NULL, total)
    o = <unsigned char *>PyBytes_AS_STRING(run.data)
    for payload in payloads:
        size = PyBytes_GET_SIZE(<bytes>payload)
        o[to] = 0x30 | (qos << 1) | retain
        to = put_varint(o, to + 1, head + size)
        o[to] = topic_len >> 8
        o[to + 1] = topic_len & 255
        memcpy(o + to + 2, PyBytes_AS_STRING(topic), topic_len)
        to += 2 + topic_len
        if qos:
            o[to] = id >> 8
            o[to + 1] = id & 255
            to += 2
            id += 1
        memcpy(o + to, PyBytes_AS_STRING(<bytes>payload), size)
        to += size
    run.topic = topic
    run.forward = forward
    run.start = 0
    run.end = total
    run.count = len(payloads)
    run.qos = qos
    run.retain = retain
    run.first_id = 1 if qos else 0
    run.expiry = expiry
    run.head = head
    run.measure()
    return run
