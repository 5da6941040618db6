"""Folders written by the original (Go, v0.1.10): read and written alike, mended where it stops."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.disk import PosixDisk
from penstock.errors import CorruptionError, Timeout
from penstock.log import detect
from penstock.log.filechannel import ChannelOptions, FileChannel, FileChannelLog, repair
from penstock.log.filechannel.compress import Unpacker
from penstock.log.filechannel.format import Header

VECTORS = Path(__file__).parents[1] / "vectors" / "filechannel"
CASES = sorted(path.name for path in VECTORS.iterdir() if path.is_dir())
SOUND = [name for name in CASES if not name.startswith("damage-")]
DAMAGED = [name for name in CASES if name.startswith("damage-")]
# Nothing is wrong with these: the original reads them to the end and so do we.
HARMLESS = {"damage-empty-first", "damage-header-64-active", "damage-missing-active", "damage-missing-first",
            "damage-torn-on-boundary", "damage-highest-is-z",
            *(name for name in DAMAGED if name.startswith("damage-extra-"))}  # fmt: skip
# Zeros that nobody can tell from empty messages (docs/decisions/022).
ZEROS = {"damage-zero-tail-active", "damage-zero-tail-odd"}
PLAIN = ChannelOptions(sync="none", compression="none", collect=False)

Message = tuple[int, int, str]


def expected(case: str) -> list[Message]:
    lines = (VECTORS / case / "expected.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["offset"], row["length"], row.get("hex") or row.get("sha256", "")) for row in rows]


def write_offset(case: str) -> int:
    result = json.loads((VECTORS / case / "result.json").read_text())
    return int(result.get("write_offset_at_open", 0))


def seen(position: int, payload: bytes) -> Message:
    text = payload.hex() if len(payload) <= 64 else hashlib.sha256(payload).hexdigest()
    return position, len(payload), text


def copy(case: str, tmp_path: Path) -> str:
    folder = tmp_path / "channel"
    shutil.copytree(VECTORS / case / "channel", folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    return str(folder)


def everything(log: FileChannelLog) -> list[Message]:
    found, position = [], log.first_position
    while len(batch := log.read(position)):
        found += [seen(r.position, bytes(r.payload)) for r in batch]
        position = batch.next_position
    return found


def salvaged(log: FileChannelLog) -> tuple[list[Message], list[str]]:
    """Everything that can be read, stepping over damage, and what was stepped over."""
    found, problems, position = [], [], log.first_position
    while True:
        try:
            batch = log.read(position)
        except CorruptionError:
            skipped = log.skip_damage(position)
            if skipped is None:
                return found, [*problems, "the end cannot be read"]
            position, problem = skipped
            problems.append(str(problem))
            continue
        if not len(batch):
            return found, problems
        found += [seen(r.position, bytes(r.payload)) for r in batch]
        position = batch.next_position


def received(channel: FileChannel) -> tuple[list[Message], list[str]]:
    rx = channel.rx(on_damage="skip")
    found = []
    for batch in rx.batches(timeout=0):
        found += [seen(r.position, bytes(r.payload)) for r in batch]
    return found, [str(problem) for problem in rx.problems]


@pytest.mark.parametrize("case", SOUND)
def test_a_folder_of_the_original_is_read_as_the_original_reads_it(case: str, tmp_path: Path) -> None:
    folder = copy(case, tmp_path)
    assert detect(folder) == "filechannel"
    with FileChannelLog(folder) as log:
        assert everything(log) == expected(case)
        assert log.next_position == write_offset(case)
    with FileChannel.open(folder, ChannelOptions(sync="none")) as channel:
        assert received(channel) == (expected(case), [])
        position = channel.append(b"and on")
        assert position == write_offset(case)


@pytest.mark.parametrize("case", [name for name in SOUND if not name.startswith("killed")])
def test_a_sound_folder_of_the_original_has_no_problems(case: str, tmp_path: Path) -> None:
    with FileChannelLog(copy(case, tmp_path)) as log:
        assert list(log.verify()) == []


# --- Writing the same bytes


def payloads_of(op: dict[str, Any]) -> list[bytes]:
    if "hex" in op:
        return [bytes.fromhex(op["hex"])]
    return [payload(op, k) for k in range(op.get("count", 1))]


def payload(op: dict[str, Any], k: int) -> bytes:
    s = op.get("seed", 0) + k
    if "size_range" in op:
        low, high = op["size_range"]
        size = low + int.from_bytes(hashlib.sha256(b"size:%d" % s).digest()[:8], "big") % (high - low + 1)
    else:
        size = op["sizes"][k % len(op["sizes"])] if "sizes" in op else op["size"]
    match op.get("kind"):
        case "rand":
            return b"".join(hashlib.sha256(b"%d:%d" % (s, i)).digest() for i in range(size // 32 + 1))[:size]
        case "text":
            text = b"message %d " % s
            return (text * (size // len(text) + 1))[:size]
        case "ramp":
            return bytes((s + i) % 256 for i in range(size))
        case _:
            return bytes(size)


def replay(case: str, folder: str, *, batched: bool) -> None:
    for session in json.loads((VECTORS / case / "ops.json").read_text())["sessions"]:
        given = session["options"]
        options = ChannelOptions(
            sync="none",
            segment_bytes=given.get("rotate_threshold", 512 << 20),
            compression=given.get("compression", "snappy"),
        )
        with FileChannel.open(folder, options) as channel:
            receivers: dict[str, Any] = {}
            for op in session["ops"]:
                match op["op"]:
                    case "send" if batched:
                        channel.append_many(payloads_of(op))
                    case "send":
                        for one in payloads_of(op):
                            channel.append(one)
                    case "recv":
                        rx = receivers.get(op["rx"])
                        if rx is None:
                            rx = channel.ack_rx() if op.get("mode") == "ack" else channel.rx()
                            receivers[op["rx"]] = rx
                        for _ in range(op["count"]):
                            rx.recv(timeout=5)
                    case "ack":
                        receivers[op["rx"]].ack(op["count"])
                    case "close_rx":
                        receivers[op["rx"]].close()
                    case "settle":
                        channel.compact()


def unpacked(path: Path) -> bytes:
    with PosixDisk().open(str(path)) as file:
        unpacker = Unpacker(file, Header.decode(str(path), file.read_at(0, 64), packed=True))
        data = b"".join(iter(lambda: unpacker.read(1 << 20), b""))
        unpacker.finish()
    return data


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("case", [name for name in SOUND if not name.startswith("killed")])
def test_the_same_sends_leave_the_same_files(case: str, batched: bool, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", VECTORS / case / "channel"
    replay(case, str(ours), batched=batched)
    assert (ours / "lock").stat().st_size == 0
    assert (ours / "lock").stat().st_mode & 0o777 == 0o600
    their_names = {p.name for p in theirs.iterdir() if p.name.startswith("segment.")}
    our_names = {p.name for p in ours.iterdir() if p.name.startswith("segment.")}
    if "gc" in case:  # we collect a segment when it is passed, the original when the next one is begun
        assert our_names <= their_names
    else:
        assert our_names == their_names
    for name in our_names:
        if name.endswith(".z"):
            assert (ours / name).read_bytes()[:64] == (theirs / name).read_bytes()[:64]
            assert unpacked(ours / name) == unpacked(theirs / name)
        else:
            assert (ours / name).read_bytes() == (theirs / name).read_bytes()


def test_no_snappy_chunk_is_larger_than_the_original_reads(tmp_path: Path) -> None:
    folder = tmp_path / "channel"
    with FileChannel.open(str(folder), ChannelOptions(sync="none", segment_bytes=300_000)) as channel:
        for number in range(12):
            channel.append(hashlib.sha256(b"%d" % number).digest() * 4000)
        channel.compact()
    stream = (folder / "segment.0.z").read_bytes()[64:]
    at, names = 0, 0
    while at < len(stream):
        kind, length = stream[at], int.from_bytes(stream[at + 1 : at + 4], "little")
        names += kind == 0xFF
        body = stream[at + 8 : at + 4 + length]
        if kind == 1:
            assert len(body) <= 65_536
        elif kind == 0:
            size, shift = 0, 0
            for byte in body:
                size |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
            assert size <= 65_536
        at += 4 + length
    assert (at, names) == (len(stream), 1)


# --- Damage


REAL = {
    message
    for case in ("base-active", "base-sealed", "base-sealed-gzip", "damage-empty-first", "damage-empty-middle")
    for message in (*expected(case), (18, 1, "63"), (27, 1, "64"))
}


def check(case: str, found: list[Message], problems: list[str]) -> None:
    real = [message for message in found if message in REAL]
    theirs = [message for message in expected(case) if message in REAL]
    missing = [message for message in theirs if message not in real]
    assert not missing, f"the original delivers {missing}"
    invented = [message for message in found if message not in REAL]
    if case in ZEROS:
        assert all(message[1] == 0 for message in invented)
    else:
        assert not invented
    assert [m[0] for m in real] == sorted(m[0] for m in real)
    if case in HARMLESS:
        assert not problems
    elif case not in ZEROS and case != "damage-empty-middle":
        assert problems, "nothing is said of what is wrong"


def expected_of_base(case: str) -> list[Message]:
    """The messages of the undamaged folder that shares the most with a damaged one."""
    bases = [expected(base) for base in ("base-active", "base-sealed", "base-sealed-gzip")]
    theirs = set(expected(case))
    return max(bases, key=lambda base: len(theirs & set(base)))


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_folder_gives_a_receiver_all_that_is_whole(case: str, tmp_path: Path) -> None:
    folder = copy(case, tmp_path)
    with FileChannel.open(folder, PLAIN) as channel:
        found, problems = received(channel)
        problems += [str(problem) for problem in channel.problems]
        lost = {message for message in REAL if message in expected_of_base(case)} - set(found)
        assert not lost or case in HARMLESS | {"damage-empty-middle"} or problems, (
            "messages are missing and nothing is said"
        )
        with FileChannelLog(folder) as log:
            check(case, found, problems + [str(problem) for problem in log.verify()])
        position = channel.append(b"and on")
        rx = channel.rx(position)
        assert rx.recv(timeout=1) == b"and on"


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_folder_is_read_beside_its_writer_and_left_alone(case: str, tmp_path: Path) -> None:
    folder = copy(case, tmp_path)
    before = {p.name: p.read_bytes() for p in Path(folder).iterdir()}
    with FileChannelLog(folder) as log:
        found, problems = salvaged(log)
        said = [str(problem) for problem in log.verify()]
        log.stat()
    check(case, found, problems + said)
    assert {p.name: p.read_bytes() for p in Path(folder).iterdir()} == before


@pytest.mark.parametrize("case", [name for name in DAMAGED if name not in ZEROS])
def test_a_repaired_folder_reads_to_its_end_and_keeps_what_was_whole(case: str, tmp_path: Path) -> None:
    folder = copy(case, tmp_path)
    with FileChannelLog(folder) as log:
        whole = [message[1:] for message in salvaged(log)[0]]
    repair(folder)
    with FileChannelLog(folder) as log:
        assert list(log.verify()) == []
        repaired = everything(log)
        if case == "damage-begin-offset-sealed":  # a repair puts the header right, and then all of it can be read
            assert repaired == expected("base-sealed")
            whole = [message[1:] for message in repaired]
        assert [message[1:] for message in repaired] == whole
    assert repair(folder) == []
    with FileChannel.open(folder, PLAIN) as channel:
        assert channel.problems == []
        rx = channel.rx()
        for message in whole:
            assert seen(0, rx.recv(timeout=1))[1:] == message
        with pytest.raises(Timeout):
            rx.recv(timeout=0)
