"""What the two halves of an xchannel's kernel share: the numbers of a record and how far it reaches.

xchannel.pyx walks records, xchannelwrite.pyx publishes them.  What is on disk is drawn in penstock/log/xchannel/format.py.
"""

cdef enum:
    HEADER = 16
    CHANNEL = 0
    USER = 1
    SKIP = 2
    ROLL = 3


cdef inline Py_ssize_t footprint(Py_ssize_t length) noexcept nogil:
    return (HEADER + length + 7) & ~7
