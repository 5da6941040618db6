# cython: language_level=3, boundscheck=False, wraparound=False
"""Runs of MQTT messages as envelopes (penstock/log/envelope.py), many runs at a time: what a tap appends in one call.

The twin in penstock/kernel/twin/mqttcarry.py is the oracle.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from penstock.kernel.envelopebytes cimport ENVELOPE_HEAD as HEAD, put_envelope
from penstock.kernel.mqtt cimport Run
from penstock.kernel.mqttbytes cimport varint


def carry(
    list runs not None, list headers not None, list times not None, bytes id_head not None,
    int64_t[::1] offsets not None, int64_t[::1] lengths not None,
):
    """Return the messages of runs as envelopes one after another, and fill in where each is.

    The key is the topic.  ``headers`` and ``times`` (ns) have one value a run.  With QoS 2 the packet id follows the
    headers: ``id_head`` and two bytes, which differ from message to message.
    """
    cdef Py_ssize_t i, j, row = 0, total = 0, to = 0, at, size, fixed, topic_len, head_len, id_len, first = 0
    cdef uint32_t remaining = 0
    cdef uint64_t when
    cdef int used, id
    cdef Run run
    cdef bytes heads
    cdef const unsigned char *p
    cdef const unsigned char *t
    cdef const unsigned char *h
    cdef unsigned char *o
    if len(headers) != len(runs) or len(times) != len(runs):
        raise ValueError(f"{len(runs)} runs with {len(headers)} headers and {len(times)} times")
    for i in range(len(runs)):
        run = <Run?>runs[i]
        heads = <bytes?>headers[i]
        id_len = PyBytes_GET_SIZE(id_head) + 2 if run.qos == 2 else 0
        total += run.count * (HEAD + PyBytes_GET_SIZE(run.topic) + PyBytes_GET_SIZE(heads) + id_len) + run.payload_bytes
        row += run.count
    if offsets.shape[0] != row or lengths.shape[0] != row:
        raise ValueError(f"{offsets.shape[0]} spans for {row} messages")
    out = PyBytes_FromStringAndSize(NULL, total)
    o = <unsigned char *>PyBytes_AS_STRING(out)
    row = 0
    for i in range(len(runs)):
        run = <Run>runs[i]
        heads = <bytes>headers[i]
        when = times[i]
        p = <const unsigned char *>PyBytes_AS_STRING(run.data)
        t = <const unsigned char *>PyBytes_AS_STRING(run.topic)
        h = <const unsigned char *>PyBytes_AS_STRING(heads)
        topic_len, head_len = PyBytes_GET_SIZE(run.topic), PyBytes_GET_SIZE(heads)
        id_len = PyBytes_GET_SIZE(id_head) + 2 if run.qos == 2 else 0
        fixed = HEAD + topic_len + head_len + id_len
        at, id = run.start, run.first_id
        for j in range(run.count):
            used = varint(p, at + 1, run.end, &remaining)
            at += 1 + used
            size = <Py_ssize_t>remaining - run.head
            if used <= 0 or size < 0 or at + <Py_ssize_t>remaining > run.end or to + fixed + size > total:
                raise ValueError("a run does not hold what it says")  # cannot be: it was cut or made by the kernel
            offsets[row], lengths[row] = to, fixed + size
            row += 1
            if j == 0:
                first = to
                to = put_envelope(o + to, 0, 0, when, t, topic_len, h, head_len, id_len) - o
            else:  # the messages of a run begin alike
                memcpy(o + to, o + first, fixed - id_len)
                to += fixed - id_len
            if id_len:
                memcpy(o + to, PyBytes_AS_STRING(id_head), id_len - 2)
                to += id_len
                o[to - 2], o[to - 1] = (id >> 8) & 255, id & 255
                id += 1
            memcpy(o + to, p + at + run.head, size)
            to += size
            at += remaining
    if to != total:
        raise ValueError("a run does not hold what it says")
    return out
