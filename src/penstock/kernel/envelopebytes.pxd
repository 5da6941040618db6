# cython: language_level=3
"""Envelope v1 as bytes (penstock/log/envelope.py): written here and nowhere else in the kernel.

Included by the module that uses it: inline, so that it costs no call.
"""
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef enum:
    ENVELOPE_HEAD = 20
    ENVELOPE_VERSION = 1


cdef inline void put16(unsigned char *p, uint16_t v) noexcept nogil:
    memcpy(p, &v, 2)


cdef inline void put32(unsigned char *p, uint32_t v) noexcept nogil:
    memcpy(p, &v, 4)


cdef inline unsigned char *put_envelope(
    unsigned char *out, uint8_t op, uint16_t flags, uint64_t time,
    const unsigned char *key, Py_ssize_t key_len,
    const unsigned char *headers, Py_ssize_t headers_len, Py_ssize_t more_headers,
) noexcept nogil:
    """Write everything before the payload and return where that goes; ``more_headers`` bytes of headers follow first."""
    out[0] = ENVELOPE_VERSION
    out[1] = op
    put16(out + 2, flags)
    memcpy(out + 4, &time, 8)
    put32(out + 12, <uint32_t>key_len)
    put32(out + 16, <uint32_t>(headers_len + more_headers))
    out += ENVELOPE_HEAD
    if key_len:
        memcpy(out, key, key_len)
    out += key_len
    if headers_len:
        memcpy(out, headers, headers_len)
    return out + headers_len
