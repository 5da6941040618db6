"""Pipelines: each a file with plain functions on DataFrames, and one that runs them from paths to paths.

ingest     channels → the lake, each record once           audit    does the lake hold what the channels hold?
decode     payloads → typed columns, errors set aside      replay   the lake, or channels → a log
aggregate  counts and bytes by time and key                compact  many small files → few large ones
report     one row a channel
"""

from penstock.spark.pipelines.run import Summary, follow, load

__all__ = ["Summary", "follow", "load"]
