"""Every example runs as it stands, and every benchmark has a short run so that it does not rot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ELSEWHERE = {
    "artifacts", "channel_server", "channels", "filechannel", "folds", "groups", "growth", "messagelog", "mqtt",
    "mqtt_durable", "net", "ship",
}  # fmt: skip
"""These have a test of their own."""
BENCHES = sorted(path for path in (ROOT / "bench").glob("[!_]*.py") if path.stem not in ELSEWHERE)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_a_benchmark_answers_its_question(path: Path, long_run: bool) -> None:
    if path.stem == "spark" and not long_run:
        pytest.skip("takes a JVM of its own: runs with --long")
    done = subprocess.run(
        [sys.executable, str(path), "--quick"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "|---|" in done.stdout
