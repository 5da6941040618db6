"""Promise: penstock fold dump, stat and verify read every backend and say it in the agreed forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli.state import register
from penstock.errors import CorruptionError, OptionsError
from penstock.store import AppendLogStore, LmdbStore, RocksStore
from penstock.testing.log_conformance import fingerprints
from penstock.types import KvUpdate, Op, VersionToken, WatchCursor

app = typer.Typer()
register(app)
runner = CliRunner()

BACKENDS = pytest.mark.parametrize("kind", [AppendLogStore, RocksStore, LmdbStore])


def filled(path: Path, kind: Any) -> str:
    with kind.open(path) as store:
        stamp = KvUpdate(Op.PUT, "c", b"", VersionToken(bytes(10)))
        store.apply([KvUpdate.put("a", "é".encode(), 7), KvUpdate.put("b", b"\xff"), stamp], WatchCursor.of(9))
    return str(path)


@BACKENDS
def test_dump_writes_one_object_an_entry_in_key_order(tmp_path: Path, kind: Any) -> None:
    result = runner.invoke(app, ["fold", "dump", filled(tmp_path / "fold", kind), "--json"])
    assert result.exit_code == 0
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {"key": "a", "value": "é", "version": 7},
        {"key": "b", "value_base64": "/w==", "version": None},
        {"key": "c", "value": "", "version": "00" * 10},
    ]
    result = runner.invoke(app, ["fold", "dump", str(tmp_path / "fold"), "--prefix", "b"])
    assert result.stdout == "b\t-\tb'\\xff'\n"


@BACKENDS
def test_stat_names_backend_entries_cursor_and_digest(tmp_path: Path, kind: Any) -> None:
    path = filled(tmp_path / "fold", kind)
    found = json.loads(runner.invoke(app, ["fold", "stat", path, "--json"]).stdout)
    assert (found["backend"], found["entries"], found["cursor"]) == (kind.backend, 3, 9)
    assert found["digest"] in runner.invoke(app, ["fold", "stat", path]).stdout


@BACKENDS
def test_verify_finds_nothing_in_a_good_store(tmp_path: Path, kind: Any) -> None:
    path = filled(tmp_path / "fold", kind)
    result = runner.invoke(app, ["fold", "verify", path])
    assert result.exit_code == 0
    assert "3 entries" in result.stdout
    assert json.loads(runner.invoke(app, ["fold", "verify", path, "--json"]).stdout)["problems"] == []


def test_verify_names_file_and_byte_and_exits_1(tmp_path: Path) -> None:
    path = filled(tmp_path / "fold.snap", AppendLogStore)
    data = bytearray(Path(path).read_bytes())
    data[20] ^= 1
    Path(path).write_bytes(data)
    result = runner.invoke(app, ["fold", "verify", path, "--json"])
    assert result.exit_code == 1
    (problem,) = json.loads(result.stdout)["problems"]
    assert (problem["file"], problem["byte"]) == (path, 6)
    assert isinstance(runner.invoke(app, ["fold", "dump", path]).exception, CorruptionError)


def test_a_stale_digest_is_found(tmp_path: Path) -> None:
    import lmdb

    path = filled(tmp_path / "fold", LmdbStore)
    with lmdb.open(path, max_dbs=2) as env, env.begin(write=True) as txn:
        txn.put(b"a", b"\x00other", db=env.open_db(b"data", txn=txn))
    result = runner.invoke(app, ["fold", "verify", path])
    assert result.exit_code == 1
    assert "were kept" in result.stdout


def test_wrong_use_is_refused_and_nothing_goes_to_stdout(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for command in ("dump", "stat", "verify"):
        for path in ("absent", "folder"):
            result = runner.invoke(app, ["fold", command, str(tmp_path / path)])
            assert isinstance(result.exception, OptionsError)
            assert (path in str(result.exception), result.stdout) == (True, "")


@BACKENDS
def test_looking_changes_no_file_of_the_data(tmp_path: Path, kind: Any) -> None:
    path = filled(tmp_path / "fold", kind)
    before = fingerprints(str(tmp_path))
    for command in ("dump", "stat", "verify"):
        assert runner.invoke(app, ["fold", command, path]).exit_code == 0
    after = fingerprints(str(tmp_path))
    # the engine's own diary and LMDB's table of readers are no data
    assert {k: v for k, v in after.items() if "LOG" not in k and "lock.mdb" not in k} == {
        k: v for k, v in before.items() if "LOG" not in k and "lock.mdb" not in k
    }
