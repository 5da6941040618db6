"""Promise: a writer that flips lengths while others read leads nobody out of a file: queues, message logs, append logs.

Files end near the end of a page, and what lies behind is not mapped: a step too far ends the process.  Damage is
answered, or stepped over; what is handed out is never longer than the file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.store import AppendLogOptions, AppendLogStore
from penstock.types import KvUpdate, WatchCursor

PAGE = os.sysconf("SC_PAGE_SIZE")

SCRIPT = r"""
import mmap, os, sys, threading, time
from penstock.errors import PenstockError
kind, path, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
flipped = sys.argv[4:]
stop = threading.Event()
sizes = max(os.path.getsize(file) for file in flipped)

def flip(file, places, values, order):
    with open(file, "r+b") as opened, mmap.mmap(opened.fileno(), 0) as data:
        while not stop.is_set():
            for at, size in places:
                if at + size <= len(data):
                    before = bytes(data[at : at + size])
                    for value in values:
                        data[at : at + size] = (value & (256**size - 1)).to_bytes(size, order)
                    data[at : at + size] = before

def read_queue():
    from penstock.log.filechannel import FileChannel
    with FileChannel.attach(path) as view:
        for on_damage in ("skip", "raise"):
            rx = view.rx(start="earliest", on_damage=on_damage)
            while len(batch := rx.recv_many()):
                check(batch)

def read_log():
    from penstock.log.detect import open_log
    for on_damage in ("skip", "raise"):
        with open_log(path, on_damage=on_damage) as log:
            at = log.first_position
            for _ in range(50):
                batch = log.read(at, 64)
                if not len(batch):
                    break
                check(batch)
                at = batch.next_position
            log.stat()
            list(log.verify())

def read_store():
    from penstock.store import open_store
    with open_store(path) as store:
        for entry in store.range():
            assert len(entry.value) <= sizes
        list(store.keys("key1"))
        list(store.verify())

def check(batch):
    assert int(batch.payloads.lengths.max()) <= sizes, int(batch.payloads.lengths.max())
    batch.to_payloads()

if kind == "queue":
    places, order, reads = [(64 + 32 * n, 4) for n in range(200)], "big", (read_queue, read_log)
elif kind == "messagelog":
    places = [(64 * n + 16, 2) for n in range(200)] + [(64 * n + 18, 4) for n in range(200)]
    order, reads = "little", (read_log,)
else:
    places = [(8 + 45 * n + 5, 2) for n in range(200)] + [(8 + 45 * n + 13, 4) for n in range(200)]
    order, reads = "little", (read_store,)
values = (0, 1, 24, 4096, 1 << 20, 1 << 27, 0x7FFFFFFF, 0xFFFFFFF0, 0xFFFFFFFF)
threads = [threading.Thread(target=flip, args=(file, places, values, order), daemon=True) for file in flipped]
for thread in threads:
    thread.start()
answers, end = 0, time.monotonic() + seconds
while time.monotonic() < end or answers < 20:
    for read in reads:
        try:
            read()
        except (PenstockError, OSError):
            pass
        answers += 1
stop.set()
for thread in threads:
    thread.join()
print(answers)
"""


def make(kind: str, folder: Path) -> tuple[Path, list[Path]]:
    """Make one that is sealed or not, of records of one size, and return which files are flipped."""
    path = folder / "data"
    if kind == "queue":
        with FileChannel.open(path, ChannelOptions(sync="none", segment_bytes=PAGE - 64, compression="none")) as queue:
            queue.append_many([bytes(24)] * 300)
        return path, sorted(path.glob("segment.*"))[:3]
    if kind == "messagelog":
        with MessageLog.open(path, MessageLogOptions(sync="none", segment_bytes=PAGE - 1)) as log:
            log.append_many([bytes(64 - 26)] * 200, timestamp_ns=10**18)
        return path, sorted(path.glob("*.log"))[:3]
    with AppendLogStore.open(path, AppendLogOptions(compact_threshold_bytes=1 << 40)) as store:
        for number in range(300):
            store.apply([KvUpdate.put(f"key{number:03}", b"v" * 5, number)], WatchCursor.of(number))
    return path, [path]


@pytest.mark.parametrize("kind", ["queue", "messagelog", "append-log"])
def test_lengths_that_flip_while_others_read_lead_nowhere(kind: str, tmp_path: Path, long_run: bool) -> None:
    path, flipped = make(kind, tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind, str(path), "60" if long_run else "1", *map(str, flipped)],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert int(run.stdout) >= 20


CUT = r"""
import os, sys
from penstock.errors import PenstockError
from penstock.log.detect import open_log
on_damage, path, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
told = 0
with open_log(path, on_damage=on_damage) as log:
    at = log.first_position
    kept = [log.read(at, 5)]
    at = kept[0].next_position
    for file in sys.argv[4:]:
        os.truncate(file, min(size, os.path.getsize(file)))
    found = 0
    try:
        while len(batch := log.read(at, 64)):
            for payload in batch.to_payloads():
                assert len(payload) in (24, 38), len(payload)
            found += len(batch)
            at = batch.next_position
        told += bool(log.damage_count)
    except PenstockError:
        told += 1
    for batch in kept:
        batch.to_payloads()
    list(log.verify())
print(told)
"""


@pytest.mark.parametrize("size", [0, 30, 100, 1000, 2048])
@pytest.mark.parametrize("on_damage", ["skip", "raise"])
@pytest.mark.parametrize("kind", ["queue", "messagelog"])
def test_sealed_segments_that_are_cut_while_they_are_mapped_are_told(
    kind: str, on_damage: str, size: int, tmp_path: Path
) -> None:
    path, files = make(kind, tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", CUT, on_damage, str(path), str(size), *map(str, files)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip() == "1"
