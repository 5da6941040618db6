"""The benchmark of the broker still runs, and its generator counts what arrives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_benchmark_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "mqtt.py"), "--quick", "--json", "--brokers", "penstock"]
    done = subprocess.run(command, capture_output=True, check=False, cwd=tmp_path, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    cases = {row["case"] for row in rows}
    assert {"QoS 0, 64 B, 1→1", "QoS 2, 64 B, 1→1", "latency, QoS 1, 1,000/s"} <= cases
    assert [row for row in rows if row["delivered"] != row["expected"]] == []


def test_the_benchmark_of_what_is_kept_runs_and_a_message_is_written_once(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "bench" / "mqtt_durable.py"),
        "--quick",
        "--json",
        "--only",
        "offline,reconnect",
    ]
    done = subprocess.run(command, capture_output=True, check=False, cwd=tmp_path, text=True)
    assert done.returncode == 0, done.stderr
    rows = {row["what"]: row for row in json.loads(done.stdout)}
    assert rows["offline"]["payload"] < rows["offline"]["written"] < 2 * rows["offline"]["payload"]
    assert rows["reconnect"]["seconds"] > 0
