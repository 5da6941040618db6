"""Promise: an embedded bucket holds its word across processes, whenever one of them is killed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.disk import PosixDisk
from penstock.kv import EmbeddedOptions, StoreConfig
from penstock.kv.embedded.bucket import Bucket
from penstock.kv.embedded.plan import Change
from penstock.log.envelope import open_envelopes
from penstock.log.messagelog import MessageLogReader
from penstock.types import Op

CONFIG = StoreConfig(name="b", max_bytes=-1)
OPTIONS = EmbeddedOptions(sync="none", checkpoint_bytes=2000)

INCREMENTS = """
import asyncio, sys
from penstock.errors import RevisionMismatch
from penstock.kv import EmbeddedConnection, EmbeddedOptions, StoreConfig

async def main(folder, times):
    async with EmbeddedConnection(folder, EmbeddedOptions(sync="none", checkpoint_bytes=2000)) as connection:
        store = await connection.store_with_config(StoreConfig(name="b", max_bytes=-1))
        done = 0
        while done < times:
            found = await store.reader.entry("counter")
            try:
                await store.writer.update("counter", b"%d" % (int(found.value) + 1), found.version)
                done += 1
            except RevisionMismatch:
                pass

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""

PUTS = """
import sys
from penstock.disk import PosixDisk
from penstock.kv import EmbeddedOptions, StoreConfig
from penstock.kv.embedded.bucket import Bucket
from penstock.kv.embedded.plan import Change

folder, who, start = sys.argv[1], sys.argv[2], int(sys.argv[3])
options = EmbeddedOptions(sync="none", checkpoint_bytes=20_000)
bucket = Bucket.open(folder, StoreConfig(name="b", max_bytes=60_000, discard="old"), options, disk=PosixDisk())
n = start
while True:
    changes = [Change("put", f"{who}.{n % 50}", b"%d" % n * 20), Change("put", f"{who}.last", b"%d" % n)]
    revisions = bucket.commit(changes)
    print(n, revisions[1], flush=True)
    n += 1
"""

DIES_BEFORE_APPLY = """
import os, signal, sys
from penstock.disk import PosixDisk
from penstock.kv import EmbeddedOptions, StoreConfig
from penstock.kv.embedded.bucket import Bucket
from penstock.kv.embedded.plan import Change
from penstock.kv.embedded.state import BucketState

bucket = Bucket.open(sys.argv[1], StoreConfig(name="b", max_bytes=-1), EmbeddedOptions(sync="none"), disk=PosixDisk())
BucketState.apply = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
bucket._head = type("Gone", (), {"write_at": lambda *args: None})()
bucket.commit([Change("update", "k", b"2", 1), Change("put", "other", b"3")])
"""


def run(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def opened(folder: Path, config: StoreConfig = CONFIG) -> Bucket:
    return Bucket.open(str(folder), config, OPTIONS, disk=PosixDisk())


def recomputed(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return the state as the log alone tells it, record by record."""
    state: dict[str, tuple[bytes, int]] = {}
    with MessageLogReader(folder / "log") as log:
        position = log.first_position
        while len(batch := log.read(position)):
            for record in open_envelopes(batch):
                assert record.extra is not None
                key = bytes(record.extra["key"]).decode()  # type: ignore[call-overload]
                if record.extra["op"] == Op.PUT:
                    state[key] = (bytes(record.payload), record.position)
                else:
                    state.pop(key, None)
            position = batch.next_position
    return state


def state_of(bucket: Bucket) -> dict[str, tuple[bytes, int]]:
    rows = bucket.scan("", hidden=True)[0]
    return {update.key: (update.value, update.version.as_int() or 0) for update in rows}


def test_increments_of_two_processes_lose_none(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    times = 5000 if request.config.getoption("--long", default=False) else 250
    bucket = opened(tmp_path / "b")
    bucket.commit([Change("create", "counter", b"0")])
    children = [run(INCREMENTS, tmp_path, times) for _ in range(2)]
    assert [child.wait(240) for child in children] == [0, 0]
    for child in children:
        assert child.stdout is not None
        child.stdout.close()
    assert bucket.catch_up() == 1 + 2 * times
    entry = bucket.entry("counter")
    assert entry is not None
    assert int(entry.value) == 2 * times
    assert state_of(bucket) == recomputed(tmp_path / "b")
    bucket.close()


def test_a_writer_killed_between_append_and_apply_leaves_a_bucket_that_goes_on(tmp_path: Path) -> None:
    bucket = opened(tmp_path / "b")
    assert bucket.commit([Change("create", "k", b"1")]) == [1]
    child = run(DIES_BEFORE_APPLY, tmp_path / "b")
    assert child.wait(60) == -signal.SIGKILL
    assert child.stdout is not None
    child.stdout.close()
    # The change was never confirmed, and it is in the log: from now on everyone has it.
    assert bucket.head() == 1
    assert bucket.commit([Change("update", "k", b"9", 1)])[0] != 4  # it is of an older revision than the newest
    assert bucket.commit([Change("update", "k", b"9", 2)]) == [4]
    again = opened(tmp_path / "b")
    expected = {"k": (b"9", 4), "other": (b"3", 3)}
    assert state_of(bucket) == state_of(again) == recomputed(tmp_path / "b") == expected
    bucket.close()
    again.close()


def test_whatever_is_killed_no_confirmed_write_is_lost(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    rounds = 60 if request.config.getoption("--long", default=False) else 3
    random.seed(7)
    config = StoreConfig(name="b", max_bytes=60_000, discard="old")
    started = {"x": 0, "y": 0}
    confirmed: dict[str, tuple[int, int]] = {}
    for _ in range(rounds):
        children = {who: run(PUTS, tmp_path / "b", who, start) for who, start in started.items()}
        first = {who: child.stdout.readline() for who, child in children.items() if child.stdout is not None}
        time.sleep(random.random() * 0.3)
        for child in children.values():
            child.send_signal(signal.SIGKILL)
        for who, child in children.items():
            output = first[who] + child.communicate(timeout=60)[0]
            lines = [line.split() for line in output.splitlines() if line.count(" ") == 1 and line[-1:].isdigit()]
            if lines:
                confirmed[who] = (int(lines[-1][0]), int(lines[-1][1]))
                started[who] = int(lines[-1][0]) + 10
        bucket = opened(tmp_path / "b", config)
        for who, (n, revision) in confirmed.items():
            entry = bucket.entry(f"{who}.last")
            assert entry is not None
            assert int(entry.value) >= n
            assert (entry.version.as_int() or 0) >= revision
        seen = state_of(bucket)
        # Retention has taken the beginning of the log; what is left of it agrees with the state.
        for key, found in recomputed(tmp_path / "b").items():
            assert seen[key] == found
        assert list(bucket.reader.verify()) == []
        bucket.close()
    assert len(confirmed) == 2
