"""A Spark driver that moves channels into a log and into the lake until both have everything; to be killed.

python _spark_driver.py FOLDER RECORDS
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from penstock.spark import lake, session


def main(folder: str, records: int) -> None:
    spark = session("crash", master="local[2]", memory="1g", java_options="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    options: dict[str, Any] = {"maxRecordsPerTrigger": records // 8}
    queries = [
        lake.ingest(
            spark,
            f"{folder}/in",
            f"{folder}/lake",
            f"{folder}/checkpoints/lake",
            options=options,
            trigger={"availableNow": True},
        ),
        spark.readStream.format("penstock")
        .options(**options)
        .load(f"{folder}/in")
        .select("payload", "kind", "timestamp_ns")
        .writeStream.format("penstock")
        .option("checkpointLocation", f"{folder}/checkpoints/log")
        .trigger(availableNow=True)
        .start(f"{folder}/out"),
    ]
    Path(folder, "started").touch()
    for query in queries:
        while query.isActive:
            time.sleep(0.1)
        if query.exception() is not None:
            raise query.exception()  # type: ignore[misc]
    Path(folder, "finished").touch()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
