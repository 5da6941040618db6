"""One Spark for all tests of this folder: a session takes seconds to start."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.spark import session

FAST = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder: Path = tmp_path_factory.mktemp("spark")
    found = session(
        "penstock-tests",
        master="local[2]",
        memory="1g",
        java_options=FAST,
        log=str(folder / "jvm.log"),
        config={"spark.sql.warehouse.dir": str(folder / "warehouse")},
    )
    yield found
    found.stop()
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is not None:  # so that no JVM outlives the tests, and no socket is left for the collector to complain of
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gateway.shutdown()
            process = getattr(gateway, "proc", None)
            if process is not None:
                process.stdin.close()
                process.wait(30)
            SparkContext._gateway = SparkContext._jvm = None
            del gateway
            gc.collect()
