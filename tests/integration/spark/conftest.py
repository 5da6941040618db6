"""One Spark for all tests of this folder: a session takes seconds to start."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.spark import session
from penstock.testing.s3 import S3Server

FAST = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """The object store of these tests; each uses a prefix of its own."""
    with S3Server("spark-tests") as server:
        yield server


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, s3: S3Server) -> Iterator[Any]:
    folder: Path = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as environment:  # Python in Spark's tasks has that of its Java
        for name, value in s3.environment.items():
            environment.setenv(name, value)
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
