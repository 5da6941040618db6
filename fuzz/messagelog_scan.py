"""Feed the decoders of the message log damaged segments: nothing crashes, and kernel and twin agree.

    python fuzz/messagelog_scan.py --inputs 10000000 [--seed N]

A segment is made of entries, and each input is that segment cut, flipped, spliced or left alone.  The bytes lie right
before a page that cannot be read, so one byte read past the end kills the process.  The compiled kernel scans, walks
and searches every input and its answers are held against what a segment can hold; one in a hundred goes to the twin
as well, with an index and a cursor treated alike.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np

from _run import main
from penstock import kernel
from penstock.errors import CorruptionError
from penstock.kernel.twin import messagelog as twin
from penstock.log.messagelog.fifo_cursor import decode_cursor, encode_cursor
from penstock.log.messagelog.format import index_problem, used_index
from penstock.log.messagelog.recover import walk_segment
from xchannel_scan import Guarded

TWIN_EVERY = 100
EACH = 500  # inputs made of one segment
LIMIT = 16
LARGEST = 64 << 10
WANTS = (0, 1, 3, (1 << 64) - 1)
FIELDS = (0, 8, 16, 18)  # where seq, time and the two lengths begin in an entry
WORDS = (b"\xff" * 4, bytes(4), b"\1\0\0\0", b"\0\0\1\0", b"\xff\xff\0\0")


def make_segment(rng: random.Random) -> tuple[bytes, list[int]]:
    """Return a segment whose numbers may be odd, and where its entries begin and end."""
    seq, data, slots = rng.choice((0, 1, 1, 1 << 32, (1 << 64) - 5)), bytearray(), [0]
    for _ in range(rng.randrange(7)):
        size = rng.choice((0, 1, 3, 20, 70, 100, 4200))
        data += twin.encode_one(seq & (1 << 64) - 1, rng.getrandbits(64), b"s" * rng.randrange(9), rng.randbytes(size))
        slots.append(len(data))
        seq = max(seq + rng.choice((1, 1, 1, 2, -1, 0, 1 << 31)), 0)
    return bytes(data), slots


def mutate(data: bytes, slots: list[int], rng: random.Random) -> bytes:
    """Return the segment with a few things wrong, or with none."""
    changes = int(rng.random() * 4)
    if not changes:
        return data
    changed = bytearray(data)
    for _ in range(changes):
        what = rng.random()
        at = slots[int(rng.random() * len(slots))] + FIELDS[int(rng.random() * 4)]
        if what < 0.25 and changed:
            changed[int(rng.random() * len(changed))] ^= 1 << int(rng.random() * 8)
        elif what < 0.5 and at + 4 <= len(changed):
            changed[at : at + 4] = WORDS[int(rng.random() * len(WORDS))]
        elif what < 0.7:
            del changed[int(rng.random() * (len(changed) + 1)) :]
        elif what < 0.85:
            changed += changed[at : at + 60]
        else:
            changed += rng.randbytes(int(rng.random() * 40))
    return bytes(changed[:LARGEST])


def scan(module: Any, data: memoryview, at: int, want: int) -> tuple[Any, Any]:
    """Return everything a scan says, and check that it stays inside the data."""
    columns = np.zeros((6, LIMIT), np.int64)
    found = module.scan(data, at, want, True, columns)
    count, stop_at = found[0], found[1]
    assert at <= stop_at <= max(len(data), at), found
    last = -1
    for seq, _, sender_at, sender, body_at, body in columns[:, :count].T.tolist():
        assert last < seq & (1 << 64) - 1, "numbers do not grow"
        assert at + 22 <= sender_at <= sender_at + sender == body_at, "a sender is outside"
        assert body_at <= body_at + body <= len(data) - 4, "a payload is outside"
        last, at = seq & (1 << 64) - 1, body_at + body + 4
    return found, columns


def compare(data: memoryview, at: int, want: int, low: int, rng: random.Random) -> None:
    """Hold the twin, and what is built upon the kernel, against the same bytes."""
    found, columns = scan(kernel.messagelog, data, at, want)
    again, theirs = scan(twin, data, at, want)
    assert (found, columns.tolist()) == (again, theirs.tolist())
    one, two = np.zeros(120, np.uint8), np.zeros(120, np.uint8)
    assert kernel.messagelog.walk(data, 1, one) == twin.walk(data, 1, two)
    assert one.tobytes() == two.tobytes()
    walk = walk_segment(data, 1)
    start = rng.choice((0, walk.end))
    budget = rng.choice((0, 60, 1 << 30))
    following = kernel.messagelog.find_entry(data, start, low, low + 100, budget)
    assert following == twin.find_entry(data, start, low, low + 100, budget)
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


def run(inputs: int, seed: int) -> None:
    """Try that many inputs."""
    rng, guarded, room = random.Random(seed), Guarded(LARGEST), np.zeros(120, np.uint8)
    data, slots = b"", [0]
    for number in range(inputs):
        if number % EACH == 0:
            data, slots = make_segment(rng)
        raw = mutate(data, slots, rng)
        view = guarded.tail(len(raw))
        view[:] = raw
        at = 0 if rng.random() < 0.8 else slots[int(rng.random() * len(slots))]
        want, low = WANTS[int(rng.random() * 4)], int(rng.random() * 4)
        try:
            scan(kernel.messagelog, view, at, want)
            end, *_, sound, _, _ = kernel.messagelog.walk(view, 1, room)
            assert 0 <= sound <= end <= len(view), (sound, end)
            following, _ = kernel.messagelog.find_entry(view, end, low, low + 100, 1 << 30)
            assert following == -1 or end <= following <= len(view) - 26, following
            if number % TWIN_EVERY == 0:
                compare(view, at, want, low, rng)
        except Exception:
            print(f"seed {seed}, input {number}, at {at}, want {want}: {raw.hex()}", file=sys.stderr)
            raise


if __name__ == "__main__":
    main(__doc__, run)
