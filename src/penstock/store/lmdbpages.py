"""Whether the pages of an LMDB file can be followed, asked before LMDB follows them.

LMDB has no checksums, and takes page numbers, lengths and offsets from its pages as they are: one flipped bit can lead
it behind the end of the file, in a circle, or to pages that are free.  So every page that a snapshot reaches is looked
at once, with the lists of free pages, whose members it will write over; the contents of values are not.

    meta := page head:16 magic:u32 version:u32 address:u64 map:u64 free:table main:table last:u64 transaction:u64
    table := padding:u32 flags:u16 depth:u16 branches:u64 leaves:u64 overflows:u64 entries:u64 root:u64
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np

from penstock import kernel
from penstock.disk import ReadDisk
from penstock.errors import CorruptionError

__all__ = ["META_BYTES", "TRANSACTION_AT", "check_pages", "page_size"]

META: Final = struct.Struct("<16xII8xQ48s48sQQ")
TABLE: Final = struct.Struct("<IHHQQQQQ")
META_BYTES: Final = META.size
MAGIC: Final = 0xBEEFC0DE
FREE_AT: Final = 40
MAIN_AT: Final = 88
LAST_AT: Final = 136
TRANSACTION_AT: Final = 144
ROOT_AT: Final = 40
NO_ROOT: Final = 2**64 - 1
INTEGER_KEYS: Final = 8
WITHOUT_FOLDER: Final = 0x4000
"""Kept in the flags of the free table, and without meaning for the pages."""
BEHIND_PAGES: Final = 1 << 20
"""How many free pages behind the end of the file are looked at for being there twice."""
PAGE_BYTES: Final = range(512, (1 << 15) + 1)


def page_size(disk: ReadDisk, path: str) -> int:
    """Return the size of its pages as the first meta page says, or 0 for a file that is empty or not there."""
    try:
        with disk.open(path) as file:
            first = file.read_at(0, META_BYTES)
    except FileNotFoundError:
        return 0
    if not first:
        return 0
    size: int = TABLE.unpack(META.unpack(first)[3])[0] if len(first) == META_BYTES else 0
    if size not in PAGE_BYTES or size & (size - 1):
        raise CorruptionError(path, FREE_AT, f"pages of {size} bytes")
    return size


def check_pages(disk: ReadDisk, path: str, transaction: int) -> bool:
    """Check every page that a snapshot reaches; False if the meta pages are not those of a store at that transaction.

    Whoever asks has that snapshot open, so that nobody writes over its pages meanwhile.  A commit writes one meta page
    in turn, so they are one transaction apart: a newest one that a flipped bit made older would take the store back in
    silence.
    """
    size = page_size(disk, path)
    with disk.open(path) as file:
        length = file.stat().size
        raw = [file.read_at(begin, META_BYTES) for begin in (0, size)]
        if length < 2 * size or len(raw[1]) < META_BYTES:
            raise CorruptionError(path, length, "it ends before its meta pages do")
        metas = [META.unpack(part) for part in raw]
        if sorted(meta[6] for meta in metas) not in ([0, 0], [transaction - 1, transaction]):
            return False
        begin = size * (transaction & 1)
        magic, _, _, free, main, last, found = metas[transaction & 1]
        if magic != MAGIC or found != transaction:
            return False
        if not 1 <= last < 1 << 48:
            raise CorruptionError(path, begin + LAST_AT, f"its last page is {last}")
        memory = file.map(0, length)
    seen = np.zeros((min(last + 1, length // size + BEHIND_PAGES) + 7) // 8, np.uint8)

    def check(table: bytes, at: int, kind: int) -> list[int]:
        _, flags, depth, _, _, _, _, root = TABLE.unpack(table)
        if flags & ~(WITHOUT_FOLDER if kind == kernel.lmdbtree.FREE else 0) != (
            INTEGER_KEYS if kind == kernel.lmdbtree.FREE else 0
        ):
            raise CorruptionError(path, at + 4, f"a table has the flags {flags}")
        if root == NO_ROOT:
            return []
        if not 1 <= depth <= 32:
            raise CorruptionError(path, at + 6, f"a tree of {depth} levels")
        answer = kernel.lmdbtree.check_tree(memory, size, last + 1, root, depth, kind, seen)
        if isinstance(answer, tuple):
            byte, reason = answer
            raise CorruptionError(path, byte or at + ROOT_AT, reason)
        return answer

    check(free, begin + FREE_AT, kernel.lmdbtree.FREE)
    view = memoryview(memory)
    for at in check(main, begin + MAIN_AT, kernel.lmdbtree.MAIN):
        check(bytes(view[at : at + TABLE.size]), at, kernel.lmdbtree.PLAIN)
    if memory.torn:
        raise CorruptionError(path, length, "it was cut while it was looked at")
    return True
