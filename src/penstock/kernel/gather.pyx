# cython: language_level=3, boundscheck=False, wraparound=False
"""From spans over one buffer to what others want: one run of bytes, bytes objects, Arrow views."""
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy, memset

cdef enum:
    INLINE = 12  # Arrow keeps payloads up to this length inside the view itself


cdef Py_ssize_t check(
    Py_ssize_t size, const int64_t[::1] offsets, const int64_t[::1] lengths
) except -1:
    """Refuse spans outside the buffer, once, so that nothing past this line needs to."""
    cdef Py_ssize_t i, count = offsets.shape[0], total = 0, bad = -1
    if lengths.shape[0] != count:
        raise ValueError("offsets and lengths differ in length")
    with nogil:
        for i in range(count):
            if offsets[i] < 0 or lengths[i] < 0 or lengths[i] > size or offsets[i] > size - lengths[i]:
                bad = i
                break
            total += lengths[i]
    if bad >= 0:
        raise ValueError(f"span {bad} lies outside its buffer of {size} bytes")
    return total


def total_bytes(Py_ssize_t size, const int64_t[::1] offsets not None, const int64_t[::1] lengths not None):
    """Return how many bytes the spans hold, having checked that they lie within size."""
    return check(size, offsets, lengths)


def gather(
    const unsigned char[::1] data not None,
    const int64_t[::1] offsets not None,
    const int64_t[::1] lengths not None,
    unsigned char[::1] out not None,
    int64_t[::1] starts not None,
):
    """Copy the spans one after another into out; starts gets count + 1 offsets."""
    cdef Py_ssize_t i, count = offsets.shape[0], at = 0
    if check(data.shape[0], offsets, lengths) > out.shape[0] or starts.shape[0] != count + 1:
        raise ValueError("the output is too small")
    with nogil:
        starts[0] = 0
        for i in range(count):
            if lengths[i]:
                memcpy(&out[at], &data[offsets[i]], lengths[i])
            at += lengths[i]
            starts[i + 1] = at


def to_bytes_list(
    const unsigned char[::1] data not None,
    const int64_t[::1] offsets not None,
    const int64_t[::1] lengths not None,
):
    """Return the spans as a list of bytes objects."""
    cdef Py_ssize_t i, count = offsets.shape[0]
    check(data.shape[0], offsets, lengths)
    cdef const char *base = <const char *>&data[0] if data.shape[0] else NULL
    return [
        PyBytes_FromStringAndSize(base + offsets[i], lengths[i]) if lengths[i] else b""
        for i in range(count)
    ]


def binary_views(
    const unsigned char[::1] data not None,
    const int64_t[::1] offsets not None,
    const int64_t[::1] lengths not None,
    int64_t origin,
    unsigned char[::1] out not None,
):
    """Write Arrow's 16-byte views; offsets in them count from origin."""
    cdef Py_ssize_t i, count = offsets.shape[0]
    cdef unsigned char *view
    cdef int32_t length, place, zero = 0
    check(data.shape[0], offsets, lengths)
    if out.shape[0] < count * 16:
        raise ValueError("the output is too small")
    with nogil:
        for i in range(count):
            view = &out[0] + i * 16
            length = <int32_t>lengths[i]
            memset(view, 0, 16)
            memcpy(view, &length, 4)
            if length <= INLINE:
                if length:
                    memcpy(view + 4, &data[offsets[i]], length)
            else:
                place = <int32_t>(offsets[i] - origin)
                memcpy(view + 4, &data[offsets[i]], 4)
                memcpy(view + 8, &zero, 4)
                memcpy(view + 12, &place, 4)
