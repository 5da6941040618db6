# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""One PGSS record: how it is read, judged and compared.  Layout: store/pgss.py."""
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memmove

from penstock.kernel.atomics cimport get8, get16, get32
from penstock.kernel.crc cimport crc32

cdef enum:
    PUT = 1
    DELETE = 2
    CURSOR = 3
    TOKEN_MAX = 10
    VALUE_MAX = 16777216
    KEY_MAX = 65535
    SMALLEST = 6  # a cursor record without a cursor
    # how a replay ends; twin/pgss.py and store/pgss.py know the same numbers
    CLEAN = 0
    TRUNCATED = 1
    TORN = 2
    BAD_CRC = 3
    HOLE = 4
    BAD_TYPE = 5
    BAD_VERSION = 6
    BAD_CURSOR = 7
    BAD_KEY = 8
    NO_MEMORY = 9

cdef struct Rec:
    int kind
    int64_t key
    int64_t key_len
    int64_t value
    int64_t value_len
    int64_t version
    int64_t version_len
    int64_t total
    int64_t detail


cdef inline bint valid_utf8(const uint8_t *p, int64_t n) noexcept nogil:
    cdef int64_t i = 0
    cdef uint64_t word
    cdef uint8_t c, low, high
    cdef int more
    while i < n:
        if i + 8 <= n:
            memcpy(&word, p + i, 8)
            if not word & <uint64_t>0x8080808080808080:
                i += 8
                continue
        c = p[i]
        i += 1
        if c < 0x80:
            continue
        low, high = 0x80, 0xBF
        if 0xC2 <= c <= 0xDF:
            more = 1
        elif 0xE0 <= c <= 0xEF:
            more = 2
            if c == 0xE0:
                low = 0xA0
            elif c == 0xED:  # no surrogates
                high = 0x9F
        elif 0xF0 <= c <= 0xF4:
            more = 3
            if c == 0xF0:
                low = 0x90
            elif c == 0xF4:
                high = 0x8F
        else:
            return False
        if i + more > n or p[i] < low or p[i] > high:
            return False
        i += 1
        while more > 1:
            if p[i] & 0xC0 != 0x80:
                return False
            i += 1
            more -= 1
    return True


cdef inline int mismatch(int64_t rest, int64_t consumed) noexcept nogil:
    """A bad checksum is a torn tail only where no complete record can follow."""
    if consumed > rest:
        consumed = rest
    return TORN if rest - consumed < SMALLEST else BAD_CRC


cdef inline int parse(const uint8_t *p, int64_t size, int64_t at, bint check, Rec *r) noexcept nogil:
    """Read the record at ``at``; the order of the checks is that of the original."""
    cdef int64_t rest = size - at, n = 5, i
    cdef const uint8_t *q = p + at
    r.detail = 0
    if rest < 5:
        return TRUNCATED
    r.kind = get8(q + 4)
    if r.kind == CURSOR:
        if rest < 6:
            return TRUNCATED
        r.version_len = get8(q + 5)
        r.version = at + 6
        r.total = 6 + r.version_len
        if r.version_len > TOKEN_MAX:
            r.detail = r.version_len
            return BAD_CURSOR
        if rest < r.total:
            return TRUNCATED
        if check and crc32(0, q + 4, r.total - 4) != get32(q):
            return mismatch(rest, r.total)
        return CLEAN
    if r.kind != PUT and r.kind != DELETE:
        r.detail = r.kind
        if r.kind == 0 and get32(q) == 0:
            for i in range(rest):
                if q[i]:
                    return HOLE
            return TRUNCATED
        return BAD_TYPE
    if rest < 7:
        return TRUNCATED
    r.key_len = get16(q + 5)
    r.key = at + 7
    n = 7 + r.key_len
    r.value = r.value_len = 0
    if r.kind == PUT:
        if rest < n + 4:
            return TRUNCATED
        r.value_len = get32(q + n)
        n += 4
        if r.value_len > VALUE_MAX:
            return mismatch(rest, n)
        r.value = at + n
        n += r.value_len
    if rest < n + 1:
        return TRUNCATED
    r.version_len = get8(q + n)
    r.version = at + n + 1
    if r.version_len > TOKEN_MAX:
        r.detail = r.version_len
        return BAD_VERSION
    r.total = n + 1 + r.version_len
    if rest < r.total:
        return TRUNCATED
    if check:
        if crc32(0, q + 4, r.total - 4) != get32(q):
            return mismatch(rest, r.total)
        if not valid_utf8(p + r.key, r.key_len):
            return BAD_KEY
    return CLEAN


cdef inline int64_t key_length(const uint8_t *p, int64_t size, int64_t at) noexcept nogil:
    """Return the length of a key of a put or delete record, within the log whatever the record says by now."""
    cdef int64_t n = get16(p + at + 5)
    return n if n <= size - at - 7 else size - at - 7


cdef inline int compare_keys(const uint8_t *p, int64_t size, int64_t a, int64_t b) noexcept nogil:
    """Order two put or delete records by the bytes of their keys."""
    cdef int n = <int>key_length(p, size, a), m = <int>key_length(p, size, b)
    cdef int order = memcmp(p + a + 7, p + b + 7, n if n < m else m)
    return order if order else n - m


cdef inline int compare_prefix(
    const uint8_t *p, int64_t size, int64_t a, const uint8_t *prefix, int64_t length
) noexcept nogil:
    """Where a key stands to all keys with a prefix: below, among (0) or above them."""
    cdef int64_t n = key_length(p, size, a)
    cdef int order = memcmp(p + a + 7, prefix, n if n < length else length)
    return order if order else (-1 if n < length else 0)


cdef inline void merge(
    const uint8_t *p, int64_t size, uint32_t *slots, int64_t *offs, int64_t i, int64_t mid, int64_t end, uint32_t *s, int64_t *o
) noexcept nogil:
    """Merge two sorted runs that lie side by side."""
    cdef int64_t j = mid, k = 0, start = i
    if mid >= end or i >= mid or compare_keys(p, size, offs[mid - 1], offs[mid]) <= 0:
        return
    while i < mid and j < end:
        if compare_keys(p, size, offs[i], offs[j]) <= 0:
            s[k], o[k] = slots[i], offs[i]
            i += 1
        else:
            s[k], o[k] = slots[j], offs[j]
            j += 1
        k += 1
    # what is left of the right run lies where it belongs; what is left of the left one may move by less than its length
    memmove(slots + start + k, slots + i, (mid - i) * sizeof(uint32_t))
    memmove(offs + start + k, offs + i, (mid - i) * sizeof(int64_t))
    memcpy(slots + start, s, k * sizeof(uint32_t))
    memcpy(offs + start, o, k * sizeof(int64_t))


cdef inline bint sort_slots(
    const uint8_t *p, int64_t size, uint32_t *slots, int64_t *offs, int64_t start, int64_t count
) noexcept nogil:
    """Sort slots[start:] and their record offsets by key, then merge them with the sorted part before."""
    cdef int64_t i, j, k, mid, end, width = 1, n = count - start
    cdef uint32_t *s = <uint32_t *>malloc((count + 1) * sizeof(uint32_t))
    cdef int64_t *o = <int64_t *>malloc((count + 1) * sizeof(int64_t))
    if s is NULL or o is NULL:
        free(s)
        free(o)
        return False
    while width < n:
        i = start
        while i < count:
            mid = i + width if i + width < count else count
            end = mid + width if mid + width < count else count
            merge(p, size, slots, offs, i, mid, end, s, o)
            i = end
        width *= 2
    if start:
        merge(p, size, slots, offs, 0, start, count, s, o)
    free(s)
    free(o)
    return True
