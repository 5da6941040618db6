# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Every page of a tree of LMDB 0.9, before LMDB follows it: numbers, lengths and offsets in these pages are used by it unchecked.

    page := number:u64 padding:u16 flags:u16 lower:u16 upper:u16 (offset:u16)* … node*     a branch or a leaf
    page := number:u64 padding:u16 flags:u16 pages:u32 value                              a value that is on pages of its own
    node := low:u16 high:u16 flags:u16 key size:u16 key value         in a branch low, high and flags are the number of a page

Each field is loaded once.  A page may be reached once; a page that is free may not be reached at all.  Keys ascend over the whole tree,
so that a search finds what a scan finds.
"""
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp

from penstock.kernel.atomics cimport get16, get32, get64

cdef enum:
    FREE_TREE = 0
    MAIN_TREE = 1
    DEPTH_MAX = 32
    KEY_MAX = 511
    PAGE_MAX = 32768
    TABLE_BYTES = 48
    BRANCH = 1
    LEAF = 2
    OVERFLOW = 4
    BIG = 1
    TABLE = 2

cdef enum Reason:
    GOOD = 0
    NOT_IN_FILE
    TWICE
    ANOTHER
    KIND
    LOWER
    FEW
    NODE_OUTSIDE
    KEY_OUTSIDE
    KEY_LENGTH
    ORDER
    NODE_FLAGS
    VALUE_OUTSIDE
    TABLE_LENGTH
    BIG_PAGES
    FREE_LIST
    FREE_PAGE

cdef dict TEXTS = {
    NOT_IN_FILE: "page {} is not in the file",
    TWICE: "page {} is used twice",
    ANOTHER: "page {} says that it is another",
    KIND: "a page is of another kind than its place in the tree",
    LOWER: "the table of a page has no such length",
    FEW: "a page has too few nodes",
    NODE_OUTSIDE: "a node lies outside of its page",
    KEY_OUTSIDE: "a key reaches out of its page",
    KEY_LENGTH: "a key of {} bytes",
    ORDER: "the keys are out of order",
    NODE_FLAGS: "a node has the flags {}",
    VALUE_OUTSIDE: "a value reaches out of its page",
    TABLE_LENGTH: "a table is described in another length",
    BIG_PAGES: "a value of {} bytes on {} pages",
    FREE_LIST: "a list of {} free pages in {} bytes",
    FREE_PAGE: "page {} is free, which is no page or out of order",
}

FREE = FREE_TREE
MAIN = MAIN_TREE
PLAIN = 2

cdef struct Walk:
    const uint8_t *data
    int64_t page_bytes
    uint64_t pages     # of the tree's snapshot
    uint64_t inside    # of them, in the file
    int kind
    uint8_t *seen
    uint64_t seen_bits
    const uint8_t *last
    uint16_t last_length
    bint strict
    int64_t bad        # where something is wrong
    uint64_t one, two  # what its text says
    int64_t table      # where the table of this node is described, or -1


cdef inline Reason wrong(Walk *w, Reason reason, int64_t at, uint64_t one=0, uint64_t two=0) noexcept nogil:
    w.bad, w.one, w.two = at, one, two
    return reason


cdef Reason mark(Walk *w, uint64_t page, int64_t at) noexcept nogil:
    if page < w.seen_bits:
        if w.seen[page >> 3] & (1 << (page & 7)):
            return wrong(w, TWICE, at, page)
        w.seen[page >> 3] |= <uint8_t>(1 << (page & 7))
    return GOOD


cdef Reason enter(Walk *w, uint64_t page, int64_t at, bint branch, uint16_t *upper, uint32_t *count) noexcept nogil:
    """Check the head of a branch or a leaf."""
    cdef Reason found
    cdef int64_t begin
    cdef uint16_t lower
    if page < 2 or page >= w.inside:
        return wrong(w, NOT_IN_FILE, at, page)
    found = mark(w, page, at)
    if found:
        return found
    begin = <int64_t>page * w.page_bytes
    if get64(w.data + begin) != page:
        return wrong(w, ANOTHER, begin, page)
    if get16(w.data + begin + 10) != (BRANCH if branch else LEAF):
        return wrong(w, KIND, begin + 10)
    lower, upper[0] = get16(w.data + begin + 12), get16(w.data + begin + 14)
    if lower < 16 or lower > upper[0] or upper[0] > w.page_bytes or lower & 1:
        return wrong(w, LOWER, begin + 12)
    count[0] = (lower - 16) // 2
    if count[0] < <uint32_t>(2 if branch and w.kind != FREE_TREE else 1):
        return wrong(w, FEW, begin + 12)
    return GOOD


cdef Reason order(Walk *w, int64_t at, uint16_t length) noexcept nogil:
    """Keys ascend over the whole tree; the first key behind a separator may be equal to it."""
    cdef const uint8_t *key = w.data + at + 8
    cdef uint64_t a, b
    cdef int found
    if length < 1 or length > KEY_MAX or (w.kind == FREE_TREE and length != 8):
        return wrong(w, KEY_LENGTH, at + 6, length)
    if w.last is not NULL:
        if w.kind == FREE_TREE:
            a, b = get64(key), get64(w.last)
            found = (a > b) - (a < b)
        else:
            found = memcmp(key, w.last, min(length, w.last_length))
            if not found:
                found = (length > w.last_length) - (length < w.last_length)
        if found < 0 or (found == 0 and w.strict):
            return wrong(w, ORDER, at + 8)
    w.last, w.last_length = key, length
    return GOOD


cdef Reason big(Walk *w, uint64_t page, uint32_t size, int64_t at) noexcept nogil:
    cdef int64_t begin
    cdef uint64_t count, number
    cdef Reason found
    if page < 2 or page >= w.inside:
        return wrong(w, NOT_IN_FILE, at, page)
    begin = <int64_t>page * w.page_bytes
    count = get32(w.data + begin + 12)
    if get64(w.data + begin) != page:
        return wrong(w, ANOTHER, begin, page)
    if get16(w.data + begin + 10) != OVERFLOW:
        return wrong(w, KIND, begin + 10)
    if count > w.inside - page or count * w.page_bytes < <uint64_t>size + 16:
        return wrong(w, BIG_PAGES, begin + 12, size, count)
    for number in range(page, page + count):
        found = mark(w, number, at)
        if found:
            return found
    return GOOD


cdef Reason free_pages(Walk *w, int64_t at, uint32_t size) noexcept nogil:
    """Check a list of free pages: as long as it says, descending, and none of them in use."""
    cdef uint64_t count = get64(w.data + at) if size >= 8 else size, before = w.pages, page, i
    cdef Reason found
    if size < 8 or size % 8 or count > size // 8 - 1:
        return wrong(w, FREE_LIST, at, count, size)
    for i in range(count):
        at += 8
        page = get64(w.data + at)
        if page < 2 or page >= before:
            return wrong(w, FREE_PAGE, at, page)
        found = mark(w, page, at)
        if found:
            return found
        before = page
    return GOOD


cdef Reason leaf(Walk *w, int64_t at, uint32_t size, uint16_t flags, uint16_t length, int64_t room) noexcept nogil:
    cdef int64_t value = at + 8 + length
    cdef uint64_t page
    cdef Reason found
    w.table = -1
    if flags != 0 and flags != BIG and not (flags == TABLE and w.kind == MAIN_TREE):
        return wrong(w, NODE_FLAGS, at + 4, flags)
    if flags == BIG:
        if room < 8:
            return wrong(w, VALUE_OUTSIDE, at)
        page = get64(w.data + value)
        found = big(w, page, size, value)
        if found:
            return found
        value = <int64_t>page * w.page_bytes + 16
    elif size > room:
        return wrong(w, VALUE_OUTSIDE, at)
    if flags == TABLE:
        if size != TABLE_BYTES:
            return wrong(w, TABLE_LENGTH, at)
        w.table = value
    return free_pages(w, value, size) if w.kind == FREE_TREE else GOOD


def check_tree(
    const uint8_t[::1] data not None, int64_t page_bytes, uint64_t pages, uint64_t root, int depth, int kind, uint8_t[::1] seen not None
):
    """Check every page of one tree; return (byte, what is wrong), or a list of where tables are described.

    ``pages`` is how many the snapshot has, of which the file may lack free ones; ``seen`` has a bit for each of the first of them.
    """
    cdef Walk w
    cdef uint64_t begins[DEPTH_MAX]
    cdef uint32_t counts[DEPTH_MAX]
    cdef uint32_t nexts[DEPTH_MAX]
    cdef uint16_t uppers[DEPTH_MAX]
    cdef Reason found = GOOD
    cdef int level = 0
    cdef int64_t begin, at, room
    cdef uint32_t index
    cdef uint16_t low, high, flags, length
    if page_bytes < 512 or page_bytes > PAGE_MAX or page_bytes & (page_bytes - 1) or not 1 <= depth <= DEPTH_MAX:
        raise ValueError(f"pages of {page_bytes} bytes and a depth of {depth}")
    w.data = &data[0] if data.shape[0] else NULL
    w.page_bytes, w.pages, w.inside = page_bytes, pages, min(pages, <uint64_t>(data.shape[0] // page_bytes))
    w.kind = kind
    w.seen, w.seen_bits = &seen[0] if seen.shape[0] else NULL, <uint64_t>seen.shape[0] * 8
    w.last, w.last_length, w.strict, w.table = NULL, 0, True, -1
    tables = []
    with nogil:
        found = enter(&w, root, 0, depth > 1, &uppers[0], &counts[0])
        begins[0], nexts[0] = root, 0
        while not found and level >= 0:
            if nexts[level] == counts[level]:
                level -= 1
                continue
            begin = <int64_t>begins[level] * page_bytes
            index = nexts[level]
            nexts[level] += 1
            at = get16(w.data + begin + 16 + 2 * index)
            if at & 1 or at < uppers[level] or at + 8 > page_bytes:
                found = wrong(&w, NODE_OUTSIDE, begin + 16 + 2 * index)
                break
            room = page_bytes - at - 8
            at += begin
            low, high = get16(w.data + at), get16(w.data + at + 2)
            flags, length = get16(w.data + at + 4), get16(w.data + at + 6)
            if length > room:
                found = wrong(&w, KEY_OUTSIDE, at + 6)
                break
            if level + 1 < depth:
                if index:
                    found = order(&w, at, length)
                    if found:
                        break
                    w.strict = False
                level += 1
                begins[level] = low | <uint64_t>high << 16 | <uint64_t>flags << 32
                nexts[level] = 0
                found = enter(&w, begins[level], at, level + 1 < depth, &uppers[level], &counts[level])
            else:
                found = order(&w, at, length)
                if found:
                    break
                w.strict = True
                found = leaf(&w, at, low | <uint32_t>high << 16, flags, length, room - length)
                if w.table >= 0 and not found:
                    with gil:
                        tables.append(w.table)
    if found:
        return w.bad, TEXTS[found].format(w.one, w.two)
    return tables
