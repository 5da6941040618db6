"""Promise: the bench of the stores runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[3] / "bench" / "stores.py"


def test_a_short_run_of_the_bench_reports_every_contender() -> None:
    command = [sys.executable, str(BENCH), "--quick", "--json", "--keys", "1000", "--batch", "500", "--seconds", "1"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout.splitlines()
    results = [json.loads(line) for line in lines]
    assert {"append log", "RocksDB", "LMDB", "sqlite3, WAL", "shelve", "diskcache"} <= {row["store"] for row in results}
    assert all(row["insert"] > 0 for row in results)
