"""The fuzz target and the benchmark of the message log run; their long forms are targets of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_decoders_stand_damaged_input() -> None:
    assert "3000 inputs, nothing found" in run("fuzz/messagelog_scan.py", "--inputs", "3000")


def test_the_benchmark_measures_every_question() -> None:
    rows = json.loads(run("bench/messagelog.py", "--quick", "--json"))["rows"]
    assert len(rows) == 8
    assert all(row["penstock"] > 0 and row["sqlite"] > 0 for row in rows)
