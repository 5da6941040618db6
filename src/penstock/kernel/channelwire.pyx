# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Lines of the channel protocol, many at a time: drawn in penstock/channels/wire/frames.py.

No I/O, no policy.  Only lines in the form the encoder writes are cut into runs here, each parameter once and plain;
whatever else a line may be, the caller looks at it by itself.  Every length is checked before it is used.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport UINT64_MAX, uint8_t, uint32_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy

cdef enum:
    BROADCAST = 1
    MESSAGE = 2
    ACK = 4
    HAS_ID = 1
    HAS_CHANNEL = 2
    HAS_LENGTH = 4
    HAS_QOS = 8
    HAS_FROM = 16
    HAS_SEQ = 32
    HAS_TIMESTAMP = 64

cdef struct Line:
    uint64_t id, length, seq, timestamp
    int qos, found
    const uint8_t *channel
    Py_ssize_t channel_len
    const uint8_t *sender
    Py_ssize_t sender_len
    Py_ssize_t end                # of the line: where its LF is


cdef inline bint is_space(uint8_t c) noexcept nogil:
    return c == 32 or c == 9 or c == 11 or c == 12 or c == 13


cdef inline bint digits(const uint8_t *p, Py_ssize_t size, uint64_t most, uint64_t *out) noexcept nogil:
    cdef uint64_t total = 0
    cdef unsigned int digit
    cdef Py_ssize_t i
    if size <= 0 or size > 20:
        return False
    for i in range(size):
        digit = <unsigned int>p[i] - 48
        if digit > 9 or total > (UINT64_MAX - digit) // 10:
            return False
        total = total * 10 + digit
    if total == 0 or total > most:
        return False
    out[0] = total
    return True


cdef bint parse(const uint8_t *p, Py_ssize_t at, Py_ssize_t end, int kind, Line *out) noexcept nogil:
    """Read the parameters of a line that ends at ``end``; False when it is anything but plain."""
    cdef Py_ssize_t name, equals, value, i
    cdef int flag
    cdef uint64_t qos
    out.found = 0
    out.qos = -1
    i = at
    while i < end:
        if p[i] != 32:
            return False
        name = i + 1
        equals = name
        while equals < end and equals - name < 10 and p[equals] != 61:
            equals += 1
        if equals >= end or p[equals] != 61:
            return False
        value = equals + 1
        i = value
        while i < end and 32 < p[i] < 127:
            i += 1
        if i == value or (i < end and p[i] != 32) or p[value] == 92:
            return False
        flag = 0
        if equals - name == 2 and memcmp(p + name, b"id", 2) == 0 and kind & (BROADCAST | ACK):
            flag = HAS_ID
            if not digits(p + value, i - value, 0xFFFFFFFF, &out.id):
                return False
        elif equals - name == 3 and memcmp(p + name, b"seq", 3) == 0 and kind & (MESSAGE | ACK):
            flag = HAS_SEQ
            if not digits(p + value, i - value, UINT64_MAX, &out.seq):
                return False
        elif equals - name == 3 and memcmp(p + name, b"qos", 3) == 0 and kind & BROADCAST:
            flag = HAS_QOS
            if i - value != 1 or not (p[value] == 48 or p[value] == 49):
                return False
            out.qos = p[value] - 48
        elif equals - name == 4 and memcmp(p + name, b"from", 4) == 0 and kind & MESSAGE:
            flag = HAS_FROM
            out.sender = p + value
            out.sender_len = i - value
        elif equals - name == 6 and memcmp(p + name, b"length", 6) == 0 and kind & (BROADCAST | MESSAGE):
            flag = HAS_LENGTH
            if not digits(p + value, i - value, 0xFFFFFFFF, &out.length):
                return False
        elif equals - name == 7 and memcmp(p + name, b"channel", 7) == 0 and kind & (BROADCAST | MESSAGE):
            flag = HAS_CHANNEL
            out.channel = p + value
            out.channel_len = i - value
        elif equals - name == 9 and memcmp(p + name, b"timestamp", 9) == 0 and kind & MESSAGE:
            flag = HAS_TIMESTAMP
            if not digits(p + value, i - value, UINT64_MAX, &out.timestamp):
                return False
        if flag == 0 or out.found & flag:
            return False
        out.found |= flag
    if kind == BROADCAST:
        return out.found & (HAS_ID | HAS_CHANNEL | HAS_LENGTH) == (HAS_ID | HAS_CHANNEL | HAS_LENGTH)
    if kind == MESSAGE:
        return out.found == (HAS_CHANNEL | HAS_FROM | HAS_LENGTH | HAS_SEQ | HAS_TIMESTAMP)
    return out.found == (HAS_ID | HAS_SEQ)


cdef bint take(const uint8_t *p, Py_ssize_t at, Py_ssize_t size, int kind, Py_ssize_t max_line,
               Py_ssize_t max_payload, Line *out) noexcept nogil:
    """Read one whole frame of a kind; False when it is not there whole, or is to be looked at by itself."""
    cdef const char *name
    cdef Py_ssize_t length, room
    cdef const uint8_t *lf
    if kind == BROADCAST:
        name = b"BROADCAST"
        length = 9
    elif kind == MESSAGE:
        name = b"MESSAGE"
        length = 7
    else:
        name = b"BROADCAST_ACK"
        length = 13
    room = size - at if size - at < max_line else max_line
    if room <= length or memcmp(p + at, name, length) != 0 or p[at + length] != 32:
        return False
    lf = <const uint8_t *>memchr(p + at, 10, room)
    if lf == NULL:
        return False
    out.end = lf - p
    if not parse(p, at + length, out.end, kind, out):
        return False
    if kind == ACK:
        return True
    if out.length > <uint64_t>max_payload or <uint64_t>(size - out.end) < out.length + 2:
        return False
    return p[out.end + 1 + <Py_ssize_t>out.length] == 10


def tokenize(bytes line not None):
    """Return the name of a message (None if there is none), its parameters in order, and whether the line is whole."""
    cdef const uint8_t *p = <const uint8_t *>PyBytes_AS_STRING(line)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(line), at = 0, start, name, name_end, equals, colon, i, back
    cdef uint64_t count
    cdef unsigned int digit
    cdef uint8_t quote
    cdef list pairs = []
    cdef bytes label = None
    while at < size and is_space(p[at]):
        at += 1
    if at >= size or p[at] == 0:
        return None, pairs, False
    start = at
    while at < size and p[at] != 0 and not is_space(p[at]):
        at += 1
    found = line[start:at]
    at += at < size                       # what ended the token is gone
    count = 0
    while True:
        if label is None:
            while at < size and is_space(p[at]):
                at += 1
            if at >= size or p[at] == 0:
                return found, pairs, True
            equals = at
            while equals < size and p[equals] != 61:
                equals += 1
            if equals == size:
                return found, pairs, False
            colon = at
            while colon < equals and p[colon] != 58:
                colon += 1
            for i in range(at, colon):
                if not (48 <= p[i] <= 57 or 65 <= p[i] <= 90 or 97 <= p[i] <= 122 or p[i] == 95):
                    return found, pairs, False
            count = 1
            if colon < equals:
                i = colon + 1
                if i < equals and p[i] == 43:
                    i += 1
                if i == equals:
                    return found, pairs, False
                count = 0
                while i < equals:
                    digit = <unsigned int>p[i] - 48
                    if digit > 9 or count > (UINT64_MAX - digit) // 10:
                        return found, pairs, False
                    count = count * 10 + digit
                    i += 1
            label = line[at:colon]
            at = equals + 1
        # One value.  A count of 0 takes all that follows, and then misses one.
        while at < size and is_space(p[at]):
            at += 1
        if at >= size or p[at] == 0:
            return found, pairs, False
        start = at
        if p[at] == 92 and at + 1 < size and (p[at + 1] == 34 or p[at + 1] == 39 or p[at + 1] == 58 or p[at + 1] == 42):
            quote = p[at + 1]
            start = i = at + 2
            back = -1
            while True:
                if i >= size or p[i] == 0:
                    return found, pairs, False
                if p[i] == 92 and back < 0:
                    # the original does not see a backslash that comes first: an empty value never ends
                    back = i if i != start else -1
                elif p[i] == quote and back >= 0:
                    break
                else:
                    back = -1
                i += 1
            pairs.append((label, line[start:back]))
            at = i + 1
        else:
            if p[at] == 92 and at + 1 == size and not is_space(p[at - 1]):
                start = at - 1                # a lone backslash at the end takes the byte before it along
            while at < size and p[at] != 0 and not is_space(p[at]):
                at += 1
            pairs.append((label, line[start:at]))
            at += at < size
        count -= 1
        if count == 0:
            label = None


def cut_broadcasts(bytes data not None, Py_ssize_t at, Py_ssize_t max_line, Py_ssize_t max_payload):
    """Cut a run of BROADCASTs on one channel with one QoS; None when the next frame is not one."""
    cdef const uint8_t *p = <const uint8_t *>PyBytes_AS_STRING(data)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(data), first = at, count = 0, payload
    cdef Line line, next_line
    if at < 0 or not take(p, at, size, BROADCAST, max_line, max_payload, &line):
        return None
    next_line = line
    cdef list payloads = []
    cdef bytearray ids = bytearray(), sizes = bytearray()
    cdef uint32_t number
    while True:
        payload = next_line.end + 1
        payloads.append(PyBytes_FromStringAndSize(<const char *>p + payload, <Py_ssize_t>next_line.length))
        number = <uint32_t>next_line.id
        ids.extend((<const uint8_t *>&number)[:4])
        number = <uint32_t>(next_line.end - at + <Py_ssize_t>next_line.length)
        sizes.extend((<const uint8_t *>&number)[:4])
        at = payload + <Py_ssize_t>next_line.length + 1
        if not take(p, at, size, BROADCAST, max_line, max_payload, &next_line):
            break
        if next_line.qos != line.qos or next_line.channel_len != line.channel_len \
                or memcmp(next_line.channel, line.channel, line.channel_len) != 0:
            break
    channel = PyBytes_FromStringAndSize(<const char *>line.channel, line.channel_len)
    return channel, 1 if line.qos < 0 else line.qos, bytes(ids), payloads, bytes(sizes), at


def cut_messages(bytes data not None, Py_ssize_t at, Py_ssize_t max_line, Py_ssize_t max_payload):
    """Cut a run of MESSAGEs of one sender on one channel, numbered in a row; None when the next frame is not one."""
    cdef const uint8_t *p = <const uint8_t *>PyBytes_AS_STRING(data)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(data), payload
    cdef Line line, next_line
    if at < 0 or not take(p, at, size, MESSAGE, max_line, max_payload, &line):
        return None
    next_line = line
    cdef list payloads = []
    cdef uint64_t expected = line.seq
    while True:
        payload = next_line.end + 1
        payloads.append(PyBytes_FromStringAndSize(<const char *>p + payload, <Py_ssize_t>next_line.length))
        at = payload + <Py_ssize_t>next_line.length + 1
        expected += 1
        if not take(p, at, size, MESSAGE, max_line, max_payload, &next_line):
            break
        if next_line.seq != expected or next_line.timestamp != line.timestamp \
                or next_line.channel_len != line.channel_len or next_line.sender_len != line.sender_len \
                or memcmp(next_line.channel, line.channel, line.channel_len) != 0 \
                or memcmp(next_line.sender, line.sender, line.sender_len) != 0:
            break
    channel = PyBytes_FromStringAndSize(<const char *>line.channel, line.channel_len)
    sender = PyBytes_FromStringAndSize(<const char *>line.sender, line.sender_len)
    return channel, sender, line.seq, line.timestamp, payloads, at


def cut_acks(bytes data not None, Py_ssize_t at, Py_ssize_t max_line):
    """Cut a run of BROADCAST_ACKs into ids and numbers; None when the next frame is not one."""
    cdef const uint8_t *p = <const uint8_t *>PyBytes_AS_STRING(data)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
    cdef Line line
    cdef list ids = [], seqs = []
    while at >= 0 and take(p, at, size, ACK, max_line, 0, &line):
        ids.append(line.id)
        seqs.append(line.seq)
        at = line.end + 1
    return (ids, seqs, at) if ids else None


cdef inline Py_ssize_t put_number(uint8_t *out, uint64_t value) noexcept nogil:
    cdef uint8_t buffer[20]
    cdef int i = 20
    while True:
        i -= 1
        buffer[i] = 48 + <uint8_t>(value % 10)
        value //= 10
        if value == 0:
            break
    memcpy(out, &buffer[i], 20 - i)
    return 20 - i


cdef inline Py_ssize_t width(uint64_t value) noexcept nogil:
    """Return how many digits a number has."""
    cdef Py_ssize_t digits = 1
    while value > 9:
        value //= 10
        digits += 1
    return digits


def encode_acks(bytes ids not None, uint64_t first_seq):
    """Return BROADCAST_ACKs for these ids (32 bits each), with numbers in a row."""
    cdef Py_ssize_t count = PyBytes_GET_SIZE(ids) // 4, i, at = 0
    cdef const uint8_t *source = <const uint8_t *>PyBytes_AS_STRING(ids)
    cdef uint32_t id
    cdef bytearray out = bytearray(count * (17 + 10 + 5 + 20 + 1))
    cdef uint8_t *p = out
    for i in range(count):
        memcpy(&id, source + 4 * i, 4)
        memcpy(p + at, b"BROADCAST_ACK id=", 17)
        at += 17
        at += put_number(p + at, id)
        memcpy(p + at, b" seq=", 5)
        at += 5
        at += put_number(p + at, first_seq + <uint64_t>i)
        p[at] = 10
        at += 1
    return PyBytes_FromStringAndSize(<const char *>p, at)


def encode_messages(bytes head not None, uint64_t first_seq, uint64_t timestamp, tuple payloads not None):
    """Return MESSAGEs with numbers in a row; ``head`` is the line up to and with ``length=``."""
    cdef Py_ssize_t head_len = PyBytes_GET_SIZE(head), count = len(payloads), total = 0, at = 0, i, size
    cdef uint8_t stamp[40]
    cdef Py_ssize_t stamp_len
    cdef bytes payload
    memcpy(stamp, b" timestamp=", 11)
    stamp_len = 11 + put_number(&stamp[11], timestamp)
    stamp[stamp_len] = 10
    stamp_len += 1
    for i in range(count):
        payload = payloads[i]
        size = PyBytes_GET_SIZE(payload)
        total += head_len + width(size) + 5 + width(first_seq + <uint64_t>i) + stamp_len + size + 1
    cdef bytes out = PyBytes_FromStringAndSize(NULL, total)  # as long as it will be: payloads are copied once
    cdef uint8_t *p = <uint8_t *>PyBytes_AS_STRING(out)
    for i in range(count):
        payload = payloads[i]
        size = PyBytes_GET_SIZE(payload)
        memcpy(p + at, PyBytes_AS_STRING(head), head_len)
        at += head_len
        at += put_number(p + at, size)
        memcpy(p + at, b" seq=", 5)
        at += 5
        at += put_number(p + at, first_seq + <uint64_t>i)
        memcpy(p + at, stamp, stamp_len)
        at += stamp_len
        memcpy(p + at, PyBytes_AS_STRING(payload), size)
        at += size
        p[at] = 10
        at += 1
    return out


def encode_broadcasts(uint32_t first_id, bytes head not None, bytes tail not None, tuple payloads not None):
    """Return BROADCASTs with ids in a row; ``head`` is `` channel=… length=`` and ``tail`` what follows the length."""
    cdef Py_ssize_t head_len = PyBytes_GET_SIZE(head), tail_len = PyBytes_GET_SIZE(tail), count = len(payloads)
    cdef Py_ssize_t total = 0, at = 0, i, size
    cdef bytes payload
    for i in range(count):
        payload = payloads[i]
        size = PyBytes_GET_SIZE(payload)
        total += 13 + width(<uint64_t>first_id + <uint64_t>i) + head_len + width(size) + tail_len + size + 1
    cdef bytes out = PyBytes_FromStringAndSize(NULL, total)
    cdef uint8_t *p = <uint8_t *>PyBytes_AS_STRING(out)
    for i in range(count):
        payload = payloads[i]
        size = PyBytes_GET_SIZE(payload)
        memcpy(p + at, b"BROADCAST id=", 13)
        at += 13
        at += put_number(p + at, <uint64_t>first_id + <uint64_t>i)
        memcpy(p + at, PyBytes_AS_STRING(head), head_len)
        at += head_len
        at += put_number(p + at, size)
        memcpy(p + at, PyBytes_AS_STRING(tail), tail_len)
        at += tail_len
        memcpy(p + at, PyBytes_AS_STRING(payload), size)
        at += size
        p[at] = 10
        at += 1
    return out
