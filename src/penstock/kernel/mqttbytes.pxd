# cython: language_level=3
"""Numbers, strings and values of properties as MQTT has them in bytes; each is looked at within its bounds.

Included by the module that uses it: inline, so that it costs no call.
"""
from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memchr

cdef enum:
    # How the value of a property is laid out.
    NONE = 0
    BYTE = 1
    TWO = 2
    FOUR = 3
    VARINT = 4
    TEXT = 5
    BINARY = 6
    PAIR = 7

cdef extern from *:
    """
    #include <stdint.h>
    /* How the value of each property is laid out, by its identifier: the enum of mqttbytes.pxd. */
    static const uint8_t pk_mqtt_layout[128] = {
        [1] = 1, [23] = 1, [25] = 1, [36] = 1, [37] = 1, [40] = 1, [41] = 1, [42] = 1,
        [19] = 2, [33] = 2, [34] = 2, [35] = 2,
        [2] = 3, [17] = 3, [24] = 3, [39] = 3,
        [11] = 4,
        [3] = 5, [8] = 5, [18] = 5, [21] = 5, [26] = 5, [28] = 5, [31] = 5,
        [9] = 6, [22] = 6,
        [38] = 7,
    };
    """
    const uint8_t LAYOUT "pk_mqtt_layout"[128]


cdef inline int varint(const unsigned char *p, Py_ssize_t at, Py_ssize_t end, uint32_t *value) noexcept nogil:
    """Return how many bytes the number takes; 0 when it goes past end, -1 when it is malformed (MQTT-1.5.5-1)."""
    cdef uint32_t total
    if at >= end:
        return 0
    total = p[at]
    if total < 128:
        value[0] = total
        return 1
    if at + 1 >= end:
        return 0
    total = (total & 127) | (<uint32_t>(p[at + 1] & 127) << 7)
    if p[at + 1] < 128:
        value[0] = total
        return 2 if p[at + 1] else -1
    if at + 2 >= end:
        return 0
    total |= <uint32_t>(p[at + 2] & 127) << 14
    if p[at + 2] < 128:
        value[0] = total
        return 3 if p[at + 2] else -1
    if at + 3 >= end:
        return 0
    total |= <uint32_t>(p[at + 3] & 127) << 21
    if p[at + 3] < 128:
        value[0] = total
        return 4 if p[at + 3] else -1
    return -1


cdef inline int varint_size(Py_ssize_t value) noexcept nogil:
    return 1 if value < 128 else 2 if value < 16384 else 3 if value < 2097152 else 4


cdef inline Py_ssize_t put_varint(unsigned char *p, Py_ssize_t at, Py_ssize_t value) noexcept nogil:
    while value >= 128:
        p[at] = (value & 127) | 128
        value >>= 7
        at += 1
    p[at] = <unsigned char>value
    return at + 1


cdef inline bint text(const unsigned char *p, Py_ssize_t size) noexcept nogil:
    """Whether it is UTF-8 without U+0000 and surrogates, each character in its shortest form."""
    cdef Py_ssize_t at = 0
    cdef unsigned char c, d
    while at < size:
        c = p[at]
        if c < 0x80:
            if c == 0:
                return False
            at += 1
        elif c < 0xC2:
            return False
        elif c < 0xE0:
            if size - at < 2 or (p[at + 1] & 0xC0) != 0x80:
                return False
            at += 2
        elif c < 0xF0:
            if size - at < 3 or (p[at + 1] & 0xC0) != 0x80 or (p[at + 2] & 0xC0) != 0x80:
                return False
            d = p[at + 1]
            if (c == 0xE0 and d < 0xA0) or (c == 0xED and d > 0x9F):
                return False
            at += 3
        elif c < 0xF5:
            if size - at < 4 or (p[at + 1] & 0xC0) != 0x80 or (p[at + 2] & 0xC0) != 0x80 \
                    or (p[at + 3] & 0xC0) != 0x80:
                return False
            d = p[at + 1]
            if (c == 0xF0 and d < 0x90) or (c == 0xF4 and d > 0x8F):
                return False
            at += 4
        else:
            return False
    return True


cdef inline bint wild(const unsigned char *p, Py_ssize_t size) noexcept nogil:
    return memchr(p, 43, size) != NULL or memchr(p, 35, size) != NULL


cdef inline Py_ssize_t value_end(const unsigned char *p, Py_ssize_t at, Py_ssize_t end, int layout) noexcept nogil:
    """Return where the value of a property that starts at ``at`` ends, or -1 when it is malformed."""
    cdef uint32_t number
    cdef int used
    cdef Py_ssize_t size
    if layout <= FOUR:
        size = 1 if layout == BYTE else 2 if layout == TWO else 4
        return at + size if end - at >= size else -1
    if layout == VARINT:
        used = varint(p, at, end, &number)
        return at + used if used > 0 else -1
    if end - at < 2:
        return -1
    size = (<Py_ssize_t>p[at] << 8) | p[at + 1]
    if end - at - 2 < size or (layout != BINARY and not text(p + at + 2, size)):
        return -1
    at += 2 + size
    return value_end(p, at, end, TEXT) if layout == PAIR else at
