"""Promise: ``penstock erase`` reaches what it says it reached, and says what it did not."""

from __future__ import annotations

import json
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest
from command import penstock

from penstock.log import open_log
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.messagelog import MessageLog
from penstock.node.version import check_version

KEY = "it's pump-1"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return the data directory of a node that has one log, of two keys, in several segments."""
    data = tmp_path / "data"
    (data / "logs").mkdir(parents=True)
    check_version(str(data))
    with MessageLog.open(data / "logs" / "readings", content=CONTENT, segment_bytes=4000) as log:
        keys = (KEY.encode(), b"pump-2")
        log.append_many([encode_envelope(Envelope(keys[number % 2], b"value %d" % number)) for number in range(300)])
    return data


def erased(data: Path, *more: object) -> tuple[int, dict[str, int | str]]:
    """Erase the key; return the exit code and, for each kind of place, how many there were or why they are left."""
    done = penstock("erase", data, "--key", KEY, "--json", *more)
    assert "Traceback" not in done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return done.returncode, {row["kind"]: row.get("count", row.get("left")) for row in rows}


def test_a_key_goes_from_logs_and_from_a_table_of_the_lake(data: Path, tmp_path: Path) -> None:
    table = str(tmp_path / "raw")
    keys = pa.array([KEY.encode(), b"pump-2", None, KEY.encode()], pa.binary())
    deltalake.write_deltalake(table, pa.table({"key": keys, "number": [1, 2, 3, 4]}))
    code, found = erased(data, "--logs", "--lake", table)
    assert (code, found["log"], found["lake"]) == (0, 150, 2)
    assert sorted(deltalake.DeltaTable(table).to_pyarrow_table()["number"].to_pylist()) == [2, 3]


def test_nothing_is_erased_when_a_table_is_none(data: Path, tmp_path: Path) -> None:
    keyless = str(tmp_path / "keyless")
    deltalake.write_deltalake(keyless, pa.table({"number": [1]}))
    for table, says in ((tmp_path / "nowhere", "there is no table here"), (keyless, "it has no column key")):
        done = penstock("erase", data, "--key", KEY, "--logs", "--lake", table)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"penstock: {table}: {says}\n")
    assert erased(data, "--logs")[1]["log"] == 150


def test_what_is_damaged_is_not_dropped_in_silence(data: Path) -> None:
    log = data / "logs" / "readings"
    segment = sorted(log.glob("*.log"))[1]
    whole = segment.read_bytes()
    place = len(whole) // 2
    segment.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    before = segment.read_bytes()
    code, found = erased(data, "--logs")
    assert (code, segment.read_bytes() == before) == (1, True)
    assert f"{segment.name} at byte " in str(found["log"])
    assert "left as it is" in str(found["log"])
    kept = b"".join(file.read_bytes() for file in log.glob("*.log") if file != segment)
    assert KEY.encode() not in kept
    with open_log(str(log)) as reader:
        assert [problem.file for problem in reader.verify()] == [str(segment)]
