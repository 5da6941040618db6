/* Notes what a process does to the files below TRACE_ROOT: one line in TRACE_FILE for each call, after it returned.

   Loaded with LD_PRELOAD it sees what C code does as well as what Python does.  A line is

       call TAB path TAB other path TAB bytes TAB error number NEWLINE

   and the lines of one thread stand in the order of its calls. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int trace = -1;
static const char *root = "";

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("TRACE_FILE");
    root = getenv("TRACE_ROOT");
    if (path && root) trace = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static void note(const char *call, const char *path, const char *other, long bytes, long result) {
    int before = errno;
    char line[2 * PATH_MAX + 100];
    if (trace < 0 || strncmp(path, root, strlen(root))) return;
    int length = snprintf(line, sizeof line, "%s\t%s\t%s\t%ld\t%d\n", call, path, other, bytes, result < 0 ? before : 0);
    if (REAL(write)(trace, line, (size_t)length) != length) abort();
    errno = before;
}

static void note_fd(const char *call, int fd, long bytes, long result) {
    int before = errno;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length < 0 || trace < 0) return;
    path[length] = 0;
    note(call, path, "", bytes, result);
}

#define ON_FD(call, type, name, parameters, arguments, bytes)                                                           \
    type name parameters {                                                                                             \
        type result = REAL(name) arguments;                                                                            \
        note_fd(call, fd, bytes, (long)result);                                                                        \
        return result;                                                                                                 \
    }

ON_FD("write", ssize_t, write, (int fd, const void *data, size_t count), (fd, data, count), (long)result)
ON_FD("write", ssize_t, pwrite, (int fd, const void *data, size_t count, off_t at), (fd, data, count, at), (long)result)
ON_FD("write", ssize_t, pwrite64, (int fd, const void *data, size_t count, off64_t at), (fd, data, count, at), (long)result)
ON_FD("write", ssize_t, pwritev, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at), (long)result)
ON_FD("write", ssize_t, pwritev64, (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at), (long)result)
ON_FD("truncate", int, ftruncate, (int fd, off_t size), (fd, size), (long)size)
ON_FD("truncate", int, ftruncate64, (int fd, off64_t size), (fd, size), (long)size)
ON_FD("sync", int, fsync, (int fd), (fd), 0)
ON_FD("sync", int, fdatasync, (int fd), (fd), 0)

#define ON_PATHS(call, name, parameters, arguments, path, other)                                                        \
    int name parameters {                                                                                              \
        int result = REAL(name) arguments;                                                                             \
        note(call, path, other, 0, result);                                                                            \
        return result;                                                                                                 \
    }

ON_PATHS("make", mkdir, (const char *path, mode_t mode), (path, mode), path, "")
ON_PATHS("remove", unlink, (const char *path), (path), path, "")
ON_PATHS("remove", unlinkat, (int at, const char *path, int flags), (at, path, flags), path, "")
ON_PATHS("link", link, (const char *one, const char *other), (one, other), one, other)
ON_PATHS("link", linkat, (int a, const char *one, int b, const char *other, int flags), (a, one, b, other, flags), one, other)
ON_PATHS("rename", rename, (const char *one, const char *other), (one, other), one, other)
ON_PATHS("rename", renameat, (int a, const char *one, int b, const char *other), (a, one, b, other), one, other)
ON_PATHS(flags & RENAME_EXCHANGE ? "exchange" : "rename", renameat2,
         (int a, const char *one, int b, const char *other, unsigned flags), (a, one, b, other, flags), one, other)

long syscall(long number, ...) {
    va_list given;
    long a[6];
    va_start(given, number);
    for (int index = 0; index < 6; index++) a[index] = va_arg(given, long);
    va_end(given);
    long result = REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (number == SYS_renameat2) note(a[4] & RENAME_EXCHANGE ? "exchange" : "rename", (char *)a[1], (char *)a[3], 0, result);
    return result;
}
