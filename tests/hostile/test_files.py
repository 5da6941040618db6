"""Promise: links, pipes, holes and other people's files are answered: no hang, no crash, nothing outside is touched."""

from __future__ import annotations

import os
import resource
import socket
import time
from pathlib import Path

import pytest
from owners import OWNERS, Owner

from penstock.disk import PosixDisk, disk_for, read_disk_for
from penstock.disk.sparse import data_end
from penstock.errors import CorruptionError, LockedError, OptionsError, PenstockError
from penstock.log.detect import open_log
from penstock.log.xchannel import Reader, Writer
from penstock.store import AppendLogStore, open_store

owners = pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: owner.name)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder"])
def test_what_is_no_file_is_an_error_and_no_wait(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "thing"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        server.close()
    elif kind == "folder":
        path.mkdir()
    else:
        path = Path("/dev/zero")
    for opening in (PosixDisk().open, PosixDisk().modify, PosixDisk().lock):
        with pytest.raises(OSError, match=path.name):
            opening(str(path))


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "link to /dev/zero", "link to a pipe"])
@owners
def test_a_pipe_or_device_in_the_place_of_data_is_an_answer(owner: Owner, kind: str, tmp_path: Path) -> None:
    owner.open(tmp_path / "data").close()
    for path in owner.data(tmp_path / "data"):
        path.unlink()
        if "/dev/zero" in kind:
            path.symlink_to("/dev/zero")
        else:
            os.mkfifo(tmp_path / "pipe" if "link" in kind else path)
            if "link" in kind:
                path.symlink_to(tmp_path / "pipe")
        break
    try:
        owner.open(tmp_path / "data").close()
    except (PenstockError, OSError) as exc:
        assert "data" in str(exc)


@pytest.mark.parametrize("name", ["data.penstock-lock", "data.penstock-id", "data.penstock-mark", "data.penstock-new"])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_linked_sidecar_leads_nowhere(name: str, dangling: bool, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    if not dangling:
        target.write_bytes(b"precious")
    (tmp_path / name).symlink_to(target)
    for opening in (Writer.open, AppendLogStore.open):
        for data in ("data", "data.snap"):
            if opening is AppendLogStore.open and data == "data":
                continue
            try:
                with opening(tmp_path / "data") as opened:  # type: ignore[operator]
                    if isinstance(opened, Writer):
                        opened.append(b"x")
                        opened.sync()
            except (PenstockError, OSError):
                pass
    assert target.exists() is not dangling
    if not dangling:
        assert target.read_bytes() == b"precious"


def test_a_reader_follows_a_link_to_a_log(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    with Writer.open(tmp_path / "real" / "ticks", region_bytes=4096) as writer:
        writer.append(b"one")
        writer.roll()
        writer.append(b"two")
    with AppendLogStore.open(tmp_path / "real" / "fold.snap"):
        pass
    (tmp_path / "ticks").symlink_to(tmp_path / "real" / "ticks")
    (tmp_path / "fold").symlink_to(tmp_path / "real" / "fold.snap")
    with Reader.open(tmp_path / "ticks") as reader:
        assert [bytes(record.payload) for record in reader.records(timeout=0)] == [b"one", b"two"]
    with open_log(str(tmp_path / "ticks")) as log:
        assert log.format == "xchannel"
    with open_store(tmp_path / "fold") as store:
        assert store.count() == 0


def test_a_reader_does_not_follow_a_link_out_of_a_log(tmp_path: Path) -> None:
    with Writer.open(tmp_path / "other", region_bytes=4096) as writer:
        writer.append(b"secret")
    with Writer.open(tmp_path / "ticks", region_bytes=4096) as writer:
        writer.append(b"one")
        writer.roll()
        writer.append(b"two")
    (tmp_path / "ticks.1").unlink()
    (tmp_path / "ticks.1").symlink_to(tmp_path / "other")
    with Reader.open(tmp_path / "ticks") as reader:
        assert bytes(reader.read(0).payload) == b"one"
        with pytest.raises(OSError, match="symbolic link"):
            reader.read(0)


def test_a_zero_byte_in_a_path_is_refused_by_name() -> None:
    for resolve in (disk_for, read_disk_for):
        with pytest.raises(OptionsError, match="zero byte"):
            resolve("data\0/etc")
    with pytest.raises(OptionsError, match="zero byte"):
        Writer.open("a\0b")
    with pytest.raises(OptionsError, match="zero byte"):
        PosixDisk().stat("a\0b")


def test_new_files_and_folders_belong_to_their_owner_alone(tmp_path: Path) -> None:
    for owner in OWNERS:
        path = tmp_path / owner.name
        opened = owner.open(path)
        owner.use(opened, 1)
        opened.close()
        made = [path, *path.rglob("*")] if owner.folder else list(tmp_path.glob(owner.name + "*"))
        for file in made:
            if owner.name == "rocksdb" and file != path:
                continue  # the engine's own, in a folder that nobody else can enter
            assert not file.stat().st_mode & 0o077, file


# --- Holes


@pytest.fixture
def little_memory() -> object:
    """Two gigabytes of address space more than there is now, and no more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_where_the_data_of_a_file_with_holes_ends(tmp_path: Path) -> None:
    with PosixDisk().create(str(tmp_path / "file")) as file:
        assert data_end(file) == 0
        file.write_at(0, b"x" * 5000)
        assert data_end(file) == 5000
        file.truncate(1 << 40)
        assert 5000 <= data_end(file) <= 1 << 20
        file.write_at(1 << 39, b"y")
        assert 1 << 39 < data_end(file) <= (1 << 39) + (1 << 20)


@pytest.mark.usefixtures("little_memory")
def test_a_channel_that_is_a_hole_takes_no_time(tmp_path: Path) -> None:
    with Writer.open(tmp_path / "ticks", region_bytes=4096) as writer:
        writer.append(b"one")
    os.truncate(tmp_path / "ticks", 1 << 39)
    begun = time.process_time()
    with open_log(str(tmp_path / "ticks")) as log:
        assert log.stat()["next_position"] == 104
        list(log.verify())
        assert log.read(80).to_payloads() == [b"one"]
    with Writer.open(tmp_path / "ticks") as writer:
        assert writer.append(b"two") == 104
    assert time.process_time() - begun < 10


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("behind", [b"", b"x"])
def test_an_append_log_with_a_terabyte_of_hole_is_an_answer(behind: bytes, tmp_path: Path) -> None:
    AppendLogStore.open(tmp_path / "fold.snap").close()
    os.truncate(tmp_path / "fold.snap", 1 << 40)
    if behind:
        with (tmp_path / "fold.snap").open("r+b") as file:
            file.seek(1 << 40)
            file.write(behind)
    begun = time.process_time()
    for read_only in (True, False):
        try:
            AppendLogStore.open(tmp_path / "fold.snap", read_only=read_only).close()
        except CorruptionError as exc:
            assert behind, exc
    assert time.process_time() - begun < 10


def test_who_has_no_locks_is_told_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import fcntl

    def no_locks(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    for owner in OWNERS:
        with pytest.raises(OSError, match=owner.name):
            owner.open(tmp_path / owner.name)
    assert not isinstance(OSError(), LockedError)
