"""Promise: who chooses the keys of a store cannot choose where they fall in its index."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock import kernel
from penstock.store import AppendLogStore
from penstock.types import KvUpdate, WatchCursor

COUNT, PLACES = 1024, 2048  # as many places as a table for so many keys has

Words = NDArray[np.uint64]


def murmur(keys: Words) -> Words:
    """The first word of MurmurHash3_x64_128, seed 0, of keys of eight bytes: what the index once went by."""

    def rotl(x: Words, r: int) -> Words:
        return (x << np.uint64(r)) | (x >> np.uint64(64 - r))

    def mix(k: Words) -> Words:
        k = (k ^ (k >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
        k = (k ^ (k >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
        return k ^ (k >> np.uint64(33))

    a = rotl(keys * np.uint64(0x87C37B91114253D5), 31) * np.uint64(0x4CF5AD432745937F)
    a = a ^ np.uint64(8)
    b = np.full_like(a, 8)
    a = a + b
    b = b + a
    a, b = mix(a), mix(b)
    return a + b


@pytest.mark.skipif(not kernel.native, reason="the twin's index is a dict, which has a seed of its own")
def test_keys_that_fell_on_one_place_are_spread(tmp_path: Path) -> None:
    digits = np.char.mod("%08d", np.arange(COUNT * PLACES * 2)).astype("S8")
    hashed = murmur(digits.view(np.uint64))
    chosen = digits[((hashed >> np.uint64(32)) % np.uint64(PLACES)) == 0][:COUNT]
    assert len(chosen) == COUNT
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        store.apply([KvUpdate.put(key.decode(), b"v") for key in chosen], WatchCursor.of(1))
    with AppendLogStore.open(tmp_path / "fold.snap", read_only=True) as store:
        assert store.count() == COUNT
        assert store._fold.collisions < COUNT * 20  # half a million, when all of them fell on one place


def test_the_digest_does_not_depend_on_the_process(tmp_path: Path) -> None:
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        store.apply([KvUpdate.put(f"key{number}", b"v", number) for number in range(1000)], WatchCursor.of(1000))
        digest = store.digest()
    code = "import sys; from penstock.store import open_store; print(open_store(sys.argv[1]).digest())"
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "fold.snap")], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == digest
