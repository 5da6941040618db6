# cython: language_level=3
"""Room for a growing file, and a thread for it: the next piece gets its blocks and its pages before it is needed.

Handing out zeroed pages and mapping them is most of what a mapped log costs; a second core can do it while the writer fills the
pages it has, and take back what the writer has left.  ``run`` is that thread: it never takes the GIL, so a busy interpreter does not
hold it up.

Only the owner of the file calls ``ask``, ``settle`` and ``tidy``, and it settles before it changes the file's size or closes it.
"""
from penstock.kernel.maps cimport Mapping

cdef extern from *:
    """
    #include <errno.h>
    #include <fcntl.h>
    #include <pthread.h>
    #include <sys/mman.h>
    #include <sys/stat.h>
    #include <unistd.h>
    #ifdef __linux__
    #include <sys/vfs.h>
    #define PK_POPULATE_WRITE 23 /* MADV_POPULATE_WRITE, Linux 5.14; changes no byte */

    /* Whether bytes that were written once have room for good: these write over them in place. */
    static int pk_in_place(int fd) {
        struct statfs found;
        if (fstatfs(fd, &found)) return 0;
        return found.f_type == 0xEF53 /* ext */ || found.f_type == 0x58465342 /* xfs */ || found.f_type == 0x01021994; /* tmpfs */
    }

    /* The size changes at once: whoever looks at the file meanwhile finds whole pieces. */
    static int pk_write_zeros(int fd, long long offset, long long length) {
        static const unsigned char zeros[1 << 18];
        if (ftruncate(fd, offset + length)) return errno;
        while (length > 0) {
            ssize_t done = pwrite(fd, zeros, length < (long long)sizeof zeros ? (size_t)length : sizeof zeros, offset);
            if (done < 0 && errno == EINTR) continue;
            if (done <= 0) return done ? errno : ENOSPC;
            offset += done;
            length -= done;
        }
        return 0;
    }
    #endif

    /* Returns 0, or an error number and then nothing was changed. */
    static int pk_give_room(int fd, long long offset, long long length) {
    #ifdef __linux__
        struct stat before;
        int failed;
        if (fstat(fd, &before)) return errno;
        if (before.st_size == offset && pk_in_place(fd)) failed = pk_write_zeros(fd, offset, length);
        else failed = posix_fallocate(fd, offset, length);
        if (failed && ftruncate(fd, before.st_size)) {}
        return failed;
    #else
        (void)fd; (void)offset; (void)length;
        return ENOSYS;
    #endif
    }

    static int pk_same_file(int fd) { return fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0); }

    /* All of it takes long for a large file, and no data is touched: pages that are still wanted come back when they are used. */
    static void pk_let_go(unsigned char *at, long long length, int file, int removed) {
        if (madvise(at, (size_t)length, MADV_DONTNEED)) {}
        if (file >= 0) close(file);
        if (removed >= 0) close(removed);
    }

    /* 0: nothing was changed; 1: the file has the bytes; 2: and their pages are mapped */
    static int pk_make_room(int fd, long long offset, long long length, unsigned char *at) {
    #ifdef __linux__
        struct stat before;
        if (fstat(fd, &before) || before.st_size != offset || pk_give_room(fd, offset, length)) return 0;
        return madvise(at, (size_t)length, PK_POPULATE_WRITE) ? 1 : 2;
    #else
        (void)fd; (void)offset; (void)length; (void)at;
        return 0;
    #endif
    }
    """
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *lock, void *how) nogil
    int pthread_mutex_lock(pthread_mutex_t *lock) nogil
    int pthread_mutex_unlock(pthread_mutex_t *lock) nogil
    int pthread_cond_init(pthread_cond_t *changed, void *how) nogil
    int pthread_cond_wait(pthread_cond_t *changed, pthread_mutex_t *lock) nogil
    int pthread_cond_broadcast(pthread_cond_t *changed) nogil
    int pk_give_room(int fd, long long offset, long long length) nogil
    int make_room "pk_make_room"(int fd, long long offset, long long length, unsigned char *at) nogil
    int same_file "pk_same_file"(int fd) nogil
    void let_go "pk_let_go"(unsigned char *at, long long length, int file, int removed) nogil

cdef enum:
    IDLE = 0
    ASKED = 1
    WORKING = 2
    ENDED = 3


def give_room(int fd, long long offset, long long length):
    """Give those bytes of a file room on the device; return 0, or an error number and nothing was changed.

    Where a file grows on a file system that overwrites in place, zeros are written: they are in the page cache then, and
    storing to them through a mapping asks the file system for nothing.  Elsewhere, and for holes, it is fallocate, which
    also holds where writing again needs new room (copy on write).
    """
    cdef int failed
    with nogil:
        failed = pk_give_room(fd, offset, length)
    return failed


cdef class Ahead:
    """One request at a time: IDLE → ASKED → WORKING → IDLE, and ENDED from anywhere.  Tidying waits until there is none."""

    cdef pthread_mutex_t lock
    cdef pthread_cond_t changed
    cdef int state
    cdef int made
    cdef int fd
    cdef long long offset
    cdef long long length
    cdef unsigned char *at
    cdef Mapping window  # keeps the pages mapped while the thread works on them
    cdef bint untidy
    cdef Mapping left    # the same for the window that was left
    cdef unsigned char *left_at
    cdef long long left_length
    cdef int file        # the last descriptors of the file that was left, and of one that has no name; or -1
    cdef int removed

    def __cinit__(self):
        pthread_mutex_init(&self.lock, NULL)
        pthread_cond_init(&self.changed, NULL)

    def run(self):
        """Serve requests until ``end``; the body of a thread."""
        cdef int made
        with nogil:
            pthread_mutex_lock(&self.lock)
            while True:
                if self.state == ASKED:
                    self.state = WORKING
                    pthread_mutex_unlock(&self.lock)
                    made = make_room(self.fd, self.offset, self.length, self.at)
                    pthread_mutex_lock(&self.lock)
                    self.made = made
                    if self.state == WORKING:
                        self.state = IDLE
                    pthread_cond_broadcast(&self.changed)
                elif self.untidy:
                    pthread_mutex_unlock(&self.lock)
                    let_go(self.left_at, self.left_length, self.file, self.removed)
                    pthread_mutex_lock(&self.lock)
                    self.untidy = False
                elif self.state == ENDED:
                    break
                else:
                    pthread_cond_wait(&self.changed, &self.lock)
            pthread_mutex_unlock(&self.lock)

    def ask(self, int fd, long long offset, Mapping window not None, Py_ssize_t start, Py_ssize_t length):
        """Have the file grow by ``length`` bytes at ``offset``, its end, which are at ``start`` of the window."""
        if not window.writable or start < 0 or length <= 0 or start > window.length - length:
            raise ValueError(f"cannot make room at {start}..{start + length} of {window.length}")
        self.settle()
        with nogil:
            pthread_mutex_lock(&self.lock)
        if self.state == IDLE:
            self.fd, self.offset, self.length = fd, offset, length
            self.window, self.at = window, window.base + start
            self.made = 0
            self.state = ASKED
        if not self.untidy:
            self.left = None
        with nogil:
            pthread_cond_broadcast(&self.changed)
            pthread_mutex_unlock(&self.lock)

    def tidy(self, Mapping window not None, int file=-1, int removed=-1):
        """Let the thread give back the pages of a window that was left, and be the last to close those two files.

        The caller closes its own descriptors at once.  While the thread is at an earlier window nothing is taken over.
        """
        with nogil:
            pthread_mutex_lock(&self.lock)
        if not self.untidy and self.state != ENDED:
            self.left, self.left_at, self.left_length = window, window.base, window.length
            self.file, self.removed = same_file(file), same_file(removed)
            self.untidy = True
        with nogil:
            pthread_cond_broadcast(&self.changed)
            pthread_mutex_unlock(&self.lock)

    def settle(self):
        """Return what became of the request: 0 nothing, 1 the file has the bytes, 2 and they are mapped.

        A request that was not begun is taken back; one that was is waited for.
        """
        with nogil:
            pthread_mutex_lock(&self.lock)
            if self.state == ASKED:
                self.state = IDLE
            while self.state == WORKING:
                pthread_cond_wait(&self.changed, &self.lock)
            pthread_mutex_unlock(&self.lock)
        return self.made

    def end(self):
        """Let the thread go."""
        self.settle()
        with nogil:
            pthread_mutex_lock(&self.lock)
            self.state = ENDED
            pthread_cond_broadcast(&self.changed)
            pthread_mutex_unlock(&self.lock)
        self.window = None
