"""One number for all rows of a DataFrame, whatever their order: two that have it in common hold the same rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Digest", "digest_of"]

WORD = (1 << 64) - 1


class Digest(msgspec.Struct, frozen=True):
    """How many rows there are, and what they add up to.

    >>> Digest(2, "00") == Digest(2, "00")
    True
    """

    rows: int
    digest: str


def digest_of(frame: DataFrame) -> Digest:
    """Return count and digest of a DataFrame's rows, computed in Spark in one pass.

    Each row is hashed (xxHash64 over its columns by name, and over which of them are null); the digest is the sum and
    the exclusive or of those.  So it depends neither on the order of rows nor on the order of columns, nor on how many
    tasks computed it.  It tells mistakes, not malice.

    ``digest_of(spark.read.format("penstock").load("data").select("position", "payload"))``

    >>> digest_of(None)
    Traceback (most recent call last):
    AttributeError: 'NoneType' object has no attribute 'columns'
    """
    from pyspark.sql import functions as F  # noqa: N812

    columns = []
    for name in sorted(frame.columns):
        column = F.col("`" + name.replace("`", "``") + "`")
        if frame.schema[name].dataType.typeName() == "map":  # Spark hashes none, because its entries have no order
            column = F.array_sort(F.map_entries(column))
        columns.append(column)
    nulls = F.concat(*(F.when(column.isNull(), "0").otherwise("1") for column in columns))
    found = frame.select(F.xxhash64(nulls, *columns).alias("hash")).agg(
        F.count("*"), F.sum(F.col("hash").cast("decimal(20,0)")), F.bit_xor("hash")
    )
    count, total, mixed = found.collect()[0]
    return Digest(count, f"{int(total or 0) & WORD:016x}{int(mixed or 0) & WORD:016x}")
