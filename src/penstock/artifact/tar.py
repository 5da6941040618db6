"""An artifact as a tar, made and taken apart piece by piece, without a file in between.

Made:   ./  MANIFEST.json  data  data/…  in this order, GNU headers, time and owner the same every time.
Taken:  in any order, sparse files and long names too.  Only what the manifest declares is written, and of no file
        more than it declares; links, devices and names that lead elsewhere are refused, whatever they are called.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, Final, cast

from penstock.artifact.manifest import MANIFEST_FILE, MANIFEST_MAX_BYTES, ExportManifest
from penstock.disk import disk_for
from penstock.disk.plain import make_folders
from penstock.disk.tree import free_bytes
from penstock.errors import CorruptionError, OptionsError

__all__ = ["pack", "unpack"]

CHUNK_BYTES: Final = 1 << 20
BLOCK: Final = 512
READ_MAX_BYTES: Final = 4 << 20
HEADERS_BYTES: Final = 16 << 20
HEADERS_BYTES_A_FILE: Final = 16 << 10
"""What a tar may have beside the contents of its files, which is all kept: folders, long names, maps of holes."""
"""The most that is read into memory at once: manifests and headers, whatever length a header claims."""


def pack(
    artifact: str, manifest: ExportManifest, data: bytes, progress: Callable[[int], None] = lambda _: None
) -> Iterator[bytes]:
    """Yield the tar of an artifact whose manifest has these bytes; CorruptionError if a file is not as declared."""
    yield _folder("./", manifest)
    yield _header(MANIFEST_FILE, len(data), manifest) + data + bytes(-len(data) % BLOCK)
    folders = {"data"}
    yield _folder("data", manifest)
    for file in manifest.files:
        parts = file.path.split("/")[:-1]
        for depth in range(2, len(parts) + 1):
            name = "/".join(parts[:depth])
            if name not in folders:
                folders.add(name)
                yield _folder(name, manifest)
        yield _header(file.path, file.size, manifest)
        at = 0
        with disk_for(artifact).open(f"{artifact}/{file.path}") as source:
            while at < file.size and (some := source.read_at(at, min(CHUNK_BYTES, file.size - at))):
                at += len(some)
                progress(len(some))
                yield some
        if at != file.size:
            raise CorruptionError(f"{artifact}/{file.path}", at, f"{at} bytes, where the manifest says {file.size}")
        yield bytes(-at % BLOCK)
    yield bytes(2 * BLOCK)


def _header(name: str, size: int, manifest: ExportManifest) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size, manifest.created_at_unix, 0o644
    return info.tobuf(tarfile.GNU_FORMAT)


def _folder(name: str, manifest: ExportManifest) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.mtime, info.mode = tarfile.DIRTYPE, manifest.created_at_unix, 0o755
    return info.tobuf(tarfile.GNU_FORMAT)


class _Pieces:
    """Pieces of bytes as a file that is read once, and only forward."""

    def __init__(self, pieces: Iterable[Any], headers: int) -> None:
        self._pieces, self._rest, self._at, self._headers = iter(pieces), memoryview(b""), 0, headers

    def allow(self, size: int) -> None:
        """Let so many bytes be read that are no headers."""
        self._headers += size

    def tell(self) -> int:
        return self._at

    def take(self, most: int) -> memoryview:
        """Return the next bytes where they are, at most so many; nothing at the end."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return self._rest
            self._rest = memoryview(piece)
        some, self._rest = self._rest[:most], self._rest[most:]
        self._at += len(some)
        return some

    def seek(self, position: int) -> int:
        if position < self._at:
            raise tarfile.StreamError("what comes in pieces cannot be read again")
        while self._at < position and self.take(position - self._at):
            pass
        return self._at

    def read(self, size: int) -> bytes:
        if not 0 <= size <= READ_MAX_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        self._headers -= size
        if self._headers < 0:
            raise tarfile.ReadError("more folders, names and holes than its files need")
        parts = []
        while size and (some := self.take(size)):
            parts.append(some)
            size -= len(some)
        return b"".join(parts)


def unpack(pieces: Iterable[Any], folder: str, manifest: ExportManifest, data: bytes, name: str) -> None:
    """Write the files that a manifest with these bytes declares into ``folder``, hashed on the way.

    CorruptionError, naming the member, for anything that is not an artifact with exactly this manifest.
    """
    if manifest.total_bytes > free_bytes(folder):
        raise OptionsError(f"{name}: {manifest.total_bytes} bytes, and only {free_bytes(folder)} are free in {folder}")
    missing = {file.path: file for file in manifest.files}
    embedded: bytes | None = None
    stream = _Pieces(pieces, HEADERS_BYTES + HEADERS_BYTES_A_FILE * len(manifest.files))
    try:
        with tarfile.TarFile(fileobj=cast("IO[bytes]", stream), mode="r") as tar:
            for member in tar:
                path = _checked(member, name)
                if path is None:
                    continue
                if path == MANIFEST_FILE:
                    if embedded is not None or member.size > MANIFEST_MAX_BYTES:
                        raise CorruptionError(name, 0, "a second manifest, or one that is too long")
                    stream.allow(member.size)
                    embedded = _read(tar, member)
                elif path.startswith("data/"):
                    declared = missing.pop(path, None)
                    if declared is None:
                        raise CorruptionError(name, 0, f"the member {path} is not declared, or there twice")
                    if member.size != declared.size:
                        reason = f"the member {path} has {member.size} bytes, where the manifest says {declared.size}"
                        raise CorruptionError(name, 0, reason)
                    _write(tar, stream, member, f"{folder}/{path}", declared.blake3, name)
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as exc:
        raise CorruptionError(name, 0, f"not a tar, or cut short: {exc}") from None
    if embedded is None:
        raise CorruptionError(name, 0, "there is no manifest in it")
    if embedded != data:
        raise CorruptionError(name, 0, "the manifest in it is not the one that was published")
    if missing:
        raise CorruptionError(name, 0, f"{min(missing)} is missing, though the manifest declares it")
    with disk_for(folder).create(f"{folder}/{MANIFEST_FILE}") as file:
        file.write_at(0, data)


def _checked(member: tarfile.TarInfo, name: str) -> str | None:
    """Return the path of a member below the artifact, None for a folder; CorruptionError for one that must not be."""
    shown = member.name[:200]
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    if member.name.startswith("/") or ".." in parts or "\\" in member.name or "\0" in member.name:
        raise CorruptionError(name, 0, f"the member {shown!r} leads out of the artifact")
    if member.isdir():
        return None
    if not member.isreg():
        kind = "a link" if member.issym() or member.islnk() else "a device or something else that is no file"
        raise CorruptionError(name, 0, f"the member {shown!r} is {kind}")
    return "/".join(parts)


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None  # it is a regular file
    data = file.read(MANIFEST_MAX_BYTES + 1)
    if len(data) != member.size:
        raise EOFError("the manifest is cut short")
    return data


def _contents(tar: tarfile.TarFile, stream: _Pieces, member: tarfile.TarInfo) -> Iterator[bytes | memoryview]:
    """Yield what a member holds: as it came where it lies in one piece, put together where it has holes."""
    if member.issparse():
        stream.allow(member.size)
        file = tar.extractfile(member)
        assert file is not None  # it is a regular file
        while data := file.read(CHUNK_BYTES):
            yield data
        return
    stream.seek(member.offset_data)
    left = member.size
    while left and (some := stream.take(min(CHUNK_BYTES, left))):
        left -= len(some)
        yield some


def _write(tar: tarfile.TarFile, stream: _Pieces, member: tarfile.TarInfo, path: str, wanted: str, name: str) -> None:
    from blake3 import blake3

    hasher, at = blake3(), 0
    make_folders(os.path.dirname(path))
    with disk_for(path).create(path) as file:
        for data in _contents(tar, stream, member):
            hasher.update(data)
            file.write_at(at, data)
            at += len(data)
    if at != member.size:
        raise EOFError(f"{member.name} is cut short")
    if hasher.hexdigest() != wanted:
        raise CorruptionError(
            name, 0, f"the BLAKE3 of {member.name} is {hasher.hexdigest()}, the manifest says {wanted}"
        )
