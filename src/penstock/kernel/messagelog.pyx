# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Entries of a message log, many at a time: drawn in penstock/log/messagelog/format.py.

No I/O and no policy: bytes in, columns out, or columns in, bytes out.  Every length is checked against the
buffer before a byte behind it is looked at.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from penstock.kernel.atomics cimport get16, get32, get64, put64
from penstock.kernel.crc cimport crc32, crc_init

crc_init()

cdef enum:
    HEAD = 22
    TAIL = 4
    LEAST = 26
    INDEX_EVERY = 4096
    INDEX_ENTRY = 12
    MAX_SENDER = 65535

cdef enum:  # why a walk stopped: format.Stop
    LIMIT = 0
    END = 1
    SHORT = 2
    BAD_CRC = 3

cdef uint64_t NS_PER_MS = 1000000
cdef uint64_t LAST_MS = 18446744073709
cdef uint64_t NO_TIME = 18446744073709551615


cdef inline void put16(unsigned char *p, uint16_t v) noexcept nogil:
    memcpy(p, &v, 2)


cdef inline void put32(unsigned char *p, uint32_t v) noexcept nogil:
    memcpy(p, &v, 4)


cdef inline int64_t entry_at(const unsigned char *base, int64_t at, int64_t size, int *stop) noexcept nogil:
    """Return the length of the entry at ``at``, or 0 with the reason in ``stop``."""
    cdef int64_t length
    if at >= size:
        stop[0] = END
        return 0
    if size - at < LEAST:
        stop[0] = SHORT
        return 0
    length = <int64_t>LEAST + get16(base + at + 16) + get32(base + at + 18)
    if length > size - at:
        stop[0] = SHORT
        return 0
    if crc32(0, base + at, length - TAIL) != get32(base + at + length - TAIL):
        stop[0] = BAD_CRC
        return 0
    return length


def scan(
    const unsigned char[::1] data not None,
    int64_t at,
    uint64_t want,
    bint ordered,
    int64_t[:, ::1] columns not None,
):
    """Fill the columns with entries from ``at`` on whose seq is at least ``want``.

    With ``ordered`` an entry that is not above the one before is passed over.  Rows of columns: seq and time in ns,
    both the bits of an unsigned number, sender offset, sender length, payload offset, payload length.  One array
    for all six, because taking hold of an array costs as much as scanning ten entries.  Returns (entries, where it
    stopped, why, passed over).
    """
    cdef int64_t size = data.shape[0], length, sender
    cdef Py_ssize_t count = 0, limit = columns.shape[1], skipped = 0
    cdef uint64_t seq, ms
    cdef int stop = LIMIT
    cdef const unsigned char *base
    if columns.shape[0] != 6:
        raise ValueError("an entry has six columns")
    if at < 0:
        raise ValueError(f"offset {at} is before the data")
    if size == 0 or at >= size:
        return 0, at, END, 0
    base = &data[0]
    with nogil:
        while count < limit:
            length = entry_at(base, at, size, &stop)
            if length == 0:
                break
            seq = get64(base + at)
            if seq < want:
                if count:
                    skipped += 1
            else:
                ms = get64(base + at + 8)
                sender = get16(base + at + 16)
                if sender > length - LEAST:  # it was less when the entry was checked: someone writes to it
                    stop = BAD_CRC
                    break
                columns[0, count] = <int64_t>seq
                columns[1, count] = <int64_t>(ms * NS_PER_MS if ms <= LAST_MS else NO_TIME)
                columns[2, count] = at + HEAD
                columns[3, count] = sender
                columns[4, count] = at + HEAD + sender
                columns[5, count] = length - LEAST - sender
                count += 1
                if ordered:
                    if seq == NO_TIME:  # nothing is above the last number
                        at += length
                        break
                    want = seq + 1
            at += length
    return count, at, stop, skipped


def walk(const unsigned char[::1] data not None, uint64_t name, uint8_t[::1] index not None):
    """Walk a whole segment and build its index.

    Returns (end of the intact entries, why it ends, entries, first seq, last seq, highest seq, entries not above
    an earlier one, end of the last entry with a seq above 0, bytes since the last index entry, index entries).
    """
    cdef int64_t size = data.shape[0], at = 0, length, since = 0, sound = 0
    cdef Py_ssize_t count = 0, unordered = 0, indexed = 0, room = index.shape[0] // INDEX_ENTRY
    cdef uint64_t seq = 0, first = 0, highest = 0
    cdef int stop = END
    cdef const unsigned char *base
    cdef unsigned char *out = NULL
    if size == 0:
        return 0, END, 0, 0, 0, 0, 0, 0, 0, 0
    base = &data[0]
    if room:
        out = &index[0]
    with nogil:
        while True:
            length = entry_at(base, at, size, &stop)
            if length == 0:
                break
            seq = get64(base + at)
            if count == 0:
                first = seq
            elif seq <= highest:
                unordered += 1
            if seq > highest:
                highest = seq
            if at == 0 or since >= INDEX_EVERY:
                if indexed < room:
                    put32(out + indexed * INDEX_ENTRY, <uint32_t>(seq - name))
                    put64(out + indexed * INDEX_ENTRY + 4, <uint64_t>at)
                    indexed += 1
                since = 0
            since += length
            at += length
            count += 1
            if seq:
                sound = at
    return at, stop, count, first, seq, highest, unordered, sound, since, indexed


def find_entry(const unsigned char[::1] data not None, int64_t at, uint64_t low, uint64_t high, int64_t budget):
    """Return (the first offset from ``at`` on where an intact entry with low < seq <= high begins, bytes summed up).

    The offset is -1 when there is none, and -2 when more than ``budget`` bytes would have to be summed up: what looks
    like an entry at every byte, each as long as the rest, would take the square of its length.
    """
    cdef int64_t size = data.shape[0], found = -1, spent = 0, length
    cdef uint64_t seq
    cdef int stop = END
    cdef const unsigned char *base
    if at < 0 or size == 0:
        return -1, 0
    base = &data[0]
    with nogil:
        while at <= size - LEAST:
            seq = get64(base + at)
            if low < seq <= high:
                length = <int64_t>LEAST + get16(base + at + 16) + get32(base + at + 18)
                if length <= size - at:
                    if length > budget - spent:
                        found = -2
                        break
                    spent += length
                    if entry_at(base, at, size, &stop):
                        found = at
                        break
            at += 1
    return found, spent


def encode_one(uint64_t seq, uint64_t ms, sender, payload):
    """Return the bytes of one entry."""
    cdef Py_buffer name, body
    cdef bytes entry
    cdef unsigned char *out
    cdef int64_t length
    PyObject_GetBuffer(sender, &name, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(payload, &body, PyBUF_SIMPLE)
        try:
            if name.len > MAX_SENDER or body.len > <int64_t>0xFFFFFFFF:
                raise ValueError("sender or payload is too long for an entry")
            length = <int64_t>LEAST + name.len + body.len
            entry = PyBytes_FromStringAndSize(NULL, length)
            out = <unsigned char *>PyBytes_AS_STRING(entry)
            if length < 65536:
                put_entry(out, seq, ms, <const unsigned char *>name.buf, name.len,
                          <const unsigned char *>body.buf, body.len)
            else:
                with nogil:
                    put_entry(out, seq, ms, <const unsigned char *>name.buf, name.len,
                              <const unsigned char *>body.buf, body.len)
            return entry
        finally:
            PyBuffer_Release(&body)
    finally:
        PyBuffer_Release(&name)


cdef inline int64_t put_entry(
    unsigned char *out, uint64_t seq, uint64_t ms, const unsigned char *sender, int64_t sender_length,
    const unsigned char *payload, int64_t payload_length,
) noexcept nogil:
    cdef int64_t body = <int64_t>HEAD + sender_length + payload_length
    put64(out, seq)
    put64(out + 8, ms)
    put16(out + 16, <uint16_t>sender_length)
    put32(out + 18, <uint32_t>payload_length)
    memcpy(out + HEAD, sender, sender_length)
    memcpy(out + HEAD + sender_length, payload, payload_length)
    put32(out + body, crc32(0, out, body))
    return body + TAIL


cdef struct Target:  # where a run of entries goes
    int64_t offset   # of the next entry in its file
    int64_t since    # bytes since the last index entry
    int64_t limit    # a file is full when it is longer
    uint64_t name    # of the file
    Py_ssize_t room  # index entries that still fit
    unsigned char *index
    Py_ssize_t indexed


cdef inline void note(Target *target, uint64_t seq, int64_t length) noexcept nogil:
    """Account for an entry of that length, and put it into the index if it is its turn."""
    if target.offset == 0 or target.since >= INDEX_EVERY:
        if target.indexed < target.room:
            put32(target.index + target.indexed * INDEX_ENTRY, <uint32_t>(seq - target.name))
            put64(target.index + target.indexed * INDEX_ENTRY + 4, <uint64_t>target.offset)
            target.indexed += 1
        target.since = 0
    target.since += length
    target.offset += length


def longest(list payloads not None):
    """Return the length of the longest of these bytes objects, or -1 when one of them is something else."""
    cdef Py_ssize_t most = 0
    for item in payloads:
        if not PyBytes_CheckExact(item):
            return -1
        if PyBytes_GET_SIZE(item) > most:
            most = PyBytes_GET_SIZE(item)
    return most


def encode_list(
    list payloads not None, Py_ssize_t start, bytes sender not None, uint64_t seq, uint64_t ms,
    int64_t largest, int64_t chunk, int64_t offset, int64_t since, int64_t limit, uint64_t name,
    uint8_t[::1] index not None,
):
    """Encode payloads[start:], numbered from ``seq``, until the file is full or ``chunk`` bytes are there.

    Stops before what is not exactly bytes or longer than ``largest``.  Returns (encoded bytes, index of the first
    payload left, bytes since the last index entry, index entries).
    """
    cdef Py_ssize_t i, count = len(payloads), taken = 0, capacity
    cdef int64_t total = 0, at, sender_length = len(sender), length
    cdef const unsigned char *who = <const unsigned char *>PyBytes_AS_STRING(sender)
    cdef unsigned char *out
    cdef bytes encoded
    cdef Target target
    cdef list held
    if start < 0 or start > count:
        raise ValueError(f"start {start} is outside of the list")
    if sender_length > MAX_SENDER:
        raise ValueError("the sender is too long for an entry")
    capacity = count - start
    cdef const unsigned char **parts = <const unsigned char **>malloc(max(capacity, 1) * sizeof(void *))
    cdef int64_t *lengths = <int64_t *>malloc(max(capacity, 1) * sizeof(int64_t))
    target.offset, target.since, target.limit, target.name = offset, since, limit, name
    target.room, target.indexed = index.shape[0] // INDEX_ENTRY, 0
    target.index = &index[0] if index.shape[0] else NULL
    try:
        if parts == NULL or lengths == NULL:
            raise MemoryError
        held = payloads[start:]  # keeps the bytes alive whatever others do to the list
        for i in range(capacity):
            item = held[i]
            if not PyBytes_CheckExact(item):
                break
            length = PyBytes_GET_SIZE(item)
            if length > largest:
                break
            if taken and total + LEAST + sender_length + length > chunk:
                break
            parts[taken] = <const unsigned char *>PyBytes_AS_STRING(item)
            lengths[taken] = length
            taken += 1
            total += LEAST + sender_length + length
            if offset + total > limit:
                break
        encoded = PyBytes_FromStringAndSize(NULL, total)
        out = <unsigned char *>PyBytes_AS_STRING(encoded)
        with nogil:
            at = 0
            for i in range(taken):
                length = put_entry(out + at, seq + <uint64_t>i, ms, who, sender_length, parts[i], lengths[i])
                note(&target, seq + <uint64_t>i, length)
                at += length
        return encoded, start + taken, target.since, target.indexed
    finally:
        free(parts)
        free(lengths)


def encode_spans(
    const unsigned char[::1] data not None,
    const int64_t[::1] offsets not None,
    const int64_t[::1] lengths not None,
    const unsigned char[::1] sender_data not None,
    const int64_t[::1] sender_offsets not None,
    const int64_t[::1] sender_lengths not None,
    const uint64_t[::1] seqs not None,
    const uint64_t[::1] times not None,
    Py_ssize_t start, int64_t largest, int64_t chunk, int64_t offset, int64_t since, int64_t limit, uint64_t name,
    uint8_t[::1] index not None,
):
    """Do the same for columns; senders and times (ms) may be one for all.  Spans are checked against their data."""
    cdef Py_ssize_t i, count = offsets.shape[0], stop
    cdef Py_ssize_t one_sender = sender_offsets.shape[0] == 1, one_time = times.shape[0] == 1
    cdef int64_t size = data.shape[0], sender_size = sender_data.shape[0], total = 0, at, who, length
    cdef unsigned char *out
    cdef const unsigned char *base = &data[0] if size else NULL
    cdef const unsigned char *names = &sender_data[0] if sender_size else NULL
    cdef bytes encoded
    cdef Target target
    if lengths.shape[0] != count or seqs.shape[0] != count or sender_offsets.shape[0] != sender_lengths.shape[0] \
            or (not one_sender and sender_offsets.shape[0] != count) or (not one_time and times.shape[0] != count):
        raise ValueError("the columns differ in length")
    if start < 0 or start > count:
        raise ValueError(f"start {start} is outside of the columns")
    target.offset, target.since, target.limit, target.name = offset, since, limit, name
    target.room, target.indexed = index.shape[0] // INDEX_ENTRY, 0
    target.index = &index[0] if index.shape[0] else NULL
    stop = start
    with nogil:
        while stop < count:
            length = lengths[stop]
            who = 0 if one_sender else stop
            if length < 0 or length > largest or length > size or offsets[stop] < 0 \
                    or offsets[stop] > size - length:
                break
            if sender_lengths[who] < 0 or sender_lengths[who] > MAX_SENDER or sender_lengths[who] > sender_size \
                    or sender_offsets[who] < 0 or sender_offsets[who] > sender_size - sender_lengths[who]:
                break
            length += LEAST + sender_lengths[who]
            if stop > start and total + length > chunk:
                break
            total += length
            stop += 1
            if offset + total > limit:
                break
    encoded = PyBytes_FromStringAndSize(NULL, total)
    out = <unsigned char *>PyBytes_AS_STRING(encoded)
    with nogil:
        at = 0
        for i in range(start, stop):
            who = 0 if one_sender else i
            length = put_entry(
                out + at, seqs[i], times[0 if one_time else i], names + sender_offsets[who], sender_lengths[who],
                base + offsets[i], lengths[i])
            note(&target, seqs[i], length)
            at += length
    return encoded, stop, target.since, target.indexed
