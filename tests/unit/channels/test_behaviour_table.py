"""Promise: every behaviour that the original tests of itself has a test here, and the page that says so is right."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "channel-behaviours.md"
COUNTS = {"6.1": 40, "6.2": 15, "6.3": 19, "6.4": 5, "6.6": 27}
ROW = re.compile(r"^\| ([^|]+) \| `([^:`]+)::(\w+)(?:\[([^\]]+)\])?` \|$", re.MULTILINE)


def test_every_behaviour_has_a_test() -> None:
    rows = {number: (path, name, case) for number, path, name, case in ROW.findall(PAGE.read_text())}
    wanted = {f"{section}.{n}" for section, count in COUNTS.items() for n in range(1, count + 1)}
    assert {number for number in rows if number in wanted} == wanted
    for number, (path, name, case) in rows.items():
        text = (ROOT / path).read_text()
        assert f"def {name}(" in text, number
        if case and "conversation" not in name:  # those are recorded, and named by the recording
            assert case in text or re.sub(r"max_\w+", "{field}", case) in text, number
