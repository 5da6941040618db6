# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Publishing the records of an xchannel; xchannel.pyx walks them.

No allocation, no I/O, no policy: offsets in, offsets out.  A window is a piece of a channel file, mapped for writing, that
begins on a region; every offset here counts from the window's start.  There is no twin: without a compiler nobody writes.

Threads: everything runs under the GIL in one piece, except where it says nogil; there the appender is
parked first, so that another thread takes the caller's slow path and waits for its lock.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_CheckExact
from cpython.memoryview cimport PyMemoryView_FromObject
from cpython.number cimport PyNumber_Index
from libc.stdint cimport int64_t, uint16_t, uint64_t
from libc.string cimport memcpy
from libc.time cimport timespec

from penstock.kernel.atomics cimport get64, put64, store_release, store_word
from penstock.kernel.maps cimport Mapping
from penstock.kernel.xchannelrecord cimport HEADER, ROLL, SKIP, USER, footprint

from penstock.errors import OptionsError

cdef extern from "time.h" nogil:
    int clock_gettime(int clock, timespec *now)
    int CLOCK_REALTIME

cdef enum:
    POPULATE_AHEAD = 256 << 10

cdef bint WHOLE = False  # of no window
cdef uint64_t PRISTINE = 0x0100  # committed 0, kind User, everything else 0


cdef uint64_t now_ns() except? 0:
    cdef timespec now
    clock_gettime(CLOCK_REALTIME, &now)
    if now.tv_sec < 0:
        raise OptionsError(f"the clock of this machine says {now.tv_sec} s since 1970: no record has a time before that")
    return <uint64_t>now.tv_sec * 1000000000 + now.tv_nsec


cdef inline uint64_t as_time(object timestamp_ns) except? 0:
    if timestamp_ns is None:
        return now_ns()
    try:
        return timestamp_ns if PyLong_CheckExact(timestamp_ns) else PyNumber_Index(timestamp_ns)
    except OverflowError:
        raise OptionsError(f"timestamp_ns={timestamp_ns}: must fit 64 bits without a sign") from None


cdef inline uint16_t as_kind(object kind) except? 0:
    try:
        return kind if PyLong_CheckExact(kind) else PyNumber_Index(kind)
    except OverflowError:
        raise OptionsError(f"kind={kind}: must be between 0 and 65535") from None


@cython.final
cdef class Appender:
    """The one writer's place: publishes records at ``slot`` of a window, region by region.

    Publication order: payload, next header, this header, then the commit byte with release; after
    it message_count and write_position.  A record that does not fit here calls ``make_room``, which
    moves the window or raises; while the caller works on that it parks the appender, and every
    other thread lands in make_room too, where a lock makes it wait.
    """

    def __cinit__(self, make_room, Py_ssize_t largest):
        self.make_room = make_room
        self.largest = largest
        self.limit = -1
        self.torn = &WHOLE
        self.parked = True
        self.populates = True
        self.reserved = -1

    def attach(
        self, Mapping window not None, Mapping head not None, Py_ssize_t slot, Py_ssize_t region_end,
        Py_ssize_t roll_end, Py_ssize_t mapped, int64_t window_offset, int64_t window_position,
    ):
        """Write from ``slot`` on, where a header lies already; parked until ``resume``.

        The pages up to ``mapped`` are there; the others are faulted in ahead of the records, a piece at a time.
        """
        if not window.writable or not head.writable or head.length < 80:
            raise ValueError("the window and the channel header must be mapped for writing")
        if slot < 0 or slot % 8 or region_end > window.length or slot + HEADER > region_end:
            raise ValueError(f"slot {slot} is outside its region, which ends at {region_end}")
        self.window = window
        self.view = PyMemoryView_FromObject(window)
        self.head = head
        self.base = window.base
        self.torn = &window.torn
        self.header = head.base + HEADER
        self.slot = slot
        self.region_end = region_end
        self.roll_end = roll_end
        self.window_offset = window_offset
        self.window_position = window_position
        self.populated = max(slot, min(mapped, region_end))
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

    cdef unsigned char *place(self, Py_ssize_t length) except? NULL:
        """Return where the payload of a record of that length goes, or NULL: it needs room that is not here.

        Nothing may come between this and ``publish`` that lets another thread run.
        """
        if self.reserved >= 0:
            self.drop()
        if (self.slot + footprint(length) + HEADER > self.limit or length > self.largest) and not self.room(length):
            return NULL
        return self.base + self.slot + HEADER

    cdef int check_whole(self) except -1:
        """Raise where the file was cut under records that were published since."""
        if self.torn[0]:
            self.make_room(0)
        return 0

    cdef void publish(self, Py_ssize_t length, uint16_t kind, uint64_t timestamp) noexcept nogil:
        cdef Py_ssize_t slot = self.slot, after = slot + footprint(length)
        put64(self.base + after, PRISTINE)
        put64(self.base + after + 8, 0)
        put64(self.base + slot + 8, timestamp)
        if self.torn[0]:
            return  # the file was cut: what was stored is nowhere, so nothing is committed
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
        if self.torn[0]:
            self.make_room(length)  # which says that the file was cut under us
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
        if self.torn[0]:
            self.make_room(0)
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
            if self.torn[0]:
                self.make_room(0)
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
        if self.torn[0]:
            self.make_room(length)
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
        self.torn = &WHOLE


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
