"""Feed the decoders of the message log damaged segments: nothing crashes, and kernel and twin agree.

    python fuzz/messagelog_scan.py --inputs 200000

Each input is a segment made of entries, then cut, flipped, spliced or left alone, and an index treated alike.  The
compiled kernel scans and walks all of them; one in a hundred goes to the twin as well.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any

import numpy as np

from penstock import kernel
from penstock.errors import CorruptionError
from penstock.kernel.twin import messagelog as twin
from penstock.log.messagelog.fifo_cursor import decode_cursor, encode_cursor
from penstock.log.messagelog.format import index_problem, used_index
from penstock.log.messagelog.recover import walk_segment

TWIN_EVERY = 100
LIMIT = 64


def make_segment(rng: random.Random) -> bytes:
    """Return a segment that may be sound."""
    seq, parts = rng.choice((0, 1, 1, 1 << 32, (1 << 64) - 5)), []
    for _ in range(rng.randrange(6)):
        size = rng.choice((0, 1, 3, 20, 100, 4200))
        parts.append(twin.encode_one(seq & (1 << 64) - 1, rng.getrandbits(64), b"s" * rng.randrange(9), bytes(size)))
        seq += rng.choice((1, 1, 1, 2, -1, 0, 1 << 31))
        seq = max(seq, 0)
    data = bytearray(b"".join(parts))
    for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
        if not data:
            break
        at = rng.randrange(len(data))
        match rng.randrange(5):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:]
            case 2:
                data[at : at + 4] = rng.choice((b"\xff" * 4, bytes(4), rng.randbytes(4)))
            case 3:
                data += data[at : at + 60]
            case 4:
                data += rng.randbytes(rng.randrange(40))
    return bytes(data)


def scan(module: Any, data: bytes, at: int, want: int) -> tuple[Any, list[int], list[int]]:
    """Return everything a scan says, and check that it stays inside the data."""
    columns = np.zeros((6, LIMIT), np.int64)
    found = module.scan(data, at, want, True, columns)
    seqs, spans = columns[0].view(np.uint64), columns[2:]
    count, stop_at = found[0], found[1]
    assert at <= stop_at <= max(len(data), at), (data.hex(), found)
    ends = spans[2, :count] + spans[3, :count]
    assert not count or (spans[:, :count].min() >= 0 and ends.max() <= len(data)), data.hex()
    assert (seqs[:count][1:] > seqs[:count][:-1]).all(), data.hex()
    return found, seqs.tolist(), spans.ravel().tolist()


def check(rng: random.Random, number: int) -> None:
    """Try one input."""
    data = make_segment(rng)
    at, want = rng.choice((0, 0, rng.randrange(80))), rng.choice((0, 1, 3, (1 << 64) - 1))
    result = scan(kernel.messagelog, data, at, want)
    walk = walk_segment(data, 1)
    assert walk.end <= len(data)
    low = rng.randrange(4)
    following = kernel.messagelog.find_entry(data, walk.end, low, low + 100)
    index = bytearray(walk.index.tobytes() + bytes(rng.choice((0, 12, 5))))
    if index and rng.random() < 0.5:
        index[rng.randrange(len(index))] ^= 1 << rng.randrange(8)
    used_index(bytes(index))
    if walk.count:
        index_problem(bytes(index), walk.index, walk.end, 1000)
    cursor = bytearray(encode_cursor(rng.randrange(1, 99)))
    cursor[rng.randrange(16)] ^= rng.choice((0, 1))
    try:
        decode_cursor(bytes(cursor[: rng.choice((16, 16, 15))]))
    except CorruptionError:
        pass
    if number % TWIN_EVERY == 0:
        assert result == scan(twin, data, at, want), data.hex()
        one, two = np.zeros(120, np.uint8), np.zeros(120, np.uint8)
        assert kernel.messagelog.walk(data, 1, one) == twin.walk(data, 1, two), data.hex()
        assert one.tobytes() == two.tobytes(), data.hex()
        assert following == twin.find_entry(data, walk.end, low, low + 100), data.hex()


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=200_000, help="how many inputs to try")
    parser.add_argument("--seed", type=int, default=1, help="the same seed tries the same inputs")
    options = parser.parse_args()
    rng, began = random.Random(options.seed), time.monotonic()
    for number in range(options.inputs):
        check(rng, number)
    seconds = time.monotonic() - began
    print(f"messagelog_scan: {options.inputs} inputs, nothing found, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
