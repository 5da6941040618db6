"""The same work on whichever Spark: count and digest of channels, the channels into the lake, the digest of that.

python _job.py MASTER CHANNELS FOLDER

MASTER may be the word cluster: one of two workers is started for this job, by this interpreter.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from penstock.spark import lake, session

DIGEST = (
    "count(*) records",
    "sum(length(payload)) bytes",
    "bit_xor(xxhash64(channel, position, timestamp_ns, kind, key, payload)) digest",
)
FAST = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def digest(frame: Any) -> Any:
    """Return one row a channel: how many records, how many bytes, and a digest that does not depend on their order."""
    return frame.groupBy("channel").agg(*map(_expr, DIGEST)).orderBy("channel")


def where_penstock_is(_: int) -> str:
    """Return the file that a task imports penstock from."""
    import penstock

    return str(penstock.__file__)


def _expr(text: str) -> Any:
    from pyspark.sql import functions as F  # noqa: N812

    return F.expr(text)


def main(master: str, channels: str, folder: str) -> None:
    if master == "cluster":
        from penstock.testing.spark import SparkCluster

        with SparkCluster(f"{folder}/cluster", workers=2) as cluster:
            job(cluster.url, channels, folder)
    else:
        job(master, channels, folder)


def job(master: str, channels: str, folder: str) -> None:
    spark = session("job", master=master, memory="1g", java_options=FAST)
    found: dict[str, Any] = {}
    frame = spark.read.format("penstock").option("partitions", 4).load(channels)
    found["channels"] = [row.asDict() for row in digest(frame).collect()]
    table = f"{folder}/table"
    options = {"maxRecordsPerTrigger": 50_000}
    query = lake.ingest(spark, channels, table, f"{folder}/checkpoint", options=options)
    assert query.awaitTermination(240)
    if query.exception() is not None:
        raise query.exception()  # type: ignore[misc]
    found["lake"] = [row.asDict() for row in digest(lake.read(spark, table)).collect()]
    if hasattr(spark, "_jsparkSession"):
        context = spark.sparkContext._jsc.sc()
        found["executors"] = context.getExecutorMemoryStatus().size() - 1
        found["packages"] = spark.sparkContext.parallelize(range(4), 4).map(where_penstock_is).distinct().collect()
    spark.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
