"""Promise: names are judged and ordered as narwhal 0.7.0 does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.channels.ids import ChannelId, Nid
from penstock.channels.username import is_username
from penstock.errors import OptionsError
from penstock.testing.packed import read_cases

VECTORS = Path(__file__).parents[2] / "vectors" / "narwhal-metadata"
CASES = read_cases(VECTORS / "ids.jsonl")


@pytest.mark.parametrize("case", [case for case in CASES if case["kind"] != "nid_order"], ids=lambda c: repr(c["text"]))
def test_an_id_gets_the_verdict_of_the_original(case: dict[str, Any]) -> None:
    parse: Any = Nid.parse if case["kind"] == "nid" else ChannelId.parse
    if not case["ok"]:
        with pytest.raises(OptionsError, match="invalid"):
            parse(case["text"])
        return
    parsed = parse(case["text"])
    first = "username" if case["kind"] == "nid" else "handler"
    assert parsed._asdict() == {first: case[first], "domain": case["domain"]}
    assert str(parsed) == case["text"]


def test_nids_are_ordered_by_username_then_domain() -> None:
    (case,) = [case for case in CASES if case["kind"] == "nid_order"]
    assert [str(nid) for nid in sorted(map(Nid.parse, case["input"]))] == case["sorted"]


def test_a_username_has_the_characters_of_the_table_and_no_others() -> None:
    allowed: set[int] = set()
    for first, last in json.loads((VECTORS / "username_chars.json").read_text())["ranges"]:
        allowed.update(range(first, last + 1))
    points = [point for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    assert {point for point in points if is_username(chr(point))} == allowed


def test_a_username_is_measured_in_bytes() -> None:
    assert is_username("é" * 128)
    assert not is_username("é" * 129)
    assert is_username("a" * 256)
    assert not is_username("a" * 257)
