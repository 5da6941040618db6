"""How fast are stores and folds, and against what?

    python bench/folds.py                    everything: 1 M keys, 200 000 from NATS; about seven minutes
    python bench/folds.py --quick            small, for a test
    python bench/folds.py --only stores      one part: stores, synced, nats or acks
    python bench/folds.py --only stores --batch 100 --keys 200000

Peers in the same run: shelve, sqlite3 (WAL), diskcache, rocksdict's bare WriteBatch, nats-py's own watch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import _fold_acks
import _fold_nats
import _fold_stores as stores

BATCHES = [1, 100, 10_000]


def collect(results: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for result in results:
        found.append(result)
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true", help="3 000 keys, one repeat")
    parser.add_argument("--batch", type=int, action="append", help="only these batch sizes")
    parser.add_argument("--seconds", type=float, default=6.0, help="the most one pass of one contender may take")
    parser.add_argument("--only", action="append", choices=["stores", "synced", "nats", "acks"], help="only this part")
    arguments = parser.parse_args()
    quick, parts = arguments.quick, arguments.only or ["stores", "synced", "nats", "acks"]
    count, budget = (3_000, 0.25) if quick else (arguments.keys, arguments.seconds)
    if "stores" in parts:
        found = collect(stores.run(count, arguments.batch or BATCHES, budget))
        print(
            f"Stores: {count:,} keys of 27 bytes (a fifth of them in batches of 1), 100-byte values, compaction on. "
            "Durability of all: what apply returned from is with the operating system and survives the death of the "
            "process; nothing is fsynced.\n"
        )
        print(stores.table(found) + "\n")
        print(stores.memory_table(found) + "\n")
    if "synced" in parts:
        found = collect(stores.run(500 if quick else 20_000, [1, 100], min(budget, 4.0), sync=True))
        print("The same with every apply fsynced before it returns (shelve cannot): the disk is what is measured.\n")
        print(stores.table(found) + "\n")
    if "nats" in parts:
        print("Folds of a bucket on a real nats-server, 100-byte values, stores without fsync.\n")
        print(_fold_nats.table(quick=quick) + "\n")
    if "acks" in parts:
        print(_fold_acks.table(quick=quick))


if __name__ == "__main__":
    main()
