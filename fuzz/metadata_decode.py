"""Throw damaged metadata at the decoder: it must answer with a channel or with CorruptionError, fast and small.

Inputs are made by mutating valid files: flipped, inserted and removed bytes, cut tails, huge lengths, spliced
files.  What decodes must encode, and decode to the same again.  Memory must not grow with the number of inputs.

    python fuzz/metadata_decode.py [--inputs N] [--seed N] [--jobs N]
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from penstock.channels.ids import Nid
from penstock.channels.model import Allow, ChannelAcl, ChannelType, PersistedChannel, StoredConfig
from penstock.channels.postcard import decode, encode
from penstock.errors import CorruptionError

SEEDS = [
    PersistedChannel("ch"),
    PersistedChannel(
        "ops/east",
        Nid("zoe", "localhost"),
        StoredConfig(100, 65_536, 1000, True, 250),
        ChannelAcl(join=Allow({"localhost": frozenset({"zoe", "ann"})}), read=Allow({"example.com": frozenset()})),
        (Nid("ann", "localhost"), Nid("zoe", "localhost")),
    ),
    PersistedChannel(
        "jobs/" + "x" * 150,
        None,
        StoredConfig(None, 1 << 31, 0, False, None),
        ChannelAcl(publish=Allow({f"d{number}.org": frozenset({f"u{number}"}) for number in range(5)})),
        tuple(Nid(f"user{number}", "10.0.0.1:80") for number in range(20)),
        ChannelType.FIFO,
    ),
    PersistedChannel("é日", Nid("日本", "x.io"), members=(Nid("", "x.io"), Nid("é", "x.io"))),
]
HUGE = [b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\x01", b"\x80\x00", b"\xff" * 12, b"\x02", b"\x00", b"\x7f", b"\x80"]
MAX_GROWTH_KIB = 200 << 10


def mutate(rng: random.Random, corpus: list[bytes]) -> bytes:
    """Return one input."""
    some = rng.random  # int(some() * n) is several times as fast as randrange(n)
    data = bytearray(corpus[int(some() * len(corpus))])
    for _ in range((1, 1, 1, 2, 3, 8)[int(some() * 6)]):
        at = int(some() * (len(data) + 1))
        kind = int(some() * 7)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << int(some() * 8)
        elif kind == 1 and data:
            data[at % len(data)] = int(some() * 256)
        elif kind == 2:
            data[at:at] = HUGE[int(some() * len(HUGE))]
        elif kind == 3:
            del data[at : at + 1 + int(some() * 8)]
        elif kind == 4:
            del data[at:]
        elif kind == 5:
            data[at:at] = rng.randbytes(1 + int(some() * 8))
        else:
            other = corpus[int(some() * len(corpus))]
            data[at:] = other[int(some() * len(other)) :]
    return bytes(data)


def attempt(data: bytes) -> bool:
    """Return whether ``data`` decodes; AssertionError if it does so wrongly."""
    try:
        channel = decode(data)
    except CorruptionError as exc:
        where = exc.byte
    else:
        assert decode(encode(channel)) == channel
        return True
    assert 0 <= where <= len(data)
    return False


def run(inputs: int, seed: int) -> None:
    """Try that many inputs, or say which one did harm."""
    rng = random.Random(seed)
    corpus = [encode(channel) for channel in SEEDS]
    good = bad = 0
    slowest = 0.0
    before = 0
    started = time.perf_counter()
    for number in range(inputs):
        data = mutate(rng, corpus)
        begun = time.perf_counter()
        try:
            found = attempt(data)
        except BaseException:
            print(f"input {number} of seed {seed} did harm: {data.hex()}", file=sys.stderr)
            raise
        good, bad = good + found, bad + (not found)
        slowest = max(slowest, time.perf_counter() - begun)
        if number == min(100_000, inputs // 2):  # the caches are full by now
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    seconds = time.perf_counter() - started
    print(
        f"seed {seed}: {inputs} inputs in {seconds:.1f} s: {good} decoded, {bad} refused, "
        f"slowest {slowest * 1000:.2f} ms, {growth} KiB more memory",
        flush=True,
    )
    assert growth < MAX_GROWTH_KIB, f"memory grew by {growth} KiB"


def main() -> None:
    """Divide the inputs among processes; each has a seed of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; one for each core")
    options = parser.parse_args()
    shares = [options.inputs // options.jobs + (job < options.inputs % options.jobs) for job in range(options.jobs)]
    seeds = range(options.seed, options.seed + options.jobs)
    with ProcessPoolExecutor(options.jobs) as processes:
        list(processes.map(run, shares, seeds))


if __name__ == "__main__":
    main()
