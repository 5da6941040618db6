"""Promise: the name of a file need not be UTF-8: what reads it shows it, as text and as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from command import penstock

from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.messagelog import MessageLog
from penstock.log.xchannel import Writer

ODD = os.fsdecode(b"p\xfcmp")
SHOWN = "p\\udcfcmp"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one thing of each kind, below a folder whose name is not UTF-8."""
    folder = tmp_path_factory.mktemp("names") / ODD
    folder.mkdir()
    with MessageLog.open(folder / "sales", content=CONTENT) as log:
        log.append(encode_envelope(Envelope(b"a", b"1")))
    with Writer.open(folder / "torn") as writer:
        writer.append_many([b"tick"] * 3)
    with (folder / "torn").open("r+b") as file:
        file.seek(80)
        file.write(b"\x02")
    assert penstock("send", folder / "jobs", "one").returncode == 0
    assert penstock("fold", "follow", folder / "sales", folder / "sales.snap", "--once").returncode == 0
    assert penstock("artifact", "export", folder / "sales.snap", folder / "artifact").returncode == 0
    return folder


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("stat @torn --json", 1),
        ("verify @torn", 1),
        ("verify @torn --json", 1),
        ("stat @jobs --json", 0),
        ("queue stat @jobs --json", 0),
        ("fold stat @sales.snap --json", 0),
        ("fold verify @sales.snap", 0),
        ("fold verify @torn", 1),
        ("artifact inspect @artifact --json", 0),
        ("artifact verify @artifact --json", 0),
    ],
)
def test_a_name_that_is_not_utf_8_is_shown(place: Path, words: str, code: int) -> None:
    done = penstock(*(word.replace("@", f"{place}/") for word in words.split()))
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    if "--json" in words:
        assert f"/{SHOWN}/" in json.loads(done.stdout)["path"]
    else:
        assert f"/{SHOWN}/" in done.stdout
