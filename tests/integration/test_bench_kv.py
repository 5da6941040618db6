"""A short run of each benchmark and fuzz target of the key-value floor, so that they do not rot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize("name", ["nats_ack.py", "nats_hydrate.py"])
def test_the_benchmark_runs(name: str) -> None:
    command = [sys.executable, str(BENCH / name), "--quick"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("|") > 8


def test_the_fuzz_target_runs() -> None:
    command = [sys.executable, str(BENCH.parent / "fuzz" / "nats_decode.py"), "--inputs", "3000"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "3000 inputs" in done.stdout
