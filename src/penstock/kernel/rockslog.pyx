# cython: language_level=3, boundscheck=False, wraparound=False
"""A walk over the records of a log of RocksDB: heads, lengths and sums.  ``store/rockslog.py`` says what they are.

The twin in penstock/kernel/twin/rockslog.py is the oracle.
"""
from libc.stdint cimport uint8_t, uint32_t

cdef enum:
    BLOCK = 32 << 10
    HEAD = 7

cdef uint32_t[8][256] table


cdef void fill() noexcept:
    cdef uint32_t i, c
    cdef int step
    for i in range(256):
        c = i
        for step in range(8):
            c = (c >> 1) ^ (0x82F63B78u if c & 1 else 0)
        table[0][i] = c
    for step in range(1, 8):
        for i in range(256):
            table[step][i] = (table[step - 1][i] >> 8) ^ table[0][table[step - 1][i] & 0xFF]

fill()


cdef uint32_t masked(const uint8_t *p, Py_ssize_t n) noexcept nogil:
    """Return the CRC-32C of some bytes as RocksDB stores it."""
    cdef uint32_t c = 0xFFFFFFFFu
    while n >= 8:
        c ^= p[0] | (<uint32_t>p[1] << 8) | (<uint32_t>p[2] << 16) | (<uint32_t>p[3] << 24)
        c = (
            table[7][c & 0xFF] ^ table[6][(c >> 8) & 0xFF] ^ table[5][(c >> 16) & 0xFF] ^ table[4][c >> 24]
            ^ table[3][p[4]] ^ table[2][p[5]] ^ table[1][p[6]] ^ table[0][p[7]]
        )
        p += 8
        n -= 8
    while n > 0:
        c = (c >> 8) ^ table[0][(c ^ p[0]) & 0xFF]
        p += 1
        n -= 1
    c ^= 0xFFFFFFFFu
    return ((c >> 15) | (c << 17)) + 0xA282EAD8u


cdef bint sums(const uint8_t *p, Py_ssize_t length) noexcept nogil:
    cdef uint32_t said = p[0] | (<uint32_t>p[1] << 8) | (<uint32_t>p[2] << 16) | (<uint32_t>p[3] << 24)
    return said == masked(p + HEAD - 1, length + 1)


def walk(const uint8_t[::1] data not None):
    """Return where the first record with a number of its file begins, and the first place that has no good record.

    ``data`` begins with a block.  Either is -1 when there is none.  A block is left at the first place without a good
    record, or at its end; what is behind such a place in later blocks is looked at for numbers all the same.
    """
    cdef Py_ssize_t size = data.shape[0], block = 0, at, end, length, strange = -1, bad = -1
    cdef const uint8_t *p
    cdef uint8_t kind
    if not size:
        return -1, -1
    p = &data[0]
    with nogil:
        while block < size and strange < 0:
            at = block
            end = min(block + BLOCK, size)
            while end - at >= HEAD:
                length = p[at + 4] | (<Py_ssize_t>p[at + 5] << 8)
                kind = p[at + 6]
                if 5 <= kind <= 8 or kind == 11:
                    strange = at
                    break
                if length > end - at - HEAD or (not kind and not length) or (bad < 0 and not sums(p + at, length)):
                    break
                at += HEAD + length
            if bad < 0 and at < end and (end - at >= HEAD or end - block < BLOCK):
                bad = at
            block += BLOCK
    return strange, bad


def good(const uint8_t[::1] data not None, Py_ssize_t start):
    """Return where a good record begins in this block at or behind ``start``, or -1."""
    cdef Py_ssize_t size = min(data.shape[0], <Py_ssize_t>BLOCK), at = start, length, found = -1
    cdef const uint8_t *p
    if start < 0 or not size:
        return -1
    p = &data[0]
    with nogil:
        while size - at >= HEAD:
            length = p[at + 4] | (<Py_ssize_t>p[at + 5] << 8)
            if p[at + 6] and length <= size - at - HEAD and sums(p + at, length):
                found = at
                break
            at += 1
    return found
