"""A Spark driver that follows live channels into a log and into the lake until it is told that all is written.

python _spark_driver.py FOLDER BATCH_RECORDS
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from penstock.spark import lake, session

EVERY = {"processingTime": "100 milliseconds"}


def main(folder: str, records: int) -> None:
    spark = session("crash", master="local[2]", memory="1g", java_options="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    options: dict[str, Any] = {"maxRecordsPerTrigger": records}
    queries = [
        lake.ingest(
            spark, f"{folder}/in", f"{folder}/lake", f"{folder}/checkpoints/lake", options=options, trigger=EVERY
        ),
        spark.readStream.format("penstock")
        .options(**options)
        .load(f"{folder}/in")
        .select("payload", "kind", "timestamp_ns")
        .writeStream.format("penstock")
        .option("checkpointLocation", f"{folder}/checkpoints/log")
        .trigger(**EVERY)
        .start(f"{folder}/out/copy"),
    ]
    Path(folder, "started").touch()
    while not Path(folder, "all-written").exists():
        for query in queries:
            if query.exception() is not None:
                raise query.exception()  # type: ignore[misc]
        time.sleep(0.05)
    for query in queries:
        query.processAllAvailable()
        query.stop()
    Path(folder, "finished").touch()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
