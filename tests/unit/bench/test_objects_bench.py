"""The benchmarks of artifacts and shipping still run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["artifacts", "ship"])
def test_the_benchmark_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / f"{name}.py"), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True, cwd=tmp_path)
    assert len(json.loads(done.stdout)) >= 6
