# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Walking the records of an xchannel; xchannelwrite.pyx publishes them.

No allocation, no I/O, no policy: offsets in, offsets out.  A window is a piece of a channel file
that begins on a region; every offset here counts from the window's start.  What is on disk is drawn
in penstock/log/xchannel/format.py.  twin/xchannel.py has the same walk in Python.

Threads: everything runs under the GIL in one piece, except where it says nogil; there the cursor is
parked first, so that another thread takes the caller's slow path and waits for its lock.
"""
from cpython.buffer cimport PyBuffer_IsContiguous
from cpython.memoryview cimport PyMemoryView_FromObject, PyMemoryView_GET_BUFFER
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint64_t
from libc.time cimport timespec

from penstock.kernel.atomics cimport get64, load_acquire, load_word, pause
from penstock.kernel.maps cimport Mapping
from penstock.kernel.xchannelrecord cimport CHANNEL, HEADER, ROLL, SKIP, USER, footprint

from penstock.types import Record

cdef extern from "time.h" nogil:
    int clock_gettime(int clock, timespec *now)
    int nanosleep(const timespec *wanted, timespec *left)
    int CLOCK_MONOTONIC


cdef inline int64_t monotonic_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <int64_t>now.tv_sec * 1000000000 + now.tv_nsec


# Why a walk stopped: the same numbers as in twin/xchannel.py, with their meaning in format.Stop.
cdef enum:
    LIMIT = 0
    TAIL = 1
    END = 2
    ROLLED = 3
    TRUNCATED = 4
    BAD_COMMIT = 5
    BAD_KIND = 6
    PAST_REGION = 7
    NO_SLOT = 8
    SHORT_SKIP = 9
    STRAY_CHANNEL = 10


cdef int64_t OFFSET_MASK = (<int64_t>1 << 40) - 1  # of a position: its byte in the file


cdef inline int look(
    const unsigned char *base, Py_ssize_t at, Py_ssize_t region_end, Py_ssize_t stop, int64_t own, Py_ssize_t *after, uint64_t *head
) noexcept nogil:
    """Judge the slot at ``at``: minus its kind and one more for a record to take, else why not.  At ``own`` is the Channel record of the file.

    ``head`` gets the first eight bytes of the record as they were judged.  Whoever needs kind, type or length takes it from
    there: the file may be written by someone who changes them after the look.
    """
    cdef uint8_t committed, kind
    cdef Py_ssize_t length
    if at >= stop:
        return END
    if region_end - at < HEADER:
        return NO_SLOT
    if at + HEADER > stop:
        return TRUNCATED
    committed = load_acquire(base + at)
    if committed == 0:
        return TAIL
    if committed != 1:
        return BAD_COMMIT
    head[0] = get64(base + at)
    kind = (head[0] >> 8) & 0xFF
    if kind > ROLL:
        return BAD_KIND
    length = length_of(head[0])
    if HEADER + length > region_end - at:
        return PAST_REGION
    if kind == ROLL:
        return ROLLED
    if kind == SKIP and at + HEADER + length != region_end:
        return SHORT_SKIP
    if kind == CHANNEL and at != own:
        return STRAY_CHANNEL
    if at + HEADER + length > stop:
        return TRUNCATED
    after[0] = at + footprint(length)
    return -1 - kind


cdef inline Py_ssize_t length_of(uint64_t head) noexcept nogil:
    return <Py_ssize_t>(head >> 32)


cdef inline uint16_t type_of(uint64_t head) noexcept nogil:
    return <uint16_t>(head >> 16)


cdef class Cursor:
    """A place in a window and the walk from there.

    A window is a Mapping or anything else that has bytes; it stays alive as long as the cursor or a payload.
    ``next`` and ``scan`` hand out user records and step over the rest; when they stop for another
    reason than their limit, ``status`` says why and ``at`` stays on the slot it is about.
    """

    cdef readonly object window
    cdef object view
    cdef const unsigned char *base
    cdef Py_ssize_t length
    cdef readonly Py_ssize_t at
    cdef Py_ssize_t region_end
    cdef Py_ssize_t region
    cdef readonly Py_ssize_t stop
    cdef readonly int64_t window_position
    cdef readonly int status
    cdef int64_t own
    cdef int64_t rests_until
    cdef bint parked

    def attach(
        self, window, Py_ssize_t at, Py_ssize_t stop, Py_ssize_t region, int64_t window_position,
    ):
        """Stand at ``at`` of ``window``, whose bytes up to ``stop`` the file has."""
        cdef object view = PyMemoryView_FromObject(window)
        cdef Py_buffer *bytes_of = PyMemoryView_GET_BUFFER(view)
        if bytes_of.itemsize != 1 or bytes_of.ndim != 1 or not PyBuffer_IsContiguous(bytes_of, b"C"):
            raise ValueError("a window is one run of bytes")
        if region <= 0 or region % 8 or at < 0 or at % 8 or stop > bytes_of.len:
            raise ValueError(f"cannot walk {at}..{stop} of {bytes_of.len} in regions of {region}")
        self.window = window
        self.view = view
        self.base = <const unsigned char *>bytes_of.buf
        self.length = bytes_of.len
        self.at = at
        self.stop = stop
        self.region = region
        self.region_end = (at // region + 1) * region
        self.window_position = window_position
        self.status = LIMIT
        self.own = -(window_position & OFFSET_MASK)
        self.rests_until = 0

    def detach(self):
        """Let go of the window; from here on there is nothing to read."""
        self.window = self.view = None
        self.base = NULL
        self.at = self.stop = self.length = 0
        self.status = LIMIT

    def extend(self, Py_ssize_t stop):
        """Allow the walk up to ``stop``: the file has grown."""
        if stop < self.stop or stop > self.length:
            raise ValueError(f"cannot extend {self.stop} to {stop} of {self.length}")
        self.stop = stop

    @property
    def position(self):
        """The position of the slot it stands on."""
        return self.window_position + self.at

    def ready(self):
        """Step over service records; whether a user record is next, else the reason in status."""
        cdef Py_ssize_t after = 0
        cdef uint64_t head = 0
        cdef int found
        if self.parked or self.base is NULL:
            self.status = LIMIT
            return False
        while True:
            found = look(self.base, self.at, self.region_end, self.stop, self.own, &after, &head)
            if found == -1 - USER:
                return True
            if found >= 0:
                self.status = found
                return False
            self.at = after
            if after >= self.region_end:
                self.region_end += self.region

    def rest(self, int64_t nanoseconds):
        """Find nothing more to do at the tail for that long, or until it is attached elsewhere."""
        self.rests_until = monotonic_ns() + nanoseconds

    def resting(self):
        """Whether it stopped at the tail and there is nothing to do but wait."""
        return self.rests()

    cdef inline bint rests(self) noexcept:
        return self.status == TAIL and monotonic_ns() < self.rests_until

    def next(self):
        """Return the next user record, or None with the reason in status."""
        return self.advance()

    cdef object advance(self):
        cdef Py_ssize_t after = 0, at
        cdef uint64_t head = 0
        cdef int found
        if self.parked or self.base is NULL:
            self.status = LIMIT
            return None
        while True:
            at = self.at
            found = look(self.base, at, self.region_end, self.stop, self.own, &after, &head)
            if found >= 0:
                self.status = found
                return None
            self.at = after
            if after >= self.region_end:
                self.region_end += self.region
            if found == -1 - USER:
                break
        return Record(
            self.window_position + at,
            get64(self.base + at + 8),
            type_of(head),
            self.part(at + HEADER, length_of(head)),
        )

    cdef inline object part(self, Py_ssize_t at, Py_ssize_t length):
        """Return view[at : at + length]: what slicing does, without a slice and two numbers, which cost more than the view."""
        cdef object view = PyMemoryView_FromObject(self.view)
        cdef Py_buffer *bytes_of = PyMemoryView_GET_BUFFER(view)  # the new view's own
        bytes_of.buf = <void *>(self.base + at)
        bytes_of.len = bytes_of.shape[0] = length
        return view

    def scan(
        self,
        Py_ssize_t limit,
        Py_ssize_t span,
        int64_t[::1] positions not None,
        uint64_t[::1] timestamps not None,
        uint16_t[::1] kinds not None,
        int64_t[::1] offsets not None,
        int64_t[::1] lengths not None,
    ):
        """Fill the arrays with up to ``limit`` records within ``span`` bytes; return how many."""
        cdef Py_ssize_t at = self.at, region_end = self.region_end, stop = self.stop, after = 0
        cdef Py_ssize_t region = self.region, count = 0, first = self.at
        cdef uint64_t head = 0
        cdef int64_t base_position = self.window_position, own = self.own
        cdef const unsigned char *base = self.base
        cdef int found = LIMIT
        cdef object window = self.window  # keeps the records mapped while the GIL is away
        if limit > positions.shape[0] or limit > timestamps.shape[0] or limit > kinds.shape[0] \
                or limit > offsets.shape[0] or limit > lengths.shape[0]:
            raise ValueError(f"the arrays are shorter than the limit {limit}")
        if base is NULL:
            raise ValueError("the cursor is not attached")
        self.parked = True
        with nogil:
            while count < limit and at - first < span:
                found = look(base, at, region_end, stop, own, &after, &head)
                if found >= 0:
                    break
                if found == -1 - USER:
                    positions[count] = base_position + at
                    timestamps[count] = get64(base + at + 8)
                    kinds[count] = type_of(head)
                    offsets[count] = at + HEADER
                    lengths[count] = length_of(head)
                    count += 1
                at = after
                if at >= region_end:
                    region_end += region
        self.at = at
        self.region_end = region_end
        self.status = found if found >= 0 else LIMIT
        self.parked = False
        return count

    def walk(self, Py_ssize_t until=-1):
        """Go on to ``until`` or the first slot that is not a record; return (user, service) records."""
        cdef Py_ssize_t at = self.at, region_end = self.region_end, stop = self.stop, after = 0
        cdef Py_ssize_t users = 0, services = 0, region = self.region
        cdef uint64_t head = 0
        cdef int64_t own = self.own
        cdef const unsigned char *base = self.base
        cdef int found = LIMIT
        cdef object window = self.window  # keeps the records mapped while the GIL is away
        if base is NULL:
            raise ValueError("the cursor is not attached")
        self.parked = True
        with nogil:
            while until < 0 or at < until:
                found = look(base, at, region_end, stop, own, &after, &head)
                if found >= 0:
                    break
                if found == -1 - USER:
                    users += 1
                else:
                    services += 1
                at = after
                if at >= region_end:
                    region_end += region
        self.at = at
        self.region_end = region_end
        self.status = found if found >= 0 else LIMIT
        self.parked = False
        return users, services

    def spin(self, int64_t nanoseconds):
        """Look at the slot until it changes or the time is over; other threads run meanwhile."""
        cdef int64_t deadline
        cdef const unsigned char *slot
        cdef int turn
        cdef bint ready = False
        cdef object window = self.window  # keeps the slot mapped while the GIL is away
        if self.base is NULL or self.at + HEADER > self.stop:
            return False
        slot = self.base + self.at
        with nogil:
            deadline = monotonic_ns() + nanoseconds
            while not ready:
                for turn in range(64):
                    if load_acquire(slot):
                        ready = True
                        break
                    pause()
                else:
                    if monotonic_ns() >= deadline:
                        break
        return ready


    def doze(self, int64_t nanoseconds, int64_t first, int64_t last):
        """Sleep until the slot changes or the time is over, from ``first`` up to ``last`` ns at a time; whether it changed.

        Below Python, so that waiting costs a load and a system call a look.  Nobody wakes it: xchannel 2.0.0 has no such word.
        """
        cdef int64_t deadline, left, nap = first
        cdef const unsigned char *slot
        cdef timespec pause_for
        cdef bint ready = False
        cdef object window = self.window  # keeps the slot mapped while the GIL is away
        if self.base is NULL or self.at + HEADER > self.stop or self.status != TAIL:
            return False
        slot = self.base + self.at
        with nogil:
            deadline = monotonic_ns() + nanoseconds
            while True:
                if load_acquire(slot):
                    ready = True
                    break
                left = deadline - monotonic_ns()
                if left <= 0:
                    break
                if nap > left:
                    nap = left
                pause_for.tv_sec, pause_for.tv_nsec = nap // 1000000000, nap % 1000000000
                if nanosleep(&pause_for, NULL):
                    break  # a signal: Python has a look
                nap = nap * 2 if nap * 2 < last else last
        return ready


cdef class Taker:
    """Takes one record after another, and asks ``move_on`` whenever its cursor stops and does not rest.

    Not part of the cursor: ``move_on`` knows that one, and the two would keep each other alive.
    """

    cdef Cursor cursor
    cdef object move_on

    def __cinit__(self, Cursor cursor not None, move_on):
        self.cursor = cursor
        self.move_on = move_on

    def take(self):
        """Return the next record, or None when there is none yet."""
        cdef object record
        while True:
            record = self.cursor.advance()
            if record is not None or self.cursor.rests() or not self.move_on():
                return record


def load_counts(Mapping head not None):
    """Return (write_position, message_count)."""
    if head.length < 80:
        raise ValueError("the channel header must be mapped")
    return load_word(head.base + HEADER), load_word(head.base + HEADER + 8)
