"""Feed damaged and invented segments to everything that decodes a filechannel.

    python fuzz/filechannel_scan.py --inputs 10000000 [--seed N]

A run of frames is made, and each input is that run cut, flipped, spliced or left alone.  The bytes lie right before a
page that cannot be read, so one byte read past the end kills the process.  The compiled scan sees every input; one in
fifty goes to its twin; and of one in two hundred a folder of plain and compressed segments is made, which is read
without a crash, a hang or an invented message, and verified.  Nothing but CorruptionError may be raised.
"""

from __future__ import annotations

import random
import struct
import sys
import zlib
from typing import Any

import numpy as np

from _run import main
from penstock import kernel
from penstock.disk import MemoryDisk
from penstock.errors import CorruptionError, ExpiredError
from penstock.kernel.twin import filechannel as twin
from penstock.log.filechannel.format import Header
from penstock.log.filechannel.segments import Folder, Walk
from penstock.log.filechannel.verify import verify
from xchannel_scan import Guarded

EACH = 500  # inputs made of one run
TWIN_EVERY = 50
READ_EVERY = 200
LIMITS = (1, 3, 50)
LARGEST = 64 << 10
LENGTHS = tuple(struct.pack(">I", length) for length in (0, 1, 8, 300, 1 << 20, 0x7FFFFFFF, 0xFFFFFFF8, 0xFFFFFFFF))
SNAPPY_NAME = b"\xff\x06\x00\x00sNaPpY"


def frame(payload: bytes) -> bytes:
    """Return a whole frame."""
    return struct.pack(">II", len(payload), zlib.crc32(payload)) + payload


def make_run(rng: random.Random) -> tuple[bytes, list[int], set[bytes]]:
    """Return whole frames, where they begin and end, and the payloads that are really in them."""
    payloads = [rng.randbytes(rng.choice((0, 1, 7, 8, 40, 70, 300))) for _ in range(rng.randrange(7))]
    data, slots = bytearray(), [0]
    for payload in payloads:
        data += frame(payload)
        slots.append(len(data))
    return bytes(data), slots, {*payloads, b""}


def mutate(data: bytes, slots: list[int], rng: random.Random) -> bytes:
    """Return the run with a few things wrong, or with none."""
    changes = int(rng.random() * 4)
    if not changes:
        return data
    changed = bytearray(data)
    for _ in range(changes):
        what = rng.random()
        at = slots[int(rng.random() * len(slots))]
        if what < 0.25 and changed:
            changed[int(rng.random() * len(changed))] ^= 1 << int(rng.random() * 8)
        elif what < 0.5 and at + 4 <= len(changed):
            changed[at : at + 4] = LENGTHS[int(rng.random() * len(LENGTHS))]
        elif what < 0.7:
            del changed[int(rng.random() * (len(changed) + 1)) :]
        elif what < 0.85:
            changed += rng.randbytes(int(rng.random() * 20))
        else:
            changed += bytes(int(rng.random() * 40))
    return bytes(changed)


def scan(data: memoryview, limit: int, columns: tuple[Any, ...]) -> None:
    """Scan with the kernel and hold what it says against what a run can hold."""
    count, at, status = kernel.scan_frames(data, 0, len(data), 7, *(column[:limit] for column in columns))
    assert 0 <= count <= limit
    end = 0
    for position, offset, length in zip(*(column[:count].tolist() for column in columns), strict=True):
        assert position == end + 7, "a frame does not begin where the one before ends"
        assert offset == end + 8 <= len(data) - length <= len(data), "a span is outside"
        end = offset + length
    assert at == end, (at, end, status)


def scan_agrees(data: memoryview, limit: int) -> None:
    """Both kernels see the same."""
    results = []
    for module in (kernel.scan_frames, twin.scan):
        columns = tuple(np.zeros(limit, np.int64) for _ in range(3))
        results.append((tuple(map(int, module(data, 0, len(data), 7, *columns))), *(c.tolist() for c in columns)))
    assert results[0] == results[1], results


def read_all(disk: MemoryDisk, real: set[bytes]) -> None:
    """Read a folder to its end, stepping over damage."""
    folder = Folder(disk, ".")
    walk = Walk(folder)
    position, steps = folder.first_position(), 0
    while (steps := steps + 1) < 10_000:
        try:
            batch = walk.read(position, 5)
        except CorruptionError:
            skipped = walk.skip_damage(position)
            if skipped is None:
                break
            position = skipped[0]
            continue
        except ExpiredError:
            break
        if not len(batch):
            break
        invented = [payload for payload in batch.to_payloads() if payload not in real]
        assert not invented, invented
        position = batch.next_position
    else:
        raise AssertionError("reading does not end")
    walk.close()
    assert sum(1 for _ in verify(folder)) < 1000


def segments(data: bytes, rng: random.Random) -> MemoryDisk:
    """Return a folder of one to three segments with the bytes in one of them."""
    disk, begin = MemoryDisk(), rng.choice((0, 1000))
    kinds = [rng.randrange(3) for _ in range(rng.randrange(1, 3))]
    for index, kind in enumerate(kinds):
        end = begin + len(data)
        if kind == 0:
            path, raw = f"segment.{index}", Header(index, begin).encode() + data
        elif kind == 1:
            packer = zlib.compressobj(1, wbits=31)
            stream = packer.compress(data) + packer.flush()
            path, raw = f"segment.{index}.z", Header(index, begin, end, "gzip").encode() + stream
        else:
            stream = SNAPPY_NAME + b"\x01" + struct.pack("<I", 4 + len(data))[:3] + rng.randbytes(4) + data
            path, raw = f"segment.{index}.z", Header(index, begin, end, "snappy").encode() + stream
        if rng.randrange(4) == 0 and raw:
            broken = bytearray(raw)
            broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
            raw = bytes(broken[: rng.randrange(len(broken) + 1)]) if rng.randrange(3) == 0 else bytes(broken)
        with disk.create(path) as file:
            file.write_at(0, raw)
        begin = end
    return disk


def run(inputs: int, seed: int) -> None:
    """Try that many inputs."""
    rng, guarded = random.Random(seed), Guarded(LARGEST)
    columns = tuple(np.zeros(max(LIMITS), np.int64) for _ in range(3))
    data, slots, real = b"", [0], {b""}
    for number in range(inputs):
        if number % EACH == 0:
            data, slots, real = make_run(rng)
        raw = mutate(data, slots, rng)
        view = guarded.tail(len(raw))
        view[:] = raw
        limit = LIMITS[int(rng.random() * 3)]
        try:
            scan(view, limit, columns)
            if number % TWIN_EVERY == 0:
                scan_agrees(view, limit)
            if number % READ_EVERY == 0:
                read_all(segments(raw, rng), real)
        except Exception:
            print(f"seed {seed}, input {number}: {raw.hex()}", file=sys.stderr)
            raise


if __name__ == "__main__":
    main(__doc__, run)
