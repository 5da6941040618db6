"""Throw mutated channel files at the scanner: it must stay inside the file and say what it met.

    python fuzz/xchannel_scan.py --inputs 10000000 --seed 7

The bytes lie right before a page that cannot be read, so a single byte read past the end of the file kills the
process.  After each scan the spans are checked one against the other and against the file; now and then the plain
Python twin walks the same bytes and must find the same.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import random
import struct
import sys
import time
from typing import Any

import numpy as np

from penstock.kernel.twin import xchannel as twin

RECORD = struct.Struct("<BBHIQ")
REGION = 4096
LENGTHS = (0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 100, 3984, 4000, 4064, 4065, 4072, 4080, 4081, 4096, 65536)
HUGE = (2**31 - 1, 2**31, 2**32 - 17, 2**32 - 16, 2**32 - 8, 2**32 - 1)
LIMIT = 256
SAMPLE = 500  # one input in so many is walked by the twin as well


class Guarded:
    """Memory that ends at a page nobody may touch.

    >>> guarded = Guarded(4096)
    >>> guarded.tail(100)[:] = bytes(100)
    """

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        self.size = -(-size // page) * page
        self._map = mmap.mmap(-1, self.size + page)
        self._view = memoryview(self._map)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(base + self.size), ctypes.c_size_t(page), 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    def tail(self, size: int) -> memoryview:
        """Return the last ``size`` bytes before the guard."""
        return self._view[self.size - size : self.size]


def valid_file(rng: random.Random) -> tuple[bytes, list[int]]:
    """Return a sound channel file of one to three regions and where its records begin."""
    regions = rng.randint(1, 3)
    data = bytearray(regions * REGION)
    RECORD.pack_into(data, 0, 1, 0, 0, 64, 0)
    struct.pack_into("<QQQII", data, 16, 96, 1, 0, REGION, 0)
    slots, at = [0], 80
    for region in range(regions):
        end = (region + 1) * REGION
        at = max(at, region * REGION)
        for _ in range(rng.randint(0, 40)):
            length = rng.choice((0, 1, 8, 20, 63, 64, 200, 1000))
            after = at + (16 + length + 7) // 8 * 8
            if after + 16 > end:
                break
            RECORD.pack_into(data, at, 1, 1, rng.randrange(65536), length, rng.getrandbits(64))
            data[at + 16 : at + 16 + length] = rng.randbytes(length)
            slots.append(at)
            at = after
        slots.append(at)
        if region < regions - 1:
            RECORD.pack_into(data, at, 1, 2, 0, end - at - 16, 0)
        elif rng.random() < 0.3:
            RECORD.pack_into(data, at, 1, 3, 0, 0, 1)
        else:
            RECORD.pack_into(data, at, 0, 1, 0, 0, 0)
    return bytes(data), slots


def mutate(view: memoryview, slots: list[int], rng: random.Random) -> None:
    """Change one thing that a scanner looks at, or any byte."""
    slot = slots[int(rng.random() * len(slots))]
    if slot + 16 > len(view):
        return
    what = rng.random()
    if what < 0.2:
        view[slot] = int(rng.random() * 256) if what < 0.1 else 1
    elif what < 0.4:
        view[slot + 1] = int(rng.random() * 6)
    elif what < 0.8:
        left = REGION - slot % REGION - 16
        choices = HUGE if what < 0.5 else LENGTHS if what < 0.65 else range(max(left - 24, 0), left + 24)
        view[slot + 4 : slot + 8] = choices[int(rng.random() * len(choices))].to_bytes(4, "little")
    else:
        view[int(rng.random() * len(view))] = int(rng.random() * 256)


class Columns:
    """The arrays a scan fills."""

    def __init__(self) -> None:
        self.positions = np.empty(LIMIT, np.int64)
        self.timestamps = np.empty(LIMIT, np.uint64)
        self.kinds = np.empty(LIMIT, np.uint16)
        self.offsets = np.empty(LIMIT, np.int64)
        self.lengths = np.empty(LIMIT, np.int64)
        self.all = (self.positions, self.timestamps, self.kinds, self.offsets, self.lengths)


def check(columns: Columns, count: int, start: int, cursor: Any, size: int) -> None:
    """Hold the result of one scan against what a file can hold, without asking the scanner."""
    assert 0 <= count <= LIMIT
    assert start <= cursor.at, "a scan went backwards"
    if count:
        offsets, lengths = columns.offsets[:count], columns.lengths[:count]
        ends = offsets + lengths
        assert int(offsets[0]) >= start + 16
        assert int(ends[-1]) <= size, "a span reaches past the file"
        assert bool((offsets[1:] >= ends[:-1] + 16).all()), "two spans overlap"
        assert bool((lengths >= 0).all()), "a span has a negative length"
        assert bool((offsets // REGION == (ends - (lengths > 0)) // REGION).all()), "a span crosses its region"
        assert bool((columns.positions[:count] == offsets - 16).all())


def twin_agrees(view: memoryview, start: int, columns: Columns, count: int, cursor: Any) -> None:
    """Walk the same bytes in Python and compare everything."""
    other, filled = twin.Cursor(), Columns()
    other.attach(view, start, len(view), REGION, 0)
    assert other.scan(LIMIT, 1 << 30, *filled.all) == count
    assert (other.at, other.status) == (cursor.at, cursor.status)
    for mine, theirs in zip(columns.all, filled.all, strict=True):
        assert bool((mine[:count] == theirs[:count]).all())


def run(inputs: int, seed: int, *, progress: bool = False) -> dict[int, int]:
    """Scan that many mutated files; return how often each reason to stop was met."""
    from penstock.kernel.xchannel import Cursor

    rng = random.Random(seed)
    guarded, columns, cursor = Guarded(3 * REGION), Columns(), Cursor()
    stops: dict[int, int] = {}
    began = shown = time.monotonic()
    done = 0
    while done < inputs:
        data, slots = valid_file(rng)
        for _ in range(min(2000, inputs - done)):
            size = len(data)
            if rng.random() < 0.2:
                size = int(rng.random() * size) + 1
            view = guarded.tail(size)
            view[:] = data[:size]
            for _ in range(1 + int(rng.random() * 4)):
                mutate(view, slots, rng)
            start = 0 if rng.random() < 0.8 else int(rng.random() * (size // 8 + 1)) * 8
            try:
                cursor.attach(view, start, size, REGION, 0)
                count = cursor.scan(LIMIT, 1 << 30, *columns.all)
                check(columns, count, start, cursor, size)
                if done % SAMPLE == 0:
                    twin_agrees(view, start, columns, count, cursor)
                    cursor.attach(view, start, size, REGION, 0)
                    cursor.walk()
            except AssertionError:
                print(f"seed {seed}, input {done}, start {start}: {bytes(view).hex()}", file=sys.stderr)
                raise
            stops[cursor.status] = stops.get(cursor.status, 0) + 1
            done += 1
        if progress and time.monotonic() - shown > 1:
            shown = time.monotonic()
            rate = done / (shown - began)
            print(f"\r{done:,} of {inputs:,} inputs, {rate:,.0f}/s ", end="", file=sys.stderr, flush=True)
    if progress:
        print(f"\r{done:,} inputs in {time.monotonic() - began:.1f} s, stops {stops}", file=sys.stderr)
    return stops


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    run(options.inputs, options.seed, progress=True)


if __name__ == "__main__":
    main()
