"""Promise: a backup that somebody else made is untrusted: nothing outside is written, cut, removed or copied in."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import pytest
from command import penstock

from penstock.errors import CorruptionError, OptionsError, PenstockError
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.messagelog import MessageLog
from penstock.node.backup import MANIFEST, back_up, restore
from penstock.node.erase import erase_key


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A backup of a node that has one log."""
    (tmp_path / "data" / "logs").mkdir(parents=True)
    with MessageLog.open(tmp_path / "data" / "logs" / "readings") as log:
        log.append(b"21.5")
    back_up(str(tmp_path / "data"), str(tmp_path / "copy"))
    return tmp_path / "copy"


def name_file(copy: Path, name: str, content: bytes) -> None:
    """Let the manifest name one file more."""
    manifest = msgspec.json.decode((copy / MANIFEST).read_bytes())
    manifest["files"][name] = hashlib.blake2b(content, digest_size=32).hexdigest()
    (copy / MANIFEST).write_bytes(msgspec.json.encode(manifest))


def test_a_backup_that_names_files_elsewhere_is_refused(copy: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    before = (copy / MANIFEST).read_bytes()
    for name in (str(precious), "../precious", "logs/../../precious", "a\0b", "", ".", "..", "/"):
        name_file(copy, name, b"precious")
        with pytest.raises(CorruptionError, match=MANIFEST):
            restore(str(copy), str(tmp_path / "again"))
        assert precious.read_bytes() == b"precious", name
        assert not (tmp_path / "again").exists()
        (copy / MANIFEST).write_bytes(before)
    restore(str(copy), str(tmp_path / "again"))


@pytest.mark.parametrize("field", ["logs", "stores"])
def test_a_backup_that_names_logs_or_stores_elsewhere_is_refused(field: str, copy: Path, tmp_path: Path) -> None:
    manifest = msgspec.json.decode((copy / MANIFEST).read_bytes())
    if field == "logs":
        manifest["logs"][0]["path"] = "../data/logs/readings"
    else:
        manifest["stores"]["../data/fold.snap"] = "00"
    (copy / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(CorruptionError, match=MANIFEST):
        restore(str(copy), str(tmp_path / "again"))


@pytest.mark.parametrize("kind", ["link", "pipe", "folder that is a link"])
def test_a_backup_leads_nowhere(kind: str, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "secret").write_bytes(b"secret")
    name = "secret"
    if kind == "link":
        (copy / "secret").symlink_to(tmp_path / "mine" / "secret")
    elif kind == "pipe":
        os.mkfifo(copy / "secret")
    else:
        (copy / "folder").symlink_to(tmp_path / "mine")
        name = "folder/secret"
    name_file(copy, name, b"secret")
    with pytest.raises((PenstockError, OSError)):
        restore(str(copy), str(tmp_path / "again"))
    assert not (tmp_path / "again").exists()


def test_a_manifest_that_is_a_pipe_or_a_hole_is_an_answer(copy: Path, tmp_path: Path) -> None:
    (copy / MANIFEST).unlink()
    os.mkfifo(copy / MANIFEST)
    with pytest.raises(OSError, match=MANIFEST):
        restore(str(copy), str(tmp_path / "again"))
    (copy / MANIFEST).unlink()
    (copy / MANIFEST).touch()
    os.truncate(copy / MANIFEST, 1 << 40)
    with pytest.raises((PenstockError, OSError), match=MANIFEST):
        restore(str(copy), str(tmp_path / "again"))


def test_a_folder_that_has_a_name_like_ours_is_left_alone(tmp_path: Path, copy: Path) -> None:
    for name in ("again.partial", "copy2.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_bytes(b"precious")
    restore(str(copy), str(tmp_path / "again"))
    back_up(str(tmp_path / "data"), str(tmp_path / "copy2"))
    for name in ("again.partial", "copy2.partial"):
        assert (tmp_path / name / "precious").read_bytes() == b"precious"


def test_what_a_backup_makes_belongs_to_its_owner_alone(tmp_path: Path, copy: Path) -> None:
    restore(str(copy), str(tmp_path / "again"))
    for folder in (copy, tmp_path / "again"):
        for path in (folder, *folder.rglob("*")):
            assert not path.stat().st_mode & 0o077, path


def keyed(path: Path) -> None:
    with MessageLog.open(path, content=CONTENT) as log:
        log.append_many([encode_envelope(Envelope(key, b"x")) for key in (b"ann", b"bob")])


@pytest.mark.parametrize("what", ["the log", "a folder above"])
def test_erasing_follows_no_link_out_of_the_data_directory(what: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "data" / "logs").mkdir(parents=True)
    keyed(tmp_path / "mine" / "log")
    keyed(tmp_path / "data" / "logs" / "own")
    before = {path.name: path.read_bytes() for path in (tmp_path / "mine" / "log").iterdir()}
    if what == "the log":
        (tmp_path / "data" / "logs" / "link").symlink_to(tmp_path / "mine" / "log")
    else:
        (tmp_path / "data" / "link").symlink_to(tmp_path / "mine")
    found = erase_key(str(tmp_path / "data"), "ann", logs=True)
    assert [one.count for one in found] == [1]
    assert {path.name: path.read_bytes() for path in (tmp_path / "mine" / "log").iterdir()} == before


def test_copying_and_erasing_make_nothing_in_a_folder_that_is_no_data_directory(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    back_up(str(tmp_path / "folder"), str(tmp_path / "copy"))
    found = penstock("erase", tmp_path / "folder", "--key", "ann")
    assert found.returncode == 2
    assert "not the data directory of a node" in found.stderr
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_data_directory_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="nowhere"):
        back_up(str(tmp_path / "nowhere"), str(tmp_path / "copy"))
