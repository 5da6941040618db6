"""Spark Declarative Pipelines read channels and write a log, with nothing registered: the format is found by its name.

Takes two JVMs of its own, so it runs with --long.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.log.detect import open_log
from penstock.log.xchannel import Writer
from penstock.spark.session import launch_environment
from penstock.testing.log_conformance import contents

SPEC = """\
name: readings
storage: file://{folder}/storage
configuration: {{spark.sql.shuffle.partitions: "2"}}
libraries: [{{glob: {{include: transformations/**}}}}]
"""

DEFINITIONS = """\
from pyspark import pipelines as dp
from pyspark.sql import functions as F


@dp.table
def raw():
    return spark.readStream.format("penstock").load("{folder}/channels")


@dp.materialized_view
def per_kind():
    return spark.read.table("raw").groupBy("kind").agg(F.count("*").alias("records"))


dp.create_sink("copy", "penstock", {{"path": "{folder}/copy", "appId": "declared"}})


@dp.append_flow(target="copy")
def copied():
    return spark.readStream.table("raw").where("kind = 1").select("payload", "kind", "timestamp_ns")
"""


@pytest.mark.timeout(1800)
def test_declarative_pipelines_use_source_and_sink(tmp_path: Path, long_run: bool) -> None:
    if not long_run:
        pytest.skip("takes JVMs of its own: runs with --long")
    (tmp_path / "channels").mkdir()
    with Writer.open(tmp_path / "channels" / "ticks") as writer:
        writer.append_many([b"%d" % n for n in range(1000)], kind=[n % 2 for n in range(1000)], timestamp_ns=7)
    (tmp_path / "transformations").mkdir()
    (tmp_path / "spark-pipeline.yml").write_text(SPEC.format(folder=tmp_path))
    (tmp_path / "transformations" / "readings.py").write_text(DEFINITIONS.format(folder=tmp_path))
    environment = {**os.environ, **launch_environment(str(tmp_path))}
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path, environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [f"{environment['SPARK_HOME']}/bin/spark-pipelines", "run"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    with open_log(str(tmp_path / "copy")) as log:
        assert sorted(contents(log), key=int) == [b"%d" % n for n in range(1, 1000, 2)]
