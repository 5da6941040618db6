"""Promise: however often its process is killed, a store without unfinished applies is what some apply left."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.store import AppendLogOptions, AppendLogStore

OPTIONS = AppendLogOptions(unfinished="drop", compact_threshold_bytes=50_000)

WRITER = """
import sys
from penstock.store import AppendLogOptions, AppendLogStore
from penstock.types import KvUpdate, WatchCursor
store = AppendLogStore.open(sys.argv[1], AppendLogOptions(unfinished="drop", compact_threshold_bytes=50_000))
n = store.cursor().token.as_int() or 0
print(n, flush=True)
while True:
    n += 1
    store.apply([KvUpdate.put(f"k{i}", b"%d" % n, n) for i in range(500)], WatchCursor.of(n))
    print(n, flush=True)
"""


def test_a_killed_writer_leaves_whole_applies(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path, rng, last = str(tmp_path / "fold.snap"), random.Random(1), 0
    for _ in range(200 if request.config.getoption("--long", default=False) else 3):
        command = [sys.executable, "-c", WRITER, path]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert int(process.stdout.readline()) >= last  # what the one before had applied
            time.sleep(rng.random() * 0.15)
            process.send_signal(signal.SIGKILL)
            for line in process.stdout:
                last = int(line) if line.endswith("\n") else last
        with AppendLogStore.open(path, OPTIONS, read_only=True) as store:
            revision = store.cursor().token.as_int() or 0
            assert revision >= last
            assert {int(entry.value) for entry in store.range()} <= {revision}
            assert store.count() in (0, 500)
            last = revision
