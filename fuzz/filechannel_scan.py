"""Feed damaged and invented segments to everything that decodes a filechannel.

    python fuzz/filechannel_scan.py --inputs 200000 [--seed N]

Each input is judged four ways: the compiled scan agrees with its twin; a plain and a compressed segment made of it read
without a crash, a hang or an invented message; verify ends.  Nothing but CorruptionError may be raised.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import time
import zlib

import numpy as np

from penstock import kernel
from penstock.disk import MemoryDisk
from penstock.errors import CorruptionError, ExpiredError
from penstock.kernel.twin import filechannel as twin
from penstock.log.filechannel.format import Header
from penstock.log.filechannel.segments import Folder, Walk
from penstock.log.filechannel.verify import verify

SNAPPY_NAME = b"\xff\x06\x00\x00sNaPpY"


def frame(payload: bytes) -> bytes:
    """Return a whole frame."""
    return struct.pack(">II", len(payload), zlib.crc32(payload)) + payload


def sample(rng: random.Random) -> tuple[bytes, set[bytes]]:
    """Return bytes that are nearly frames, and the payloads that are really in them."""
    payloads = [rng.randbytes(rng.choice((0, 1, 7, 8, 40, 300))) for _ in range(rng.randrange(6))]
    data = bytearray(b"".join(map(frame, payloads)))
    for _ in range(rng.randrange(4)):
        match rng.randrange(5):
            case 0 if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 1:
                del data[rng.randrange(len(data) + 1) :]
            case 2:
                data += rng.randbytes(rng.randrange(20))
            case 3:
                data += bytes(rng.randrange(40))
            case 4 if data:
                at = rng.randrange(len(data))
                data[at : at + 4] = struct.pack(">I", rng.choice((0, 1, 8, 1 << 20, 0xFFFFFFFF)))
    return bytes(data), {*payloads, b""}


def scan_agrees(data: bytes, rng: random.Random) -> None:
    """Both kernels see the same."""
    limit = rng.choice((1, 3, 50))
    results = []
    for scan in (kernel.scan_frames, twin.scan):
        columns = tuple(np.zeros(limit, np.int64) for _ in range(3))
        results.append((tuple(map(int, scan(data, 0, len(data), 7, *columns))), *(c.tolist() for c in columns)))
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


def main() -> int:
    """Run the inputs and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    started = time.monotonic()
    for number in range(arguments.inputs):
        rng = random.Random(arguments.seed * 1_000_003 + number)
        data, real = sample(rng)
        try:
            scan_agrees(data, rng)
            if number % 20 == 0:
                read_all(segments(data, rng), real)
        except Exception:
            print(f"input {number} of seed {arguments.seed}: {data.hex()}", file=sys.stderr)
            raise
    print(f"filechannel_scan: {arguments.inputs} inputs in {time.monotonic() - started:.1f} s, no finding")
    return 0


if __name__ == "__main__":
    sys.exit(main())
