"""The queue commands, run as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from penstock.cli import queue
from penstock.errors import CorruptionError, LockedError, OptionsError
from penstock.log import open_log
from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.messagelog import MessageLog
from penstock.log.xchannel import Writer


@pytest.fixture
def run() -> object:
    app = typer.Typer()
    queue.register(app)

    def call(*arguments: object, stdin: bytes | None = None) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)

    return call


def lines(result: Result) -> list[dict[str, object]]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_what_is_sent_is_received_and_acknowledged_by_name(tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "jobs"
    sent = lines(run("send", folder, "one", "two", "three", "--json"))
    assert sent == [{"sent": 3, "positions": [0, 11, 22], "next_position": 35}]
    first = run("recv", folder, "--name", "w", "--ack", "--limit", 2, "--timeout", 0, "--json")
    assert lines(first) == [
        {"position": 0, "timestamp_ns": None, "kind": None, "payload": "one"},
        {"position": 11, "timestamp_ns": None, "kind": None, "payload": "two"},
    ]
    with open_log(str(folder)) as log:
        assert log.stat()["receivers"] == {"w": {"position": 22, "lag_bytes": 13}}
    assert run("recv", folder, "--name", "w", "--timeout", 0).stdout == "three\n"
    assert run("recv", folder, "--name", "w", "--ack", "--timeout", 0).stdout == "three\n"
    assert run("recv", folder, "--name", "w", "--ack", "--timeout", 0).stdout == ""
    assert run("recv", folder, "--timeout", 0).stdout == "one\ntwo\nthree\n"


def test_lines_of_stdin_are_messages(tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    assert run("send", tmp_path / "jobs", "-", stdin=b"one\n\xff\xfe\n\nlast").exit_code == 0
    found = lines(run("recv", tmp_path / "jobs", "--timeout", 0, "--json"))
    assert [row.get("payload", row.get("payload_base64")) for row in found] == ["one", "//4=", "", "last"]


def test_compact_gc_and_repair(tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "jobs"
    with FileChannel.open(folder, ChannelOptions(sync="none", segment_bytes=1000, compression="none")) as channel:
        channel.append_many([b"x" * 100] * 100)
        rx = channel.ack_rx("w")
        for _ in range(50):
            rx.recv()
    [sizes] = lines(run("compact", folder, "--json"))
    assert sizes["bytes_after"] < sizes["bytes_before"]  # type: ignore[operator]
    assert lines(run("gc", folder, "--json")) == [{"removed": 0, "first_position": 0}]
    with FileChannel.attach(folder) as view:
        rx = view.ack_rx("w")
        for _ in range(50):
            rx.recv(timeout=1)
        rx.ack()
    assert lines(run("gc", folder, "--json")) == [{"removed": 5, "first_position": 5400}]
    assert lines(run("repair", folder, "--json")) == [{"mended": [], "kept": 50, "set_aside": 0, "set_aside_bytes": 0}]
    (folder / "segment.6.z").write_bytes(b"short")
    broken = run("recv", folder, "--timeout", 0)
    assert isinstance(broken.exception, CorruptionError)
    assert "segment.6.z at byte 5" in str(broken.exception)
    skipped = run("recv", folder, "--timeout", 0, "--skip-damage")
    assert (skipped.exit_code, len(skipped.stdout.splitlines())) == (1, 40)
    [mended] = lines(run("repair", folder, "--json"))
    assert mended["mended"]
    assert len(run("recv", folder, "--timeout", 0).stdout.splitlines()) == 40


def test_a_receiver_that_will_not_come_back_is_forgotten(tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "jobs"
    with FileChannel.open(folder, ChannelOptions(sync="none", segment_bytes=1000, compression="none")) as channel:
        channel.append_many([b"x" * 100] * 100)
        channel.ack_rx("gone").close()
    with FileChannel.attach(folder) as view, view.ack_rx("here", "latest"):
        assert lines(run("gc", folder, "--json")) == [{"removed": 0, "first_position": 0}]
        assert lines(run("forget", folder, "gone", "--json")) == [{"forgotten": "gone"}]
        assert lines(run("gc", folder, "--json"))[0]["removed"] == 9
        assert isinstance(run("forget", folder, "here").exception, LockedError)
    for wrong in ("gone", "../x"):
        assert isinstance(run("forget", folder, wrong).exception, OptionsError)


def test_wrong_use_and_trouble_are_told_apart(tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    assert isinstance(run("recv", tmp_path / "nothing").exception, OptionsError)
    assert isinstance(run("recv", tmp_path, "--ack").exception, OptionsError)
    assert isinstance(run("send", tmp_path / "jobs", "x", "--sync", "sometimes").exception, OptionsError)
    with FileChannel.open(tmp_path / "jobs"):
        busy = run("send", tmp_path / "jobs", "x")
        assert isinstance(busy.exception, LockedError)
        assert busy.stdout == ""


@pytest.mark.parametrize("command", ["compact", "gc", "repair"])
def test_tending_a_queue_that_is_not_there_makes_none(command: str, tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    assert isinstance(run(command, tmp_path / "nothing").exception, OptionsError)
    with Writer.open(tmp_path / "ticks"):
        pass
    with MessageLog.open(tmp_path / "log"):
        pass
    before = sorted(tmp_path.rglob("*"))
    for other in ("ticks", "log"):
        assert isinstance(run(command, tmp_path / other).exception, OptionsError)
    assert sorted(tmp_path.rglob("*")) == before
