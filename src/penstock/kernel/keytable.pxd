# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The hash table of a fold: from 32 bits of a key's hash to the slot of that key.

A place holds bits << 32 | slot + 1; zero is free.  A taken place sends to the next one, and taking an entry out
closes the gap behind it, so no place has to be marked as deleted.  The table knows no keys: whether a slot with
the right bits is the one looked for is its caller's to find out.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

cdef enum:
    FEWEST_PLACES = 64

cdef struct KeyTable:
    uint64_t *places
    uint64_t mask


cdef inline bint table_begin(KeyTable *t) noexcept nogil:
    t.mask = FEWEST_PLACES - 1
    t.places = <uint64_t *>calloc(FEWEST_PLACES, sizeof(uint64_t))
    return t.places is not NULL


cdef inline void table_end(KeyTable *t) noexcept nogil:
    free(t.places)


cdef inline uint64_t table_home(KeyTable *t, uint64_t hashed) noexcept nogil:
    """Return the place where looking for a hash begins."""
    return (hashed >> 32) & t.mask


cdef inline int64_t table_slot(KeyTable *t, uint64_t place) noexcept nogil:
    """Return the slot at a place, -1 for a free one."""
    return <int64_t>(<uint32_t>t.places[place]) - 1


cdef inline void table_add(KeyTable *t, uint64_t hashed, uint32_t slot) noexcept nogil:
    cdef uint64_t i = table_home(t, hashed)
    while t.places[i]:
        i = (i + 1) & t.mask
    t.places[i] = (hashed >> 32) << 32 | (slot + 1)


cdef inline void table_remove(KeyTable *t, uint64_t place) noexcept nogil:
    """Empty a place and close the gap behind it."""
    cdef uint64_t gap = place, i = place
    while True:
        i = (i + 1) & t.mask
        if not t.places[i]:
            break
        if ((i - (t.places[i] >> 32)) & t.mask) >= ((i - gap) & t.mask):
            t.places[gap] = t.places[i]
            gap = i
    t.places[gap] = 0


cdef inline bint table_grow(KeyTable *t, int64_t count) noexcept nogil:
    """Make room for ``count`` entries, at most two thirds of the places; False where there is no memory."""
    cdef uint64_t mask = t.mask * 2 + 1, i, j
    cdef uint64_t *places
    if <uint64_t>count * 3 <= (t.mask + 1) * 2:
        return True
    places = <uint64_t *>calloc(mask + 1, sizeof(uint64_t))
    if places is NULL:
        return False
    for i in range(t.mask + 1):
        if t.places[i]:
            j = (t.places[i] >> 32) & mask
            while places[j]:
                j = (j + 1) & mask
            places[j] = t.places[i]
    free(t.places)
    t.places, t.mask = places, mask
    return True
