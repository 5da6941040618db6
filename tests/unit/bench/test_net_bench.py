"""The benchmark of the net floor still runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_benchmark_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "net.py"), "--quick", "--json"]
    figures = json.loads(subprocess.run(command, capture_output=True, check=True, cwd=tmp_path).stdout)
    assert {"sink quiet", "sink plain-buffered", "echo echo", "refused cpu"} <= figures.keys()
    assert all(value > 0 for name, value in figures.items() if not name.startswith("idle"))
