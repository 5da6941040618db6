"""``penstock write`` appends to any log, and says what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import penstock

from penstock.log.detect import FORMATS
from penstock.log.xchannel import Writer


def rows(path: Path, *words: str) -> list[dict[str, object]]:
    done = penstock("cat", path, "--json", *words)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("format", FORMATS)
def test_write_appends_what_cat_prints(format: str, tmp_path: Path) -> None:
    path = tmp_path / "ticks"
    assert penstock("write", path, "one", "two", "--format", format).returncode == 0
    done = penstock("write", path, "--json", input="three\nfour\n")  # the format is the one that is there
    assert json.loads(done.stdout)["written"] == 2
    assert [row["payload"] for row in rows(path)] == ["one", "two", "three", "four"]
    assert [row["payload"] for row in rows(path, "-n", "1")] == ["one"]


def test_write_with_a_key_makes_a_log_that_folds(tmp_path: Path) -> None:
    path = tmp_path / "devices"
    for words in (["on", "--key", "pump.7"], ["off", "--key", "pump.8"], ["--delete", "--key", "pump.7"]):
        assert penstock("write", path, *words).returncode == 0
    assert [(row["key"], row["op"]) for row in rows(path)] == [("pump.7", 0), ("pump.8", 0), ("pump.7", 1)]


def test_write_does_not_mix_envelopes_and_plain_records(tmp_path: Path) -> None:
    path = tmp_path / "ticks"
    assert penstock("write", path, "plain").returncode == 0
    done = penstock("write", path, "keyed", "--key", "k")
    assert (done.returncode, "its content is raw" in done.stderr) == (2, True)
    assert [row["payload"] for row in rows(path)] == ["plain"]


def test_write_beside_another_writer_says_so(tmp_path: Path) -> None:
    path = tmp_path / "ticks"
    with Writer.open(path) as writer:
        writer.append(b"mine")
        done = penstock("write", path, "theirs")
    assert (done.returncode, str(path) in done.stderr) == (1, True)


def test_short_forms_of_help_and_version() -> None:
    assert "Usage" in penstock("-h").stdout
    assert "Usage" in penstock("write", "-h").stdout
    assert penstock("-V").stdout.startswith("penstock 0.")
