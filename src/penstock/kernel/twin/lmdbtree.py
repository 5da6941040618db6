"""The twin of lmdbtree.pyx."""

from __future__ import annotations

import struct
from typing import Any, Final

from penstock.kernel.twin.maps import view_of

FREE: Final = 0
MAIN: Final = 1
PLAIN: Final = 2

PAGE: Final = struct.Struct("<QHHHH")  # number, padding, flags, lower, upper
NODE: Final = struct.Struct("<HHHH")  # low, high, flags, key size
LONG: Final = struct.Struct("<Q")
BRANCH, LEAF, OVERFLOW = 1, 2, 4
BIG, TABLE = 1, 2
KEY_MAX: Final = 511
PAGE_MAX: Final = 32768
DEPTH_MAX: Final = 32
TABLE_BYTES: Final = 48


class _Bad(Exception):
    """A place in the file, and what is wrong there."""


class _Walk:
    def __init__(self, data: memoryview, page_bytes: int, pages: int, kind: int, seen: Any, tables: list[int]) -> None:
        self.data, self.page_bytes, self.pages, self.kind = data, page_bytes, pages, kind
        self.seen, self.tables = seen, tables
        self.inside = min(pages, len(data) // page_bytes)
        self.last: Any = None
        self.strict = True

    def mark(self, page: int, at: int) -> None:
        byte, bit = page >> 3, 1 << (page & 7)
        if byte < len(self.seen):
            if self.seen[byte] & bit:
                raise _Bad(at, f"page {page} is used twice")
            self.seen[byte] |= bit

    def visit(self, page: int, at: int, level: int, depth: int) -> None:
        if not 2 <= page < self.inside:
            raise _Bad(at, f"page {page} is not in the file")
        self.mark(page, at)
        begin = page * self.page_bytes
        number, _, flags, lower, upper = PAGE.unpack_from(self.data, begin)
        if number != page:
            raise _Bad(begin, f"page {page} says that it is another")
        branch = level < depth
        if flags != (BRANCH if branch else LEAF):
            raise _Bad(begin + 10, "a page is of another kind than its place in the tree")
        if not 16 <= lower <= upper <= self.page_bytes or lower & 1:
            raise _Bad(begin + 12, "the table of a page has no such length")
        count = (lower - 16) // 2
        if count < (2 if branch and self.kind != FREE else 1):
            raise _Bad(begin + 12, "a page has too few nodes")
        for index in range(count):
            slot = begin + 16 + 2 * index
            at = begin + int.from_bytes(self.data[slot : slot + 2], "little")
            if at & 1 or at < begin + upper or at + 8 > begin + self.page_bytes:
                raise _Bad(slot, "a node lies outside of its page")
            low, high, kind, length = NODE.unpack_from(self.data, at)
            room = begin + self.page_bytes - at - 8
            if length > room:
                raise _Bad(at + 6, "a key reaches out of its page")
            if branch:
                if index:
                    self.order(at, length)
                    self.strict = False
                self.visit(low | high << 16 | kind << 32, at, level + 1, depth)
            else:
                self.order(at, length)
                self.strict = True
                self.leaf(at, low | high << 16, kind, length, room - length)

    def order(self, at: int, length: int) -> None:
        """Keys ascend over the whole tree; the first key behind a separator may be equal to it."""
        raw = bytes(self.data[at + 8 : at + 8 + length])
        if not 1 <= length <= KEY_MAX or (self.kind == FREE and length != 8):
            raise _Bad(at + 6, f"a key of {length} bytes")
        key: Any = LONG.unpack(raw)[0] if self.kind == FREE else raw
        if self.last is not None and (key < self.last or (key == self.last and self.strict)):
            raise _Bad(at + 8, "the keys are out of order")
        self.last = key

    def leaf(self, at: int, size: int, flags: int, length: int, room: int) -> None:
        value = at + 8 + length
        if flags not in ((0, BIG, TABLE) if self.kind == MAIN else (0, BIG)):
            raise _Bad(at + 4, f"a node has the flags {flags}")
        if flags == BIG:
            if room < 8:
                raise _Bad(at, "a value reaches out of its page")
            value = self.big(LONG.unpack_from(self.data, value)[0], size, value)
        elif size > room:
            raise _Bad(at, "a value reaches out of its page")
        if flags == TABLE:
            if size != TABLE_BYTES:
                raise _Bad(at, "a table is described in another length")
            self.tables.append(value)
        if self.kind == FREE:
            self.free(value, size)

    def big(self, page: int, size: int, at: int) -> int:
        """Check a value on pages of its own; return where it begins."""
        if not 2 <= page < self.inside:
            raise _Bad(at, f"page {page} is not in the file")
        begin = page * self.page_bytes
        number, _, flags, low, high = PAGE.unpack_from(self.data, begin)
        count = low | high << 16
        if number != page:
            raise _Bad(begin, f"page {page} says that it is another")
        if flags != OVERFLOW:
            raise _Bad(begin + 10, "a page is of another kind than its place in the tree")
        if count > self.inside - page or count * self.page_bytes < size + 16:
            raise _Bad(begin + 12, f"a value of {size} bytes on {count} pages")
        for number in range(page, page + count):
            self.mark(number, at)
        return begin + 16

    def free(self, at: int, size: int) -> None:
        """Check a list of free pages: as long as it says, descending, and none of them in use."""
        count = LONG.unpack_from(self.data, at)[0] if size >= 8 else size
        if size < 8 or size % 8 or count > size // 8 - 1:
            raise _Bad(at, f"a list of {count} free pages in {size} bytes")
        before = self.pages
        for place in range(at + 8, at + 8 + 8 * count, 8):
            page = LONG.unpack_from(self.data, place)[0]
            if not 2 <= page < before:
                raise _Bad(place, f"page {page} is free, which is no page or out of order")
            self.mark(page, place)
            before = page


def check_tree(
    data: Any, page_bytes: int, pages: int, root: int, depth: int, kind: int, seen: Any
) -> tuple[int, str] | list[int]:
    """Check every page of one tree; return what is wrong, or where tables are described."""
    memory = view_of(data)
    if not 512 <= page_bytes <= PAGE_MAX or page_bytes & (page_bytes - 1) or not 1 <= depth <= DEPTH_MAX:
        raise ValueError(f"pages of {page_bytes} bytes and a depth of {depth}")
    tables: list[int] = []
    try:
        _Walk(memory, page_bytes, pages, kind, seen, tables).visit(root, 0, 1, depth)
    except _Bad as exc:
        at, reason = exc.args
        return at, reason
    return tables
