"""The command line is an interface: its forms and exit codes are held here."""

from __future__ import annotations

import base64
import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest
from command import PENSTOCK, penstock

from penstock.log.detect import FORMATS, open_writer
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.xchannel import Writer
from penstock.types import Op


@pytest.fixture(scope="module")
def ticks(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("cli") / "ticks")
    with Writer.open(path, region_bytes=4096, roll_bytes=8192) as writer:
        for number in range(300):
            writer.append(b"tick %d" % number, kind=number % 3, timestamp_ns=number)
        writer.append(b"\xff\xfe", kind=9, timestamp_ns=2**64 - 1)
    return path


def test_cat_json_is_one_object_a_line_with_the_fixed_names(ticks: str) -> None:
    done = penstock("cat", ticks, "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert done.stderr == ""
    assert list(rows[0]) == ["position", "timestamp_ns", "kind", "payload"]
    assert rows[0] == {"position": 80, "timestamp_ns": 0, "kind": 0, "payload": "tick 0"}
    assert [row["timestamp_ns"] for row in rows[:-1]] == list(range(300))
    assert list(rows[-1]) == ["position", "timestamp_ns", "kind", "payload_base64"]
    assert base64.b64decode(rows[-1]["payload_base64"]) == b"\xff\xfe"
    assert rows[-1]["timestamp_ns"] == 2**64 - 1


def test_cat_begins_at_a_position_and_stops_at_a_limit(ticks: str) -> None:
    rows = [json.loads(line) for line in penstock("cat", ticks, "--json").stdout.splitlines()]
    part = penstock("cat", ticks, "--json", "--from", str(rows[100]["position"]), "--limit", "3")
    assert [json.loads(line) for line in part.stdout.splitlines()] == rows[100:103]
    assert penstock("cat", ticks, "--json", "--limit", "0").stdout == ""


def test_cat_begins_and_ends_at_the_ends_of_a_log(ticks: str) -> None:
    everything = penstock("cat", ticks, "--json").stdout
    assert penstock("cat", ticks, "--json", "--from", "earliest", "--to", "latest").stdout == everything
    assert penstock("cat", ticks, "--json", "--from", "latest").stdout == ""
    assert penstock("cat", ticks, "--json", "--to", "earliest").stdout == ""


def test_cat_reads_between_two_positions_and_between_two_times(ticks: str) -> None:
    rows = [json.loads(line) for line in penstock("cat", ticks, "--json").stdout.splitlines()]

    def cat(*options: str) -> list[object]:
        done = penstock("cat", ticks, "--json", *options)
        assert (done.returncode, done.stderr) == (0, "")
        return [json.loads(line) for line in done.stdout.splitlines()]

    first, last = str(rows[100]["position"]), str(rows[200]["position"])
    assert cat("--from", first, "--to", last) == rows[100:200]
    assert cat("--to", last, "-n", "3") == rows[:3]
    early, late = "1970-01-01T00:00:00.000000007Z", "1970-01-01 01:00:00.000000250+01:00"
    assert cat("--from", early, "--to", late) == rows[7:250]
    assert cat("--from", early, "--to", late, "--limit", "5") == rows[7:12]
    assert cat("--from", early, "--to", first) == rows[7:100]  # a time and a position
    assert cat("--from", "1h") == rows[300:]  # the last one is of a far future


@pytest.mark.parametrize("name", FORMATS)
def test_cat_by_time_works_on_every_format_that_has_times(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    with open_writer(path, format=name) as writer:
        writer.append_many([b"a", b"b", b"c"])
    done = penstock("cat", path, "--json", "--from", "1h")
    if name == "filechannel":
        assert done.returncode == 2
        assert "its records have no times; give positions" in done.stderr
    else:
        assert [json.loads(line)["payload"] for line in done.stdout.splitlines()] == ["a", "b", "c"]
        assert penstock("cat", path, "--json", "--to", "1h").stdout == ""


def test_cat_says_what_a_bound_may_be(ticks: str) -> None:
    done = penstock("cat", ticks, "--from", "yesterday")
    assert done.returncode == 2
    assert "--from yesterday: not earliest, latest, a position, a time (2026-11-16T08:30) or an age" in done.stderr


def test_cat_for_people_shows_time_kind_and_payload(ticks: str) -> None:
    first = penstock("cat", ticks, "--limit", "1").stdout
    assert first.split() == ["80", "1970-01-01", "00:00:00.000000000Z", "0", "tick", "0"]


def test_cat_opens_envelopes_where_the_log_says_so(tmp_path: Path) -> None:
    path = str(tmp_path / "keyed")
    with Writer.open(path, content=CONTENT) as writer:
        writer.append(encode_envelope(Envelope(b"devices/7", b"on", Op.PUT, 5)), timestamp_ns=1)
    row = json.loads(penstock("cat", path, "--json").stdout)
    assert (row["key"], row["payload"], row["op"], row["event_time_ns"]) == ("devices/7", "on", 0, 5)


def test_cat_prints_a_foreign_message_log_with_its_own_numbers() -> None:
    """Numbers and times that no position and no column of 64 bits can express are printed as they are."""
    case = Path(__file__).parents[2] / "vectors/messagelog/log/big_numbers"
    expected = json.loads((case / "expected.json").read_text())
    entries = [entry for segment in expected["segments"] for entry in segment["entries"]]
    done = penstock("cat", str(case / "data"), "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["position"], row["timestamp_ns"], row["from"]) for row in rows] == [
        (entry["seq"], entry["timestamp"] * 1_000_000, entry["from"]) for entry in entries
    ]
    assert done.returncode == 0


def test_cat_into_head_ends_quietly(ticks: str) -> None:
    command = f"{' '.join(PENSTOCK)} cat {ticks} --json | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 1)


@pytest.mark.parametrize("shared", [True, False])
def test_on_a_terminal_no_bar_is_drawn_between_the_lines(ticks: str, shared: bool) -> None:
    """A bar is for those who wait: where lines come to the same terminal, they are what moves."""
    ours, theirs = pty.openpty()
    out = theirs if shared else subprocess.DEVNULL
    process = subprocess.Popen([*PENSTOCK, "cat", ticks], stdin=theirs, stdout=out, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 1 << 16)
        except OSError:  # everyone who had the terminal has left
            break
    os.close(ours)
    assert process.wait(60) == 0
    assert (b"reading" in shown, shown.count(b"tick ")) == ((False, 300) if shared else (True, 0))


def test_tail_shows_the_newest(ticks: str) -> None:
    rows = [json.loads(line) for line in penstock("tail", ticks, "-n", "2", "--json").stdout.splitlines()]
    assert [row["timestamp_ns"] for row in rows] == [299, 2**64 - 1]


def test_tail_of_no_lines_prints_none(ticks: str) -> None:
    for option in ("-n", "--limit", "--lines"):
        found = penstock("tail", ticks, option, "0", "--json")
        assert (found.returncode, found.stdout) == (0, ""), found.stderr


def test_tail_f_waits_for_what_comes(tmp_path: Path) -> None:
    path = str(tmp_path / "live")
    with Writer.open(path) as writer:
        writer.append(b"before")
        process = subprocess.Popen([*PENSTOCK, "tail", "-f", path, "--json"], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["payload"] == "before"
        writer.append(b"after")
        assert json.loads(process.stdout.readline())["payload"] == "after"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        process.stdout.close()


def test_stat_json_is_one_object(ticks: str) -> None:
    facts = json.loads(penstock("stat", ticks, "--json", "--count").stdout)
    assert facts["format"] == "xchannel"
    assert facts["first_position"] == 80
    assert facts["records"] == 301
    assert facts["bytes"] == sum(os.path.getsize(entry["file"]) for entry in facts["files"])


def test_verify_lists_every_problem_with_file_byte_and_reason(ticks: str, tmp_path: Path) -> None:
    assert json.loads(penstock("verify", ticks, "--json").stdout)["problems"] == []
    path = tmp_path / "bad"
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append_many([bytes(1000)] * 12)
    damaged = bytearray(path.read_bytes())
    damaged[80], damaged[4096 + 1] = 2, 77  # a commit byte in region 0, a kind in region 1
    path.write_bytes(damaged)
    done = penstock("verify", str(path), "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert [(problem["byte"], problem["reason"]) for problem in found["problems"]] == [
        (80, "commit byte is 2, neither 0 nor 1"),
        (4097, "record kind is 77, not one of 0 to 3"),
    ]
    assert {problem["file"] for problem in found["problems"]} == {str(path)}


def test_a_damaged_log_gives_what_is_before_the_damage_then_exit_code_1(tmp_path: Path) -> None:
    path = tmp_path / "bad"
    with Writer.open(path, region_bytes=4096) as writer:
        positions = writer.append_many([b"good", b"bad"])
    damaged = bytearray(path.read_bytes())
    damaged[positions[1]] = 3
    path.write_bytes(damaged)
    done = penstock("cat", str(path), "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["payload"] == "good"
    assert f"bad at byte {positions[1]}: commit byte is 3" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("cat", "nowhere"), 2, "there is nothing here"),
        (("cat", "."), 2, "not a log of a known format"),
        (("cat", "{ticks}", "--format", "kafka"), 2, "must be one of"),
        (("cat", "{ticks}", "--from", "81"), 2, "no record begins at position 81"),
        (("cat", "{ticks}", "--from", "3"), 1, "has expired, the log begins at 80"),
        (("cat",), 2, "Missing argument"),
        (("frobnicate",), 2, "No such command"),
    ],
)
def test_wrong_use_is_told_in_one_line(
    ticks: str, tmp_path: Path, words: tuple[str, ...], code: int, says: str
) -> None:
    done = penstock(*(word.format(ticks=ticks) for word in words), cwd=tmp_path)
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["cat", "tail", "stat", "verify", "bench", "demo"])
def test_help_shows_an_example(command: str) -> None:
    assert f"Example: penstock {command}" in penstock(command, "--help").stdout


def test_help_names_every_format_and_what_happens_without() -> None:
    shown = penstock("cat", "--help").stdout
    assert [name for name in FORMATS if name not in shown] == []
    assert "[default: what" in shown  # brackets are no markup


@pytest.mark.parametrize("group", ["", "kv", "fold", "channels", "pipeline", "queue", "mqtt", "artifact", "ship"])
def test_every_command_is_explained_on_one_line(group: str) -> None:
    _, _, listed = penstock(*group.split(), "--help").stdout.partition("Commands:\n")
    assert listed
    assert "..." not in listed


def test_bench_and_demo_run_and_end_by_themselves(tmp_path: Path) -> None:
    rates = json.loads(penstock("bench", str(tmp_path), "--seconds", "0.1", "--json").stdout)["records_per_second"]
    assert set(rates) == {"append", "append_many", "read_batch", "try_read"}
    assert list(tmp_path.iterdir()) == []
    done = penstock("demo", "--ticks", "--seconds", "1.5", "--rate", "50000", "--json")
    assert done.returncode == 0, done.stderr
    assert all(json.loads(done.stdout)["exact"].values())
