# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The end of a queue's newest segment in memory: a send is a few stores, and no system call.

    … frame frame | FF FF FF FF | room …
                  ^ end

Behind the last frame stand four bytes 0xFF: the length of a frame that no file holds.  To a reader, to whoever recovers the
file, and to the original, that is a frame cut short, so what lies behind is never taken for messages.  A frame is stored
behind-first: the next mark, the payload, its checksum, and last, in release order, its length over the old mark.  Whatever
instruction the process dies at, the file is whole up to the last length that was stored.

Everything here runs with the GIL, which is its lock.  The bytes it stores to have their room on the device.
Little-endian hosts only.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from penstock.kernel.crc cimport crc32, crc_init
from penstock.kernel.maps cimport Mapping

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    #ifdef __linux__
    #include <sys/vfs.h>
    /* Whether bytes that were written once have room for good: these write over them in place. */
    static int pk_overwrites(int fd) {
        struct statfs found;
        if (fstatfs(fd, &found)) return 0;
        return found.f_type == 0xEF53 /* ext */ || found.f_type == 0x58465342 /* xfs */ || found.f_type == 0x01021994; /* tmpfs */
    }
    #else
    static int pk_overwrites(int fd) { (void)fd; return 0; }
    #endif
    /* One store of four bytes, after everything before it; the address need not be aligned. */
    static inline void pk_publish(unsigned char *p, uint32_t length) {
        uint32_t big = __builtin_bswap32(length);
        __atomic_thread_fence(__ATOMIC_RELEASE);
        memcpy(p, &big, 4);
        __asm__ __volatile__("" ::: "memory");
    }
    static inline void pk_put32(unsigned char *p, uint32_t v) {
        uint32_t big = __builtin_bswap32(v);
        memcpy(p, &big, 4);
    }
    """
    int pk_overwrites(int fd) nogil
    void pk_publish(unsigned char *p, uint32_t length) noexcept nogil
    void pk_put32(unsigned char *p, uint32_t v) noexcept nogil

cdef enum:
    HEAD = 8
    MARK = 4
    SECTOR = 512
    SLOT = 64

crc_init()


def overwrites(int fd):
    """Whether stores to bytes that were written before can never find the device full: ext, XFS, tmpfs."""
    return bool(pk_overwrites(fd))


cdef class Tail:
    """The end of one segment.  ``append`` works while it is armed; whoever changes the file disarms it first."""

    cdef Mapping _map
    cdef Py_ssize_t _at
    cdef Py_ssize_t _longest
    cdef int64_t _full
    cdef readonly int64_t end
    cdef public bint armed

    def __cinit__(self, Mapping map not None, Py_ssize_t at, int64_t end, int64_t full, Py_ssize_t longest):
        if not 0 <= at <= map.length - MARK:
            raise ValueError(f"the end at {at} is not inside a map of {map.length} bytes")
        self._map, self._at, self.end, self._full, self._longest = map, at, end, full, longest
        self.armed = False

    def append(self, payload):
        """Store one message and return its position; -1, and nothing happened, if that is not to be done here."""
        cdef Py_buffer view
        cdef int64_t position
        if not self.armed:
            return -1
        if PyBytes_CheckExact(payload):
            return self._store(<const unsigned char *>PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload))
        PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE)
        try:
            position = self._store(<const unsigned char *>view.buf, view.len) if self.armed else -1
        finally:
            PyBuffer_Release(&view)
        return position

    cdef int64_t _store(self, const unsigned char *payload, Py_ssize_t length) noexcept:
        cdef int64_t position = self.end
        cdef unsigned char *at = self._map.base + self._at
        if length > self._longest or position >= self._full or length > self._map.length - self._at - HEAD - MARK:
            return -1
        memset(at + HEAD + length, 0xFF, MARK)
        if length:
            memcpy(at + HEAD, payload, length)
        pk_put32(at + 4, crc32(0, at + HEAD, length))
        pk_publish(at, <uint32_t>length)
        self._at += HEAD + length
        self.end = position + HEAD + length
        return position

    def put(self, const unsigned char[::1] run not None):
        """Store whole frames, all of them visible at once; False, and nothing happened, where they do not fit."""
        cdef Py_ssize_t size = run.shape[0]
        cdef unsigned char *at = self._map.base + self._at
        cdef uint32_t first
        if size < HEAD or size > self._map.length - self._at - MARK:
            return False
        memset(at + size, 0xFF, MARK)
        memcpy(at + MARK, &run[MARK], size - MARK)
        memcpy(&first, &run[0], 4)
        pk_publish(at, swapped(first))
        self._at += size
        self.end += size
        return True


cdef inline uint32_t swapped(uint32_t v) noexcept nogil:
    return ((v & 0xFF) << 24) | ((v & 0xFF00) << 8) | ((v >> 8) & 0xFF00) | (v >> 24)


cdef class Slots:
    """The two slots of a cursor's register (log/sidecar.py) in memory: moving a cursor is a store of 64 bytes."""

    cdef Mapping _map
    cdef uint64_t _generation
    cdef unsigned char _owner[16]
    cdef unsigned char _seen[16]

    def __cinit__(self, Mapping map not None, uint64_t generation, bytes owner not None):
        if map.length < SECTOR + SLOT or PyBytes_GET_SIZE(owner) != 16:
            raise ValueError("a register has two sectors, and an owner 16 bytes")
        self._map, self._generation = map, generation
        memcpy(self._owner, PyBytes_AS_STRING(owner), 16)
        memset(self._seen, 0, 16)

    def note(self, bytes seen not None):
        """Keep the fingerprint of a record before the position, for the slots that are written from now on."""
        if PyBytes_GET_SIZE(seen) != 16:
            raise ValueError("a fingerprint has 16 bytes")
        memcpy(self._seen, PyBytes_AS_STRING(seen), 16)

    def write(self, uint64_t position):
        """Overwrite the older slot; one that is torn by a kill leaves the other."""
        cdef unsigned char slot[SLOT]
        cdef uint32_t crc
        self._generation += 1
        memcpy(slot, b"PNSTKRG1", 8)
        memcpy(slot + 8, &self._generation, 8)
        memcpy(slot + 16, &position, 8)
        memcpy(slot + 24, self._owner, 16)
        memcpy(slot + 40, self._seen, 16)
        memset(slot + 56, 0, 4)
        crc = crc32(0, slot, SLOT - 4)
        memcpy(slot + SLOT - 4, &crc, 4)
        memcpy(self._map.base + self._generation % 2 * SECTOR, slot, SLOT)
