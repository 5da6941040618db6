"""One job, whichever Spark: one core, two cores, a standalone cluster of two workers; and `pipeline run` on each kind.

Each takes JVMs of its own, so they run with --long.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.demo_readings import SITES
from penstock.log.detect import open_writer
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.testing.spark import ConnectServer, SparkCluster

JOB = Path(__file__).with_name("_job.py")
RECORDS = 40_000


@pytest.fixture(scope="module", autouse=True)
def _long(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--long", default=False):
        pytest.skip("takes JVMs of its own: runs with --long")


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("channels")
    for site, kind in SITES.items():
        with contextlib.closing(open_writer(str(folder / site), format=kind, content=CONTENT)) as channel:
            for start in range(0, RECORDS, 10_000):
                numbers = range(start, start + 10_000)
                channel.append_many(
                    [encode_envelope(Envelope(b"%s/%d" % (site.encode(), n % 50), b'{"n": %d}' % n)) for n in numbers]
                )
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with SparkCluster(str(tmp_path_factory.mktemp("cluster")), workers=2) as found:
        yield found


def run(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(JOB.parent)])},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def penstock(*words: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run("-m", "penstock.cli.main", *words).splitlines()]


@pytest.mark.timeout(3600)
def test_the_same_counts_and_digests_on_one_core_on_two_and_on_a_cluster(
    channels: Path, cluster: SparkCluster, tmp_path: Path
) -> None:
    found = {}
    for name, master in (("one", "local[1]"), ("two", "local[2]"), ("cluster", cluster.url)):
        found[name] = json.loads(run(str(JOB), master, str(channels), str(tmp_path / name)))
    assert found["cluster"].pop("executors") == 2
    found["one"].pop("executors"), found["two"].pop("executors")
    assert found["one"] == found["two"] == found["cluster"]
    rows = found["one"]["channels"]
    assert {row["channel"]: row["records"] for row in rows} == dict.fromkeys(SITES, RECORDS)
    assert len({row["digest"] for row in rows}) == len(SITES)
    assert found["one"]["lake"] == rows


@pytest.mark.timeout(1800)
def test_pipeline_run_takes_a_function_to_a_cluster(channels: Path, cluster: SparkCluster) -> None:
    words = ("pipeline", "run", "_job:digest", str(channels), "--master", cluster.url, "--json")
    rows = penstock(*words, "--py-files", str(JOB))
    assert {row["channel"]: row["records"] for row in rows} == dict.fromkeys(SITES, RECORDS)


@pytest.mark.timeout(1800)
def test_spark_connect_reads_channels_and_writes_the_lake(channels: Path, tmp_path: Path) -> None:
    with ConnectServer(str(tmp_path / "server")) as server:
        rows = penstock("pipeline", "run", "_job:digest", str(channels), "--master", server.url, "--json")
        assert {row["channel"]: row["records"] for row in rows} == dict.fromkeys(SITES, RECORDS)
        table = str(tmp_path / "table")
        (done,) = penstock("pipeline", "run", "ingest", str(channels), table, "--master", server.url, "--json")
        assert done["batches"] >= 1
        again = penstock("pipeline", "run", "_job:digest", table, "--master", server.url, "--json")
    assert again == rows
