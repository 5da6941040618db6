"""Promises: commands say what is missing once, on stderr, and leave with 1; a terminal gets nothing to act upon."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest
from command import PENSTOCK, penstock

from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.messagelog import MessageLog, MessageLogOptions


def test_a_damaged_message_log_is_read_to_its_end_and_what_is_missing_is_said_once(tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "ops", MessageLogOptions(sync="none")) as log:
        log.append_many([b"entry %d" % number for number in range(1, 43)])
    (file,) = (tmp_path / "ops").glob("*.log")
    data = bytearray(file.read_bytes())
    data[30] ^= 1  # in the first entry
    file.write_bytes(data)
    found = penstock("cat", tmp_path / "ops", "--json")
    assert [json.loads(line)["seq"] for line in found.stdout.splitlines()] == list(range(2, 43))
    assert found.returncode == 1
    assert found.stderr.count("1 is missing") == 1
    assert f"{file} at byte 0" in found.stderr
    stat = penstock("stat", tmp_path / "ops", "--json")
    assert stat.returncode == 1
    assert "1 is missing" in json.loads(stat.stdout)["damage"][0]


def test_damage_of_a_queue_is_stepped_over_on_request(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "jobs", ChannelOptions(sync="none")) as channel:
        positions = channel.append_many([b"one", b"two", b"three"]).tolist()
    data = bytearray((tmp_path / "jobs/segment.0").read_bytes())
    data[64 + positions[1] + 3] = 200  # the length of the second
    (tmp_path / "jobs/segment.0").write_bytes(data)
    stopped = penstock("cat", tmp_path / "jobs")
    assert (stopped.returncode, len(stopped.stdout.splitlines())) == (1, 1)
    for words in (
        ["cat", tmp_path / "jobs", "--skip-damage"],
        ["recv", tmp_path / "jobs", "--timeout", 0, "--skip-damage"],
    ):
        found = penstock(*words)
        assert [line.split()[-1] for line in found.stdout.splitlines()] == ["one", "three"]
        assert found.returncode == 1
        assert found.stderr.count("segment.0 at byte") == 1


def test_damage_in_a_synced_queue_is_said_once_and_is_no_cut(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "jobs", ChannelOptions(sync="always")) as channel:
        positions = channel.append_many([b"one", b"two", b"three"]).tolist()
    data = bytearray((tmp_path / "jobs/segment.0").read_bytes())
    data[64 + positions[1] + 3] = 200  # the length of the second
    (tmp_path / "jobs/segment.0").write_bytes(data)
    for words in (["cat", "--skip-damage"], ["verify"], ["stat"]):
        found = penstock(words[0], tmp_path / "jobs", *words[1:])
        said = found.stdout + found.stderr
        assert (found.returncode, said.count("segment.0 at byte"), said.count("were synced")) == (1, 1, 0), words


@pytest.mark.parametrize("words", [["cat"], ["cat", "--json"], ["recv", "--timeout", "0"]])
def test_a_terminal_is_sent_no_control_and_no_direction_characters(words: list[str], tmp_path: Path) -> None:
    evil = "\x1b]0;title\x07 \x9b31m \u202e turned \u2066 two\nlines"
    with FileChannel.open(tmp_path / "jobs", ChannelOptions(sync="none")) as channel:
        channel.append(evil.encode())
    outer, inner = pty.openpty()
    try:
        command = [*PENSTOCK, words[0], str(tmp_path / "jobs"), *words[1:]]
        subprocess.run(command, stdout=inner, stderr=subprocess.PIPE, timeout=180, check=False)
        shown = os.read(outer, 1 << 16).decode()
    finally:
        os.close(outer)
        os.close(inner)
    assert "turned" in shown
    assert not set(shown.replace("\r\n", "")) & set("\x1b\x07\x9b\u202e\u2066\n")


def test_a_warning_about_a_file_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "jobs\x1b]0;title\x07\u202e"
    with FileChannel.open(path, ChannelOptions(sync="none")) as channel:
        channel.append(b"one")
    with (path / "segment.0").open("ab") as file:
        file.write(b"torn")
    found = penstock("send", path, "two")
    assert found.returncode == 0
    assert "jobs\\x1b]0;title\\x07\\u202e/segment.0 at byte 75" in found.stderr


def test_json_in_a_file_has_no_direction_characters_either(tmp_path: Path) -> None:
    with FileChannel.open(tmp_path / "jobs", ChannelOptions(sync="none")) as channel:
        channel.append("\x9b\u202eturned".encode())
    found = penstock("cat", tmp_path / "jobs", "--json").stdout
    assert "\\u009b\\u202e" in found
    assert json.loads(found)["payload"] == "\x9b\u202eturned"
