# cython: language_level=3, boundscheck=False, wraparound=False
"""The short way of a read that is one PUBLISH of QoS 0 on a topic whose receivers are known.

A fleet sends one small packet a read.  Such a read is passed on as it came, without a run and without Python in
between; whatever else it is goes the long way, and nothing has happened then.  The classes are what the long way and
the short one share: routes, receivers and counts of ``penstock.mqtt`` derive from them.  No I/O; whether a read may go
the short way is for the caller to say.  The twin in penstock/kernel/twin/mqttrelay.py is the oracle.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItemWithError
from cpython.object cimport PyObject
from libc.stdint cimport uint32_t

from penstock.kernel.mqttbytes cimport text, varint, wild

cdef enum:
    PLAIN = 0x30    # PUBLISH of QoS 0, neither retained nor sent again
    DOLLAR = 36


cdef class Traffic:
    """What came and what went."""

    cdef public long long bytes_received, messages_received, publish_received, publish_bytes_received
    cdef public long long bytes_sent, messages_sent, publish_sent, publish_bytes_sent


cdef class Sink:
    """A connection: to receivers ``write``, its version, and the payloads that need no further look.

    ``_short`` are the routes while a read may go the short way, None while it may not: whoever derives from it says
    so, and has ``received_any(data)``, the long way.
    """

    cdef public object write
    cdef public bint version5
    cdef public Py_ssize_t plain_payload, _limit
    cdef public Traffic _counts
    cdef public WayCache _short

    def received(self, bytes data not None):
        """Take what one read brought."""
        if self._short is None or not relay(data, self.version5, self._limit, self._short, self._counts):
            self.received_any(data)


cdef class Outlet:
    """A receiver: its connection, whether that takes messages now, and how many it was given."""

    cdef public Sink link
    cdef public bint ready
    cdef public long long delivered


cdef class Way:
    """Where a topic's messages go: ``outlets`` where all of them get QoS 0 as it came, else None."""

    cdef public tuple outlets


cdef class CachedWay:
    """A way and the version of the routes it was found at."""

    cdef public Way plan
    cdef public long long version

    def __init__(self, Way plan not None, long long version):
        self.plan = plan
        self.version = version


cdef class WayCache:
    """Topic → CachedWay; what was found at another version must be looked at again."""

    cdef public dict _young
    cdef public long long _version


cpdef bint relay(
    bytes data, bint version5, Py_ssize_t limit, WayCache routes, Traffic counts
) except -1:
    """Pass ``data`` on if it is one such packet and everyone can take it; return whether that was so."""
    cdef const unsigned char *p
    cdef Py_ssize_t size, body, rest, topic_len, payload
    cdef uint32_t remaining = 0
    cdef int used
    cdef PyObject *found
    cdef CachedWay cached
    cdef tuple outlets
    cdef Outlet outlet
    cdef Sink sink
    if data is None or routes is None or counts is None:
        raise TypeError("relay needs a read, routes and counts")
    p = <const unsigned char *>PyBytes_AS_STRING(data)
    size = PyBytes_GET_SIZE(data)
    if size < 4 or size > limit or p[0] != PLAIN:
        return False
    used = varint(p, 1, size, &remaining)
    if used <= 0 or 1 + used + <Py_ssize_t>remaining != size or remaining < 2:
        return False
    body = 1 + used
    topic_len = (<Py_ssize_t>p[body] << 8) | p[body + 1]
    rest = body + 2 + topic_len
    if topic_len == 0 or rest > size or p[body + 2] == DOLLAR or not text(p + body + 2, topic_len) \
            or wild(p + body + 2, topic_len):
        return False
    if version5:
        if rest == size or p[rest] != 0:  # properties may need a look
            return False
        rest += 1
    payload = size - rest
    topic = PyBytes_FromStringAndSize(<const char *>p + body + 2, topic_len)
    found = PyDict_GetItemWithError(routes._young, topic)
    if found is NULL:
        return False
    cached = <CachedWay?><object>found
    outlets = cached.plan.outlets
    if cached.version != routes._version or outlets is None:
        return False
    for each in outlets:
        outlet = <Outlet>each
        if not outlet.ready:
            return False
        sink = outlet.link
        if sink is None or sink.version5 != version5 or payload >= sink.plain_payload:
            return False
    counts.bytes_received += size
    counts.messages_received += 1
    counts.publish_received += 1
    counts.publish_bytes_received += payload
    for each in outlets:
        outlet = <Outlet>each
        sink = outlet.link
        if sink is None:  # it went while another was written to
            continue
        sink.write(data)
        outlet.delivered += 1
        counts.bytes_sent += size
        counts.messages_sent += 1
        counts.publish_sent += 1
        counts.publish_bytes_sent += payload
    return True
