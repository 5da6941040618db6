# cython: language_level=3, boundscheck=False, wraparound=False
"""Envelope v1, many at a time: drawn in penstock/log/envelope.py."""
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint64_t

from penstock.kernel.atomics cimport get16, get32, get64

cdef enum:
    HEAD = 20
    VERSION = 1
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
