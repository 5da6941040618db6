"""The benchmark and the fuzz target of the queue still run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_benchmark_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "filechannel.py"), "--quick", "--json"]
    rows = json.loads(subprocess.run(command, capture_output=True, check=True, cwd=tmp_path).stdout)
    queues = {row["queue"] for row in rows[:-1]}
    assert queues >= {"penstock, batches", "diskcache.Deque", "plain file, no messages: the ceiling"}
    assert rows[-1]["opening"].endswith("of its segments only segment.4.")


def test_the_fuzz_target_runs() -> None:
    command = [sys.executable, str(ROOT / "fuzz" / "filechannel_scan.py"), "--inputs", "4000"]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    assert "4000 inputs, nothing found" in done.stdout
