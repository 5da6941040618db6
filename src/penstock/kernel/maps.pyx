# cython: language_level=3, boundscheck=False, wraparound=False
"""A piece of a file in memory, for as long as anyone looks at it.

Unlike the standard library's mmap this one may reach past the end of the file: a log grows region
by region under a mapping made once.  Whoever uses it keeps to the bytes that the file has, because
touching the others is a SIGBUS; no view of them is ever handed out.  The mapping goes away with the
last view, and works on after the file was unlinked.

A file that someone else cuts short while it is mapped would end the process at the next touch of what is gone.  So SIGBUS in
a mapping of ours puts a page of zeros there, which nobody else sees, and sets ``torn``: whoever uses the mapping looks at that after
its work and raises.  A SIGBUS elsewhere goes to whoever handled it before.
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

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <errno.h>
    #include <pthread.h>
    #include <signal.h>
    #include <stdint.h>
    #include <string.h>
    #include <sys/mman.h>
    #include <unistd.h>

    enum { PK_PLACES = 1 << 16 };
    /* base is stored last and cleared first: the handler takes no lock */
    static struct { uintptr_t base; size_t length; int *torn; int writable; const void *head; size_t head_length; } pk_maps[PK_PLACES];
    static int pk_free[PK_PLACES], pk_freed, pk_top;
    static pthread_mutex_t pk_maps_lock = PTHREAD_MUTEX_INITIALIZER;
    static struct sigaction pk_before;
    static uintptr_t pk_page;

    /* Puts a page of zeros at ``at``, or one that begins with the bytes of ``head``; whole at once, because other threads may look. */
    static int pk_put_page(void *at, int writable, const void *head, size_t length) {
    #ifdef __linux__
        void *made;
        if (length) {
            made = mmap(NULL, pk_page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (made == MAP_FAILED) return 0;
            memcpy(made, head, length);
            if (!writable) mprotect(made, pk_page, PROT_READ);
            return mremap(made, pk_page, pk_page, MREMAP_MAYMOVE | MREMAP_FIXED, at) != MAP_FAILED;
        }
    #endif
        (void)head; (void)length;
        return mmap(at, pk_page, PROT_READ | (writable ? PROT_WRITE : 0), MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
    }

    static void pk_on_bus(int number, siginfo_t *info, void *context) {
        uintptr_t at = (uintptr_t)info->si_addr;
        int i, kept = errno, top = __atomic_load_n(&pk_top, __ATOMIC_ACQUIRE);
        if (info->si_code == BUS_ADRERR || info->si_code == BUS_OBJERR)
            for (i = 0; i < top; i++) {
                uintptr_t base = __atomic_load_n(&pk_maps[i].base, __ATOMIC_ACQUIRE);
                if (!base || at < base || at - base >= pk_maps[i].length) continue;
                __atomic_store_n(pk_maps[i].torn, 1, __ATOMIC_RELEASE);
                if (!pk_put_page((void *)(at & ~(pk_page - 1)), pk_maps[i].writable, pk_maps[i].head, pk_maps[i].head_length)) break;
                errno = kept;
                return;
            }
        errno = kept;
        if (pk_before.sa_flags & SA_SIGINFO) pk_before.sa_sigaction(number, info, context);
        else if (pk_before.sa_handler == SIG_DFL || pk_before.sa_handler == SIG_IGN) signal(SIGBUS, SIG_DFL); /* and again */
        else pk_before.sa_handler(number);
    }

    static void pk_guard(void) {
        struct sigaction mine;
        pk_page = (uintptr_t)sysconf(_SC_PAGESIZE);
        memset(&mine, 0, sizeof mine);
        mine.sa_sigaction = pk_on_bus;
        mine.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigemptyset(&mine.sa_mask);
        sigaction(SIGBUS, &mine, &pk_before);
    }

    /* Returns a place, or -1 where there are none left: such a mapping is not guarded. */
    static int pk_enter(void *base, size_t length, int writable, int *torn, const void *head, size_t head_length) {
        static int guarded;
        int place = -1;
        pthread_mutex_lock(&pk_maps_lock);
        if (!guarded) { pk_guard(); guarded = 1; }
        if (pk_freed) place = pk_free[--pk_freed];
        else if (pk_top < PK_PLACES) place = pk_top;
        if (place >= 0) {
            pk_maps[place].length = length;
            pk_maps[place].torn = torn;
            pk_maps[place].writable = writable;
            pk_maps[place].head = head;
            pk_maps[place].head_length = head_length < pk_page ? head_length : pk_page;
            __atomic_store_n(&pk_maps[place].base, (uintptr_t)base, __ATOMIC_RELEASE);
            if (place == pk_top) __atomic_store_n(&pk_top, pk_top + 1, __ATOMIC_RELEASE);
        }
        pthread_mutex_unlock(&pk_maps_lock);
        return place;
    }

    static void pk_leave(int place) {
        if (place < 0) return;
        pthread_mutex_lock(&pk_maps_lock);
        __atomic_store_n(&pk_maps[place].base, (uintptr_t)0, __ATOMIC_RELEASE);
        pk_free[pk_freed++] = place;
        pthread_mutex_unlock(&pk_maps_lock);
    }

    static void pk_maps_forked(void) { pthread_mutex_init(&pk_maps_lock, NULL); }
    static void pk_maps_at_fork(void) { pthread_atfork(NULL, NULL, pk_maps_forked); }
    """
    int pk_enter(void *base, size_t length, int writable, int *torn, const void *head, size_t head_length)
    void pk_leave(int place)
    void pk_maps_at_fork()

cdef enum:
    POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; changes no byte

cdef Py_ssize_t PAGE = os.sysconf("SC_PAGE_SIZE")

pk_maps_at_fork()


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
        self.place = pk_enter(base, length, writable, <int *>&self.torn, NULL, 0)

    def __dealloc__(self):
        if self.base is not NULL:
            pk_leave(self.place)
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


cdef class Guard:
    """The same for memory that a library has mapped by itself: a cut of its file shows as ``torn``, not as SIGBUS.

    It is released as soon as the mapping is gone.  ``head`` is how the pages begin that stand in for what is gone, where
    the library would not take zeros.
    """
    cdef int place
    cdef readonly bint torn
    cdef bytes head

    def __cinit__(self, uintptr_t address, size_t length, bint writable=False, bytes head not None=b""):
        self.head = head
        self.place = pk_enter(<void *>address, length, writable, <int *>&self.torn, <const char *>self.head, len(head))

    def release(self):
        """Leave the memory to itself; twice is fine."""
        cdef int place = self.place
        self.place = -1
        pk_leave(place)

    def __dealloc__(self):
        pk_leave(self.place)
