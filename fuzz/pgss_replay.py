"""Replay damaged PGSS logs: no crash, no hang, and every answer is one of the allowed ones.

    python fuzz/pgss_replay.py --inputs 200000

Each input is a log of random updates with bytes flipped, cut out, doubled or appended.  The replay may
accept a prefix, or refuse with an error that names file and byte; what it accepts must fold to the same
digest when read entry by entry, and, for one input in a hundred, must be what the Python twin finds.
"""

from __future__ import annotations

import random
import sys

from _run import main
from penstock.batch import UpdateBatch
from penstock.errors import CorruptionError, UnsupportedError
from penstock.kernel import pgss
from penstock.kernel.twin import foldindex as twin
from penstock.store.logfile import replay
from penstock.store.pgss import HEADER, cursor_record, encode_updates
from penstock.types import KvUpdate


def make_log(rng: random.Random) -> bytearray:
    """Return an undamaged log."""
    log = bytearray(HEADER)
    for _ in range(rng.randrange(5)):
        batch = [make_update(rng) for _ in range(rng.randrange(5))]
        log += encode_updates("log", UpdateBatch.of(batch)) + cursor_record(rng.randbytes(rng.choice((0, 8, 8, 10))))
    return log


def make_update(rng: random.Random) -> KvUpdate:
    """Return a put or a delete of one of a few keys."""
    key = rng.choice("abcdé") * rng.randrange(4)
    if rng.random() < 0.25:
        return KvUpdate.delete(key, rng.randrange(9))
    return KvUpdate.put(key, rng.randbytes(rng.randrange(30)), rng.choice((None, rng.randrange(1 << 63))))


def damage(rng: random.Random, log: bytearray) -> bytes:
    """Return the log with a few bytes changed, taken out, doubled or added."""
    for _ in range(rng.randrange(4)):
        at, length = rng.randrange(len(log) + 1), rng.randrange(1, 20)
        match rng.randrange(5):
            case 0 if at < len(log):
                log[at] ^= 1 << rng.randrange(8)
            case 1:
                del log[at : at + length]
            case 2:
                log[at:at] = log[at : at + length]
            case 3:
                log[at:at] = rng.choice((bytes(length), rng.randbytes(length)))
            case 4:
                del log[at:]
    return bytes(log)


def check(data: bytes, *, compare: bool) -> str:
    """Replay one input and return what became of it."""
    try:
        state = replay("log", data, len(data))
    except CorruptionError as exc:
        return "refused" if 0 <= exc.byte <= len(data) else "misplaced"
    except UnsupportedError:
        return "unsupported"
    fold = state.fold
    offsets = fold.select(b"")
    assert len(offsets) == fold.count
    rows = [fold.read(at) for at in offsets.tolist()]
    keys = [key for key, _, _ in rows]
    assert keys == sorted(set(keys))
    records: list[bytes | None] = [bytes((len(version),)) + version + value for _, value, version in rows]
    assert pgss.digest_values(keys, records) == (fold.count, fold.digest)
    if compare:
        other = twin.Fold()
        other.attach(data, state.end)
        assert other.index(len(HEADER), True)[:2] == (state.end, 0)
        assert (other.digest, other.cursor) == (fold.digest, fold.cursor)
    return "clean" if state.clean else "torn"


def run(inputs: int, seed: int) -> str:
    """Try that many inputs and say what became of them."""
    rng, counts = random.Random(seed), dict.fromkeys(("clean", "torn", "refused", "unsupported"), 0)
    for number in range(inputs):
        data = damage(rng, make_log(rng))
        try:
            counts[check(data, compare=number % 100 == 0)] += 1
        except Exception:
            print(f"seed {seed}, input {number}: {data.hex()}", file=sys.stderr)
            raise
    return str(counts)


if __name__ == "__main__":
    main(__doc__, run)
