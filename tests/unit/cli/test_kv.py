"""Promise: penstock kv and penstock fold follow speak the agreed forms, on embedded buckets and on NATS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.errors import AlreadyExists, ExpiredError, OptionsError, RevisionMismatch
from penstock.log.envelope import Envelope, encode_envelope
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.testing.nats import NatsServer

runner = CliRunner()


@pytest.fixture(scope="module", params=["embedded", "nats"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp(request.param))
    if request.param == "embedded":
        yield folder
        return
    with NatsServer(folder) as server:
        yield server.url


def kv(*arguments: object) -> Any:
    return runner.invoke(app, ["kv", *map(str, arguments)])


def rows(result: Any) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_put_get_ls_watch_and_delete(place: str) -> None:
    assert kv("put", place, "b", "node.a", "one").stdout == "1\n"
    assert rows(kv("put", place, "b", "node.b", "two", "--json")) == [{"key": "node.b", "revision": 2}]
    assert runner.invoke(app, ["kv", "put", place, "b", "svc.x", "-"], input=b"\xff").stdout == "3\n"
    assert kv("get", place, "b", "node.a").stdout == "one\n"
    assert rows(kv("get", place, "b", "svc.x", "--json")) == [{"key": "svc.x", "value_base64": "/w==", "revision": 3}]
    assert kv("ls", place, "b").stdout == "node.a\nnode.b\nsvc.x\n"
    assert rows(kv("ls", place, "b", "node.", "--json")) == [
        {"key": "node.a", "revision": 1, "bytes": 3},
        {"key": "node.b", "revision": 2, "bytes": 3},
    ]
    assert kv("delete", place, "b", "node.a").exit_code == 0
    assert rows(kv("watch", place, "b", "--from", 2, "--once", "--json")) == [
        {"op": "put", "key": "svc.x", "value_base64": "/w==", "revision": 3},
        {"op": "delete", "key": "node.a", "value": "", "revision": 4},
    ]
    assert "node.b" in kv("watch", place, "b", "node.", "--once").stdout
    missing = kv("get", place, "b", "node.a")
    assert (missing.exit_code, missing.stdout) == (1, "")


def test_conflicts_are_told(place: str) -> None:
    assert kv("put", place, "c", "k", "1", "--create").stdout == "1\n"
    assert isinstance(kv("put", place, "c", "k", "2", "--create").exception, AlreadyExists)
    assert kv("put", place, "c", "k", "2", "--revision", 1).stdout == "2\n"
    assert isinstance(kv("put", place, "c", "k", "3", "--revision", 1).exception, RevisionMismatch)
    assert isinstance(kv("put", place, "c", "k", "3", "--create", "--ttl", 1).exception, OptionsError)


def test_a_bucket_that_is_not_there_is_not_made_by_reading(tmp_path: Path) -> None:
    for command in (["get", "b", "k"], ["ls", "b"], ["watch", "b", "--once"], ["delete", "b", "k"]):
        assert isinstance(kv(command[0], tmp_path, *command[1:]).exception, OptionsError)
    assert list(tmp_path.iterdir()) == []


def test_follow_folds_a_bucket_and_goes_on(place: str, tmp_path: Path) -> None:
    for n in range(5):
        kv("put", place, "f", f"k{n}", n)
    source = [place, str(tmp_path / "fold.snap"), "--bucket", "f", "--once", "--json"]
    result = runner.invoke(app, ["fold", "follow", *source])
    assert (rows(result)[0]["cursor"], rows(result)[0]["folded"]) == (5, 5)
    kv("delete", place, "f", "k0")
    assert rows(runner.invoke(app, ["fold", "follow", *source]))[0]["folded"] == 1
    found = rows(runner.invoke(app, ["fold", "dump", str(tmp_path / "fold.snap"), "--json"]))
    assert [row["key"] for row in found] == ["k1", "k2", "k3", "k4"]


def test_follow_takes_the_folder_of_a_bucket(tmp_path: Path) -> None:
    kv("put", tmp_path, "b", "k", "1")
    result = runner.invoke(app, ["fold", "follow", str(tmp_path / "b"), str(tmp_path / "f.snap"), "--once", "--json"])
    assert rows(result) == [{"cursor": 1, "lag": 0, "folded": 1}]


def test_follow_folds_a_log_and_names_what_is_wrong(tmp_path: Path) -> None:
    options = MessageLogOptions(content="envelope/1", segment_bytes=500)
    log, snap = str(tmp_path / "log"), str(tmp_path / "fold.snap")
    with MessageLog.open(log, options) as writer:
        writer.append_many([encode_envelope(Envelope(b"k%d" % n, b"v")) for n in range(10)])
        result = runner.invoke(app, ["fold", "follow", log, snap, "--once", "--json"])
        assert rows(result) == [{"cursor": 11, "lag": 0, "folded": 10}]
        writer.append_many([encode_envelope(Envelope(b"k%d" % n, b"v")) for n in range(100)])
        writer.drop_before(80)
    result = runner.invoke(app, ["fold", "follow", log, snap, "--once"])
    assert isinstance(result.exception, ExpiredError)
    result = runner.invoke(app, ["fold", "follow", log, snap, "--once", "--on-expired", "restart"])
    assert result.exit_code == 0
    assert "cursor 111" in result.stderr
    assert isinstance(runner.invoke(app, ["fold", "follow", log, snap, "--on-expired", "hope"]).exception, OptionsError)
