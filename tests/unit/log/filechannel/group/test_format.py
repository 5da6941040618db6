"""The bytes of a group's journal."""

from __future__ import annotations

import pytest

from penstock import kernel
from penstock.log.filechannel.group.format import (
    Cut,
    Done,
    Event,
    Failed,
    GroupSnapshot,
    Released,
    Renewed,
    Seen,
    Taken,
    Unfinished,
    decode_event,
    encode_event,
)

EVENTS: list[tuple[Event, str]] = [
    (Done([0, 24]), "92 03 92 00 18"),
    (Cut(7), "92 07 07"),
    (Seen(9, [1], [b"k"]), "94 01 09 91 01 91 c4 01 6b"),
    (Released([3], "x"), "93 06 91 03 a1 78"),
]


@pytest.mark.parametrize(("event", "expected"), EVENTS)
def test_a_record_on_disk_is_the_one_drawn_in_format(event: Event, expected: str) -> None:
    assert encode_event(event).hex(" ") == expected


def test_the_example_of_the_format_page() -> None:
    assert kernel.encode_frame(encode_event(Done([0, 24]))).hex(" ") == "00 00 00 05 92 aa d8 4b 92 03 92 00 18"


@pytest.mark.parametrize(
    "event",
    [
        GroupSnapshot(
            1, bytes(16), bytes(16), True, 9, 4, [Unfinished(0, key=b"k"), Unfinished(5, 2, True, 3, "ann", 1.5)]
        ),
        Taken(30, [0, 10], "ann", 12.5, 3, 77),
        Failed([1], 2.5, 1.0, 7, "no"),
        Renewed([1, 2], 9.5),
    ],
)
def test_records_come_back_as_they_were(event: Event) -> None:
    assert decode_event(encode_event(event)) == event
