"""Promise: without a compiler the package installs; sealed files are read, and what needs memory order says why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.log.xchannel import Writer

ROOT = Path(__file__).parents[2]
CODE = """
import sys
from penstock import kernel
from penstock.batch import Batch
from penstock.errors import UnsupportedError
from penstock.log import open_log
from penstock.log.xchannel import Reader, Writer

sealed, live, target = sys.argv[1:]
assert kernel.__file__.startswith(target)
assert not kernel.native
assert "not installed" in kernel.reason
reader = Reader.open(sealed)
assert [bytes(reader.try_read().payload) for _ in range(3)] == [b"one", b"two", b"x" * 3000]
reader = Reader.open(sealed)
batch = reader.read_batch(10)
assert batch.to_payloads() == [b"one", b"two"] + [b"x" * 3000], batch
assert batch.kinds.tolist() == [1, 2, 3]
try:
    reader.read_batch(10)
except UnsupportedError as exc:
    print("next file:", exc)
for open_it in (lambda: Reader.open(live), lambda: Writer.open(live), lambda: Writer.open(live + "-new")):
    try:
        open_it()
    except UnsupportedError as exc:
        print("refused:", exc)
print([str(problem) for problem in open_log(live).verify()])
assert Batch.of([b"a", b"bc"]).to_payloads() == [b"a", b"bc"]
"""


@pytest.mark.timeout(280)
def test_it_installs_without_a_compiler_and_says_what_is_missing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(
        ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.so", "*.c", "*.egg-info", "__pycache__")
    )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    target = tmp_path / "target"
    environment = {**os.environ, "CC": "/bin/false", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    command += ["--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--target", str(target), "."]
    done = subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not list(target.rglob("*.so"))

    sealed, live = str(tmp_path / "sealed"), str(tmp_path / "live")
    with Writer.open(sealed, region_bytes=4096) as writer:
        for kind, payload in enumerate((b"one", b"two", b"x" * 3000), start=1):
            writer.append(payload, kind=kind)
        writer.roll()
        writer.append(b"in the live file")
    with Writer.open(live) as writer:
        writer.append(b"live")
    done = subprocess.run(
        [sys.executable, "-c", CODE, sealed, live, str(target)],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("next file: ")
    assert all(line.startswith("refused: ") for line in lines[1:4])
    assert all("compiled kernel is not installed" in line for line in lines)
    assert all("memory order" in line for line in lines[:4])
    assert not (tmp_path / "live-new").exists()
