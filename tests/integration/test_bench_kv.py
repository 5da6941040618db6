"""A short run of each benchmark and fuzz target of the key-value floor, so that they do not rot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def test_the_benchmark_of_folds_reports_every_part() -> None:
    command = [sys.executable, str(BENCH / "folds.py"), "--quick"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    contenders = ["append log", "RocksDB", "LMDB", "sqlite3, WAL", "shelve", "diskcache", "rocksdict WriteBatch, raw"]
    parts = ["bytes/key in memory", "nats-py watchall", "a restart", "10,000 ACK subjects"]
    assert [name for name in contenders + parts if name not in done.stdout] == []


def test_the_fuzz_target_runs() -> None:
    command = [sys.executable, str(BENCH.parent / "fuzz" / "nats_decode.py"), "--inputs", "3000"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "3000 inputs" in done.stdout
