"""Tables of Spark's catalog: ``CREATE TABLE … USING penstock OPTIONS (…)``.

Spark tells a Python source the options of such a table once, when the table is made, and never again; what it keeps and
hands over with every query is the schema.  So the options travel there, in the metadata of the first column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from pyspark.sql.types import StructField, StructType

from penstock.spark.source.names import given_options
from penstock.spark.source.options import absolute_path

__all__ = ["keep_options", "with_kept_options"]

KEPT: Final = "penstock.options"


def keep_options(schema: StructType, options: Mapping[str, str]) -> StructType:
    """Return the schema of a table that is made, with what its options say.

    >>> from pyspark.sql.types import StringType
    >>> told = {"owner": "ann", "provider": "penstock", "path": "file:/data/ticks"}
    >>> with_kept_options({}, keep_options(StructType([StructField("channel", StringType())]), told))
    {'path': '/data/ticks'}
    """
    kept = given_options(options)
    if "path" in kept:
        kept["path"] = absolute_path(kept["path"])  # another query may be planned in another folder
    first, *others = schema.fields
    metadata = {**(first.metadata or {}), KEPT: msgspec.json.encode(kept).decode()}
    return StructType([StructField(first.name, first.dataType, first.nullable, metadata), *others])


def with_kept_options(options: Mapping[str, str], schema: StructType) -> dict[str, str]:
    """Return the options of a query; of one on a table of the catalog those of the table, unless it gives its own.

    >>> with_kept_options({"path": "data/ticks"}, StructType())
    {'path': 'data/ticks'}
    """
    texts = [field.metadata[KEPT] for field in schema.fields if KEPT in (field.metadata or {})]
    kept = msgspec.json.decode(texts[0], type=dict[str, str]) if texts else {}
    return {**kept, **{name.lower() if kept else name: value for name, value in options.items()}}
