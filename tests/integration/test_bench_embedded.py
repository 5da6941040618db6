"""A short run of the benchmark of embedded buckets, so that it does not rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def test_the_benchmark_of_buckets_runs() -> None:
    command = [sys.executable, str(BENCH / "kv.py"), "--quick", "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "penstock" in found["sides"]
    assert all(row[1][0] > 0 for row in found["rows"])
