"""One job, whichever Spark: one core, two cores, a standalone cluster of two workers, and one that has the wheel only;
and every pipeline on a cluster and on Spark Connect.

Each takes JVMs of its own, so they run with --long.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from penstock.cli.demo_readings import SITES
from penstock.disk import object_store_for
from penstock.log.detect import open_log, open_writer
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.messagelog import MessageLog
from penstock.ship import Shipper
from penstock.testing.log_conformance import contents
from penstock.testing.s3 import S3Server
from penstock.testing.spark import ConnectServer, SparkCluster

JOB = Path(__file__).with_name("_job.py")
ROOT = JOB.parents[3]
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    with ConnectServer(str(tmp_path_factory.mktemp("server"))) as found:
        yield found


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An environment that has penstock from its wheel; what penstock depends on is the environment of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run(wheel, check=True, timeout=3600)  # all kernels, on a machine with other work
    (built,) = folder.glob("penstock-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True, timeout=120)
    python = str(folder / "env" / "bin" / "python")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", str(built)], check=True, timeout=120)
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python


def run(*words: str, python: str = sys.executable) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if python == sys.executable:
        environment["PYTHONPATH"] = os.pathsep.join([*sys.path, str(JOB.parent)])
    done = subprocess.run(
        [python, *words],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def penstock(*words: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run("-m", "penstock.cli.main", *words).splitlines()]


@pytest.mark.timeout(3600)
def test_the_same_counts_and_digests_on_one_core_on_two_and_on_a_cluster(
    channels: Path, cluster: SparkCluster, installed: str, tmp_path: Path
) -> None:
    found = {}
    for name, master in (("one", "local[1]"), ("two", "local[2]"), ("cluster", cluster.url)):
        found[name] = json.loads(run(str(JOB), master, str(channels), str(tmp_path / name)))
    found["wheel"] = json.loads(run(str(JOB), "cluster", str(channels), str(tmp_path / "wheel"), python=installed))
    packages = {name: job.pop("packages") for name, job in found.items()}
    assert packages["wheel"] == [
        next(Path(installed).parents[1].glob("lib/*/site-packages/penstock/__init__.py")).as_posix()
    ]
    assert packages["cluster"] != packages["wheel"]
    executors = {name: job.pop("executors") for name, job in found.items()}
    assert executors["cluster"] == executors["wheel"] == 2
    assert found["one"] == found["two"] == found["cluster"] == found["wheel"]
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
def test_spark_connect_reads_channels_and_writes_the_lake(
    channels: Path, server: ConnectServer, tmp_path: Path
) -> None:
    rows = penstock("pipeline", "run", "_job:digest", str(channels), "--master", server.url, "--json")
    assert {row["channel"]: row["records"] for row in rows} == dict.fromkeys(SITES, RECORDS)
    table = str(tmp_path / "table")
    (done,) = penstock("pipeline", "run", "ingest", str(channels), table, "--master", server.url, "--json")
    assert done["batches"] >= 1
    assert done["rows"] == RECORDS * len(SITES)
    assert penstock("pipeline", "run", "_job:digest", table, "--master", server.url, "--json") == rows


@pytest.mark.timeout(3600)
def test_every_pipeline_gives_the_same_on_a_cluster_and_on_connect(
    channels: Path, cluster: SparkCluster, server: ConnectServer, tmp_path: Path
) -> None:
    found = {}
    for name, master in (("local", "local[2]"), ("cluster", cluster.url), ("connect", server.url)):
        folder = tmp_path / name
        folder.mkdir()
        found[name] = every_pipeline(channels, folder, master)
    assert found["cluster"] == found["local"]
    assert found["connect"] == found["local"]


def every_pipeline(channels: Path, folder: Path, master: str) -> dict[str, Any]:
    """Run each pipeline once and return what it said and what it left, without times and places."""
    source, north, raw = str(channels), str(channels / "north"), str(folder / "raw")
    steps: dict[str, tuple[str, ...]] = {
        "ingest": (source, raw),
        "decode": (raw, str(folder / "typed"), "--schema", "n long"),
        "decode stream": (source, str(folder / "streamed"), "--schema", "n long"),
        "aggregate": (raw, "--every", "all", "--by", "channel"),
        "aggregate stream": (north, str(folder / "hours"), "--watermark", "1 second"),
        "fold": (north, "--store", str(folder / "fold")),
        "fold table": (source, "--table", str(folder / "latest")),
        "audit": (source, raw),
        "audit fold": (north, "--store", str(folder / "fold")),
        "replay": (raw, str(folder / "again"), "--app", "again", "--where", "channel = 'north'", "--content", CONTENT),
        "report": (source, str(folder / "page.html"), "--table", raw, "--check"),
        "compact": (raw,),
    }
    found: dict[str, Any] = {}
    for step, words in steps.items():
        command, on = step.split()[0], () if step == "compact" else ("--master", master)
        said = penstock("pipeline", command, *words, *on, *(() if step == "replay" else ("--json",)))
        found[step] = [{k: v for k, v in row.items() if k not in ("seconds", "table", "page", "store")} for row in said]
    for table in ("raw", "typed", "streamed", "latest"):
        rows = DeltaTable(str(folder / table)).to_pyarrow_table()
        found[f"rows of {table}"] = rows.num_rows
    with open_log(str(folder / "again")) as log:
        found["replayed"] = contents(log)
    assert len(found["replayed"]) == RECORDS
    return found


@pytest.mark.timeout(1800)
def test_a_cluster_reads_a_fleet_with_the_wheel_and_credentials_only(
    installed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with S3Server("fleet-tests") as s3:
        for name, value in {**s3.environment, "AWS_SECRET_ACCESS_KEY": "fleet-secret"}.items():
            monkeypatch.setenv(name, value)
        for node in ("edge-1", "edge-2"):
            with MessageLog.open(tmp_path / node) as log:
                log.append_many([b"%d" % number for number in range(1000)])
                log.roll()
            store = object_store_for(f"s3://{s3.bucket}/fleet/{node}")
            with Shipper(tmp_path / node, store, node=node, channel="ticks") as shipper:
                shipper.step()
        job = JOB.with_name("_fleet_job.py")
        found = json.loads(run(str(job), f"s3://{s3.bucket}/fleet/*/ticks", f"s3://{s3.bucket}/lake", python=installed))
    each = {"edge-1": 1000, "edge-2": 1000}
    assert found == {"read": each, "held": each, "ingested": 2000, "secret": False}
