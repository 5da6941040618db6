# cython: language_level=3, boundscheck=False, wraparound=False
"""Runs of MQTT messages as envelopes (penstock/log/envelope.py), many runs at a time: what a tap appends in one call.

``carry`` makes them in a buffer, for any log; a ``Carrier`` makes them where an xchannel is mapped, so that nothing is
copied twice.  The twin in penstock/kernel/twin/mqttcarry.py is the oracle of both.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from penstock.kernel.envelopebytes cimport ENVELOPE_HEAD as HEAD, put_envelope
from penstock.kernel.mqtt cimport Run
from penstock.kernel.mqttbytes cimport varint
from penstock.kernel.xchannelwrite cimport Appender, now_ns


cdef class _Messages:
    """The messages of one run, one after another; all but the packet id, the payload and its size is the same in each."""

    cdef Run run
    cdef bytes alike         # envelope up to the packet id
    cdef bytes id_head
    cdef Py_ssize_t fixed    # bytes of a record before its payload
    cdef Py_ssize_t left     # messages that are still to come
    cdef Py_ssize_t at       # where the payload of the present one is
    cdef Py_ssize_t size     # and its bytes
    cdef int id

    cdef int begin(self, Run run, bytes headers, uint64_t when, bytes id_head) except -1:
        cdef Py_ssize_t id_len = PyBytes_GET_SIZE(id_head) + 2 if run.qos == 2 else 0
        cdef Py_ssize_t size = HEAD + PyBytes_GET_SIZE(run.topic) + PyBytes_GET_SIZE(headers)
        self.run, self.id_head = run, id_head
        self.alike = PyBytes_FromStringAndSize(NULL, size)
        put_envelope(
            <unsigned char *>PyBytes_AS_STRING(self.alike), 0, 0, when,
            <const unsigned char *>PyBytes_AS_STRING(run.topic), PyBytes_GET_SIZE(run.topic),
            <const unsigned char *>PyBytes_AS_STRING(headers), PyBytes_GET_SIZE(headers), id_len,
        )
        self.fixed, self.left = size + id_len, run.count
        self.at, self.size, self.id = run.start, 0, run.first_id - 1
        return 0

    cdef bint next(self) except -1:
        """Go to the next message; False behind the last."""
        cdef const unsigned char *p = <const unsigned char *>PyBytes_AS_STRING(self.run.data)
        cdef Py_ssize_t at = self.at + self.size
        cdef uint32_t remaining = 0
        cdef int used
        if not self.left:
            return False
        used = varint(p, at + 1, self.run.end, &remaining)
        at += 1 + used
        if used <= 0 or <Py_ssize_t>remaining < self.run.head or at + <Py_ssize_t>remaining > self.run.end:
            raise ValueError("a run does not hold what it says")  # cannot be: it was cut or made by the kernel
        self.at, self.size = at + self.run.head, <Py_ssize_t>remaining - self.run.head
        self.left -= 1
        self.id += 1
        return True

    cdef inline void put(self, unsigned char *out) noexcept:
        """Write the record of the present message."""
        cdef Py_ssize_t size = PyBytes_GET_SIZE(self.alike)
        memcpy(out, PyBytes_AS_STRING(self.alike), size)
        out += size
        if size < self.fixed:
            size = self.fixed - size
            memcpy(out, PyBytes_AS_STRING(self.id_head), size - 2)
            out += size - 2
            out[0], out[1] = (self.id >> 8) & 255, self.id & 255
            out += 2
        memcpy(out, PyBytes_AS_STRING(self.run.data) + self.at, self.size)


cdef int check_alike(list runs, list headers, list times) except -1:
    if len(headers) != len(runs) or len(times) != len(runs):
        raise ValueError(f"{len(runs)} runs with {len(headers)} headers and {len(times)} times")
    return 0


def carry(
    list runs not None, list headers not None, list times not None, bytes id_head not None,
    int64_t[::1] offsets not None, int64_t[::1] lengths not None,
):
    """Return the messages of runs as envelopes one after another, and fill in where each is.

    The key is the topic.  ``headers`` and ``times`` (ns) have one value a run.  With QoS 2 the packet id follows the
    headers: ``id_head`` and two bytes, which differ from message to message.
    """
    cdef Py_ssize_t i, row = 0, total = 0, to = 0, size
    cdef Run run
    cdef _Messages messages = _Messages()
    cdef unsigned char *o
    check_alike(runs, headers, times)
    for i in range(len(runs)):
        run = <Run?>runs[i]
        size = HEAD + PyBytes_GET_SIZE(run.topic) + len(<bytes?>headers[i])
        if run.qos == 2:
            size += PyBytes_GET_SIZE(id_head) + 2
        total += run.count * size + run.payload_bytes
        row += run.count
    if offsets.shape[0] != row or lengths.shape[0] != row:
        raise ValueError(f"{offsets.shape[0]} spans for {row} messages")
    out = PyBytes_FromStringAndSize(NULL, total)
    o = <unsigned char *>PyBytes_AS_STRING(out)
    row = 0
    for i in range(len(runs)):
        messages.begin(<Run>runs[i], <bytes>headers[i], times[i], id_head)
        while messages.next():
            size = messages.fixed + messages.size
            if size > total - to:
                raise ValueError("a run does not hold what it says")
            messages.put(o + to)
            offsets[row], lengths[row] = to, size
            row += 1
            to += size
    if to != total:
        raise ValueError("a run does not hold what it says")
    return out


cdef class Carrier:
    """Runs on their way into an xchannel: each message becomes a record in the mapped file itself.

    Arguments are those of ``carry``.  One that is half written goes on where it was.
    """

    cdef list runs, headers, times
    cdef bytes id_head
    cdef Py_ssize_t index
    cdef bint begun, waiting
    cdef _Messages messages
    cdef readonly int64_t last  # position of the last record, -1 before the first

    def __cinit__(self, list runs not None, list headers not None, list times not None, bytes id_head not None):
        check_alike(runs, headers, times)
        self.runs, self.headers, self.times, self.id_head = runs, headers, times, id_head
        self.messages = _Messages()
        self.last = -1

    def fill(self, Appender log not None):
        """Publish messages while there is room; return the size of the record that found none, -1 behind the last."""
        cdef _Messages messages = self.messages
        cdef uint64_t now = now_ns()
        cdef Py_ssize_t size
        cdef unsigned char *to
        while True:
            if not self.waiting:
                if self.begun and messages.next():
                    self.waiting = True
                elif self.index == len(self.runs):
                    break
                else:
                    messages.begin(
                        <Run?>self.runs[self.index], <bytes?>self.headers[self.index], self.times[self.index], self.id_head
                    )
                    self.begun = True
                    self.index += 1
                    continue
            size = messages.fixed + messages.size
            to = log.place(size)
            if to is NULL:
                log.check_whole()
                return size
            messages.put(to)
            self.last = log.window_position + log.slot
            log.publish(size, 0, now)
            self.waiting = False
        log.check_whole()
        return -1
