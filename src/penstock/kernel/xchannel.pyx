# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The hot loops of an xchannel: walking records, and publishing them.

No allocation, no I/O, no policy: offsets in, offsets out.  A window is a piece of a channel file
that begins on a region; every offset here counts from the window's start.  What is on disk is drawn
in penstock/log/xchannel/format.py.  twin/xchannel.py has the same walk in Python.

Threads: everything runs under the GIL in one piece, except where it says nogil; there the object is
parked first, so that another thread takes the caller's slow path and waits for its lock.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_IsContiguous, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.memoryview cimport PyMemoryView_FromObject, PyMemoryView_GET_BUFFER
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libc.time cimport timespec

from penstock.kernel.atomics cimport (
    get16, get32, get64, load_acquire, load_word, pause, put64, store_release, store_word,
)
from penstock.kernel.maps cimport Mapping

from penstock.errors import OptionsError
from penstock.types import Record

cdef extern from "time.h" nogil:
    int clock_gettime(int clock, timespec *now)
    int CLOCK_REALTIME
    int CLOCK_MONOTONIC

cdef enum:
    HEADER = 16
    CHANNEL = 0
    USER = 1
    SKIP = 2
    ROLL = 3
    POPULATE_AHEAD = 256 << 10

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

cdef uint64_t PRISTINE = 0x0100  # committed 0, kind User, everything else 0


cdef inline uint64_t now_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_REALTIME, &now)
    return <uint64_t>now.tv_sec * 1000000000 + now.tv_nsec


cdef inline uint64_t as_time(object timestamp_ns) except? 0:
    if timestamp_ns is None:
        return now_ns()
    try:
        return timestamp_ns
    except OverflowError:
        raise OptionsError(f"timestamp_ns={timestamp_ns}: must fit 64 bits without a sign") from None


cdef inline uint16_t as_kind(object kind) except? 0:
    try:
        return kind
    except OverflowError:
        raise OptionsError(f"kind={kind}: must be between 0 and 65535") from None


cdef inline Py_ssize_t footprint(Py_ssize_t length) noexcept nogil:
    return (HEADER + length + 7) & ~7


cdef inline int look(
    const unsigned char *base, Py_ssize_t at, Py_ssize_t region_end, Py_ssize_t stop, Py_ssize_t *after
) noexcept nogil:
    """Judge the slot at ``at``: minus its kind and one more for a record to take, else why not."""
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
    kind = base[at + 1]
    if kind > ROLL:
        return BAD_KIND
    length = get32(base + at + 4)
    if HEADER + length > region_end - at:
        return PAST_REGION
    if kind == ROLL:
        return ROLLED
    if kind == SKIP and at + HEADER + length != region_end:
        return SHORT_SKIP
    if at + HEADER + length > stop:
        return TRUNCATED
    after[0] = at + footprint(length)
    return -1 - kind


cdef class Cursor:
    """A place in a window and the walk from there.

    A window is a Mapping or anything else that has bytes; it stays alive as long as the cursor or a payload.
    ``next`` and ``scan`` hand out user records and step over the rest; when they stop for another
    reason than their limit, ``status`` says why and ``at`` stays on the slot it is about.  ``walk`` leaves in
    ``stray`` where it first met a Channel record that is not its file's first, or -1.
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
    cdef readonly Py_ssize_t stray
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
        self.stray = -1

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
        cdef int found
        if self.parked or self.base is NULL:
            self.status = LIMIT
            return False
        while True:
            found = look(self.base, self.at, self.region_end, self.stop, &after)
            if found == -1 - USER:
                return True
            if found >= 0:
                self.status = found
                return False
            self.at = after
            if after >= self.region_end:
                self.region_end += self.region

    def next(self):
        """Return the next user record, or None with the reason in status."""
        cdef Py_ssize_t after = 0, at
        cdef int found
        if self.parked or self.base is NULL:
            self.status = LIMIT
            return None
        while True:
            at = self.at
            found = look(self.base, at, self.region_end, self.stop, &after)
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
            get16(self.base + at + 2),
            self.view[at + HEADER : at + HEADER + <Py_ssize_t>get32(self.base + at + 4)],
        )

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
        cdef int64_t base_position = self.window_position
        cdef const unsigned char *base = self.base
        cdef int found = LIMIT
        if limit > positions.shape[0] or limit > timestamps.shape[0] or limit > kinds.shape[0] \
                or limit > offsets.shape[0] or limit > lengths.shape[0]:
            raise ValueError(f"the arrays are shorter than the limit {limit}")
        if base is NULL:
            raise ValueError("the cursor is not attached")
        self.parked = True
        with nogil:
            while count < limit and at - first < span:
                found = look(base, at, region_end, stop, &after)
                if found >= 0:
                    break
                if found == -1 - USER:
                    positions[count] = base_position + at
                    timestamps[count] = get64(base + at + 8)
                    kinds[count] = get16(base + at + 2)
                    offsets[count] = at + HEADER
                    lengths[count] = get32(base + at + 4)
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
        cdef Py_ssize_t users = 0, services = 0, region = self.region, stray = self.stray
        cdef int64_t file = self.window_position >> 40 << 40  # where the file's own Channel record is
        cdef const unsigned char *base = self.base
        cdef int found = LIMIT
        if base is NULL:
            raise ValueError("the cursor is not attached")
        self.parked = True
        with nogil:
            while until < 0 or at < until:
                found = look(base, at, region_end, stop, &after)
                if found >= 0:
                    break
                if found == -1 - USER:
                    users += 1
                else:
                    services += 1
                    if found == -1 - CHANNEL and stray < 0 and self.window_position + at != file:
                        stray = at
                at = after
                if at >= region_end:
                    region_end += region
        self.at = at
        self.region_end = region_end
        self.stray = stray
        self.status = found if found >= 0 else LIMIT
        self.parked = False
        return users, services

    def spin(self, int64_t nanoseconds):
        """Look at the slot until it changes or the time is over; other threads run meanwhile."""
        cdef timespec now
        cdef int64_t deadline
        cdef const unsigned char *slot
        cdef int turn
        cdef bint ready = False
        cdef object window = self.window  # keeps the slot mapped while the GIL is away
        if self.base is NULL or self.at + HEADER > self.stop:
            return False
        slot = self.base + self.at
        with nogil:
            clock_gettime(CLOCK_MONOTONIC, &now)
            deadline = <int64_t>now.tv_sec * 1000000000 + now.tv_nsec + nanoseconds
            while not ready:
                for turn in range(64):
                    if load_acquire(slot):
                        ready = True
                        break
                    pause()
                else:
                    clock_gettime(CLOCK_MONOTONIC, &now)
                    if <int64_t>now.tv_sec * 1000000000 + now.tv_nsec >= deadline:
                        break
        return ready


cdef class Appender:
    """The one writer's place: publishes records at ``slot`` of a window, region by region.

    Publication order: payload, next header, this header, then the commit byte with release; after
    it message_count and write_position.  A record that does not fit here calls ``make_room``, which
    moves the window or raises; while the caller works on that it parks the appender, and every
    other thread lands in make_room too, where a lock makes it wait.
    """

    cdef Mapping window
    cdef Mapping head
    cdef object view
    cdef object make_room
    cdef unsigned char *base
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

    def __cinit__(self, make_room, Py_ssize_t largest):
        self.make_room = make_room
        self.largest = largest
        self.limit = -1
        self.parked = True
        self.populates = True
        self.reserved = -1

    def attach(
        self, Mapping window not None, Mapping head not None, Py_ssize_t slot, Py_ssize_t region_end,
        Py_ssize_t roll_end, int64_t window_offset, int64_t window_position,
    ):
        """Write from ``slot`` on, where a header lies already; parked until ``resume``."""
        if not window.writable or not head.writable or head.length < 80:
            raise ValueError("the window and the channel header must be mapped for writing")
        if slot < 0 or slot % 8 or region_end > window.length or slot + HEADER > region_end:
            raise ValueError(f"slot {slot} is outside its region, which ends at {region_end}")
        self.window = window
        self.view = PyMemoryView_FromObject(window)
        self.head = head
        self.base = window.base
        self.header = head.base + HEADER
        self.slot = slot
        self.region_end = region_end
        self.roll_end = roll_end
        self.window_offset = window_offset
        self.window_position = window_position
        self.populated = slot
        self.limit = -1
        self.parked = True
        self.drop()

    def park(self):
        """Send every append through make_room until ``resume``."""
        self.parked = True
        self.limit = -1

    def resume(self):
        """Allow appends again where they were."""
        if self.base is NULL:
            raise ValueError("the appender is not attached")
        self.parked = False
        self.measure()

    cdef void measure(self) noexcept:
        if self.parked:  # another thread is at work: only its resume opens the way again
            self.limit = -1
            return
        self.limit = min(self.region_end, self.roll_end)
        if self.populates and self.populated < self.limit:
            self.limit = self.populated

    cdef bint room(self, Py_ssize_t length):
        """Whether length more bytes fit here, faulting pages in ahead when that is all it takes."""
        cdef Py_ssize_t need = self.slot + footprint(length) + HEADER
        if self.parked or length < 0 or length > self.largest:
            return False
        if need <= self.limit:
            return True
        if need > self.region_end or need > self.roll_end:
            return False
        self.populated = min(self.region_end, need + POPULATE_AHEAD)
        self.populates = self.window.populate(self.slot, self.populated)
        # The GIL was away meanwhile: another thread may have appended, moved or parked the appender.
        self.measure()
        return self.slot + footprint(length) + HEADER <= self.limit

    @property
    def position(self):
        """The position of the slot the next record takes."""
        return self.window_position + self.slot

    @property
    def offset(self):
        """The byte of the file where that slot is."""
        return self.window_offset + self.slot

    def fits(self, Py_ssize_t length):
        """Whether a record of that length can be published at once."""
        return self.room(length)

    def due(self, Py_ssize_t length):
        """Whether the file must be rolled before a record of that length."""
        return self.slot + footprint(length) + HEADER > self.roll_end

    def crosses(self, Py_ssize_t length):
        """Whether a record of that length does not fit the rest of the region."""
        return self.slot + footprint(length) + HEADER > self.region_end

    cdef inline void publish(self, Py_ssize_t length, uint16_t kind, uint64_t timestamp) noexcept nogil:
        cdef Py_ssize_t slot = self.slot, after = slot + footprint(length)
        put64(self.base + after, PRISTINE)
        put64(self.base + after + 8, 0)
        put64(self.base + slot + 8, timestamp)
        put64(self.base + slot, (<uint64_t>length << 32) | (<uint64_t>kind << 16) | (USER << 8))
        store_release(self.base + slot, 1)
        store_word(self.header + 8, get64(self.header + 8) + 1)
        store_word(self.header, <uint64_t>(self.window_offset + after + HEADER))
        self.slot = after

    def append(self, payload, kind=0, timestamp_ns=None):
        """Publish one record and return its position."""
        cdef Py_buffer view
        cdef Py_ssize_t length, slot
        cdef uint16_t message_kind = as_kind(kind)
        cdef uint64_t timestamp = as_time(timestamp_ns)
        if PyBytes_CheckExact(payload):
            length = PyBytes_GET_SIZE(payload)
            while self.slot + footprint(length) + HEADER > self.limit or length > self.largest:
                if not self.room(length):
                    self.make_room(length)
            slot = self.slot
            memcpy(self.base + slot + HEADER, PyBytes_AS_STRING(payload), length)
        else:
            PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE)
            try:
                length = view.len
                while self.slot + footprint(length) + HEADER > self.limit or length > self.largest:
                    if not self.room(length):
                        self.make_room(length)
                slot = self.slot
                memcpy(self.base + slot + HEADER, view.buf, length)
            finally:
                PyBuffer_Release(&view)
        if self.reserved >= 0:
            self.drop()
        self.publish(length, message_kind, timestamp)
        return self.window_position + slot

    def append_list(
        self, list payloads not None, Py_ssize_t start, kind, timestamp_ns,
        int64_t[::1] positions not None,
    ):
        """Publish payloads[start:] while they fit; return the index of the first that did not.

        A payload that is not exactly bytes ends the run as well: the caller sends it by itself.
        """
        cdef Py_ssize_t index = start, count = PyList_GET_SIZE(payloads), length
        cdef uint16_t message_kind = as_kind(kind)
        cdef uint64_t timestamp = as_time(timestamp_ns)
        cdef object payload
        if positions.shape[0] < count:
            raise ValueError("the array of positions is too short")
        if self.reserved >= 0:
            self.drop()
        while index < count:
            payload = <object>PyList_GET_ITEM(payloads, index)
            if not PyBytes_CheckExact(payload):
                break
            length = PyBytes_GET_SIZE(payload)
            if self.slot + footprint(length) + HEADER > self.limit or length > self.largest:
                if not self.room(length):
                    break
            memcpy(self.base + self.slot + HEADER, PyBytes_AS_STRING(payload), length)
            positions[index] = self.window_position + self.slot
            self.publish(length, message_kind, timestamp)
            index += 1
        return index

    def append_spans(
        self,
        const unsigned char[::1] data not None,
        const int64_t[::1] offsets not None,
        const int64_t[::1] lengths not None,
        Py_ssize_t start,
        const uint16_t[::1] kinds not None,
        const uint64_t[::1] timestamps not None,
        int64_t[::1] positions not None,
    ):
        """Publish the spans of data from ``start`` on while they fit; return the first that did not.

        ``kinds`` and ``timestamps`` hold one value for all or one for each.
        """
        cdef Py_ssize_t index = start, count = offsets.shape[0], length, size = data.shape[0]
        cdef Py_ssize_t kind_step = 0 if kinds.shape[0] == 1 else 1
        cdef Py_ssize_t time_step = 0 if timestamps.shape[0] == 1 else 1
        cdef Py_ssize_t limit
        cdef bint outside = False
        if lengths.shape[0] != count or positions.shape[0] < count or (kind_step and kinds.shape[0] != count) \
                or (time_step and timestamps.shape[0] != count):
            raise ValueError("the columns differ in length")
        if self.reserved >= 0:
            self.drop()
        while index < count:
            if not self.room(lengths[index]):
                break
            limit = self.limit
            self.park()  # the GIL goes away: other threads wait in make_room
            with nogil:
                while index < count:
                    length = lengths[index]
                    if self.slot + footprint(length) + HEADER > limit or length > self.largest:
                        break
                    if offsets[index] < 0 or length < 0 or offsets[index] > size - length:
                        outside = True
                        break
                    memcpy(self.base + self.slot + HEADER, &data[0] + offsets[index], length)
                    positions[index] = self.window_position + self.slot
                    self.publish(length, kinds[index * kind_step], timestamps[index * time_step])
                    index += 1
            self.resume()
            if outside:
                raise ValueError(f"span {index} lies outside its buffer")
        return index

    def reserve(self, Py_ssize_t length):
        """Return the bytes of the next record's payload for filling in place, or None: no room."""
        if not self.room(length):
            return None
        self.drop()
        self.reserved = length
        self.reservation = self.view[self.slot + HEADER : self.slot + HEADER + length]
        return self.reservation

    def commit(self, Py_ssize_t length, kind, timestamp_ns):
        """Publish the first ``length`` bytes of the reservation and return the position."""
        cdef uint64_t timestamp = as_time(timestamp_ns)
        cdef uint16_t message_kind = as_kind(kind)
        cdef int64_t position = self.window_position + self.slot
        if self.reserved < 0:
            raise ValueError("there is no reservation to commit")
        if length < 0 or length > self.reserved:
            raise ValueError(f"cannot commit {length} of {self.reserved} reserved bytes")
        self.drop()
        self.publish(length, message_kind, timestamp)
        return position

    @property
    def pending(self):
        """The size of the reservation, or -1."""
        return self.reserved

    def drop(self):
        """Give a reservation up; its view is closed, so that it cannot write into a later record.

        A view that someone looks through (an array made from it) cannot be closed: that one is the
        caller's to let go of.
        """
        cdef object view = self.reservation
        self.reserved = -1
        self.reservation = None
        if view is not None:
            try:
                view.release()
            except BufferError:
                pass

    def commit_skip(self):
        """Fill the rest of the region with a Skip.  The next region must begin with a header."""
        cdef Py_ssize_t slot = self.slot
        cdef uint64_t rest = self.region_end - slot - HEADER
        self.drop()
        put64(self.base + slot + 8, 0)
        put64(self.base + slot, (rest << 32) | (SKIP << 8))
        store_release(self.base + slot, 1)
        store_word(self.header + 8, get64(self.header + 8) + 1)
        store_word(self.header, <uint64_t>(self.window_offset + self.region_end + HEADER))

    def commit_roll(self, uint64_t timestamp_ns):
        """End this file with a Roll.  The next file must be complete under its name."""
        cdef Py_ssize_t slot = self.slot
        self.drop()
        put64(self.base + slot + 8, timestamp_ns)
        put64(self.base + slot, ROLL << 8)
        store_release(self.base + slot, 1)
        store_word(self.header, <uint64_t>(self.window_offset + slot + 2 * HEADER))

    def detach(self):
        """Let go of the mappings; every later append goes to make_room."""
        self.drop()
        self.park()
        self.window = self.head = None
        self.view = None
        self.base = self.header = NULL


def commit_roll(Mapping window not None, Py_ssize_t slot, uint64_t timestamp_ns):
    """Commit a Roll at a slot whose writer did not live to do it."""
    if not window.writable or slot < 0 or slot % 8 or slot + HEADER > window.length:
        raise ValueError(f"no Roll can be committed at {slot}")
    put64(window.base + slot + 8, timestamp_ns)
    put64(window.base + slot, ROLL << 8)
    store_release(window.base + slot, 1)


def install_header(Mapping window not None, Py_ssize_t slot):
    """Lay the header of a record that is not there yet: committed 0, kind User."""
    if not window.writable or slot < 0 or slot % 8 or slot + HEADER > window.length:
        raise ValueError(f"no header can be laid at {slot}")
    put64(window.base + slot + 8, 0)
    put64(window.base + slot, PRISTINE)


def store_counts(Mapping head not None, uint64_t write_position, uint64_t message_count):
    """Store both counters of the channel header, the position last."""
    if not head.writable or head.length < 80:
        raise ValueError("the channel header must be mapped for writing")
    store_word(head.base + HEADER + 8, message_count)
    store_word(head.base + HEADER, write_position)


def load_counts(Mapping head not None):
    """Return (write_position, message_count)."""
    if head.length < 80:
        raise ValueError("the channel header must be mapped")
    return load_word(head.base + HEADER), load_word(head.base + HEADER + 8)
