"""Exporting, publishing and fetching a fold, against tar, a hash and a raw transfer of the same bytes.

python bench/artifacts.py [--mb 1024] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

import _table
from penstock.artifact import Transport, export_store, import_artifact
from penstock.disk import ObjectOptions, ObjectStore, object_store_for
from penstock.store import AppendLogStore
from penstock.testing.s3 import S3Server
from penstock.types import KvUpdate, WatchCursor


def timed(work: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def in_turns(
    works: list[tuple[Callable[[], object], Callable[[], object]]], repeats: int, room: int
) -> list[tuple[float, float]]:
    """Return the medians of works that take turns; each has what removes what it made."""
    found: list[list[tuple[float, float]]] = [[] for _ in works]
    for number in range(repeats):
        for index in [*range(number % len(works), len(works)), *range(number % len(works))]:
            work, clean = works[index]
            clean()
            _table.touch_memory(room)
            found[index].append(timed(work))
    return [(statistics.median(wall for wall, _ in took), statistics.median(cpu for _, cpu in took)) for took in found]


def make(path: Path, megabytes: int) -> AppendLogStore:
    store, value, number = AppendLogStore.open(path), os.urandom(4096), 0
    while number < megabytes * 256:
        batch = [KvUpdate.put(f"key.{n:09d}", value, n + 1) for n in range(number, number + 1024)]
        number += len(batch)
        store.apply(batch, WatchCursor.of(number))
    store.settle()
    return store


def hashed_copy(source: Path, target: Path) -> None:
    hasher = blake3()
    with open(source, "rb") as file, open(target, "wb") as out:
        while data := file.read(1 << 20):
            hasher.update(data)
            out.write(data)
        os.fsync(out.fileno())


def raw_up(artifact: Path, scratch: Path, store: ObjectStore) -> None:
    """What one would do by hand: a tar file, its hash, and a transfer of it."""
    with tarfile.open(scratch, "w") as tar:
        tar.add(artifact, ".")
    hasher = blake3()
    with open(scratch, "rb") as file:
        while data := file.read(1 << 20):
            hasher.update(data)

    def pieces() -> object:
        with open(scratch, "rb") as file:
            while data := file.read(1 << 20):
                yield data

    store.put(f"raw-{hasher.hexdigest()[:16]}.tar", pieces())  # type: ignore[arg-type]


def raw_down(store: ObjectStore, folder: Path) -> None:
    folder.mkdir()
    key = next(info.key for info in store.objects() if info.key.startswith("raw-"))
    with open(folder / "payload.tar", "wb") as out:
        out.writelines(store.stream(key))
    with tarfile.open(folder / "payload.tar") as tar:
        tar.extractall(folder, filter="data")
    hasher = blake3()
    with open(folder / "data" / "fold.snap", "rb") as file:
        while data := file.read(1 << 20):
            hasher.update(data)
        os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=1024)
    parser.add_argument("--s3-mb", type=int, default=64, help="on the S3 server of the tests, which is slow")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.mb, args.s3_mb = 8, 8
    rows, repeats = [], 1 if args.quick else args.turns
    with tempfile.TemporaryDirectory() as name, S3Server() as s3:
        folder = Path(name)
        places: list[tuple[str, ObjectStore, int]] = [
            ("folder", object_store_for(folder / "objects"), args.mb),
            ("S3 (moto)", object_store_for(f"s3://{s3.bucket}/bench", ObjectOptions(config=s3.options())), args.s3_mb),
        ]
        for place, store, size in places:
            rows += measure(folder / place.split()[0], place, store, size, repeats)
    if args.json:
        print(json.dumps(rows))
        return
    print(
        f"Measured on {_table.machine()}, load {os.getloadavg()[0]:.0f}; an append log of 4 KiB values; "
        f"medians of {repeats} turns.\n"
    )
    print("| work | size | ours | by hand | times as long | CPU ours | CPU by hand |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        ours, theirs = row["ours"], row["by_hand"]
        print(
            f"| {row['work']} | {row['mb']} MB | {row['mb'] / ours[0]:.0f} MB/s | {row['mb'] / theirs[0]:.0f} MB/s "
            f"| {ours[0] / theirs[0]:.2f}× | {ours[1]:.2f} s | {theirs[1]:.2f} s |"
        )


def measure(folder: Path, place: str, objects: ObjectStore, megabytes: int, repeats: int) -> list[dict[str, object]]:
    folder.mkdir()
    fold, artifact, copy = folder / "fold.snap", folder / "artifact", folder / "copy"
    rows: list[dict[str, object]] = []

    def gone(*paths: Path) -> Callable[[], None]:
        def clean() -> None:
            for path in paths:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

        return clean

    def add(work: str, ours: tuple[float, float], by_hand: tuple[float, float]) -> None:
        rows.append({"work": f"{work}, {place}", "mb": megabytes, "ours": ours, "by_hand": by_hand})

    def turns(*works: tuple[Callable[[], object], Callable[[], object]]) -> list[tuple[float, float]]:
        return in_turns(list(works), repeats, megabytes << 20)

    raw = folder / "raw"
    with make(fold, megabytes) as store:
        exported, by_hand = turns(
            (lambda: export_store(store, artifact), gone(artifact)), (lambda: hashed_copy(fold, raw), gone(raw))
        )
    add("export alone: copy and hash", exported, by_hand)
    gone(raw, fold)()
    transport = Transport(objects, "p")
    uploaded, by_hand = turns(
        (lambda: transport.upload(artifact, "k"), lambda: None), (lambda: raw_up(artifact, raw, objects), gone(raw))
    )
    add("upload alone: tar, hash and put", uploaded, by_hand)
    both = (exported[0] + uploaded[0], exported[1] + uploaded[1])
    add("export and upload: tar, hash and put (≤ 1.5)", both, by_hand)
    gone(raw, artifact)()

    def fetch() -> None:
        transport.download("k", copy, sync=False)  # as a bootstrap does
        import_artifact(copy, folder / "copy.snap", take=True)

    fetched, by_hand = turns(
        (fetch, gone(copy, folder / "copy.snap")), (lambda: raw_down(objects, folder / "down"), gone(folder / "down"))
    )
    add("download and import: get, untar, hash (≤ 1.5)", fetched, by_hand)
    objects.delete([info.key for info in objects.objects()])
    shutil.rmtree(folder)
    return rows


if __name__ == "__main__":
    main()
