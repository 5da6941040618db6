# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Many PGSS records at once: encode, copy, sort, search, digest.  Layout: store/pgss.py."""
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from penstock.kernel.atomics cimport get32
from penstock.kernel.crc cimport crc32, crc_init
from penstock.kernel.murmur cimport murmur
from penstock.kernel.pgssrecord cimport *

import numpy as np

crc_init()

cdef int64_t SEARCH_BYTES = 256 << 20  # the most a search for a record may checksum


cdef const uint8_t *whole(const uint8_t[::1] data) noexcept:
    return &data[0] if data.shape[0] else NULL


def sort_records(const uint8_t[::1] data not None, uint32_t[::1] slots not None, int64_t[::1] offsets not None, int64_t ordered):
    """Sort slots and the offsets of their records by key; the first ``ordered`` already are."""
    cdef bint ok = True
    cdef int64_t count = offsets.shape[0], i
    cdef Rec r
    if slots.shape[0] != count or not 0 <= ordered <= count:
        raise ValueError("slots and offsets differ in length")
    for i in range(count):
        if not 0 <= offsets[i] < data.shape[0] - 7:
            raise ValueError(f"no record at {offsets[i]}")
    if ordered < count:
        with nogil:
            ok = sort_slots(&data[0], data.shape[0], &slots[0], &offsets[0], ordered, count)
    if not ok:
        raise MemoryError


def columns(const uint8_t[::1] data not None, const int64_t[::1] offsets not None):
    """Return (key, key_len, value, value_len, version, version_len) of the put records at these offsets."""
    cdef int64_t i, count = offsets.shape[0], bad = -1
    cdef Rec r
    result = np.empty((6, count), np.int64)
    cdef int64_t[:, ::1] out = result
    cdef const uint8_t *p = whole(data)
    with nogil:
        for i in range(count):
            if not 0 <= offsets[i] < data.shape[0] or parse(p, data.shape[0], offsets[i], False, &r) or r.kind != PUT:
                bad = i
                break
            out[0, i], out[1, i], out[2, i] = r.key, r.key_len, r.value
            out[3, i], out[4, i], out[5, i] = r.value_len, r.version, r.version_len
    if bad >= 0:
        raise ValueError(f"no put record at {offsets[bad]}")
    return result


def copy_records(
    const uint8_t[::1] data not None,
    const int64_t[::1] offsets not None,
    int64_t start,
    uint8_t[::1] out not None,
    int64_t[::1] lengths not None,
):
    """Copy whole records from number ``start`` on while they fit; return (next number, bytes)."""
    cdef int64_t i = start, at = 0, bad = -1
    cdef Rec r
    cdef const uint8_t *p = whole(data)
    if lengths.shape[0] != offsets.shape[0] or start < 0:
        raise ValueError("offsets and lengths differ in length")
    with nogil:
        while i < offsets.shape[0]:
            if not 0 <= offsets[i] < data.shape[0] or parse(p, data.shape[0], offsets[i], False, &r) or r.kind != PUT:
                bad = i
                break
            if at + r.total > out.shape[0]:
                break
            memcpy(&out[at], p + offsets[i], r.total)
            lengths[i] = r.total
            at += r.total
            i += 1
    if bad >= 0:
        raise ValueError(f"no put record at {offsets[bad]}")
    return i, at


def find_record(const uint8_t[::1] data not None, int64_t start, int64_t stop):
    """Return where a whole, valid record lies in start..stop, -1 for nowhere, -2 for too long a search."""
    cdef int64_t at = start, work = 0, found = -1
    cdef Rec r
    cdef const uint8_t *p = whole(data)
    if not 0 <= start <= stop <= data.shape[0]:
        raise ValueError("the search lies outside the log")
    with nogil:
        while at + SMALLEST <= stop:
            if 1 <= p[at + 4] <= 3 and parse(p, stop, at, False, &r) == CLEAN:
                work += r.total
                if crc32(0, p + at + 4, r.total - 4) == get32(p + at):
                    found = at
                    break
                if work > SEARCH_BYTES:
                    found = -2
                    break
            at += 1
    return found


def last_cursor(const uint8_t[::1] data not None, int64_t start):
    """Return where the last cursor record of a log's readable part ends, or ``start``."""
    cdef int64_t at = start, end = start
    cdef Rec r
    cdef const uint8_t *p = whole(data)
    with nogil:
        while at < data.shape[0] and parse(p, data.shape[0], at, True, &r) == CLEAN:
            at += r.total
            if r.kind == CURSOR:
                end = at
    return end


def encode(
    const uint8_t[::1] data not None,
    const uint8_t[::1] ops not None,
    const int64_t[::1] keys not None,
    const int64_t[::1] key_lens not None,
    const int64_t[::1] values not None,
    const int64_t[::1] value_lens not None,
    const int64_t[::1] versions not None,
    const int64_t[::1] version_lens not None,
):
    """Return the records of a batch of updates, one after another; ValueError names the one refused."""
    cdef int64_t i, count = ops.shape[0], total = 0, size = data.shape[0], bad = -1
    cdef const uint8_t *p = whole(data)
    cdef uint8_t *q
    cdef uint8_t *record
    cdef const char *why = NULL
    cdef uint16_t key_len
    cdef uint32_t value_len, crc
    if not (count == keys.shape[0] == key_lens.shape[0] == values.shape[0] == value_lens.shape[0]
            == versions.shape[0] == version_lens.shape[0]):
        raise ValueError("the columns of the batch differ in length")
    with nogil:
        for i in range(count):
            if (not inside(keys[i], key_lens[i], size) or not inside(values[i], value_lens[i], size)
                    or not inside(versions[i], version_lens[i], size)):
                why = "lies outside its buffer"
            elif ops[i] > 2:
                why = "has an unknown op"
            elif key_lens[i] > KEY_MAX:
                why = "has a key of more than 65535 bytes"
            elif ops[i] == 0 and value_lens[i] > VALUE_MAX:
                why = "has a value of more than 16 MiB"
            elif version_lens[i] > TOKEN_MAX:
                why = "has a version of more than 10 bytes"
            elif not valid_utf8(p + keys[i], key_lens[i]):
                why = "has a key that is not UTF-8"
            if why is not NULL:
                bad = i
                break
            total += 8 + key_lens[i] + version_lens[i] + (4 + value_lens[i] if ops[i] == 0 else 0)
    if bad >= 0:
        raise ValueError(f"update {bad} {why.decode()}")
    result = PyByteArray_FromStringAndSize(NULL, total)
    q = <uint8_t *>PyByteArray_AS_STRING(result)
    with nogil:
        for i in range(count):
            record = q
            key_len = <uint16_t>key_lens[i]
            q[4] = PUT if ops[i] == 0 else DELETE
            memcpy(q + 5, &key_len, 2)
            memcpy(q + 7, p + keys[i], key_len)
            q += 7 + key_len
            if ops[i] == 0:
                value_len = <uint32_t>value_lens[i]
                memcpy(q, &value_len, 4)
                memcpy(q + 4, p + values[i], value_len)
                q += 4 + value_len
            q[0] = <uint8_t>version_lens[i]
            memcpy(q + 1, p + versions[i], version_lens[i])
            q += 1 + version_lens[i]
            crc = crc32(0, record + 4, q - record - 4)
            memcpy(record, &crc, 4)
    return result


def encode_list(list updates not None):
    """Return the records of a list of KvUpdate, as encode does for columns; no array is made for a few of them."""
    cdef int64_t i, count = len(updates), total = 0, at = 0, size
    cdef Py_ssize_t n
    cdef int op
    cdef const char *key
    cdef const char *why
    cdef bytes value, version
    cdef uint16_t key_len
    cdef uint32_t value_len, crc
    cdef uint8_t *q
    result = PyByteArray_FromStringAndSize(NULL, 0)
    for i in range(count):
        update = updates[i]
        op, value, version, why = update.op, update.value, update.version.raw, NULL
        try:
            key = PyUnicode_AsUTF8AndSize(update.key, &n)
        except UnicodeEncodeError:
            raise ValueError(f"update {i} has a key that is not UTF-8") from None
        if op > 2 or op < 0:
            why = "has an unknown op"
        elif n > KEY_MAX:
            why = "has a key of more than 65535 bytes"
        elif op == 0 and PyBytes_GET_SIZE(value) > VALUE_MAX:
            why = "has a value of more than 16 MiB"
        elif PyBytes_GET_SIZE(version) > TOKEN_MAX:
            why = "has a version of more than 10 bytes"
        if why is not NULL:
            raise ValueError(f"update {i} {why.decode()}")
        size = 8 + n + PyBytes_GET_SIZE(version) + (4 + PyBytes_GET_SIZE(value) if op == 0 else 0)
        if at + size > total:
            total = (at + size) * 2 if count > 1 else size
            PyByteArray_Resize(result, total)
        q = <uint8_t *>PyByteArray_AS_STRING(result) + at
        key_len = <uint16_t>n
        q[4] = PUT if op == 0 else DELETE
        memcpy(q + 5, &key_len, 2)
        memcpy(q + 7, key, n)
        n += 7
        if op == 0:
            value_len = <uint32_t>PyBytes_GET_SIZE(value)
            memcpy(q + n, &value_len, 4)
            memcpy(q + n + 4, PyBytes_AS_STRING(value), value_len)
            n += 4 + value_len
        q[n] = <uint8_t>PyBytes_GET_SIZE(version)
        memcpy(q + n + 1, PyBytes_AS_STRING(version), PyBytes_GET_SIZE(version))
        crc = crc32(0, q + 4, size - 4)
        memcpy(q, &crc, 4)
        at += size
    PyByteArray_Resize(result, at)
    return result


cdef bint inside(int64_t offset, int64_t length, int64_t size) noexcept nogil:
    return 0 <= offset and 0 <= length <= size and offset <= size - length


def pack_values(
    const uint8_t[::1] data not None,
    const int64_t[::1] values not None,
    const int64_t[::1] value_lens not None,
    const int64_t[::1] versions not None,
    const int64_t[::1] version_lens not None,
):
    """Return the engines' value records: ver_len:u8 version value, as a list of bytes."""
    cdef int64_t i, count = values.shape[0], size = data.shape[0]
    cdef const uint8_t *p = whole(data)
    cdef char *q
    result = []
    for i in range(count):
        if (not inside(values[i], value_lens[i], size) or not inside(versions[i], version_lens[i], size)
                or version_lens[i] > TOKEN_MAX):
            raise ValueError(f"update {i} lies outside its buffer")
        record = PyBytes_FromStringAndSize(NULL, 1 + version_lens[i] + value_lens[i])
        q = PyBytes_AS_STRING(record)
        q[0] = <char>version_lens[i]
        memcpy(q + 1, p + versions[i], version_lens[i])
        memcpy(q + 1 + version_lens[i], p + values[i], value_lens[i])
        result.append(record)
    return result


def digest_values(list keys not None, list records not None):
    """Return (how many, sum of hashes) of the entries whose value record is not None."""
    cdef int64_t room = 0, n, m, v, total, count = 0
    cdef uint64_t low = 0, high = 0
    cdef uint64_t hashed[2]
    cdef uint8_t *scratch = NULL
    cdef uint16_t key_len
    cdef uint32_t value_len
    cdef const uint8_t *p
    cdef bytes key, record
    try:
        for key, record in zip(keys, records, strict=True):
            if record is None:
                continue
            n, m = PyBytes_GET_SIZE(key), PyBytes_GET_SIZE(record)
            p = <const uint8_t *>PyBytes_AS_STRING(record)
            if m < 1 or p[0] > TOKEN_MAX or 1 + p[0] > m or n > KEY_MAX:
                raise ValueError(f"{key!r} has no value record")
            v = m - 1 - p[0]
            total = 7 + n + v + p[0]
            if total > room:
                free(scratch)
                room = total * 2
                scratch = <uint8_t *>malloc(room)
                if scratch is NULL:
                    raise MemoryError
            key_len, value_len = <uint16_t>n, <uint32_t>v
            memcpy(scratch, &key_len, 2)
            memcpy(scratch + 2, PyBytes_AS_STRING(key), n)
            memcpy(scratch + 2 + n, &value_len, 4)
            memcpy(scratch + 6 + n, p + 1 + p[0], v)
            scratch[6 + n + v] = p[0]
            memcpy(scratch + 7 + n + v, p + 1, p[0])
            murmur(scratch, total, hashed)
            low += hashed[0]
            high += hashed[1] + (low < hashed[0])
            count += 1
    finally:
        free(scratch)
    return count, (int(high) << 64) | int(low)
