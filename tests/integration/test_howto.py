"""Promise: what the pages show can be typed as it stands: the examples of a page run, top to bottom, in one folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.testing.nats import NatsServer

ROOT = Path(__file__).resolve().parents[2]
RUN_PAGE = ROOT / "tests/support/run_page.py"
ELSEWHERE = {"spark.md", "spark-clusters.md", "fleet.md", "nats.md"}  # these need a JVM, a cluster or a server
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/howto").glob("*.md"))]


def examples_of(page: Path, folder: Path, *address: str, seconds: float = 280) -> int:
    command = [sys.executable, "-W", "error", str(RUN_PAGE), str(page), *address]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in ELSEWHERE], ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path) -> None:
    assert examples_of(page, tmp_path) > 1


@pytest.mark.timeout(3600)
def test_the_pages_run_one_after_another_in_one_folder_and_twice(tmp_path: Path, long_run: bool) -> None:
    if not long_run:
        pytest.skip("every page twice: runs with --long")
    for page in [page for page in PAGES if page.name not in ELSEWHERE] * 2:
        assert examples_of(page, tmp_path) > 1


def test_the_examples_for_nats_run(tmp_path: Path) -> None:
    with NatsServer(str(tmp_path)) as server:
        assert examples_of(ROOT / "docs/howto/nats.md", tmp_path, server.url) > 1


@pytest.mark.timeout(900)
def test_the_examples_for_spark_run(tmp_path: Path, long_run: bool) -> None:
    if not long_run:
        pytest.skip("a JVM a command: runs with --long")
    assert examples_of(ROOT / "docs/howto/spark.md", tmp_path, seconds=800) > 20


@pytest.mark.timeout(900)
def test_the_examples_for_a_fleet_run(tmp_path: Path, long_run: bool) -> None:
    if not long_run:
        pytest.skip("a JVM a command: runs with --long")
    assert examples_of(ROOT / "docs/howto/fleet.md", tmp_path, seconds=800) > 8
