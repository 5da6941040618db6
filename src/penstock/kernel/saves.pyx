# cython: language_level=3
"""Many small files replaced at once: what disk/atomic does step by step, side by side on threads without the GIL.

A save waits for the device twice.  Waiting for many devices' answers at once is what threads are for, but threads of
Python also wait for each other; these touch no object.  They live as long as the call.
"""
from libc.stdlib cimport calloc, free

cdef extern from *:
    """
    #include <errno.h>
    #include <fcntl.h>
    #include <pthread.h>
    #include <stdio.h>
    #include <sys/syscall.h>
    #include <unistd.h>

    typedef struct {
        const char *path, *temporary, *spare, *folder; /* no spare: NULL */
        const char *data;
        size_t length;
        int reuse;
        int failed; /* an error number, 0 if all went well */
    } pk_save;

    typedef struct {
        pk_save *saves;
        long count, next;
    } pk_saves;

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
        if (save->reuse) fd = open(written, O_RDWR | O_CLOEXEC);
        if (fd < 0) {
            if (save->reuse && errno != ENOENT) return errno;
            written = save->temporary;
            fd = open(written, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
            if (fd < 0 && errno == EEXIST && !unlink(written)) fd = open(written, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
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

    static void *pk_save_next(void *given) {
        pk_saves *all = given;
        for (;;) {
            long at = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED);
            if (at >= all->count) return NULL;
            all->saves[at].failed = pk_save_one(all->saves + at);
        }
    }

    static void pk_save_many(pk_save *saves, long count) {
        pk_saves all = {saves, count, 0};
        pthread_t others[63];
        int begun = 0;
        while (begun < 63 && begun + 1 < count && !pthread_create(&others[begun], NULL, pk_save_next, &all)) begun++;
        pk_save_next(&all); /* this thread too: it goes on alone if no other could be had */
        while (begun) pthread_join(others[--begun], NULL);
    }
    """
    ctypedef struct pk_save:
        const char *path
        const char *temporary
        const char *spare
        const char *folder
        const char *data
        size_t length
        int reuse
        int failed
    void pk_save_many(pk_save *saves, long count) nogil


def save_many(list saves not None):
    """Replace many files; return an error number for each, 0 where it is durable.

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
            all[index].reuse = 1 if reuse else 0
        with nogil:
            pk_save_many(all, count)
        return [all[index].failed for index in range(count)]
    finally:
        free(all)
