# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The live keys of a PGSS log, by key.

The bytes of the log lie in one buffer, a mapped file as a rule.  The index keeps, for each live key, the
offset of its put record and nothing else: keys, values and versions are read from the record.  A hash
table (keytable.pxd) finds the slot of a key, ``offs`` the record of a slot.

For ordered reads there is ``order``, slots sorted by key, and ``fresh``, slots not yet sorted in.  The
slot of a deleted key stays in its list, flagged DEAD, until the list is rebuilt: its old record still
names the key.  Whoever calls a method holds a lock.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy

from penstock.kernel.atomics cimport get8, get16, get32
from penstock.kernel.crc cimport crc_init
from penstock.kernel.keytable cimport *
from penstock.kernel.murmur cimport murmur
from penstock.kernel.pgssrecord cimport *
from penstock.kernel.siphash cimport siphash

import os
import struct

import numpy as np

cdef extern from *:
    """
    #define pk_fetch(p) __builtin_prefetch(p)
    """
    void fetch "pk_fetch"(const void *p) noexcept nogil

crc_init()

cdef uint64_t[2] SECRET
SECRET[0], SECRET[1] = struct.unpack("<QQ", os.urandom(16))

cdef enum:
    AHEAD = 32  # records whose memory is fetched together
    MANY = 1 << 16  # places of a table from which on it no longer lies in the cache

cdef int64_t DEAD = (<int64_t>1) << 62
cdef int64_t DROPPED = -1


cdef void *grown(void *array, int64_t count, int64_t *room, size_t item) noexcept nogil:
    """Return an array with room for one more than count, or NULL."""
    cdef void *larger = array
    if count >= room[0]:
        larger = realloc(array, <size_t>(room[0] * 2 + 64) * item)
        if larger is not NULL:
            room[0] = room[0] * 2 + 64
    return larger


cdef class Fold:
    """The live keys of a log; see the head of this module."""

    cdef Py_buffer view
    cdef bint attached
    cdef const uint8_t *data
    cdef readonly int64_t size
    cdef KeyTable table
    cdef int64_t *offs
    cdef uint32_t *order
    cdef uint32_t *fresh
    cdef uint32_t *spare
    cdef int64_t slots, slots_room, ordered, order_room, unsorted_count, fresh_room, spares, spare_room
    cdef readonly int64_t count, live_bytes, cursors, generation
    cdef readonly int64_t collisions  # how often a look into the table went on to the next place
    cdef readonly bint redundant
    cdef uint64_t low, high
    cdef uint8_t[16] token
    cdef int token_len

    def __cinit__(self):
        if not table_begin(&self.table):
            raise MemoryError

    def __dealloc__(self):
        if self.attached:
            PyBuffer_Release(&self.view)
        table_end(&self.table)
        free(self.offs)
        free(self.order)
        free(self.fresh)
        free(self.spare)

    @property
    def cursor(self):
        """The bytes of the last cursor record."""
        return PyBytes_FromStringAndSize(<char *>self.token, self.token_len)

    @property
    def digest(self):
        """The sum of the hashes of all live records, modulo 2**128."""
        return (int(self.high) << 64) | int(self.low)

    @property
    def sorted(self):
        """How many slots are in key order."""
        return self.ordered

    @property
    def unsorted(self):
        """How many slots are not in key order yet."""
        return self.unsorted_count

    def attach(self, buffer, int64_t size):
        """Take ``size`` bytes of ``buffer`` as the log; what was indexed must lie where it lay."""
        cdef Py_buffer view
        PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
        if size < 0 or size > view.len:
            PyBuffer_Release(&view)
            raise ValueError(f"{size} bytes of a buffer of {view.len}")
        if self.attached:
            PyBuffer_Release(&self.view)
        self.view = view
        self.attached = True
        self.data = <const uint8_t *>view.buf
        self.size = size

    def index(self, int64_t start, bint check):
        """Replay from ``start`` to the end; return (where it stopped, status, detail)."""
        cdef int64_t at = start, fetched = start
        cdef int status = CLEAN
        cdef Rec r
        r.detail = 0
        if not 0 <= start <= self.size:
            raise ValueError(f"cannot replay from {start} of {self.size} bytes")
        with nogil:
            while at < self.size:
                if at >= fetched and self.table.mask >= MANY:
                    fetched = self.look_ahead(at)
                status = parse(self.data, self.size, at, check, &r)
                if status == CLEAN and not self.replay(at, &r):
                    status = NO_MEMORY
                if status != CLEAN:
                    break
                at += r.total
        if status == NO_MEMORY:
            raise MemoryError
        return at, status, r.detail

    def find(self, bytes key not None):
        """Return the offset of the put record of a key, or -1."""
        cdef uint64_t place
        cdef const uint8_t *p = <const uint8_t *>PyBytes_AS_STRING(key)
        cdef uint64_t hashed = siphash(SECRET, p, PyBytes_GET_SIZE(key))
        if not self.probe(p, PyBytes_GET_SIZE(key), hashed, &place):
            return -1
        return self.offs[table_slot(&self.table, place)]

    def read(self, int64_t at):
        """Return (key, value, version) of the put record at an offset."""
        cdef Rec r
        if not 0 <= at < self.size or parse(self.data, self.size, at, False, &r) != CLEAN or r.kind != PUT:
            raise ValueError(f"no put record at {at}")
        cdef const char *p = <const char *>self.data
        return (
            PyBytes_FromStringAndSize(p + r.key, r.key_len),
            PyBytes_FromStringAndSize(p + r.value, r.value_len),
            PyBytes_FromStringAndSize(p + r.version, r.version_len),
        )

    def select(self, bytes prefix not None):
        """Return the offsets of the live records whose key begins with ``prefix``, in key order."""
        cdef const uint8_t *want = <const uint8_t *>PyBytes_AS_STRING(prefix)
        cdef int64_t n = PyBytes_GET_SIZE(prefix), low, high, end, i, k = 0, sorted_count
        cdef uint32_t *slots
        cdef int64_t *found
        low, high = self.bound(want, n, 0, self.ordered, False), 0
        end = self.bound(want, n, low, self.ordered, True)
        result = np.empty(end - low + self.unsorted_count, np.int64)
        cdef int64_t[::1] view = result
        slots = <uint32_t *>malloc((end - low + self.unsorted_count + 1) * sizeof(uint32_t))
        if slots is NULL:
            raise MemoryError
        cdef bint ok = True
        if view.shape[0]:
            found = &view[0]
            with nogil:
                for i in range(low, end):
                    if self.offs[self.order[i]] < DEAD:
                        slots[k], found[k] = self.order[i], self.offs[self.order[i]]
                        k += 1
                sorted_count = k
                for i in range(self.unsorted_count):
                    if (self.offs[self.fresh[i]] < DEAD
                            and compare_prefix(self.data, self.size, self.offs[self.fresh[i]], want, n) == 0):
                        slots[k], found[k] = self.fresh[i], self.offs[self.fresh[i]]
                        k += 1
                if k > sorted_count:
                    ok = sort_slots(self.data, self.size, slots, found, sorted_count, k)
        free(slots)
        if not ok:
            raise MemoryError
        return result[:k]

    def live(self):
        """Return (slots, offsets, how many of them are in key order) of all live records."""
        cdef int64_t i, k = 0, sorted_count
        slots, offsets = np.empty(self.count, np.uint32), np.empty(self.count, np.int64)
        cdef uint32_t[::1] s = slots
        cdef int64_t[::1] o = offsets
        with nogil:
            for i in range(self.ordered):
                if self.offs[self.order[i]] < DEAD:
                    s[k], o[k] = self.order[i], self.offs[self.order[i]]
                    k += 1
            sorted_count = k
            for i in range(self.unsorted_count):
                if self.offs[self.fresh[i]] < DEAD:
                    s[k], o[k] = self.fresh[i], self.offs[self.fresh[i]]
                    k += 1
        return slots, offsets, sorted_count

    def live_part(self, bint in_order, int64_t start, int64_t stop, int64_t below):
        """Return the offsets below ``below`` of the live records from ``start`` to ``stop`` of one of the two lists.

        The lists (``in_order`` or not) are as they were while ``generation`` stays; they are over where fewer than
        ``stop`` are there.  A key that was put or deleted behind ``below`` meanwhile is left out: that record follows.
        """
        cdef uint32_t *slots = self.order if in_order else self.fresh
        cdef int64_t i, at, k = 0, count = self.ordered if in_order else self.unsorted_count
        if not 0 <= start <= stop:
            raise ValueError(f"no part from {start} to {stop}")
        stop = min(stop, count)
        offsets = np.empty(max(0, stop - start), np.int64)
        cdef int64_t[::1] o = offsets
        with nogil:
            for i in range(start, stop):
                at = self.offs[slots[i]]
                if at < DEAD and at < below:
                    o[k] = at
                    k += 1
        return offsets[:k]

    def adopt(self, const uint32_t[::1] slots not None):
        """Make ``slots``, sorted by key, the order; the slots that came since stay fresh.

        They come from a live() of the same generation.
        """
        cdef int64_t i, k = 0
        for i in range(slots.shape[0]):
            if slots[i] >= self.slots:
                raise ValueError(f"slot {slots[i]} of {self.slots}: these are of another index")
        cdef uint8_t *known = <uint8_t *>calloc(self.slots + 1, 1)
        cdef uint32_t *order = <uint32_t *>malloc((slots.shape[0] + 64) * sizeof(uint32_t))
        cdef uint32_t *fresh = <uint32_t *>malloc((self.ordered + self.unsorted_count + 64) * sizeof(uint32_t))
        if known is NULL or order is NULL or fresh is NULL:
            free(known)
            free(order)
            free(fresh)
            raise MemoryError
        with nogil:
            for i in range(slots.shape[0]):
                known[slots[i]] = 1
                if self.offs[slots[i]] != DROPPED:
                    order[k] = slots[i]
                    k += 1
            self.fresh_room = self.ordered + self.unsorted_count + 64
            self.order_room = slots.shape[0] + 64
            i = self.rest_of(self.order, self.ordered, known, fresh, 0)
            self.unsorted_count = self.rest_of(self.fresh, self.unsorted_count, known, fresh, i)
            self.ordered = k
            free(self.order)
            free(self.fresh)
            self.order, self.fresh = order, fresh
        free(known)
        self.collect_spares()

    # --- Without the GIL

    cdef int64_t rest_of(
        self, uint32_t *slots, int64_t count, const uint8_t *known, uint32_t *out, int64_t k
    ) noexcept nogil:
        cdef int64_t i
        for i in range(count):
            if not known[slots[i]]:
                out[k] = slots[i]
                k += 1
        return k

    cdef int64_t look_ahead(self, int64_t at) noexcept nogil:
        """Fetch what the next records will touch, all at once; return where they end.

        Finding a key takes three reads that wait for one another: its place in the table, its slot, its record.
        For one record after the other that is most of the time.  Hints only: nothing is changed here.
        """
        cdef uint64_t[AHEAD] hashes
        cdef int64_t[AHEAD] found
        cdef uint64_t place
        cdef int64_t n = 0, i
        cdef Rec r
        while n < AHEAD and at < self.size and parse(self.data, self.size, at, False, &r) == CLEAN:
            at += r.total
            if r.kind != CURSOR:
                hashes[n] = siphash(SECRET, self.data + r.key, r.key_len)
                fetch(&self.table.places[table_home(&self.table, hashes[n])])
                n += 1
        for i in range(n):
            place = table_home(&self.table, hashes[i])
            while self.table.places[place] and self.table.places[place] >> 32 != hashes[i] >> 32:
                place = (place + 1) & self.table.mask
            found[i] = table_slot(&self.table, place)
            if found[i] >= 0:
                fetch(&self.offs[found[i]])
        for i in range(n):
            if found[i] >= 0 and 0 <= self.offs[found[i]] < self.size:
                fetch(self.data + self.offs[found[i]])
                fetch(self.data + self.offs[found[i]] + 64)
                fetch(self.data + self.offs[found[i]] + 128)
        return at

    cdef bint replay(self, int64_t at, Rec *r) noexcept nogil:
        cdef uint64_t hashed, place
        cdef uint32_t slot
        if r.kind == CURSOR:
            self.cursors += 1
            if self.token_len:
                self.redundant = True
            memcpy(self.token, self.data + r.version, r.version_len)
            self.token_len = <int>r.version_len
            return True
        hashed = siphash(SECRET, self.data + r.key, r.key_len)
        if self.probe(self.data + r.key, r.key_len, hashed, &place):
            slot = <uint32_t>table_slot(&self.table, place)
            self.redundant = True
            self.account(self.offs[slot], False)
            if r.kind == PUT:
                self.offs[slot] = at
                self.account(at, True)
            else:
                self.offs[slot] |= DEAD
                table_remove(&self.table, place)
            return True
        if r.kind == DELETE:
            self.redundant = True
            return True
        return self.insert(at, hashed)

    cdef void account(self, int64_t at, bint add) noexcept nogil:
        """Add a put record to the sums, or take it out of them."""
        cdef int64_t room = self.size - at, total = 7 + key_length(self.data, self.size, at) + 4
        cdef uint64_t hashed[2]
        if total <= room:  # it was whole when it was indexed: if it is not now, someone writes to the file
            total += <int64_t>get32(self.data + at + total - 4)
        if total < room:
            total += 1 + get8(self.data + at + total)
        if total > room:
            total = room
        murmur(self.data + at + 5, total - 5, hashed)
        if add:
            self.count += 1
            self.live_bytes += total
            self.low += hashed[0]
            self.high += hashed[1] + (self.low < hashed[0])
        else:
            self.count -= 1
            self.live_bytes -= total
            self.high -= hashed[1] + (self.low < hashed[0])
            self.low -= hashed[0]

    cdef bint probe(self, const uint8_t *key, int64_t n, uint64_t hashed, uint64_t *place) noexcept nogil:
        """Find a key in the table; ``place`` is where it is, or where it would go."""
        cdef uint64_t i = table_home(&self.table, hashed)
        cdef int64_t at
        while self.table.places[i]:
            if self.table.places[i] >> 32 == hashed >> 32:
                at = self.offs[table_slot(&self.table, i)]
                if get16(self.data + at + 5) == n and n <= self.size - at - 7 and not memcmp(self.data + at + 7, key, n):
                    place[0] = i
                    return True
            i = (i + 1) & self.table.mask
            self.collisions += 1
        place[0] = i
        return False

    cdef bint insert(self, int64_t at, uint64_t hashed) noexcept nogil:
        """Give a new key its slot."""
        cdef uint32_t slot
        cdef void *array
        if not table_grow(&self.table, self.count + 1):
            return False
        if self.spares:
            self.spares -= 1
            slot = self.spare[self.spares]
        else:
            array = grown(self.offs, self.slots, &self.slots_room, sizeof(int64_t))
            if array is NULL:
                return False
            self.offs = <int64_t *>array
            slot = <uint32_t>self.slots
            self.slots += 1
        self.offs[slot] = at
        if not self.unsorted_count and (
            not self.ordered
            or compare_keys(self.data, self.size, self.offs[self.order[self.ordered - 1]] & ~DEAD, at) < 0
        ):
            array = grown(self.order, self.ordered, &self.order_room, sizeof(uint32_t))
            if array is NULL:
                return False
            self.order = <uint32_t *>array
            self.order[self.ordered] = slot
            self.ordered += 1
        else:
            array = grown(self.fresh, self.unsorted_count, &self.fresh_room, sizeof(uint32_t))
            if array is NULL:
                return False
            self.fresh = <uint32_t *>array
            self.fresh[self.unsorted_count] = slot
            self.unsorted_count += 1
        table_add(&self.table, hashed, slot)
        self.account(at, True)
        return True

    cdef int64_t bound(self, const uint8_t *prefix, int64_t n, int64_t low, int64_t high, bint above) noexcept nogil:
        """Return the first place in order that is not below the prefix, or that is above it."""
        cdef int64_t mid
        cdef int order
        while low < high:
            mid = (low + high) // 2
            order = compare_prefix(self.data, self.size, self.offs[self.order[mid]] & ~DEAD, prefix, n)
            if order < 0 or (above and order == 0):
                low = mid + 1
            else:
                high = mid
        return low

    cdef void prune(self) noexcept:
        """Take the slots of deleted keys out of both lists."""
        self.ordered = self.without_dead(self.order, self.ordered)
        self.unsorted_count = self.without_dead(self.fresh, self.unsorted_count)

    cdef int64_t without_dead(self, uint32_t *slots, int64_t count) noexcept nogil:
        cdef int64_t i, k = 0
        for i in range(count):
            if self.offs[slots[i]] < DEAD:
                slots[k] = slots[i]
                k += 1
            else:
                self.offs[slots[i]] = DROPPED
        return k

    cdef int collect_spares(self) except -1:
        """Make every slot that no list holds free for new keys."""
        cdef int64_t i
        cdef void *array
        self.prune()
        self.spares = 0
        self.generation += 1
        for i in range(self.slots):
            if self.offs[i] == DROPPED:
                array = grown(self.spare, self.spares, &self.spare_room, sizeof(uint32_t))
                if array is NULL:
                    raise MemoryError
                self.spare = <uint32_t *>array
                self.spare[self.spares] = <uint32_t>i
                self.spares += 1
        return 0
