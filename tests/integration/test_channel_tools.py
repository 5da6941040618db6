"""The benchmark and the fuzzer of channels run, so that they do not rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_benchmark_runs_and_answers_every_question(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "channels.py"), "--quick", "--json", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    figures = json.loads(done.stdout)["figures"]
    assert len(figures) == 9
    assert all(found["penstock"] > 0 and found["sqlite"] > 0 for found in figures.values())


def test_the_fuzzer_finds_nothing_in_a_short_run() -> None:
    script = str(ROOT / "fuzz" / "metadata_decode.py")
    command = [sys.executable, script, "--inputs", "5000", "--seed", "1", "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.count("2500 inputs") == 2
