"""A payload is a tar: only what its manifest declares comes out of it, whatever else is in there."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.artifact import encode_manifest, read_manifest
from penstock.artifact.export import hash_file
from penstock.artifact.manifest import ArtifactFile, ExportManifest
from penstock.artifact.tar import pack, unpack as unpack_tar
from penstock.errors import CorruptionError, OptionsError, PenstockError
from penstock.types import WatchCursor

Make = Callable[..., Path]


def tar_of(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for info, data in members:
            info.size = len(data) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


HOSTILE = [
    (member("../escape"), "leads out"),
    (member("data/../../escape"), "leads out"),
    (member("/etc/passwd"), "leads out"),
    (member("data\\..\\x"), "leads out"),
    (member("data/link", tarfile.SYMTYPE, "/etc/passwd"), "a link"),
    (member("data/fold.snap", tarfile.SYMTYPE, "/etc/passwd"), "a link"),
    (member("data/hard", tarfile.LNKTYPE, "data/fold.snap"), "a link"),
    (member("data/null", tarfile.CHRTYPE), "a device"),
    (member("data/disk", tarfile.BLKTYPE), "a device"),
    (member("data/pipe", tarfile.FIFOTYPE), "a device"),
    (member("data/extra"), "not declared"),
    (member("MANIFEST.json"), "second manifest"),
]


@pytest.mark.parametrize(("hostile", "says"), HOSTILE, ids=lambda value: getattr(value, "name", None))
def test_a_hostile_member_is_refused_by_name(
    hostile: tarfile.TarInfo, says: str, make_artifact: Make, tmp_path: Path
) -> None:
    artifact = make_artifact(3)
    data, fold = (artifact / "MANIFEST.json").read_bytes(), (artifact / "data/fold.snap").read_bytes()
    good = [(member("MANIFEST.json"), data)]
    if hostile.name != "data/fold.snap":
        good.append((member("data/fold.snap"), fold))
    target = tmp_path / "target"
    target.mkdir()
    for order in ([*good, (hostile, b"x")], [(hostile, b"x"), *good]):
        for left in list(target.iterdir()):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        with pytest.raises(CorruptionError):
            unpack_tar([tar_of(order)], str(target), read_manifest(artifact), data, "payload.tar")
    assert not (tmp_path / "escape").exists()
    shutil.rmtree(target)
    target.mkdir()
    with pytest.raises(CorruptionError, match=says):
        unpack_tar([tar_of([*good, (hostile, b"x")])], str(target), read_manifest(artifact), data, "payload.tar")


def test_a_member_longer_than_declared_is_refused_before_it_is_written(make_artifact: Make, tmp_path: Path) -> None:
    artifact = make_artifact(3)
    data = (artifact / "MANIFEST.json").read_bytes()
    bomb = tar_of([(member("MANIFEST.json"), data), (member("data/fold.snap"), bytes(50 << 20))])
    with pytest.raises(CorruptionError, match="52428800 bytes"):
        unpack_tar([bomb], str(tmp_path), read_manifest(artifact), data, "payload.tar")
    assert not (tmp_path / "data/fold.snap").exists()


@pytest.mark.parametrize("size", [1, 3, 511, 512, 513, 4096, 1 << 20])
def test_a_payload_may_come_in_pieces_of_any_size(size: int, make_artifact: Make, tmp_path: Path) -> None:
    artifact = make_artifact(3)
    manifest, data = read_manifest(artifact), (artifact / "MANIFEST.json").read_bytes()
    whole = b"".join(pack(str(artifact), manifest, data))
    unpack_tar((whole[at : at + size] for at in range(0, len(whole), size)), str(tmp_path), manifest, data, "x")
    assert (tmp_path / "data/fold.snap").read_bytes() == (artifact / "data/fold.snap").read_bytes()


@pytest.mark.parametrize("format", ["gnu", "posix"])
def test_a_tar_with_holes_and_a_long_name_is_taken(format: str, make_artifact: Make, tmp_path: Path) -> None:
    name = f"data/{'n' * 90}/{'m' * 90}"
    artifact, target = make_artifact(3), tmp_path / "target"
    path = artifact / name
    path.parent.mkdir()
    with open(path, "wb") as file:
        for at in (1 << 20, 3 << 20, 4 << 20):
            file.seek(at)
            file.write(os.urandom(5000))
        file.truncate(6 << 20)
    found = read_manifest(artifact)
    files = (*found.files, ArtifactFile(name, 6 << 20, hash_file(str(path))))
    manifest = msgspec.structs.replace(found, files=files)
    data = encode_manifest(manifest)
    (artifact / "MANIFEST.json").write_bytes(data)
    command = ["tar", f"--format={format}", "--sparse", "-C", str(artifact), "-cf", str(tmp_path / "x.tar"), "."]
    subprocess.run(command, check=True)
    assert (tmp_path / "x.tar").stat().st_size < 1 << 20
    target.mkdir()
    unpack_tar([(tmp_path / "x.tar").read_bytes()], str(target), manifest, data, "x.tar")
    assert (target / name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE])
def test_a_header_that_claims_to_be_huge_is_not_read_into_memory(
    kind: bytes, make_artifact: Make, tmp_path: Path
) -> None:
    artifact = make_artifact(3)
    data = (artifact / "MANIFEST.json").read_bytes()
    info = member("././@LongLink", kind)
    info.size = 1 << 33
    given = 0

    def pieces() -> Iterator[bytes]:
        nonlocal given
        yield info.tobuf(tarfile.GNU_FORMAT)
        while given < 64:
            given += 1
            yield bytes(1 << 20)

    with pytest.raises(CorruptionError, match="a header of 8589934592 bytes"):
        unpack_tar(pieces(), str(tmp_path), read_manifest(artifact), data, "x.tar")
    assert given < 8


def test_a_manifest_that_declares_more_than_there_is_room_for_is_refused(make_artifact: Make, tmp_path: Path) -> None:
    artifact = make_artifact(3)
    manifest = read_manifest(artifact)
    huge = msgspec.structs.replace(manifest, files=(msgspec.structs.replace(manifest.files[0], size=1 << 62),))
    with pytest.raises(OptionsError, match="are free"):
        unpack_tar([b""], str(tmp_path), huge, b"", "payload.tar")


def test_no_truncation_and_no_flipped_byte_of_a_payload_is_imported(
    make_artifact: Make, tmp_path: Path, long_run: bool
) -> None:
    artifact = make_artifact(3)
    manifest, data = read_manifest(artifact), (artifact / "MANIFEST.json").read_bytes()
    good = b"".join(pack(str(artifact), manifest, data))
    fold = (artifact / "data/fold.snap").read_bytes()
    target = tmp_path / "target"

    def try_it(changed: bytes) -> bool:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        try:
            unpack_tar([changed], str(target), manifest, data, "payload.tar")
        except (PenstockError, OSError):
            return False
        return True

    assert try_it(good)
    for length in range(0, len(good) - 1024, 1 if long_run else 128):
        assert not try_it(good[:length]), length
    for at in range(0, len(good), 1 if long_run else 13):
        if try_it(good[:at] + bytes((good[at] ^ 0x55,)) + good[at + 1 :]):  # header fields and padding that say nothing
            assert (target / "data/fold.snap").read_bytes() == fold
            assert (target / "MANIFEST.json").read_bytes() == data


@pytest.mark.parametrize("how", ["folders", "names", "holes"])
def test_a_tar_of_folders_names_or_holes_without_end_is_refused(how: str, tmp_path: Path) -> None:
    """All of that is kept in memory; the contents of files are not."""
    folder = tarfile.TarInfo("data")
    folder.type = tarfile.DIRTYPE
    name = tarfile.TarInfo("data/" + "n" * 4000)
    name.type = tarfile.DIRTYPE
    sparse = bytearray(tarfile.TarInfo("data/holes").tobuf(tarfile.GNU_FORMAT))
    sparse[156:157], sparse[482:483] = b"S", b"\x01"
    sparse[148:156] = b" " * 8
    sparse[148:156] = b"%06o\0 " % sum(sparse)
    hole = bytearray(512)
    hole[:504], hole[504] = (b"%011o\0" % 0 + b"%011o\0" % 0) * 21, 1
    piece = {
        "folders": folder.tobuf(tarfile.GNU_FORMAT),
        "names": name.tobuf(tarfile.GNU_FORMAT),
        "holes": bytes(hole),
    }[how]
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        if how == "holes":
            yield bytes(sparse)
        while taken < 1 << 26:
            taken += len(piece) * 64
            yield piece * 64

    manifest = ExportManifest("append-log", "2", WatchCursor(), 0, ())
    with pytest.raises(CorruptionError, match="more folders, names and holes"):
        unpack_tar(endless(), str(tmp_path), manifest, b"", "artifact")
    assert taken < 1 << 25
