# cython: language_level=3, boundscheck=False, wraparound=False
"""Envelope v1, many at a time: drawn in penstock/log/envelope.py."""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from penstock.kernel.atomics cimport get16, get32, get64
from penstock.kernel.envelopebytes cimport (
    ENVELOPE_HEAD as HEAD, ENVELOPE_VERSION as VERSION, put16, put32, put_envelope,
)

cdef enum:
    LAST_OP = 2


def decode(
    const unsigned char[::1] data not None,
    const int64_t[::1] offsets not None,
    const int64_t[::1] lengths not None,
    uint8_t[::1] ops not None,
    uint16_t[::1] flags not None,
    uint64_t[::1] times not None,
    int64_t[:, ::1] spans not None,
):
    """Fill the columns; return the index of the first record that is no envelope, or the count.

    Row i of spans: key offset, key length, headers offset, headers length, payload offset,
    payload length, all counted in data.
    """
    cdef Py_ssize_t i, count = offsets.shape[0], size = data.shape[0], at
    cdef int64_t length, key, headers
    cdef const unsigned char *p
    if lengths.shape[0] != count or ops.shape[0] < count or flags.shape[0] < count \
            or times.shape[0] < count or spans.shape[0] < count or spans.shape[1] != 6:
        raise ValueError("the columns differ in length")
    with nogil:
        for i in range(count):
            at = offsets[i]
            length = lengths[i]
            if at < 0 or length < HEAD or length > size or at > size - length:
                break
            p = &data[0] + at
            key = get32(p + 12)
            headers = get32(p + 16)
            if p[0] != VERSION or p[1] > LAST_OP or HEAD + key + headers > length:
                break
            ops[i] = p[1]
            flags[i] = get16(p + 2)
            times[i] = get64(p + 4)
            spans[i, 0] = at + HEAD
            spans[i, 1] = key
            spans[i, 2] = at + HEAD + key
            spans[i, 3] = headers
            spans[i, 4] = at + HEAD + key + headers
            spans[i, 5] = length - HEAD - key - headers
        else:
            i = count
    return i


cdef int64_t check(
    Py_ssize_t count, Py_ssize_t size, const int64_t[::1] offsets, const int64_t[::1] lengths, int64_t largest, str what
) except -1:
    """Return the bytes of a column with one span for all or one for each; refuse what lies outside its buffer."""
    cdef Py_ssize_t i, rows = offsets.shape[0], bad = -1
    cdef int64_t total = 0
    if lengths.shape[0] != rows or (rows != 1 and rows != count):
        raise ValueError("the columns differ in length")
    with nogil:
        for i in range(rows):
            if offsets[i] < 0 or lengths[i] < 0 or lengths[i] > size or offsets[i] > size - lengths[i] \
                    or lengths[i] > largest:
                bad = i
                break
            total += lengths[i]
    if bad >= 0:
        raise ValueError(f"{what} {bad} has {lengths[bad]} bytes, or lies outside its buffer of {size} bytes")
    return total * count if rows == 1 else total


def encode(
    const uint8_t[::1] ops not None,
    const uint16_t[::1] flags not None,
    const uint64_t[::1] times not None,
    const unsigned char[::1] key_data not None,
    const int64_t[::1] key_offsets not None,
    const int64_t[::1] key_lengths not None,
    const unsigned char[::1] header_data not None,
    const int64_t[::1] header_offsets not None,
    const int64_t[::1] header_lengths not None,
    const unsigned char[::1] data not None,
    const int64_t[::1] offsets not None,
    const int64_t[::1] lengths not None,
    int64_t[::1] out_offsets not None,
    int64_t[::1] out_lengths not None,
):
    """Return the envelopes one after another, and fill in where each is.

    Every column has one row for all, or as many as ``out_offsets``.  What lies outside its buffer raises ValueError.
    """
    cdef Py_ssize_t i, k, h, b, count = out_offsets.shape[0]
    cdef Py_ssize_t ks = key_offsets.shape[0] != 1, hs = header_offsets.shape[0] != 1, bs = offsets.shape[0] != 1
    cdef Py_ssize_t os = ops.shape[0] != 1, fs = flags.shape[0] != 1, ts = times.shape[0] != 1
    cdef int64_t total, at = 0
    cdef bytes encoded
    cdef unsigned char *out
    if out_lengths.shape[0] != count or (os and ops.shape[0] != count) or (fs and flags.shape[0] != count) \
            or (ts and times.shape[0] != count):
        raise ValueError("the columns differ in length")
    total = HEAD * count
    total += check(count, key_data.shape[0], key_offsets, key_lengths, 0xFFFFFFFF, "key")
    total += check(count, header_data.shape[0], header_offsets, header_lengths, 0xFFFFFFFF, "headers")
    total += check(count, data.shape[0], offsets, lengths, 0x7FFFFFFFFFFFFFFF, "payload")
    encoded = PyBytes_FromStringAndSize(NULL, total)
    out = <unsigned char *>PyBytes_AS_STRING(encoded)
    with nogil:
        for i in range(count):
            k, h, b = i if ks else 0, i if hs else 0, i if bs else 0
            out_offsets[i] = at
            at = put_envelope(
                out + at, ops[i if os else 0], flags[i if fs else 0], times[i if ts else 0],
                &key_data[0] + key_offsets[k], key_lengths[k],
                &header_data[0] + header_offsets[h], header_lengths[h], 0,
            ) - out
            if lengths[b]:
                memcpy(out + at, &data[0] + offsets[b], lengths[b])
                at += lengths[b]
            out_lengths[i] = at - out_offsets[i]
    return encoded


def split_headers(
    const unsigned char[::1] data not None,
    const int64_t[::1] offsets not None,
    const int64_t[::1] lengths not None,
    int64_t[::1] starts not None,
    int64_t[:, ::1] spans not None,
):
    """Find the headers in runs of them; return (runs that are sound, headers seen).

    ``starts`` gets, for each run and behind the last, the number of its first header.  Row j of spans: name offset, name
    length, value offset, value length; headers past its end are only counted, so a first call may have no rows.
    """
    cdef Py_ssize_t i, count = offsets.shape[0], size = data.shape[0], seen = 0, room = spans.shape[0]
    cdef int64_t at, stop, name, value
    cdef const unsigned char *p
    cdef bint bad = False
    if lengths.shape[0] != count or starts.shape[0] != count + 1 or spans.shape[1] != 4:
        raise ValueError("the columns differ in length")
    with nogil:
        starts[0] = 0
        for i in range(count):
            at = offsets[i]
            if at < 0 or lengths[i] < 0 or lengths[i] > size or at > size - lengths[i]:
                break
            stop = at + lengths[i]
            while at < stop:
                if stop - at < 6:
                    bad = True
                    break
                p = &data[0] + at
                name = get16(p)
                if name > stop - at - 6:
                    bad = True
                    break
                value = get32(p + 2 + name)
                if value > stop - at - 6 - name:
                    bad = True
                    break
                if seen < room:
                    spans[seen, 0] = at + 2
                    spans[seen, 1] = name
                    spans[seen, 2] = at + 6 + name
                    spans[seen, 3] = value
                seen += 1
                at += 6 + name + value
            if bad:
                break
            starts[i + 1] = seen
        else:
            i = count
    return i, seen


def join_headers(
    const int64_t[::1] starts not None,
    const unsigned char[::1] name_data not None,
    const int64_t[::1] name_offsets not None,
    const int64_t[::1] name_lengths not None,
    const unsigned char[::1] value_data not None,
    const int64_t[::1] value_offsets not None,
    const int64_t[::1] value_lengths not None,
    int64_t[::1] out_offsets not None,
    int64_t[::1] out_lengths not None,
):
    """Return runs of headers one after another, run i from header starts[i] to starts[i + 1], and where each is."""
    cdef Py_ssize_t i, j, count = out_offsets.shape[0], rows = name_offsets.shape[0]
    cdef int64_t total, at = 0
    cdef bytes encoded
    cdef unsigned char *out
    if starts.shape[0] != count + 1 or out_lengths.shape[0] != count or value_offsets.shape[0] != rows:
        raise ValueError("the columns differ in length")
    if starts[0] < 0 or starts[count] > rows:
        raise ValueError("the runs lie outside of the headers")
    for i in range(count):
        if starts[i + 1] < starts[i]:
            raise ValueError("the runs overlap")
    check(rows, name_data.shape[0], name_offsets, name_lengths, 0xFFFF, "name")
    check(rows, value_data.shape[0], value_offsets, value_lengths, 0xFFFFFFFF, "value")
    total = 0
    for j in range(starts[0], starts[count]):
        total += 6 + name_lengths[j] + value_lengths[j]
    encoded = PyBytes_FromStringAndSize(NULL, total)
    out = <unsigned char *>PyBytes_AS_STRING(encoded)
    with nogil:
        for i in range(count):
            out_offsets[i] = at
            for j in range(starts[i], starts[i + 1]):
                put16(out + at, <uint16_t>name_lengths[j])
                at += 2
                if name_lengths[j]:
                    memcpy(out + at, &name_data[0] + name_offsets[j], name_lengths[j])
                    at += name_lengths[j]
                put32(out + at, <uint32_t>value_lengths[j])
                at += 4
                if value_lengths[j]:
                    memcpy(out + at, &value_data[0] + value_offsets[j], value_lengths[j])
                    at += value_lengths[j]
            out_lengths[i] = at - out_offsets[i]
    return encoded
