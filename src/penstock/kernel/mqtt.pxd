"""A run of PUBLISH packets; the fields are for the other kernel modules, and described in mqtt.pyx."""

cdef class Run:
    cdef readonly bytes data
    cdef public bytes topic
    cdef readonly bytes forward
    cdef readonly Py_ssize_t start, end, count, longest, payload_bytes
    cdef readonly int qos, first_id, alias
    cdef readonly long long expiry
    cdef readonly bint retain, dup, version5, plain
    cdef public double deadline
    cdef Py_ssize_t head   # bytes of a body before its payload
    cdef Run copy(self)
    cdef void measure(self) noexcept
