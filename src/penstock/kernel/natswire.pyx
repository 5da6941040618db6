# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""NATS messages as a server sends them, many at a time: drawn in penstock/kv/nats/wire.py.

No allocation, no I/O, no policy.  Every length is checked against the buffer before it is used.
"""
from libc.stdint cimport INT64_MAX, UINT64_MAX, int64_t, uint8_t, uint64_t
from libc.string cimport memchr, memcmp

cdef enum:
    LINE_MAX = 65536        # longest control line: a server's own limit is 4096
    BODY_MAX = 134217728    # longest headers and payload: a server's own limit is 64 MiB
    TOKENS = 11
    PUT = 0
    DELETE = 1
    PURGE = 2
    OTHER = 3
    CONTROL = 4
    FOREIGN = 5

cdef struct Frame:
    Py_ssize_t subject, subject_len, reply, reply_len, body, headers_len, body_len, end
    int64_t sid

cdef struct Ack:
    uint64_t stream_seq, consumer_seq
    int64_t pending
    bint known


cdef bint number(const unsigned char *p, Py_ssize_t size, uint64_t *value) noexcept nogil:
    cdef Py_ssize_t i
    cdef uint64_t total = 0
    cdef unsigned int digit
    if size and p[0] == b'+':
        p += 1
        size -= 1
    if size <= 0:
        return False
    for i in range(size):
        digit = <unsigned int>p[i] - 48
        if digit > 9:
            return False
        if total > UINT64_MAX // 10 or (total == UINT64_MAX // 10 and digit > UINT64_MAX % 10):
            return False
        total = total * 10 + digit
    value[0] = total
    return True


cdef int frame(const unsigned char *p, Py_ssize_t at, Py_ssize_t size, Frame *out) noexcept nogil:
    """Cut one frame: 1 whole, 0 not yet whole, -1 broken.  Other control lines have sid 0."""
    cdef const unsigned char *line_end
    cdef Py_ssize_t end, i, start, count = 0, first
    cdef Py_ssize_t starts[6]
    cdef Py_ssize_t lengths[6]
    cdef bint headed
    cdef uint64_t sid, total, headers = 0
    line_end = <const unsigned char *>memchr(p + at, 10, size - at if size - at < LINE_MAX else LINE_MAX)
    if line_end == NULL:
        return -1 if size - at >= LINE_MAX else 0
    end = line_end - p
    out.end = end + 1
    out.sid = 0
    headed = p[at] == b'H' or p[at] == b'h'
    first = at + 1 if headed else at
    if end - first < 4 or not ((p[first] | 32) == b'm' and (p[first + 1] | 32) == b's' and (p[first + 2] | 32) == b'g'
                               and (p[first + 3] == 32 or p[first + 3] == 9)):
        return 1
    i = first + 3
    while i < end and count < 6:
        while i < end and (p[i] == 32 or p[i] == 9 or p[i] == 13):
            i += 1
        start = i
        while i < end and p[i] != 32 and p[i] != 9 and p[i] != 13:
            i += 1
        if i > start:
            starts[count] = start
            lengths[count] = i - start
            count += 1
    first = 4 if headed else 3   # tokens without a reply subject
    if count != first and count != first + 1:
        return -1
    if not number(p + starts[1], lengths[1], &sid) or sid == 0 or sid > <uint64_t>INT64_MAX:
        return -1
    if not number(p + starts[count - 1], lengths[count - 1], &total) or total > BODY_MAX:
        return -1
    if headed and (not number(p + starts[count - 2], lengths[count - 2], &headers) or headers > total):
        return -1
    out.subject = starts[0]
    out.subject_len = lengths[0]
    out.reply = starts[2] if count > first else starts[0]
    out.reply_len = lengths[2] if count > first else 0
    out.body = end + 1
    out.headers_len = headers
    out.body_len = total
    if size - out.body < <Py_ssize_t>total + 2:
        return 0
    out.end = out.body + total + 2
    if p[out.end - 2] != 13 or p[out.end - 1] != 10:
        return -1
    out.sid = sid
    return 1


cdef void ack(const unsigned char *p, Py_ssize_t size, Ack *out) noexcept nogil:
    cdef Py_ssize_t starts[TOKENS]
    cdef Py_ssize_t lengths[TOKENS]
    cdef Py_ssize_t count = 0, start = 0, i
    cdef int at
    cdef uint64_t pending
    out.known = False
    out.stream_seq = 0
    out.consumer_seq = 0
    out.pending = -1
    if size < 8 or memcmp(p, b"$JS.ACK.", 8) != 0:
        return
    for i in range(size + 1):
        if i == size or p[i] == b'.':
            if count < TOKENS:
                starts[count] = start
                lengths[count] = i - start
            count += 1
            start = i + 1
    if count < 9:
        return
    at = 5 if count == 9 else 7
    if not number(p + starts[at], lengths[at], &out.stream_seq):
        out.stream_seq = 0
        return
    out.known = True
    if not number(p + starts[at + 1], lengths[at + 1], &out.consumer_seq):
        out.consumer_seq = 0
    if at + 3 < TOKENS and at + 3 < count and number(p + starts[at + 3], lengths[at + 3], &pending) \
            and pending <= <uint64_t>INT64_MAX:
        out.pending = pending


cdef bint named(const unsigned char *p, Py_ssize_t size, const char *name, Py_ssize_t name_len,
                Py_ssize_t *value, Py_ssize_t *value_len) noexcept nogil:
    """Whether the header line ``p`` has this name (in any case); and where its value is."""
    cdef Py_ssize_t i, last
    cdef unsigned char c, d
    if size <= name_len or p[name_len] != b':':
        return False
    for i in range(name_len):
        c = p[i]
        d = <unsigned char>name[i]
        if c != d and not (65 <= (c & 0xDF) <= 90 and (c ^ d) == 32):
            return False
    i = name_len + 1
    while i < size and (p[i] == 32 or p[i] == 9):
        i += 1
    last = size
    while last > i and (p[last - 1] == 32 or p[last - 1] == 9):
        last -= 1
    value[0] = i
    value_len[0] = last - i
    return True


cdef void read_headers(const unsigned char *p, Py_ssize_t size, uint8_t *op, int64_t *length) noexcept nogil:
    """Find what the headers say about the operation and about the length of a value left out."""
    cdef const unsigned char *found
    cdef Py_ssize_t at, line, value = 0, value_len = 0
    cdef uint64_t total
    cdef uint8_t marker = PUT
    cdef bint said = False
    if size >= 12 and p[8] == 32:   # NATS/1.0 100 …: a status, not a message of the stream
        op[0] = CONTROL
        return
    found = <const unsigned char *>memchr(p, 10, size)
    while found != NULL:
        at = found - p + 1
        if at >= size:
            break
        found = <const unsigned char *>memchr(p + at, 10, size - at)
        line = (found - p if found != NULL else size) - at
        if line and p[at + line - 1] == 13:
            line -= 1
        if named(p + at, line, b"KV-Operation", 12, &value, &value_len):
            said = True
            if value_len == 3 and memcmp(p + at + value, b"DEL", 3) == 0:
                op[0] = DELETE
            elif value_len == 5 and memcmp(p + at + value, b"PURGE", 5) == 0:
                op[0] = PURGE
            else:
                op[0] = OTHER
        elif named(p + at, line, b"Nats-Marker-Reason", 18, &value, &value_len):
            if value_len == 6 and memcmp(p + at + value, b"Remove", 6) == 0:
                marker = DELETE
            elif (value_len == 6 and memcmp(p + at + value, b"MaxAge", 6) == 0) \
                    or (value_len == 5 and memcmp(p + at + value, b"Purge", 5) == 0):
                marker = PURGE
        elif named(p + at, line, b"Nats-Msg-Size", 13, &value, &value_len):
            if number(p + at + value, value_len, &total) and total <= <uint64_t>INT64_MAX:
                length[0] = total
    if not said:
        op[0] = marker


def cut_run(const unsigned char[::1] data not None, Py_ssize_t start):
    """Return (end, subscription id, frames) of the run of whole frames of one subscription at start.

    Lines that are no message have id 0.  end is start when the first frame is not whole yet, and -1
    frames mean that the bytes are not the protocol.
    """
    cdef Py_ssize_t at = start, size = data.shape[0], count = 0
    cdef int64_t sid = 0
    cdef int whole = 1
    cdef Frame cut
    if start < 0 or start > size:
        raise ValueError(f"start {start} is outside of {size} bytes")
    with nogil:
        while at < size:
            whole = frame(&data[0], at, size, &cut)
            if whole <= 0 or (count and cut.sid != sid):
                break
            sid = cut.sid
            count += 1
            at = cut.end
    if whole < 0 and not count:
        count = -1
    return at, sid, count


def count_frames(const unsigned char[::1] data not None, Py_ssize_t limit):
    """Return (frames, end): how many whole messages are at the start, no more than limit."""
    cdef Py_ssize_t at = 0, size = data.shape[0], count = 0
    cdef Frame cut
    with nogil:
        while at < size and count < limit:
            if frame(&data[0], at, size, &cut) <= 0:
                break
            count += 1
            at = cut.end
    return count, at


def decode(
    const unsigned char[::1] data not None,
    const unsigned char[::1] prefix not None,
    uint8_t[::1] ops not None,
    int64_t[:, ::1] spans not None,
    uint64_t[:, ::1] sequences not None,
    int64_t[:, ::1] counts not None,
):
    """Fill one row a message; return how many there were.

    spans: key offset and length, value offset and length; in a CONTROL row reply and headers stand
    there instead.  sequences: in the stream, in the consumer.  counts: pending messages (-1
    unknown), length of the value before it was left out, 1 where the sequence is known.
    """
    cdef Py_ssize_t at = 0, size = data.shape[0], i = 0, rows = ops.shape[0], head = prefix.shape[0]
    cdef Frame cut
    cdef Ack found
    cdef uint8_t op
    cdef int64_t length
    cdef const unsigned char *p
    if spans.shape[0] < rows or spans.shape[1] != 4 or sequences.shape[0] < rows or sequences.shape[1] != 2 \
            or counts.shape[0] < rows or counts.shape[1] != 3:
        raise ValueError("the columns differ in length")
    if not size or not rows:
        return 0
    with nogil:
        p = &data[0]
        while at < size and i < rows:
            if frame(p, at, size, &cut) <= 0 or cut.sid == 0:
                break
            at = cut.end
            op = PUT
            length = cut.body_len - cut.headers_len
            if cut.headers_len:
                read_headers(p + cut.body, cut.headers_len, &op, &length)
            ack(p + cut.reply, cut.reply_len, &found)
            if op == CONTROL:
                spans[i, 0] = cut.reply
                spans[i, 1] = cut.reply_len
                spans[i, 2] = cut.body
                spans[i, 3] = cut.headers_len
            else:
                if cut.subject_len <= head or (head and memcmp(p + cut.subject, &prefix[0], head) != 0):
                    op = FOREIGN
                    spans[i, 0] = cut.subject
                    spans[i, 1] = cut.subject_len
                else:
                    spans[i, 0] = cut.subject + head
                    spans[i, 1] = cut.subject_len - head
                spans[i, 2] = cut.body + cut.headers_len
                spans[i, 3] = cut.body_len - cut.headers_len
            ops[i] = op
            sequences[i, 0] = found.stream_seq
            sequences[i, 1] = found.consumer_seq
            counts[i, 0] = found.pending
            counts[i, 1] = length
            counts[i, 2] = found.known
            i += 1
    return i


def parse_acks(
    const unsigned char[::1] data not None,
    const int64_t[::1] offsets not None,
    const int64_t[::1] lengths not None,
    uint64_t[::1] sequences not None,
    uint8_t[::1] known not None,
):
    """Read the stream sequence out of many ACK subjects; known is 0 where there is none."""
    cdef Py_ssize_t i, count = offsets.shape[0], size = data.shape[0]
    cdef Ack found
    if lengths.shape[0] != count or sequences.shape[0] < count or known.shape[0] < count:
        raise ValueError("the columns differ in length")
    for i in range(count):
        if offsets[i] < 0 or lengths[i] < 0 or lengths[i] > size or offsets[i] > size - lengths[i]:
            raise ValueError(f"subject {i} is outside of {size} bytes")
    with nogil:
        for i in range(count):
            known[i] = 0
            sequences[i] = 0
            if lengths[i] == 0:
                continue
            ack(&data[0] + offsets[i], lengths[i], &found)
            sequences[i] = found.stream_seq
            known[i] = found.known
