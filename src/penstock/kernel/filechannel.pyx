# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The hot loops of a filechannel: making frames, and walking them.

    frame, big-endian := length:u32 crc32(payload):u32 payload

No I/O, no policy.  twin/filechannel.py has the same functions in Python.  Everything that is long runs without
the GIL; payload objects are held by a list of their own meanwhile.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from penstock.kernel.crc cimport crc32, crc_init

from penstock.errors import OptionsError

cdef enum:
    HEAD = 8

# Why a scan stopped: the same numbers as in twin/filechannel.py, with their meaning in format.Stop.
cdef enum:
    LIMIT = 0
    END = 1
    SHORT = 2
    BAD_CRC = 3

cdef int64_t LARGEST = 0xFFFFFFFF

crc_init()


cdef inline uint32_t get_be32(const unsigned char *p) noexcept nogil:
    return (<uint32_t>p[0] << 24) | (<uint32_t>p[1] << 16) | (<uint32_t>p[2] << 8) | p[3]


cdef inline void put_be32(unsigned char *p, uint32_t v) noexcept nogil:
    p[0] = v >> 24
    p[1] = (v >> 16) & 0xFF
    p[2] = (v >> 8) & 0xFF
    p[3] = v & 0xFF


cdef inline unsigned char *put_frame(unsigned char *at, const unsigned char *payload, Py_ssize_t length) noexcept nogil:
    put_be32(at, <uint32_t>length)
    put_be32(at + 4, crc32(0, payload, length))
    if length:
        memcpy(at + HEAD, payload, length)
    return at + HEAD + length


cdef inline int check_length(Py_ssize_t length) except -1:
    if length > LARGEST:
        raise OptionsError(f"a message of {length} bytes is too large: a frame holds at most 4294967295")
    return 0


def encode_frame(payload):
    """Return the frame of one payload."""
    cdef Py_buffer view
    if PyBytes_CheckExact(payload):
        check_length(PyBytes_GET_SIZE(payload))
        frame = PyBytes_FromStringAndSize(NULL, HEAD + PyBytes_GET_SIZE(payload))
        put_frame(
            <unsigned char *>PyBytes_AS_STRING(frame), <const unsigned char *>PyBytes_AS_STRING(payload),
            PyBytes_GET_SIZE(payload),
        )
        return frame
    PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE)
    try:
        check_length(view.len)
        frame = PyBytes_FromStringAndSize(NULL, HEAD + view.len)
        put_frame(<unsigned char *>PyBytes_AS_STRING(frame), <const unsigned char *>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    return frame


def encode_list(list payloads not None, int64_t[::1] ends not None):
    """Return the frames of all payloads in one run; ends gets where each one ends in it."""
    cdef Py_ssize_t i, count, total = 0, length
    cdef const unsigned char **starts
    cdef unsigned char *at
    cdef list items = [item if PyBytes_CheckExact(item) else bytes(memoryview(item)) for item in payloads]
    count = PyList_GET_SIZE(items)
    if ends.shape[0] != count:
        raise ValueError("ends must have one place for each payload")
    starts = <const unsigned char **>malloc((count + 1) * sizeof(void *))
    if starts is NULL:
        raise MemoryError
    try:
        for i in range(count):
            length = PyBytes_GET_SIZE(<object>PyList_GET_ITEM(items, i))
            check_length(length)
            starts[i] = <const unsigned char *>PyBytes_AS_STRING(<object>PyList_GET_ITEM(items, i))
            total += HEAD + length
            ends[i] = total
        run = PyBytes_FromStringAndSize(NULL, total)
        at = <unsigned char *>PyBytes_AS_STRING(run)
        with nogil:
            total = 0
            for i in range(count):
                at = put_frame(at, starts[i], ends[i] - total - HEAD)
                total = ends[i]
    finally:
        free(starts)
    return run


def encode_spans(
    const unsigned char[::1] data not None,
    const int64_t[::1] offsets not None,
    const int64_t[::1] lengths not None,
    int64_t[::1] ends not None,
):
    """Return the frames of spans over one buffer; ends gets where each one ends."""
    cdef Py_ssize_t i, count = offsets.shape[0], size = data.shape[0], total = 0, bad = -1
    cdef unsigned char *at
    cdef const unsigned char *base = &data[0] if size else NULL
    if lengths.shape[0] != count or ends.shape[0] != count:
        raise ValueError("offsets, lengths and ends differ in length")
    with nogil:
        for i in range(count):
            if offsets[i] < 0 or lengths[i] < 0 or lengths[i] > size or offsets[i] > size - lengths[i]:
                bad = i
                break
            if lengths[i] > LARGEST:
                bad = i
                break
            total += HEAD + lengths[i]
            ends[i] = total
    if bad >= 0:
        if 0 <= offsets[bad] and LARGEST < lengths[bad] <= size:
            check_length(lengths[bad])
        raise ValueError(f"span {bad} lies outside its buffer of {size} bytes")
    run = PyBytes_FromStringAndSize(NULL, total)
    at = <unsigned char *>PyBytes_AS_STRING(run)
    with nogil:
        for i in range(count):
            at = put_frame(at, base + offsets[i], lengths[i])
    return run


def scan(
    const unsigned char[::1] data not None,
    Py_ssize_t start,
    Py_ssize_t stop,
    int64_t base,
    int64_t[::1] positions not None,
    int64_t[::1] offsets not None,
    int64_t[::1] lengths not None,
):
    """Walk the frames of data[start:stop], checking each; return (count, at, status).

    ``base`` is the position of data[0].  As many frames are taken as the arrays hold; ``at`` is where
    the next one begins, or the one that ``status`` is about.
    """
    cdef Py_ssize_t at = start, count = 0, limit = positions.shape[0]
    cdef int64_t length
    cdef int status = LIMIT
    cdef const unsigned char *p
    if not 0 <= start <= stop <= data.shape[0]:
        raise ValueError(f"cannot scan {start}..{stop} of {data.shape[0]} bytes")
    if offsets.shape[0] != limit or lengths.shape[0] != limit:
        raise ValueError("positions, offsets and lengths differ in length")
    if not data.shape[0]:
        return 0, start, END
    p = &data[0]
    with nogil:
        while True:
            if at == stop:
                status = END
                break
            if stop - at < HEAD:
                status = SHORT
                break
            if count == limit:
                break
            length = get_be32(p + at)
            if length > stop - at - HEAD:
                status = SHORT
                break
            if crc32(0, p + at + HEAD, length) != get_be32(p + at + 4):
                status = BAD_CRC
                break
            positions[count] = base + at
            offsets[count] = at + HEAD
            lengths[count] = length
            count += 1
            at += HEAD + length
    return count, at, status


def hop(const unsigned char[::1] data not None, Py_ssize_t start, Py_ssize_t stop, Py_ssize_t target):
    """Walk the frames of data[start:stop] by their lengths alone, to the first that begins at or behind target.

    Returns where it begins, or where the walk ends before: at a frame that data[start:stop] does not hold whole.
    """
    cdef Py_ssize_t at = start
    cdef int64_t length
    cdef const unsigned char *p
    if not 0 <= start <= stop <= data.shape[0]:
        raise ValueError(f"cannot scan {start}..{stop} of {data.shape[0]} bytes")
    if not data.shape[0]:
        return start
    p = &data[0]
    with nogil:
        while at < target and stop - at >= HEAD:
            length = get_be32(p + at)
            if length > stop - at - HEAD:
                break
            at += HEAD + length
    return at
