"""How fast is the revision found in the ACK subjects of a scan?

10 000 subjects, legacy and modern by turns, as one batch through the kernel, through its Python twin, and one
at a time with str.split, which is what a client does that has no kernel.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from penstock.kernel import natswire
from penstock.kernel.twin import natswire as twin


def best_seconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def split_each(subjects: list[str]) -> list[int]:
    found = []
    for subject in subjects:
        tokens = subject.split(".")
        found.append(int(tokens[5] if len(tokens) == 9 else tokens[7]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one repeat")
    parser.add_argument("--write", action="store_true", help="accepted for make bench; the table goes to stdout")
    options = parser.parse_args()
    subjects = [
        f"$JS.ACK.KV_routes.c0ns.1.{n}.{n}.1700000000000000000.{10_000 - n}"
        if n % 2
        else f"$JS.ACK.hub.ACCHASH.KV_routes.c0ns.1.{n}.{n}.1700000000000000000.{10_000 - n}.tok"
        for n in range(10_000)
    ]
    raw = [subject.encode() for subject in subjects]
    data = b"".join(raw)
    lengths = np.fromiter(map(len, raw), np.int64, len(raw))
    offsets = np.cumsum(lengths) - lengths
    sequences, known = np.zeros(len(raw), np.uint64), np.zeros(len(raw), np.uint8)
    repeats = 1 if options.quick else 50
    rows = [
        (
            "kernel, one batch",
            best_seconds(lambda: natswire.parse_acks(data, offsets, lengths, sequences, known), repeats),
        ),
        ("str.split, one at a time", best_seconds(lambda: split_each(subjects), repeats)),
        ("Python twin, one batch", best_seconds(lambda: twin.parse_acks(data, offsets, lengths, sequences, known), 1)),
    ]
    assert sequences.tolist() == list(range(10_000))
    print("| 10 000 ACK subjects | ms |\n|---|---|")
    for name, seconds in rows:
        print(f"| {name} | {seconds * 1000:.2f} |")


if __name__ == "__main__":
    main()
