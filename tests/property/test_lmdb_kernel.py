"""Law: the compiled check of LMDB's pages and its twin say the same about any bytes."""

from __future__ import annotations

import functools
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from penstock.kernel import lmdbtree
from penstock.kernel.twin import lmdbtree as twin
from penstock.store import LmdbStore
from penstock.store.lmdbpages import META, TABLE
from penstock.types import KvUpdate, WatchCursor

PAGE = 4096
WORDS = st.sampled_from([0, 1, 2, 3, 4, 5, 8, 16, 48, 511, 512, 4095, 4096, 0x7FFF, 0x8000, 0xFFFF])


@functools.cache
def made() -> bytes:
    """A file with branches, leaves, long values and lists of free pages."""
    with tempfile.TemporaryDirectory() as folder:
        with LmdbStore.open(folder + "/fold", map_bytes=1 << 22, sync="none") as store:
            updates = [KvUpdate.put(f"key{n:04}", b"%d" % n * (3000 if n % 60 == 0 else 50), 1) for n in range(240)]
            store.apply(updates, WatchCursor.of(1))
            for number in range(0, 240, 9):
                store.apply([KvUpdate.delete(f"key{number:04}", 2)], WatchCursor.of(2 + number))
        return Path(folder + "/fold/data.mdb").read_bytes()


def trees(data: bytes) -> list[tuple[int, int, int, int]]:
    """Return (pages, root, depth, kind) of the tables of the newest snapshot."""
    meta = max((META.unpack_from(data, at) for at in (0, PAGE)), key=lambda meta: int(meta[6]))
    tables = [(meta[3], lmdbtree.FREE), (meta[4], lmdbtree.MAIN)]
    seen = np.zeros(1 << 12, np.uint8)
    root, depth = TABLE.unpack(meta[4])[7], TABLE.unpack(meta[4])[2]
    found = lmdbtree.check_tree(data, PAGE, meta[5] + 1, root, depth, lmdbtree.MAIN, seen)
    assert isinstance(found, list)
    tables += [(data[at : at + TABLE.size], lmdbtree.PLAIN) for at in found]
    return [(meta[5] + 1, TABLE.unpack(table)[7], TABLE.unpack(table)[2], kind) for table, kind in tables]


@functools.cache
def places() -> tuple[int, ...]:
    """Words that matter: heads of pages, their tables, and the nodes at the ends of them."""
    found = []
    for page in range(2, len(made()) // PAGE):
        begin = PAGE * page
        found += list(range(begin, begin + 32, 2))
        for at in struct.unpack_from("<8H", made(), begin + 16):
            found += list(range(begin + at % PAGE // 2 * 2, begin + at % PAGE // 2 * 2 + 24, 2))
    return tuple(place for place in found if place + 2 <= len(made()))


def test_an_intact_file_is_one_for_both() -> None:
    one, two = np.zeros(1 << 12, np.uint8), np.zeros(1 << 12, np.uint8)
    for pages, root, depth, kind in trees(made()):
        found = lmdbtree.check_tree(made(), PAGE, pages, root, depth, kind, one)
        assert isinstance(found, list)
        assert found == twin.check_tree(made(), PAGE, pages, root, depth, kind, two)
    assert one.any()
    assert (one == two).all()


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 1 << 30), WORDS), min_size=1, max_size=4), st.integers(0, 9))
def test_both_say_the_same_about_any_bytes(changes: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(made())
    for place, word in changes:
        struct.pack_into("<H", data, places()[place % len(places())], word)
    if not cut:
        del data[-3 * PAGE - 5 :]
    one, two = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    for pages, root, depth, kind in trees(made()):
        found = lmdbtree.check_tree(data, PAGE, pages, root, depth, kind, one)
        assert found == twin.check_tree(data, PAGE, pages, root, depth, kind, two)
        assert (one == two).all()


@pytest.mark.parametrize(("page", "depth"), [(0, 1), (511, 1), (4097, 1), (1 << 16, 1), (PAGE, 0), (PAGE, 33)])
def test_impossible_sizes_are_refused(page: int, depth: int) -> None:
    for check in (lmdbtree.check_tree, twin.check_tree):
        with pytest.raises(ValueError, match="depth of"):
            check(bytes(PAGE * 3), page, 3, 2, depth, 2, bytearray(8))
