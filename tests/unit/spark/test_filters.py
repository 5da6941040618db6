"""Filters that are taken are answered exactly; the others stay with Spark."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import datasource as ds

from penstock.batch import Batch
from penstock.spark.filters import Filters, split_filters

BATCH = Batch.of([b"a", b"b", b"c", b"d"], positions=[10, 20, 30, 40], kinds=[1, 2, 3, 1])


@pytest.mark.parametrize(
    ("item", "kept"),
    [
        (ds.EqualTo(("kind",), 1), b"ad"),
        (ds.EqualNullSafe(("kind",), 3), b"c"),
        (ds.GreaterThan(("kind",), 1), b"bc"),
        (ds.GreaterThanOrEqual(("position",), 20), b"bcd"),
        (ds.LessThan(("position",), 20), b"a"),
        (ds.LessThanOrEqual(("position",), 20), b"ab"),
        (ds.In(("position",), (10, 40, 99, None)), b"ad"),
        (ds.IsNotNull(("kind",)), b"abcd"),
        (ds.IsNotNull(("position",)), b"abcd"),
        (ds.EqualTo(("kind",), 1 << 40), b""),
    ],
)
def test_a_taken_filter_keeps_exactly_what_it_says(item: Any, kept: bytes) -> None:
    filters, rest = split_filters([item])
    assert rest == []
    assert b"".join(filters.apply(BATCH).to_payloads()) == kept
    low, high = filters.bounds
    assert all(low <= position <= high for position in filters.apply(BATCH).positions.tolist())


def test_what_a_log_cannot_answer_stays_with_spark() -> None:
    items = [
        ds.EqualTo(("payload",), b"x"),
        ds.Not(ds.EqualTo(("kind",), 1)),
        ds.IsNull(("kind",)),
        ds.EqualTo(("a", "position"), 1),
        ds.StringContains(("channel",), "x"),
    ]
    filters, rest = split_filters(items)
    assert rest == items
    assert filters == Filters()
    assert filters.apply(BATCH) is BATCH


def test_channels_are_chosen_by_name() -> None:
    filters, _ = split_filters([ds.StringStartsWith(("channel",), "site/"), ds.In(("channel",), ("site/a", "lab/a"))])
    assert [name for name in ("site/a", "site/b", "lab/a") if filters.channel_passes(name)] == ["site/a"]


def test_a_format_without_kinds_has_no_record_of_any_kind() -> None:
    filters, _ = split_filters([ds.GreaterThanOrEqual(("kind",), 0)])
    assert len(filters.apply(Batch.of([b"a"]))) == 0
