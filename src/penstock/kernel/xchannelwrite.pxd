"""The writer's place in an xchannel, for other kernel modules that publish there; described in xchannelwrite.pyx."""
cimport cython
from libc.stdint cimport int64_t, uint16_t, uint64_t

from penstock.kernel.maps cimport Mapping

cdef uint64_t now_ns() except? 0


@cython.final
cdef class Appender:
    cdef Mapping window
    cdef Mapping head
    cdef object view
    cdef object make_room
    cdef unsigned char *base
    cdef bint *torn  # whether the window's file was cut under it
    cdef unsigned char *header  # the channel header: write_position, message_count, …
    cdef Py_ssize_t slot
    cdef Py_ssize_t region_end
    cdef Py_ssize_t roll_end
    cdef Py_ssize_t limit       # min(region_end, roll_end, populated), or -1 while parked
    cdef Py_ssize_t populated
    cdef bint populates
    cdef bint parked
    cdef Py_ssize_t largest
    cdef int64_t window_position
    cdef int64_t window_offset
    cdef Py_ssize_t reserved
    cdef object reservation

    cdef void measure(self) noexcept
    cdef bint room(self, Py_ssize_t length)
    cdef unsigned char *place(self, Py_ssize_t length) except? NULL
    cdef void publish(self, Py_ssize_t length, uint16_t kind, uint64_t timestamp) noexcept nogil
    cdef int check_whole(self) except -1
