"""Groups from the shell: recv --group and penstock queue, run as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from penstock.cli.main import app
from penstock.errors import NotFoundError, OptionsError
from penstock.log.filechannel import FileChannel


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def lines(*arguments: object) -> list[dict[str, Any]]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    lines("send", tmp_path / "jobs", "a", "b", "c")
    return tmp_path / "jobs"


def test_recv_as_a_worker_prints_position_tries_and_payload(jobs: Path) -> None:
    assert lines("recv", jobs, "--group", "g", "--ack", "--limit", 2) == [
        {"position": 0, "tries": 1, "payload": "a"},
        {"position": 9, "tries": 1, "payload": "b"},
    ]
    assert lines("recv", jobs, "--group", "g", "--ack", "--timeout", 0) == [
        {"position": 18, "tries": 1, "payload": "c"}
    ]
    assert lines("recv", jobs, "--group", "g", "--ack", "--timeout", 0) == []
    assert run("recv", jobs, "--group", "other", "--timeout", 0).stdout == "a\nb\nc\n"


def test_what_is_not_acknowledged_comes_again_after_its_lease(jobs: Path) -> None:
    assert len(lines("recv", jobs, "--group", "g", "--lease", 0.3, "--limit", 3)) == 3
    again = lines("recv", jobs, "--group", "g", "--lease", 30, "--limit", 3, "--timeout", 60)
    assert [(row["payload"], row["tries"]) for row in again] == [("a", 2), ("b", 2), ("c", 2)]


def test_stat_tells_what_waits_what_is_in_work_and_with_whom(jobs: Path) -> None:
    (before,) = lines("queue", "stat", jobs)
    assert (before["waiting"], before["oldest_position"], before["groups"]) == (3, 0, {})
    lines("recv", jobs, "--group", "g", "--limit", 2)
    (told,) = lines("queue", "stat", jobs)
    assert (told["waiting"], told["leased"], told["dead"], told["oldest_position"]) == (1, 2, 0, 0)
    figures = told["groups"]["g"]
    assert sum(figures["workers"].values()) == sum(told["workers"].values()) == 2
    assert told["oldest_seconds"] == figures["oldest_seconds"]
    assert figures["oldest_seconds"] >= 0
    assert "group g" in run("queue", "stat", jobs).stdout


def test_a_shell_settles_messages_by_their_positions(jobs: Path) -> None:
    lines("recv", jobs, "--group", "g", "--limit", 3)
    assert lines("queue", "ack", jobs, "g", 0) == [{"acknowledged": [0]}]
    assert lines("queue", "fail", jobs, "g", 9, "--delay", 0) == [{"failed": [9]}]
    assert lines("queue", "fail", jobs, "g", 18, "--reason", "no", "--max-tries", 1) == [{"failed": [18]}]
    (letter,) = lines("queue", "dead", jobs, "g")
    assert (letter["position"], letter["tries"], letter["reason"], letter["payload"]) == (18, 1, "no", "c")
    assert "no" in run("queue", "dead", jobs, "g").stdout
    result = run("queue", "ack", jobs, "g", 0)
    assert isinstance(result.exception, OptionsError)


def test_dead_letters_are_sent_again(jobs: Path) -> None:
    lines("recv", jobs, "--group", "g", "--limit", 1)
    lines("queue", "fail", jobs, "g", 0, "--max-tries", 1)
    assert lines("queue", "redrive", jobs, "g") == [{"redriven": 1}]
    rows = lines("recv", jobs, "--group", "g", "--ack", "--timeout", 0)
    assert [row["payload"] for row in rows] == ["b", "c", "a"]
    (told,) = lines("queue", "stat", jobs)
    assert told["dead"] == 0


def test_a_group_is_forgotten(jobs: Path) -> None:
    lines("recv", jobs, "--group", "g", "--limit", 1)
    assert lines("queue", "forget", jobs, "g") == [{"forgotten": "g"}]
    assert isinstance(run("queue", "forget", jobs, "g").exception, OptionsError)
    assert isinstance(run("queue", "dead", jobs / "nowhere", "g").exception, NotFoundError)


def test_wrong_use_is_refused(jobs: Path) -> None:
    for arguments in (
        ("--group", "g", "--name", "w"), ("--ack",), ("--lease", 5), ("--max-tries", 2), ("--group", ""),
        ("--group", "a/b"),
    ):  # fmt: skip
        result = run("recv", jobs, *arguments, "--timeout", 0)
        assert isinstance(result.exception, OptionsError), arguments
        assert result.stdout == ""


def test_leases_are_renewed_while_recv_runs_and_end_with_it(jobs: Path) -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "recv", str(jobs), "--group", "g", "--lease", "1", "--json"]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    held = [json.loads(holder.stdout.readline())["payload"] for _ in range(3)]
    assert lines("recv", jobs, "--group", "g", "--ack", "--timeout", 1.5) == []
    lines("send", jobs, "d")
    assert json.loads(holder.stdout.readline())["payload"] == "d"  # and what it had before stays its own
    assert lines("queue", "stat", jobs)[0]["leased"] == 4
    holder.kill()
    holder.communicate(timeout=60)
    rows = lines("recv", jobs, "--group", "g", "--ack", "--limit", 4, "--timeout", 60)
    assert [(row["payload"], row["tries"]) for row in rows] == [(payload, 2) for payload in [*held, "d"]]


def test_many_processes_send_at_the_same_time(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    command = [sys.executable, "-m", "penstock.cli.main", "send", str(folder)]
    senders = [subprocess.Popen([*command, f"{n} first", f"{n} second"], stderr=subprocess.PIPE) for n in range(4)]
    for sender in senders:
        _, err = sender.communicate(timeout=120)
        assert sender.returncode == 0, err.decode()
    with FileChannel.attach(folder) as view:
        found = view.rx().recv_many().to_payloads()
    assert sorted(found) == sorted(b"%d %s" % (n, which) for n in range(4) for which in (b"first", b"second"))
    assert all(found.index(b"%d first" % n) + 1 == found.index(b"%d second" % n) for n in range(4))
