"""A piece of a file in memory; the fields are for the other kernel modules."""

cdef class Mapping:
    cdef unsigned char *base
    cdef readonly Py_ssize_t length
    cdef readonly bint writable
    cdef readonly bint torn
    cdef int place
