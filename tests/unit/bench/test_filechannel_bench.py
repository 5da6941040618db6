"""The benchmark of the queue and the fuzz targets that share a command line still run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_the_benchmark_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "filechannel.py"), "--quick", "--json"]
    rows = json.loads(subprocess.run(command, capture_output=True, check=True, cwd=tmp_path).stdout)
    queues = {row["queue"] for row in rows[:-1]}
    assert queues >= {"penstock, batches", "penstock, one at a time, asyncio", "diskcache.Deque"}
    assert "plain file, no messages: the ceiling" in queues
    assert rows[-1]["opening"].endswith("of its segments only segment.4.")


def test_the_benchmark_of_groups_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "groups.py"), "--quick", "--json"]
    tables = json.loads(subprocess.run(command, capture_output=True, check=True, cwd=tmp_path).stdout)
    assert {row["queue"] for row in tables["sharing"]} >= {"penstock group, one at a time", "litequeue"}
    assert all(row["taken"] > 0 for row in tables["sharing"])
    assert all(row["sent"] > 0 for row in tables["sending"])


@pytest.mark.parametrize(
    ("target", "said"),
    [("filechannel_scan", "nothing found"), ("messagelog_scan", "nothing found"), ("nats_decode", "nothing found"),
     ("pgss_replay", "{'clean': ")],
)  # fmt: skip
def test_the_fuzz_targets_run(target: str, said: str) -> None:
    command = [sys.executable, str(ROOT / "fuzz" / f"{target}.py"), "--inputs", "2000"]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    assert f"{target}: 2000 inputs, {said}" in done.stdout
