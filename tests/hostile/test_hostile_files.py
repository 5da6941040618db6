"""Crafted files of every format through every command: an answer within limits of memory and time, no file changed.

The limits are the same whatever a file claims.  ``make hostile`` uses files up to a tebibyte and larger bombs.
"""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.log.find import find_logs

CHILD = Path(__file__).parents[1] / "support" / "hostile_child.py"
MEMORY_BYTES = 768 << 20
CPU_SECONDS = 30.0
READING = ("stat", "stat --count", "cat", "cat --skip-damage", "cat --json --skip-damage", "tail -n 3", "verify")
FOLD = ("fold stat PATH", "fold dump PATH", "fold verify PATH")
SPARK = ("spark PATH true", "spark PATH false")
WRITING = {
    "filechannel": ("send PATH x", "gc PATH", "compact PATH", "recv PATH --group g --timeout 0", "repair PATH"),
    "messagelog": ("write PATH", "ship run --once PATH file://OUT/up"),
    "xchannel": ("write PATH", "ship run --once PATH file://OUT/up"),
    "store": ("artifact export PATH OUT/artifact", "artifact push PATH file://OUT/up"),
}
QUEUE = ("recv --timeout 0 --skip-damage", "recv --timeout 0")


def segment(index: int, begin: int, frames: bytes = b"") -> bytes:
    return struct.pack(">IQ", index, begin).ljust(64, b"\0") + frames


def packed(index: int, begin: int, end: int, stream: bytes) -> bytes:
    return struct.pack(">IQQB", index, begin, end, 1).ljust(64, b"\0") + stream


def sparse(path: Path, size: int, head: bytes = b"") -> None:
    path.write_bytes(head)
    os.truncate(path, size)


def log(folder: Path, data: bytes, *, sealed: bool) -> None:
    (folder / "00000000000000000001.log").write_bytes(data)
    if sealed:
        (folder / "00000000000000099999.log").write_bytes(b"")


def queue_numbers(folder: Path, _: bool) -> None:
    (folder / "segment.0").write_bytes(segment(0, 0))
    (folder / "segment.4294967295").write_bytes(segment(4294967295, 10))


def queue_bomb(folder: Path, long: bool) -> None:
    size = (1600 << 20) if long else (400 << 20)
    frame = struct.pack(">II", size, 0)
    out = gzip.compress(frame + bytes(1 << 20), 9)
    out += b"".join(gzip.compress(bytes(32 << 20), 9) for _ in range(size // (32 << 20)))
    (folder / "segment.0.z").write_bytes(packed(0, 0, size + 8, out))
    (folder / "segment.1").write_bytes(segment(1, size + 8))
    (folder / "segment.2").write_bytes(segment(2, size + 8))


def queue_sparse(folder: Path, long: bool) -> None:
    size = (1 << 40) if long else (1 << 30)
    sparse(folder / "segment.0", size, segment(0, 0, struct.pack(">II", 0xFFFFFFF0, 1)))
    (folder / "segment.1").write_bytes(segment(1, size - 64))


def queue_claim(folder: Path, _: bool) -> None:
    (folder / "segment.0").write_bytes(segment(0, 0, struct.pack(">II", 0xFFFFFFFF, 1) + b"x" * 5000))


def queue_fifo(folder: Path, _: bool) -> None:
    (folder / "segment.0").write_bytes(segment(0, 0))
    os.mkfifo(folder / "segment.1")


def log_near(folder: Path, _: bool) -> None:
    log(folder, struct.pack("<Q", 7) * (1 << 19), sealed=False)


def log_rest(folder: Path, _: bool) -> None:
    row = struct.pack("<QQHI", 1, 0, 0, 0)
    data = b"".join(row[:18] + struct.pack("<I", max(0, (4 << 20) - at - 26)) for at in range(0, 4 << 20, 22))
    log(folder, data, sealed=True)


def log_places(folder: Path, _: bool) -> None:
    from penstock import kernel

    data = b"".join(kernel.messagelog.encode_one(2 * n + 1, 0, b"", b"x") + b"junk" for n in range(40_000))
    log(folder, data, sealed=True)


def log_sparse(folder: Path, long: bool) -> None:
    size = (1 << 40) if long else (1 << 30)
    sparse(folder / "00000000000000000001.log", size)
    sparse(folder / "00000000000000000001.idx", size)
    sparse(folder / "00000000000000000050.log", size, struct.pack("<QQHI", 50, 0, 0, 0xFFFFFFFF))
    sparse(folder / "00000000000000000050.idx", size)


def log_fifo(folder: Path, _: bool) -> None:
    log(folder, b"", sealed=False)
    os.mkfifo(folder / "00000000000000000005.log")


def log_loop(folder: Path, _: bool) -> None:
    os.symlink("00000000000000000001.log", folder / "00000000000000000001.log")


# --- Channels: files beside each other, the first of them named like the folder of the others


def channel(folder: Path, count: int = 40) -> Path:
    from penstock.log.xchannel import Writer

    with Writer.open(folder / "chan", region_bytes=4096) as writer:
        writer.append_many([b"%04d" % number + bytes(40) for number in range(count)])
    return folder / "chan"


def poke(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def channel_sparse(folder: Path, long: bool) -> None:
    os.truncate(channel(folder), (1 << 40) if long else (16 << 30))


def channel_lengths(folder: Path, _: bool) -> None:
    path = channel(folder)
    for at, length in ((84, 0xFFFFFFFF), (152, 1 << 27), (220, 0)):
        poke(path, at, struct.pack("<I", length))


def channel_counters(folder: Path, _: bool) -> None:
    poke(channel(folder), 8, b"\xff" * 56)


def channel_fifo(folder: Path, _: bool) -> None:
    channel(folder)
    os.mkfifo(folder / "chan.1")


def channel_loop(folder: Path, _: bool) -> None:
    os.symlink("chan", folder / "chan")


def channel_linked(folder: Path, _: bool) -> None:
    channel(folder)
    os.symlink("/etc/passwd", folder / "chan.1")


def channel_many(folder: Path, _: bool) -> None:
    path = channel(folder)
    for number in range(1, 3000):
        os.link(path, folder / f"chan.{number}")


# --- Stores


def store(folder: Path, count: int = 100) -> Path:
    from penstock.store import AppendLogStore
    from penstock.types import KvUpdate, WatchCursor

    with AppendLogStore.open(folder / "fold") as opened:
        opened.apply([KvUpdate.put(f"k{n}", b"v", n) for n in range(count)], WatchCursor.of(count))
    return folder / "fold"


def store_sparse(folder: Path, long: bool) -> None:
    path = store(folder)
    (folder / "fold.penstock-mark").unlink(missing_ok=True)
    os.truncate(path, (1 << 40) if long else (16 << 30))


def store_lengths(folder: Path, _: bool) -> None:
    path = store(folder)
    poke(path, 13, struct.pack("<H", 0xFFFF))
    poke(path, 60, b"\xff" * 8)


def store_fifo(folder: Path, _: bool) -> None:
    os.mkfifo(folder / "fold")


def store_linked(folder: Path, _: bool) -> None:
    os.symlink("/dev/zero", folder / "fold")


def store_lmdb(folder: Path, _: bool) -> None:
    (folder / "fold").mkdir()
    (folder / "fold" / "data.mdb").write_bytes(b"\xff" * 65536)


CASES: dict[str, tuple[str, Callable[[Path, bool], None]]] = {
    name: (kind, make)
    for kind, makers in {
        "filechannel": (queue_numbers, queue_bomb, queue_sparse, queue_claim, queue_fifo),
        "messagelog": (log_near, log_rest, log_places, log_sparse, log_fifo, log_loop),
        "xchannel": (
            channel_sparse,
            channel_lengths,
            channel_counters,
            channel_fifo,
            channel_loop,
            channel_linked,
            channel_many,
        ),
        "store": (store_sparse, store_lengths, store_fifo, store_linked, store_lmdb),
    }.items()
    for make in makers
    for name in (make.__name__,)
}


@pytest.mark.parametrize("name", CASES)
def test_every_command_answers_within_its_limits(name: str, tmp_path: Path, long_run: bool) -> None:
    kind, make = CASES[name]
    folder = tmp_path / "log"
    folder.mkdir()
    make(folder, long_run)
    before = _look(folder)
    commands = [*(FOLD if kind == "store" else (*READING, *SPARK)), *(QUEUE if kind == "filechannel" else ())]
    path = folder / {"xchannel": "chan", "store": "fold"}.get(kind, "")
    if not long_run:
        commands = [command for command in commands if "--json" not in command and command != "tail -n 3"]
        if name not in ("queue_bomb", "log_places", "channel_lengths", "log_sparse"):
            commands = [command for command in commands if command not in SPARK]
    check(commands, path)
    assert _look(folder) == before


@pytest.mark.parametrize("name", CASES)
def test_whatever_writes_answers_too_and_touches_nothing_outside(name: str, tmp_path: Path, long_run: bool) -> None:
    if not long_run and name not in ("queue_claim", "log_rest", "channel_linked", "store_linked"):
        pytest.skip("in the long form")
    kind, make = CASES[name]
    folder, out, mine = tmp_path / "log", tmp_path / "out", tmp_path / "mine"
    for each in (folder, out, mine):
        each.mkdir()
    make(folder, long_run)
    (mine / "precious").write_bytes(b"precious")
    path = folder / {"xchannel": "chan", "store": "fold"}.get(kind, "")
    for entry in sorted(folder.iterdir())[:1]:
        if not entry.is_dir():
            os.symlink(mine / "precious", folder / f"{entry.name}.bad")
    check([command.replace("OUT", str(out)) for command in WRITING[kind]], path)
    assert (mine / "precious").read_bytes() == b"precious"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["log", "mine", "out"]


def hollow_queue(folder: Path) -> None:
    sparse(folder / "segment.0", 1 << 40, segment(0, 0, struct.pack(">II", 1 << 30, 1)))
    (folder / "segment.1").write_bytes(segment(1, (1 << 40) - 64))


def hollow_log(folder: Path) -> None:
    for number in (1, 50):
        sparse(folder / f"{number:020}.log", 1 << 40, struct.pack("<QQHI", number, 0, 0, 1 << 30))


def hollow_channel(folder: Path) -> None:
    os.truncate(channel(folder), 1 << 40)


@pytest.mark.parametrize(
    ("make", "commands"),
    [
        (hollow_queue, ("spark PATH true", "repair PATH")),
        (hollow_log, ("ship run --once PATH file://OUT/up", "write PATH")),
        (hollow_channel, ("ship run --once PATH file://OUT/up",)),
    ],
)
def test_a_file_that_claims_a_terabyte_costs_what_it_holds(
    make: Callable[[Path], None], commands: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    make(folder)
    path = folder / "chan" if (folder / "chan").exists() else folder
    check([command.replace("OUT", str(tmp_path)) for command in commands], path)
    on_disk = sum(found.stat().st_blocks * 512 for found in tmp_path.rglob("*") if found.is_file())
    assert on_disk < 64 << 20


def check(commands: list[str], path: Path) -> None:
    """Run commands under limits, and see that each answers."""
    lines = [json.dumps(_words(command, path)) for command in commands]
    found = subprocess.run(
        [sys.executable, str(CHILD), str(MEMORY_BYTES), str(CPU_SECONDS)],
        input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    answers: list[dict[str, Any]] = [json.loads(line) for line in found.stdout.splitlines()]
    assert len(answers) == len(commands), found.stderr[-2000:]
    wrong = [answer for answer in answers if answer["code"] not in (0, 1, 2) or "Traceback" in answer["stderr"]]
    assert wrong == []


def _words(command: str, path: Path) -> list[str]:
    if "PATH" in command:
        return [word.replace("PATH", str(path)) for word in command.split()]
    return [command.split(maxsplit=1)[0], str(path), *command.split()[1:]]


def _look(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        path.name: (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in folder.iterdir()
        if not path.name.startswith("penstock-")
    }


def test_links_that_fan_out_are_followed_once(tmp_path: Path) -> None:
    for number in range(12):
        os.symlink(tmp_path, tmp_path / f"link{number}")
    (tmp_path / "inner").mkdir()
    assert find_logs(str(tmp_path)) == []
