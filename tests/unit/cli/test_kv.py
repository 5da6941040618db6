"""Promise: penstock kv and penstock fold follow speak the agreed forms, on embedded buckets and on NATS."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.errors import AlreadyExists, ExpiredError, NotFoundError, OptionsError, RevisionMismatch
from penstock.log.envelope import Envelope, encode_envelope
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.testing.nats import NatsServer

runner = CliRunner()
PENSTOCK = (sys.executable, "-m", "penstock.cli.main")


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
    assert kv("get", place, "b", "node.a").stdout == "one"  # byte for byte what was put
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
    assert isinstance(kv("put", place, "c", "k", "3", "--create", "--revision", 1).exception, OptionsError)


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


def test_what_get_writes_to_a_file_is_the_value_and_nothing_else(place: str, tmp_path: Path) -> None:
    value = b"\x1b[2Jline\n\r\x00\xff\xfe"
    assert runner.invoke(app, ["kv", "put", place, "exact", "k", "-"], input=value).exit_code == 0
    with open(tmp_path / "value", "wb") as out:
        subprocess.run([*PENSTOCK, "kv", "get", place, "exact", "k"], stdout=out, check=True)
    assert (tmp_path / "value").read_bytes() == value


def test_a_terminal_sees_no_control_characters_of_a_value(place: str) -> None:
    runner.invoke(app, ["kv", "put", place, "shown", "k", "-"], input=b"\x1b[31mred\x9b\xe2\x80\xaeover\nnext")
    for arguments in (["get", place, "shown", "k"], ["watch", place, "shown", "--once"], ["ls", place, "shown"]):
        shown = on_a_terminal(*PENSTOCK, "kv", *arguments)
        assert b"\x1b[31m" not in shown
        assert "\u202e".encode() not in shown


def on_a_terminal(*command: str) -> bytes:
    """Run a command whose stdout is a terminal and return what it wrote to it."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    found = b""
    try:
        while part := os.read(ours, 4096):
            found += part
    except OSError:  # the other side has closed
        pass
    _, problems = process.communicate()
    os.close(ours)
    assert process.returncode == 0, problems
    return found


def test_looking_makes_no_bucket(place: str, tmp_path: Path) -> None:
    before = kv("buckets", place).stdout
    snap = str(tmp_path / "fold.snap")
    for arguments in (
        ["kv", "get", place, "absent", "k"], ["kv", "ls", place, "absent"], ["kv", "watch", place, "absent", "--once"],
        ["kv", "delete", place, "absent", "k"], ["fold", "follow", place, snap, "--bucket", "absent", "--once"],
    ):  # fmt: skip
        result = runner.invoke(app, arguments)
        assert result.exit_code != 0, arguments
        assert "no bucket" in str(result.exception), arguments
    assert kv("buckets", place).stdout == before
    assert not Path(snap).exists()


def test_buckets_are_made_listed_and_removed(place: str) -> None:
    assert kv("make", place, "made", "--history", "3").exit_code == 0
    assert "made\n" in kv("buckets", place).stdout
    assert {"bucket": "made"} in rows(kv("buckets", place, "--json"))
    kv("put", place, "made", "k", "1")
    assert kv("rm", place, "made").exit_code == 0
    assert "made\n" not in kv("buckets", place).stdout
    assert kv("rm", place, "made").exit_code == 1
    with pytest.raises(OptionsError, match="discard"):
        runner.invoke(app, ["kv", "make", place, "made", "--discard", "all"], catch_exceptions=False)


def test_buckets_of_a_folder_that_is_not_there_are_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere: there is no such folder"):
        runner.invoke(app, ["kv", "buckets", str(tmp_path / "nowhere")], catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []


def test_a_password_in_a_url_is_in_no_message(tmp_path: Path) -> None:
    for place in ("nats://me:hidden@127.0.0.1:1", "tls://me:hidden@127.0.0.1:1", "nats://me:hid/den@127.0.0.1:1"):
        done = subprocess.run([*PENSTOCK, "kv", "get", place, "b", "k"], capture_output=True, check=False)
        assert done.returncode in (1, 2)
        assert b"hid" not in done.stdout + done.stderr
