"""Spark looks for packages of this name: ``spark.read.format("penstock")`` works wherever penstock is installed."""

from penstock.spark.session import require_pyspark

require_pyspark()  # one that is too old says so, instead of which name it lacks

from penstock.spark.source.table import PenstockSource as DefaultSource  # noqa: E402

__all__ = ["DefaultSource"]
