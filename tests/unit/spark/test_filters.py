"""Filters keep exactly what they name."""

from __future__ import annotations

import pytest

from penstock.batch import Batch
from penstock.spark.source.filters import Filters

BATCH = Batch.of([b"a", b"b", b"c", b"d"], positions=[10, 20, 30, 40], kinds=[1, 2, 3, 1])


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        (Filters(), b"abcd"),
        (Filters(kinds=(1,)), b"ad"),
        (Filters(kinds=(2, 3, 1 << 40)), b"bc"),
        (Filters(low=20), b"bcd"),
        (Filters(high=20), b"ab"),
        (Filters(low=11, high=39, kinds=(3,)), b"c"),
        (Filters(low=41), b""),
    ],
)
def test_a_filter_keeps_exactly_what_it_names(filters: Filters, kept: bytes) -> None:
    assert b"".join(filters.apply(BATCH).to_payloads()) == kept


def test_channels_are_chosen_by_name_or_by_how_it_begins() -> None:
    filters = Filters(channels=("site/*", "lab/b"))
    assert [name for name in ("site/a", "lab/a", "lab/b", "lab/bc") if filters.channel_passes(name)] == [
        "site/a",
        "lab/b",
    ]
    assert Filters().channel_passes("anything")


def test_a_format_without_kinds_has_no_record_of_any_kind() -> None:
    assert len(Filters(kinds=(0,)).apply(Batch.of([b"a"]))) == 0
