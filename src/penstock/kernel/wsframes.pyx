# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""WebSocket frames of a read, many at a time: whole binary frames become their payloads, one behind the other.

    frame := fin:1 reserved:3 opcode:4  masked:1 length:7  [length:u16 | length:u64]  [key:4]  payload     (RFC 6455, 5.2)

Only what a message of one binary frame is (first byte 0x82).  Control frames, fragments, text and whatever is wrong are
left to a library, which is told where they begin and end.  Every length is checked against the buffer before it is
used.  The twin in penstock/kernel/twin/wsframes.py is the oracle.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

cdef enum:
    BINARY = 0x82


cdef Py_ssize_t head_of(const unsigned char *p, Py_ssize_t left, bint masked, Py_ssize_t most, Py_ssize_t *length) noexcept:
    """Return the bytes before the payload; 0 when they are not all there, -1 when the frame is not to be accepted."""
    cdef Py_ssize_t head = 2
    cdef uint64_t size
    cdef int i
    if left < 2:
        return 0
    if (p[1] >= 128) != masked:
        return -1
    size = p[1] & 127
    if size >= 126:
        head = 4 if size == 126 else 10
        if left < head:
            return 0
        size = 0
        for i in range(2, head):
            size = size << 8 | p[i]
    if size > <uint64_t>most:
        return -1
    length[0] = <Py_ssize_t>size
    return head + 4 if masked else head


cdef void unmask(unsigned char *o, const unsigned char *p, Py_ssize_t size, const unsigned char *key) noexcept:
    cdef uint32_t four
    cdef uint64_t eight, word
    cdef Py_ssize_t at = 0
    memcpy(&four, key, 4)
    if four == 0:
        memcpy(o, p, size)
        return
    eight = <uint64_t>four << 32 | four
    while at + 8 <= size:
        memcpy(&word, p + at, 8)
        word ^= eight
        memcpy(o + at, &word, 8)
        at += 8
    while at < size:
        o[at] = p[at] ^ key[at & 3]
        at += 1


def cut_frames(bytes data not None, Py_ssize_t start, bint masked, Py_ssize_t most, bint whole=True):
    """Return (payloads of the binary frames from start in one piece, where these end, size of the frame that follows).

    The size is 0 while that cannot be known, and -1 when the frame has the wrong masking or a payload of more than
    ``most`` bytes.  ``masked`` is what frames of this side must be.  Without ``whole`` no frame is taken: a message is
    under way whose frames go elsewhere.
    """
    cdef const unsigned char *p = <const unsigned char *>PyBytes_AS_STRING(data)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(data), at = start, total = 0, to = 0, end, head = 0, length = 0
    cdef unsigned char *o
    if not 0 <= start <= size or most < 0:
        raise ValueError(f"start {start} of {size} bytes, at most {most}")
    while at < size:
        head = head_of(p + at, size - at, masked, most, &length)
        if not whole or head <= 0 or p[at] != BINARY or length > size - at - head:
            break
        total += length
        at += head + length
    end = at
    following = 0 if end == size or head == 0 else -1 if head < 0 else head + length
    if total == 0:
        return b"", end, following
    out = PyBytes_FromStringAndSize(NULL, total)
    o = <unsigned char *>PyBytes_AS_STRING(out)
    at = start
    while at < end:
        head = head_of(p + at, end - at, masked, most, &length)
        at += head
        if masked:
            unmask(o + to, p + at, length, p + at - 4)
        else:
            memcpy(o + to, p + at, length)
        to += length
        at += length
    return out, end, following
