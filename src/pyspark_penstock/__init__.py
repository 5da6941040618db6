"""Spark looks for packages of this name: ``spark.read.format("penstock")`` works wherever penstock is installed."""

from penstock.spark.source import PenstockSource as DefaultSource

__all__ = ["DefaultSource"]
