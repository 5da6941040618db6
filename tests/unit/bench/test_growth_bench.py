"""The benchmark of growth still runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_benchmark_of_growth_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "growth.py"), "--quick"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert "| queue, segments | verify |" in found
    assert "| message log, segments | drop all |" in found
