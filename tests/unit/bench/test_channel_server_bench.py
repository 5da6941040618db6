"""Promise: the benchmark of the channel server runs, and its generator loses nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_a_short_run_measures_the_server_and_the_ceiling_of_the_generator() -> None:
    command = [sys.executable, str(ROOT / "bench" / "channel_server.py"), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["server"] for row in rows} == {"stub", "penstock"}
    assert all(row["acked"] > 0 and row["lost"] == 0 for row in rows), rows
