"""A fleet by URL on a cluster of two workers: what each node has, and what the lake has: _fleet_job.py FLEET TABLE."""

from __future__ import annotations

import json
import sys
import tempfile

from penstock.spark import lake, session
from penstock.testing.spark import SparkCluster


def main(fleet: str, table: str) -> None:
    with tempfile.TemporaryDirectory() as folder, SparkCluster(folder) as cluster:
        spark = session("fleet", master=cluster.url, memory="512m", config={"spark.executor.memory": "512m"})
        rows = spark.read.format("penstock").load(fleet).groupBy("node").count().collect()
        done = lake.ingest_committed(spark, fleet, table)
        held = lake.read(spark, table).groupBy("node").count().collect()
        told = json.dumps(spark.sparkContext.getConf().getAll())
        spark.stop()
    print(
        json.dumps(
            {
                "read": {row["node"]: row["count"] for row in rows},
                "held": {row["node"]: row["count"] for row in held},
                "ingested": done.records,
                "secret": "fleet-secret" in told,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
