"""What a channel tells through the face of logs; the common promises are in tests/conformance/test_logs.py."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from xchannels import CountingDisk, put

from penstock.disk import PosixDisk
from penstock.errors import CorruptionError, ExpiredError, OptionsError, UnsupportedError
from penstock.log.detect import open_log
from penstock.log.sidecar import Sidecar
from penstock.log.xchannel import Writer, XChannelLog
from penstock.log.xchannel.files import ChannelFile, discover, sidecar_prefix
from penstock.log.xchannel.log import recognise


def test_stat_says_what_there_is_to_say(tmp_path: Path) -> None:
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096, sync="always", content="envelope/1") as writer:
        writer.append(b"a")
        writer.roll()
        writer.append(b"b")
    sidecar = Sidecar(PosixDisk(), sidecar_prefix(str(path)))
    sidecar.write_cursor("billing", 80)
    with XChannelLog(path) as log:
        stat = log.stat()
        assert log.content == "envelope/1"
    assert json.loads(json.dumps(stat)) == stat
    assert stat["first_position"] == 80
    assert stat["next_position"] == stat["durable_position"] == (1 << 40) + 104
    assert (stat["bytes"], stat["region_bytes"], stat["cursors"]) == (8192, 4096, {"billing": 80})
    assert [(Path(entry["file"]).name, entry["messages"]) for entry in stat["files"]] == [("chan", 1), ("chan.1", 1)]


def test_stat_of_a_damaged_channel_names_the_problem(tmp_path: Path) -> None:
    path = tmp_path / "chan"
    Writer.precreate(path, region_bytes=4096)
    put(path, 40, bytes(4))
    with XChannelLog(path) as log:
        stat = log.stat()
    assert "region_size is 0" in stat["files"][0]["problem"]
    assert stat["next_position"] is None


def test_verify_goes_on_behind_damage(tmp_path: Path) -> None:
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append_many([b"x" * 3000] * 4)
    put(path, 80, b"\7")
    put(path, 2 * 4096 + 1, b"\x0b")
    with XChannelLog(path) as log:
        assert [problem.byte for problem in log.verify()] == [80, 2 * 4096 + 1]


def test_verify_compares_the_header_with_the_records(tmp_path: Path) -> None:
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"x")
    for offset, value, byte in ((24, 9, 24), (16, 9, 16), (32, 9, 32)):
        before = path.read_bytes()
        put(path, offset, struct.pack("<Q", value))
        with XChannelLog(path) as log:
            assert [problem.byte for problem in log.verify()] == [byte]
        path.write_bytes(before)


def test_an_unknown_format_is_refused_by_name_and_listed_by_verify(tmp_path: Path) -> None:
    path = tmp_path / "chan"
    Writer.precreate(path, region_bytes=4096)
    put(path, 48, b"\1")
    with XChannelLog(path) as log:
        assert ["format v1" in problem.reason for problem in log.verify()] == [True]
        with pytest.raises(UnsupportedError, match="format v1"):
            log.read(80)
    before = path.read_bytes()
    with pytest.raises(UnsupportedError, match="format v1"):
        Writer.open(path)
    assert path.read_bytes() == before


def test_reading_below_the_first_position_has_expired(tmp_path: Path) -> None:
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096, roll_bytes=1 << 30, keep_files=1) as writer:
        writer.append(b"a")
        writer.roll()
        writer.append(b"b")
        with XChannelLog(path) as log:
            with pytest.raises(ExpiredError):
                log.read(80)
            assert log.read(log.first_position).to_payloads() == [b"b"]


def test_a_log_reads_on_after_a_refused_position(tmp_path: Path) -> None:
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append_many([b"one", b"two"])
    with XChannelLog(path) as log:
        with pytest.raises(OptionsError, match="no record begins"):
            log.read(88)
        assert log.read(104).to_payloads() == [b"two"]


# --- Files


def test_discovery_sorts_by_number_and_ignores_the_rest(tmp_path: Path) -> None:
    for name in ("chan.10", "chan.9", "chan", "chan.old", "chan.01", "chan.penstock-id"):
        (tmp_path / name).touch()
    (tmp_path / "chan.5").mkdir()
    assert discover(PosixDisk(), str(tmp_path / "chan")) == [0, 9, 10]
    assert discover(PosixDisk(), str(tmp_path / "none")) == []
    with pytest.raises(OptionsError, match="needs a file name"):
        discover(PosixDisk(), str(tmp_path) + "/")
    (tmp_path / f"chan.{1 << 23}").touch()
    with pytest.raises(UnsupportedError, match="has no position"):
        discover(PosixDisk(), str(tmp_path / "chan"))


def test_a_file_is_walked_window_by_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.log.xchannel import files

    monkeypatch.setattr(files, "WINDOW_BYTES", 8192)
    path = tmp_path / "chan"
    values = [b"%d" % number * 300 for number in range(100)]
    with Writer.open(path, region_bytes=4096) as writer:
        positions = writer.append_many(values).tolist()
    with XChannelLog(path) as log:
        found, position = [], 80
        while len(batch := log.read(position)):
            found += batch.to_payloads()
            position = batch.next_position
        assert found == values
        assert list(log.verify()) == []
        assert log.read(positions[70], 1).to_payloads() == [values[70]]
    with Writer.open(path) as writer:
        assert writer.append(b"end") > positions[-1]


def test_an_opened_file_that_is_no_channel_is_closed_again(tmp_path: Path) -> None:
    (tmp_path / "chan").write_bytes(b"not a channel" * 10)
    with pytest.raises(CorruptionError):
        ChannelFile.open(PosixDisk(), str(tmp_path / "chan"), 0)
    assert not recognise(PosixDisk(), str(tmp_path / "chan"))


def test_a_damaged_channel_is_recognised_and_a_text_is_not(tmp_path: Path) -> None:
    Writer.precreate(tmp_path / "chan", region_bytes=4096)
    for byte in range(80):
        data = bytearray((tmp_path / "chan").read_bytes())
        data[byte] ^= 0x55
        (tmp_path / "other").write_bytes(data)
        (tmp_path / "other.penstock-id").write_bytes((tmp_path / "chan.penstock-id").read_bytes())
        assert recognise(PosixDisk(), str(tmp_path / "other"))
    for text in (b"", b"hello", b"# a text\n" * 1000, bytes(4096), b"PGSS" + bytes(100)):
        (tmp_path / "text").write_bytes(text)
        assert not recognise(PosixDisk(), str(tmp_path / "text"))
        with pytest.raises(OptionsError, match="not a log of a known format"):
            open_log(str(tmp_path / "text"))


def test_the_end_is_known_to_one_who_stands_on_the_first_file(tmp_path: Path) -> None:  # 22
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096) as writer, XChannelLog(path) as log:
        assert log.next_position == 80
        for _ in range(7):
            writer.append(b"x")
            writer.roll()
        writer.append(b"y")
        assert (log.first_position, log.next_position) == (80, writer.next_position)
        assert log.next_position == (7 << 40) + 104


def test_a_read_asks_the_disk_as_often_however_many_files_there_are(tmp_path: Path) -> None:
    path, asked, rolled = tmp_path / "chan", [], 0
    with Writer.open(path, region_bytes=4096) as writer:
        for files in (5, 60):
            while rolled < files:
                writer.append(b"one")
                writer.roll()
                rolled += 1
            disk = CountingDisk()
            with XChannelLog(path, disk) as log:
                log.read(log.first_position, 1)
                disk.calls = 0
                for sequence in (0, 3, 1, files - 2, 2, 2):
                    assert log.read(log.origin + (sequence << 40), 1).to_payloads() == [b"one"]
                asked.append(disk.calls)
    assert asked[0] == asked[1]
