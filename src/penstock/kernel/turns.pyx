# cython: language_level=3, boundscheck=False, wraparound=False
"""What every read and every write of a connection passes: a read goes to the core, what a turn wrote to the transport.

A fleet sends one small packet a read, so this runs once a message and is cold each time.  No protocol, no socket and
no timer: ``penstock.net`` derives from both classes.  The twin in penstock/kernel/twin/turns.py is the oracle.
"""

cdef enum:
    JOINED = 64 << 10   # up to here chunks are copied into one; longer ones are handed to the loop as they are
    SHORT = 8 << 10     # shorter chunks on average are copied as well: the loop takes far longer over many small ones


cdef class Turns:
    """The write at the end of a turn of a loop, for all its connections."""

    cdef public object time
    cdef public double read_at
    cdef public bint gathers
    cdef object _call_soon
    cdef list _waiting

    def __init__(self, loop):
        self.time = loop.time
        self._call_soon = loop.call_soon
        self._waiting = []
        self.read_at = 0.0
        self.gathers = True

    def flush_later(self, connection):
        """Flush a connection when this turn of the loop has run; called once a turn by each that wrote."""
        self.add(connection)

    cdef int add(self, connection) except -1:
        if self.gathers and not self._waiting:
            self._call_soon(self._flush)
        self._waiting.append(connection)
        return 0

    def read_ended(self):
        """Write at once what the first read of a millisecond caused: a lone message does not wait for a turn to end.

        Under load there are more reads in that time; theirs is gathered, for all of them in one write.
        """
        self.gathers = True
        if self._waiting:
            self._flush()

    def _flush(self):
        cdef list waiting = self._waiting
        self._waiting = []
        for connection in waiting:
            if isinstance(connection, Wire):
                (<Wire>connection).send()
            else:
                connection.flush()


cdef class Wire:
    """The part of a connection that bytes pass.

    Whoever derives from it has ``_failed(exc)``, ``_check_bound()`` and, where there are filters, ``_send_filtered(out)``.
    """

    cdef public Turns _turns
    cdef public object _transport, _receive
    cdef public tuple _filters
    cdef public list _out
    cdef public Py_ssize_t _pending, _high_water
    cdef public bint _queued, _closing, _lost, _slow
    cdef public double _last_read

    def __init__(self, Turns turns not None, Py_ssize_t high_water):
        self._turns = turns
        self._high_water = high_water
        self._filters = ()
        self._out = []

    def write(self, data):
        """Send ``data`` at the end of this turn of the loop; it must not change afterwards."""
        if self._closing:
            return
        self._out.append(data)
        self._pending += len(data)
        self.wrote()

    def write_many(self, chunks):
        """Send chunks one after the other; one write with everything else of this turn."""
        if self._closing:
            return
        for data in chunks:
            self._out.append(data)
            self._pending += len(data)
        self.wrote()

    cdef int wrote(self) except -1:
        if not self._queued:
            self._queued = True
            self._turns.add(self)
        elif self._pending > self._high_water:
            self.send()
        return 0

    def flush(self):
        """Hand what was written to the loop."""
        self.send()

    cdef int send(self) except -1:
        cdef list out = self._out
        cdef Py_ssize_t count = len(out), pending = self._pending
        self._queued = False
        if count == 0 or self._lost:
            return 0
        self._out = []
        self._pending = 0
        if self._filters:
            self._send_filtered(out)
        elif count == 1:
            self._transport.write(out[0])
        elif pending <= JOINED or pending < SHORT * count:
            self._transport.write(b"".join(out))
        else:
            self._transport.writelines(out)
        if self._slow:
            self._check_bound()
        return 0

    def data_received(self, bytes data not None):
        """Take what one read brought."""
        cdef Turns turns = self._turns
        cdef double now = turns.time()
        self._last_read = now
        if now != turns.read_at:
            turns.read_at = now
            turns.gathers = False
        self._queued = True  # answers to this very read leave at its end: they need not wait for other connections
        try:
            self._receive(data)
            if self._out:
                self.send()
            else:
                self._queued = False
        except Exception as exc:  # a fault of a core must not reach the loop or another connection
            self._failed(exc)
        if not turns.gathers:
            turns.read_ended()
