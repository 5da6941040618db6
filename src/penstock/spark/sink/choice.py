"""``write.format("penstock")`` and ``writeStream.format("penstock")``: which sink the options mean.

A sink is a file with ``batch_writer(options, schema)`` and ``stream_writer(options, schema)``, and one entry of SINKS:
the option that chooses it.  Without any of these options rows go to a log.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

from pyspark.sql.types import StructType

from penstock.errors import OptionsError

__all__ = ["SINKS", "batch_writer", "stream_writer"]

LOG: Final = "penstock.spark.sink.log"
SINKS: Final = {"bucket": "penstock.spark.sink.bucket"}


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> Any:
    """Return the writer of a batch query.

    >>> batch_writer({"path": "out"}, StructType(), overwrite=True)
    Traceback (most recent call last):
    penstock.errors.OptionsError: logs and buckets are added to, never overwritten: use append
    """
    return _sink(options, overwrite).batch_writer(options, schema)


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> Any:
    """Return the writer of a stream.

    >>> stream_writer({"path": "out"}, StructType(), overwrite=False)
    Traceback (most recent call last):
    penstock.errors.OptionsError: a stream into a log needs an appId, or its checkpointLocation given as an option
    """
    return _sink(options, overwrite).stream_writer(options, schema)


def _sink(options: Mapping[str, str], overwrite: bool) -> Any:
    if overwrite:
        raise OptionsError("logs and buckets are added to, never overwritten: use append")
    names = {name.lower() for name in options}
    return importlib.import_module(next((SINKS[name] for name in SINKS if name in names), LOG))
