"""How fast is the revision found in the ACK subjects of a scan?

10 000 subjects, legacy and modern by turns, as one batch through the kernel, through its Python twin, and one
at a time with str.split, which is what a client does that has no kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

import _table
from penstock.kernel import natswire
from penstock.kernel.twin import natswire as twin

COUNT = 10_000


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


def table(*, quick: bool) -> str:
    subjects = [
        f"$JS.ACK.KV_routes.c0ns.1.{n}.{n}.1700000000000000000.{COUNT - n}"
        if n % 2
        else f"$JS.ACK.hub.ACCHASH.KV_routes.c0ns.1.{n}.{n}.1700000000000000000.{COUNT - n}.tok"
        for n in range(COUNT)
    ]
    raw = [subject.encode() for subject in subjects]
    data = b"".join(raw)
    lengths = np.fromiter(map(len, raw), np.int64, len(raw))
    offsets = np.cumsum(lengths) - lengths
    sequences, known = np.zeros(len(raw), np.uint64), np.zeros(len(raw), np.uint8)
    repeats = 1 if quick else 50
    ours = best_seconds(lambda: natswire.parse_acks(data, offsets, lengths, sequences, known), repeats)
    assert sequences.tolist() == list(range(COUNT))
    others = {
        "str.split, one at a time": best_seconds(lambda: split_each(subjects), repeats),
        "Python twin, one batch": best_seconds(
            lambda: twin.parse_acks(data, offsets, lengths, sequences, known), 1 if quick else 3
        ),
    }
    rows = [["kernel, one batch", f"{ours * 1e3:.2f}", "1.0"]]
    rows += [[name, f"{seconds * 1e3:.2f}", f"{seconds / ours:.1f}"] for name, seconds in others.items()]
    return _table.markdown([f"{COUNT:,} ACK subjects", "ms", "times ours"], rows)
