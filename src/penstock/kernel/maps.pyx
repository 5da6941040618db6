# cython: language_level=3, boundscheck=False, wraparound=False
"""A piece of a file in memory, for as long as anyone looks at it.

Unlike the standard library's mmap this one may reach past the end of the file: a log grows region
by region under a mapping made once.  Whoever uses it keeps to the bytes that the file has, because
touching the others is a SIGBUS; no view of them is ever handed out.  The mapping goes away with the
last view, and works on after the file was unlinked.
"""
from cpython.buffer cimport PyBuffer_FillInfo
from libc.errno cimport errno
from libc.stdint cimport uintptr_t

import os

cdef extern from "sys/mman.h" nogil:
    void *mmap(void *addr, size_t length, int prot, int flags, int fd, long offset)
    int munmap(void *addr, size_t length)
    int msync(void *addr, size_t length, int flags)
    int madvise(void *addr, size_t length, int advice)
    int PROT_READ
    int PROT_WRITE
    int MAP_SHARED
    int MS_SYNC
    void *MAP_FAILED

cdef enum:
    POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; changes no byte

cdef Py_ssize_t PAGE = os.sysconf("SC_PAGE_SIZE")


cdef class Mapping:
    def __cinit__(self, int fd, Py_ssize_t offset, Py_ssize_t length, bint writable=False):
        cdef void *base
        if offset < 0 or length <= 0 or offset % PAGE:
            raise ValueError(f"cannot map {length} bytes at {offset}")
        base = mmap(NULL, length, PROT_READ | (PROT_WRITE if writable else 0), MAP_SHARED, fd, offset)
        if base == MAP_FAILED:
            raise OSError(errno, os.strerror(errno))
        self.base = <unsigned char *>base
        self.length = length
        self.writable = writable

    def __dealloc__(self):
        if self.base is not NULL:
            munmap(self.base, self.length)

    def __len__(self):
        return self.length

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.base, self.length, not self.writable, flags)

    def sync(self, Py_ssize_t start, Py_ssize_t stop):
        """Write the bytes from start to stop to the device and wait for it."""
        cdef int failed
        cdef Py_ssize_t first = start - start % PAGE
        if not 0 <= start <= stop <= self.length:
            raise ValueError(f"cannot sync {start}..{stop} of {self.length} bytes")
        with nogil:
            failed = msync(self.base + first, stop - first, MS_SYNC) if stop > first else 0
        if failed:
            raise OSError(errno, os.strerror(errno))

    def populate(self, Py_ssize_t start, Py_ssize_t stop):
        """Fault the pages of start..stop in for writing, all at once; False where it cannot be done."""
        cdef int failed
        cdef Py_ssize_t first = start - start % PAGE
        if not 0 <= start <= stop <= self.length:
            raise ValueError(f"cannot populate {start}..{stop} of {self.length} bytes")
        with nogil:
            failed = madvise(self.base + first, stop - first, POPULATE_WRITE) if stop > first else 0
        return not failed
