# cython: language_level=3
"""Many small files at once: replaced, which is what disk/atomic does step by step, or read.

A save waits for the device twice.  Waiting for many answers of a device at once is what threads are for, but threads of
Python also wait for each other, at every system call; these touch no object.  They live as long as the call.
"""
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdlib cimport calloc, free

cdef extern from *:
    """
    #include <errno.h>
    #include <fcntl.h>
    #include <pthread.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <sys/stat.h>
    #include <sys/syscall.h>
    #include <unistd.h>

    /* A file, never what a link leads to, and no wait for the other end of a pipe. */
    #define PK_PLAIN (O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY)

    static int pk_is_file(int fd) {
        struct stat found;
        return !fstat(fd, &found) && S_ISREG(found.st_mode);
    }

    /* --- Side by side */

    typedef struct {
        void (*one)(void *all, long at);
        void *all;
        long count, next;
    } pk_work;

    static void *pk_work_next(void *given) {
        pk_work *work = given;
        for (;;) {
            long at = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
            if (at >= work->count) return NULL;
            work->one(work->all, at);
        }
    }

    /* Do them all on up to 64 threads, each of which has at least `share` of them to begin with. */
    static void pk_side_by_side(void (*one)(void *, long), void *all, long count, long share) {
        pk_work work = {one, all, count, 0};
        pthread_t others[63];
        int begun = 0;
        while (begun < 63 && (begun + 1) * share < count && !pthread_create(&others[begun], NULL, pk_work_next, &work)) begun++;
        pk_work_next(&work); /* this thread too: it goes on alone if no other could be had */
        while (begun) pthread_join(others[--begun], NULL);
    }

    /* --- Replacing files */

    typedef struct {
        const char *path, *temporary, *spare, *folder; /* no spare: NULL */
        const char *data;
        size_t length;
        int reuse;
        mode_t mode;
        int failed; /* an error number, 0 if all went well */
    } pk_save;

    static int pk_exchange(const char *one, const char *other) {
    #if defined(__linux__) && defined(SYS_renameat2)
        return syscall(SYS_renameat2, AT_FDCWD, one, AT_FDCWD, other, 2) ? errno : 0; /* RENAME_EXCHANGE */
    #else
        (void)one; (void)other;
        return ENOSYS;
    #endif
    }

    static int pk_write_all(int fd, const char *data, size_t length) {
        size_t at = 0;
        while (at < length) {
            ssize_t done = pwrite(fd, data + at, length - at, (off_t)at);
            if (done < 0 && errno == EINTR) continue;
            if (done <= 0) return done ? errno : ENOSPC;
            at += (size_t)done;
        }
        return 0;
    }

    static int pk_put(const char *written, const pk_save *save) {
        if (save->spare) {
            int failed = pk_exchange(written, save->path);
            if (!failed) {
                if (written != save->spare && rename(written, save->spare)) {}
                return 0;
            }
            if (failed != ENOENT && failed != EINVAL && failed != ENOSYS && failed != EOPNOTSUPP) return failed;
        }
        return rename(written, save->path) ? errno : 0;
    }

    /* New bytes, sync, rename, sync of the folder: in this order, and nothing is left behind of one that fails before its rename. */
    static int pk_save_one(const pk_save *save) {
        const char *written = save->spare;
        int failed, fd = -1;
        if (save->reuse) fd = open(written, O_RDWR | PK_PLAIN);
        if (fd >= 0 && !pk_is_file(fd)) {
            close(fd);
            return EINVAL;
        }
        if (fd < 0) {
            if (save->reuse && errno != ENOENT) return errno;
            written = save->temporary;
            fd = open(written, O_RDWR | O_CREAT | O_EXCL | PK_PLAIN, save->mode);
            if (fd < 0 && errno == EEXIST && !unlink(written)) fd = open(written, O_RDWR | O_CREAT | O_EXCL | PK_PLAIN, save->mode);
            if (fd < 0) return errno;
        }
        failed = pk_write_all(fd, save->data, save->length);
        if (!failed && save->reuse && ftruncate(fd, (off_t)save->length)) failed = errno;
        if (!failed && fdatasync(fd)) failed = errno;
        close(fd);
        if (!failed) failed = pk_put(written, save);
        if (failed) {
            unlink(written);
            return failed;
        }
        fd = open(save->folder, O_RDONLY | O_CLOEXEC);
        if (fd < 0) return errno;
        if (fsync(fd)) failed = errno;
        close(fd);
        return failed;
    }

    static void pk_save_at(void *all, long at) {
        pk_save *save = (pk_save *)all + at;
        save->failed = pk_save_one(save);
    }

    static void pk_save_many(pk_save *saves, long count) { pk_side_by_side(pk_save_at, saves, count, 1); }

    /* --- Looking at files and reading them */

    typedef struct {
        const char *path;
        size_t most;
        char *data; /* NULL: not read */
        size_t length; /* of the data; where it was only looked: 1 if there is such a file */
    } pk_read;

    static void pk_read_at(void *all, long at) {
        pk_read *file = (pk_read *)all + at;
        struct stat found;
        int fd = open(file->path, O_RDONLY | PK_PLAIN);
        if (fd < 0) return;
        if (!fstat(fd, &found) && S_ISREG(found.st_mode) && (size_t)found.st_size <= file->most)
            file->data = malloc((size_t)found.st_size + 1);
        while (file->data && file->length < (size_t)found.st_size) {
            ssize_t done = read(fd, file->data + file->length, (size_t)found.st_size - file->length);
            if (done < 0 && errno == EINTR) continue;
            if (done < 0) {
                free(file->data);
                file->data = NULL;
            }
            if (done <= 0) break;
            file->length += (size_t)done;
        }
        close(fd);
    }

    static void pk_look_at(void *all, long at) {
        pk_read *file = (pk_read *)all + at;
        struct stat found;
        file->length = !stat(file->path, &found);
    }

    static void pk_look_many(pk_read *files, long count) { pk_side_by_side(pk_look_at, files, count, 64); }

    static void pk_read_many(pk_read *files, long count) { pk_side_by_side(pk_read_at, files, count, 32); }
    """
    ctypedef struct pk_save:
        const char *path
        const char *temporary
        const char *spare
        const char *folder
        const char *data
        size_t length
        int reuse
        int mode
        int failed
    void pk_save_many(pk_save *saves, long count) nogil
    ctypedef struct pk_read:
        const char *path
        size_t most
        char *data
        size_t length
    void pk_look_many(pk_read *files, long count) nogil
    void pk_read_many(pk_read *files, long count) nogil


def save_many(list saves not None, int mode):
    """Replace many files; return an error number for each, 0 where it is durable.  New files get that mode.

    A save is a tuple of bytes ``(path, temporary, spare, folder, data)`` and whether the spare may be written to.
    """
    cdef long count = len(saves), index
    cdef pk_save *all = <pk_save *>calloc(count or 1, sizeof(pk_save))
    cdef bytes path, temporary, spare, folder, data
    if all is NULL:
        raise MemoryError
    try:
        for index in range(count):
            path, temporary, spare, folder, data, reuse = saves[index]
            all[index].path, all[index].temporary, all[index].folder = path, temporary, folder
            all[index].spare = <const char *>spare if spare else NULL
            all[index].data, all[index].length = data, len(data)
            all[index].reuse, all[index].mode = 1 if reuse else 0, mode
        with nogil:
            pk_save_many(all, count)
        return [all[index].failed for index in range(count)]
    finally:
        free(all)


def exist_many(list paths not None):
    """Return for each path whether something is there; False also where it cannot be known."""
    cdef long count = len(paths), index
    cdef pk_read *all = <pk_read *>calloc(count or 1, sizeof(pk_read))
    cdef bytes path
    if all is NULL:
        raise MemoryError
    try:
        for index in range(count):
            path = paths[index]
            all[index].path = path
        with nogil:
            pk_look_many(all, count)
        return [all[index].length != 0 for index in range(count)]
    finally:
        free(all)


def read_many(list paths not None, size_t most):
    """Return the bytes of files that have at most ``most``; None in place of one that is larger or cannot be read."""
    cdef long count = len(paths), index
    cdef pk_read *all = <pk_read *>calloc(count or 1, sizeof(pk_read))
    cdef bytes path
    if all is NULL:
        raise MemoryError
    try:
        for index in range(count):
            path = paths[index]
            all[index].path, all[index].most = path, most
        with nogil:
            pk_read_many(all, count)
        return [
            None if all[index].data is NULL else PyBytes_FromStringAndSize(all[index].data, <Py_ssize_t>all[index].length)
            for index in range(count)
        ]
    finally:
        for index in range(count):
            free(all[index].data)
        free(all)
