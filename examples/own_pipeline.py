"""A pipeline of your own: a function on DataFrames.

penstock pipeline run own_pipeline:hottest data/channels --set limit=3
"""

from __future__ import annotations

import tempfile

from pyspark.sql import (
    DataFrame,
    functions as F,  # noqa: N812
)

from penstock import Writer
from penstock.spark import session
from penstock.spark.decode import decode_json, split_errors


def hottest(readings: DataFrame, limit: int = 2) -> DataFrame:
    """Return the devices with the highest temperature ever read."""
    good, _ = split_errors(decode_json(readings, "device string, celsius double"))
    return good.groupBy("device").agg(F.max("celsius").alias("celsius")).orderBy(F.desc("celsius")).limit(limit)


def main() -> None:
    """Write a few readings and run the function on them."""
    with tempfile.TemporaryDirectory() as folder:
        with Writer.open(f"{folder}/readings") as writer:
            writer.append_many([b'{"device": "d%d", "celsius": %d.5}' % (n % 5, n) for n in range(50)])
        spark = session("own pipeline", master="local[1]", memory="1g")
        for row in hottest(spark.read.format("penstock").load(f"{folder}/readings")).collect():
            print(row["device"], row["celsius"])
        spark.stop()


if __name__ == "__main__":
    main()
