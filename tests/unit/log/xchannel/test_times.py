"""Promise: a channel whose files, or sidecars, are from different times says so, to who reads and to who writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.errors import CorruptionError
from penstock.log.sidecar import Sidecar
from penstock.log.xchannel import Reader, Writer, XChannelLog


def fill(path: Path, numbers: range, **options: object) -> None:
    with Writer.open(path, region_bytes=4096, roll_bytes=8192, **options) as writer:  # type: ignore[arg-type]
        for number in numbers:
            writer.append(b"%03d" % number + bytes(300))


def backup(path: Path, *, sidecars: bool) -> Path:
    kept = path.parent / "kept"
    kept.mkdir()
    for file in path.parent.glob(path.name + "*"):
        if sidecars or "penstock" not in file.name:
            shutil.copy(file, kept)
    return kept


def restore(kept: Path, folder: Path) -> None:
    for file in kept.iterdir():
        shutil.copy(file, folder)


def read_all(path: Path) -> list[bytes]:
    with Reader.open(path) as reader:
        return [payload[:3] for batch in reader.batches(timeout=0) for payload in batch.to_payloads()]


@pytest.mark.parametrize("sidecars", [False, True])
@pytest.mark.parametrize("more", [25, 50])
def test_older_files_over_newer_ones_are_noticed(sidecars: bool, more: int, tmp_path: Path) -> None:
    path = tmp_path / "data" / "ticks"
    path.parent.mkdir()
    fill(path, range(50))
    kept = backup(path, sidecars=sidecars)
    fill(path, range(50, 50 + more))
    assert len(read_all(path)) == 50 + more
    restore(kept, path.parent)
    with pytest.raises(CorruptionError, match="different times"):
        read_all(path)
    with pytest.raises(CorruptionError, match="different times"):
        fill(path, range(1))
    with XChannelLog(path) as log:
        assert any("no Roll" in problem.reason for problem in log.verify())


def test_who_asks_steps_over_the_place(tmp_path: Path) -> None:
    path = tmp_path / "ticks"
    fill(path, range(50))
    kept = backup(path, sidecars=False)
    fill(path, range(50, 100))
    restore(kept, tmp_path)
    found: list[bytes] = []
    with Reader.open(path) as reader:
        with pytest.raises(CorruptionError):
            found += [bytes(record.payload[:3]) for record in reader]
        problem = reader.skip_damage()
        assert problem is not None
        assert "different times" in problem.reason
        rest = [bytes(record.payload[:3]) for record in reader.records(timeout=0)]
    assert rest[-1] == b"099"
    assert len(rest) < 50


def test_a_mark_ahead_of_the_data_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "ticks"
    with Writer.open(path, region_bytes=4096, sync="always") as writer:
        writer.append(b"one")
        shutil.copy(path, tmp_path / "kept")
        writer.append(b"two")
    shutil.copy(tmp_path / "kept", path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(CorruptionError, match=r"ends here, but it had been synced up to byte 128"):
        read_all(path)
    for sync in ("none", "always"):
        with pytest.raises(CorruptionError, match="different times"):
            Writer.open(path, sync=sync)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    (tmp_path / "ticks.penstock-mark").unlink()  # as the error says
    with Writer.open(path) as writer:
        assert writer.append(b"again") == 104


def test_a_roll_that_was_lost_alone_strands_nobody(tmp_path: Path) -> None:
    path = tmp_path / "ticks"
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"one")
        writer.roll()
        writer.append(b"two")
    assert Sidecar(writer._tip._disk, f"{path}.penstock-").last_roll() == 104
    with path.open("r+b") as file:
        file.seek(104)
        file.write(b"\0\1" + bytes(14))
    assert read_all(path) == [b"one", b"two"]
    Writer.open(path).close()
    assert read_all(path) == [b"one", b"two"]
