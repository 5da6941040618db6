"""Payloads into columns, in Spark itself, never row by row in Python.

Every decoder keeps every row.  A payload that does not decode has nulls where its columns would be, stays in
``payload``, and ``error`` says why;  ``error`` is null for the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, cast

from penstock.errors import OptionsError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

__all__ = ["decode", "decode_json", "decode_text", "split_errors", "with_key", "with_trace"]

BROKEN: Final = "__broken"
VALUE: Final = "__value"
NOT_UTF8: Final = "the payload is not UTF-8"


def decode(
    frame: DataFrame, content: str, schema: str | StructType | None = None, *, rescue: str | None = None
) -> DataFrame:
    """Decode by name: ``json`` (with a schema), ``text`` or ``raw``.

    >>> decode(None, "xml")
    Traceback (most recent call last):
    penstock.errors.OptionsError: content='xml': must be json, text or raw
    """
    match content:
        case "json" if schema is not None:
            return decode_json(frame, schema, rescue=rescue)
        case "json":
            raise OptionsError("content='json' needs a schema, such as 'device string, celsius double'")
        case "text":
            return decode_text(frame)
        case "raw":
            _check_free(frame, ["error"])
            from pyspark.sql import functions as F  # noqa: N812

            return frame.withColumn("error", F.lit(None).cast("string"))
    raise OptionsError(f"content={content!r}: must be json, text or raw")


def decode_json(
    frame: DataFrame, schema: str | StructType, *, into: str | None = None, rescue: str | None = None
) -> DataFrame:
    """Add the fields of JSON payloads as columns, or as one struct column named ``into``.

    A field that the JSON lacks is null; a payload that is no JSON object, or more than one, or whose field has another
    type, is an error.  Fields that the schema does not name are left out, or kept in a column named ``rescue``: a JSON
    object of them, their values as text, null where there are none.
    """
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import MapType, StringType, StructType

    fields = schema if isinstance(schema, StructType) else cast("StructType", StructType.fromDDL(schema))
    taken = [*(fields.names if into is None else [into]), "error", *([] if rescue is None else [rescue])]
    names = [name.lower() for name in taken]
    twice = [name for name in taken if names.count(name.lower()) > 1]
    if twice:
        raise OptionsError(f"{' and '.join(twice)} would be one column: give another name")
    _check_free(frame, taken)
    # Spark stops reading where an object ends and never sees what follows it; inside another object it has to.
    whole = StructType().add(VALUE, fields).add(BROKEN, StringType())
    text = F.col("payload").cast("string")
    wrapped = F.concat(F.lit(f'{{"{VALUE}":'), text, F.lit("}"))
    parsed = F.from_json(wrapped, whole, {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": BROKEN})
    bad = F.col(f"__json.{VALUE}").isNull() | F.col(f"__json.{BROKEN}").isNotNull()
    error = (
        F.when(F.col("payload").isNull(), F.lit("the payload is null"))
        .when(~F.is_valid_utf8(text), F.lit(NOT_UTF8))
        .when(bad, F.lit(f"the payload is not JSON of {fields.simpleString()}"))
    )
    opened = frame.withColumn("__json", parsed).withColumn("error", error)
    good = F.col("error").isNull()
    if into is not None:
        columns: list[Column] = [F.when(good, F.col(f"__json.{VALUE}")).alias(into)]
    else:
        columns = [F.when(good, F.col(f"__json.{VALUE}.`{name}`")).alias(name) for name in fields.names]
    if rescue is not None:
        every = F.from_json(text, MapType(StringType(), StringType()))
        more = F.map_filter(every, lambda name, _: ~name.isin(fields.names))
        columns.append(F.when(good & (F.size(more) > 0), F.to_json(more)).alias(rescue))
    kept = [F.col(f"`{name}`") for name in frame.columns]
    return opened.select(*kept, *columns, F.col("error"))


def with_key(frame: DataFrame, path: str) -> DataFrame:
    """Fill the column ``key`` from JSON payloads, by a path such as ``$.device`` or ``$.site.id``.

    A record that has a key keeps it; one whose payload is no JSON, or has nothing at the path, keeps none.

    >>> with_key(None, "device")
    Traceback (most recent call last):
    penstock.errors.OptionsError: key path 'device': must begin with $, like $.device
    """
    if not path.startswith("$"):
        raise OptionsError(f"key path {path!r}: must begin with $, like $.device")
    from pyspark.sql import functions as F  # noqa: N812

    text = F.col("payload").cast("string")
    found = F.get_json_object(F.when(F.is_valid_utf8(text), text), path).cast("binary")
    return frame.withColumn("key", F.coalesce(F.col("key"), found) if "key" in frame.columns else found)


def with_trace(frame: DataFrame) -> DataFrame:
    """Add the trace that a record belongs to: ``traceparent`` as it came, ``trace_id`` and ``span_id`` out of it.

    It is a header of the envelope, or a user property of the MQTT message that a tap wrote (``user.traceparent``); what
    is not well formed is null.  The frame needs its column ``headers``.

    >>> from types import SimpleNamespace
    >>> with_trace(SimpleNamespace(columns=["payload"]))
    Traceback (most recent call last):
    penstock.errors.OptionsError: there is no column headers: traces are in logs of envelopes
    """
    if "headers" not in frame.columns:
        raise OptionsError("there is no column headers: traces are in logs of envelopes")
    _check_free(frame, ["traceparent", "trace_id", "span_id"])
    from pyspark.sql import functions as F  # noqa: N812

    headers = F.col("headers")
    found = F.coalesce(headers["traceparent"], headers["user.traceparent"])
    text = F.when(found.rlike("^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"), found)
    return (
        frame.withColumn("traceparent", text.cast("string"))
        .withColumn("trace_id", F.substring("traceparent", 4, 32))
        .withColumn("span_id", F.substring("traceparent", 37, 16))
    )


def decode_text(frame: DataFrame, *, into: str = "text") -> DataFrame:
    """Add UTF-8 payloads as a string column.

    >>> from types import SimpleNamespace
    >>> decode_text(SimpleNamespace(columns=["payload", "text"]))
    Traceback (most recent call last):
    penstock.errors.OptionsError: there is a column text already: rename it, or give into= another name
    """
    _check_free(frame, [into, "error"])
    from pyspark.sql import functions as F  # noqa: N812

    text = F.col("payload").cast("string")
    valid = F.is_valid_utf8(text)
    return frame.withColumn(into, F.when(valid, text)).withColumn("error", F.when(~valid, F.lit(NOT_UTF8)))


def split_errors(frame: DataFrame) -> tuple[DataFrame, DataFrame]:
    """Return the rows that decoded, without the error column, and those that did not."""
    from pyspark.sql import functions as F  # noqa: N812

    return frame.where(F.col("error").isNull()).drop("error"), frame.where(F.col("error").isNotNull())


def _check_free(frame: DataFrame, names: Iterable[str]) -> None:
    """Refuse to put a column in the place of another."""
    wanted = {name.lower() for name in names}  # to Spark a name has no case
    taken = sorted(name for name in frame.columns if name.lower() in wanted)
    if taken:
        raise OptionsError(f"there is a column {', '.join(taken)} already: rename it, or give into= another name")
