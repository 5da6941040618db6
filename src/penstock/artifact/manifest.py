"""The manifest of an artifact, schema 1: which files a store was exported to, and the cursor they are exact at.

    artifact := MANIFEST.json  data/…

    {
      "schema_version": 1,                 always the same fields in this order, two spaces a level, no newline at the
      "backend": "append-log",             end: the payload of an artifact is named after these bytes
      "backend_version": "2",
      "cursor_hex": "0000000000000003",    the cursor's token; "" for none, 16 digits for a revision
      "created_at_unix": 1765400000,
      "files": [{"path", "size", "blake3"}]      by the parts of their paths, all below data/
    }

Any layout is read; unknown, repeated and missing fields are refused.  Fields in an array, in this order, are read too,
because the reference reads them.  Worked example and reasons: docs/formats/artifact.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from penstock.errors import CorruptionError, UnsupportedError
from penstock.types import TOKEN_MAX_BYTES, VersionToken, WatchCursor

__all__ = [
    "SCHEMA_VERSION",
    "MANIFEST_FILE",
    "MANIFEST_MAX_BYTES",
    "ArtifactFile",
    "ExportManifest",
    "decode_manifest",
    "encode_manifest",
    "payload_name",
    "rank_of",
]

SCHEMA_VERSION: Final = 1
MANIFEST_FILE: Final = "MANIFEST.json"
MANIFEST_MAX_BYTES: Final = 1 << 20
DATA: Final = "data/"
HASH: Final = re.compile(r"[0-9a-fA-F]{64}")
HEX: Final = re.compile(r"(?:[0-9a-fA-F]{2})*")


class ArtifactFile(msgspec.Struct, frozen=True):
    """One file of an artifact: its path from the root of the artifact, its size and its BLAKE3.

    >>> ArtifactFile("data/fold.snap", 6, "25" * 32).size
    6
    """

    path: str
    size: int
    blake3: str


class ExportManifest(msgspec.Struct, frozen=True):
    """What an artifact says of itself.

    >>> manifest = ExportManifest("append-log", "2", WatchCursor.of(3), 1765400000, ())
    >>> manifest.rank, manifest.total_bytes
    (3, 0)
    """

    backend: str
    backend_version: str
    cursor: WatchCursor
    created_at_unix: int
    files: tuple[ArtifactFile, ...]
    schema_version: int = SCHEMA_VERSION

    @property
    def rank(self) -> int:
        """How new it is: its revision, 0 for a cursor that is none or no revision."""
        return rank_of(self.cursor)

    @property
    def total_bytes(self) -> int:
        """What all files take together."""
        return sum(file.size for file in self.files)


def rank_of(cursor: WatchCursor) -> int:
    """Return the rank of a cursor.

    >>> rank_of(WatchCursor.of(9)), rank_of(WatchCursor()), rank_of(WatchCursor(VersionToken(bytes(10))))
    (9, 0, 0)
    """
    return cursor.token.as_int() or 0


def encode_manifest(manifest: ExportManifest) -> bytes:
    """Return the one form in which a manifest is written.

    >>> encode_manifest(ExportManifest("append-log", "2", WatchCursor(), 0, ())).decode().splitlines()[-2:]
    ['  "files": []', '}']
    """
    fields = {
        "schema_version": manifest.schema_version,
        "backend": manifest.backend,
        "backend_version": manifest.backend_version,
        "cursor_hex": manifest.cursor.token.raw.hex(),
        "created_at_unix": manifest.created_at_unix,
        "files": [{"path": file.path, "size": file.size, "blake3": file.blake3} for file in manifest.files],
    }
    return json.dumps(fields, indent=2, ensure_ascii=False).encode()


def payload_name(data: bytes, rank: int) -> str:
    """Return the name of the payload that belongs to these bytes of a manifest.

    >>> payload_name(b"", 3)
    '0000000000000003-af1349b9f5f9a1a6.tar'
    """
    from blake3 import blake3

    return f"{rank:016x}-{blake3(data).hexdigest()[:16]}.tar"


def decode_manifest(data: bytes, name: str = MANIFEST_FILE) -> ExportManifest:
    """Read a manifest; CorruptionError for what is none, UnsupportedError for one of a schema that is not read.

    >>> decode_manifest(b'{"schema_version": 1}')
    Traceback (most recent call last):
    penstock.errors.CorruptionError: MANIFEST.json at byte 0: malformed manifest: the field 'backend' is missing
    """
    try:
        text = data.decode()
        text.encode()
        found = json.loads(
            text, object_pairs_hook=_once, parse_float=_refuse, parse_constant=_refuse, parse_int=_integer
        )
        return _manifest(found)
    except (ValueError, RecursionError) as exc:
        if isinstance(exc, json.JSONDecodeError):
            raise CorruptionError(name, exc.pos, f"malformed manifest: {exc.msg}") from None
        raise CorruptionError(name, 0, f"malformed manifest: {exc}") from None
    except UnsupportedError as exc:
        raise UnsupportedError(f"{name}: {exc}") from None


def _check_schema(found: Any) -> None:
    """Refuse a manifest of a later schema by its name, whatever fields that one has."""
    version = found.get("schema_version") if isinstance(found, dict) else found[0] if found else None
    if isinstance(version, int) and SCHEMA_VERSION < version < 1 << 32:
        raise UnsupportedError(f"artifact schema {version} is not read by this release, which reads {SCHEMA_VERSION}")


def _manifest(found: Any) -> ExportManifest:
    if isinstance(found, (dict, list)):
        _check_schema(found)
    fields = _fields(found, ("schema_version", "backend", "backend_version", "cursor_hex", "created_at_unix", "files"))
    version = _number(fields["schema_version"], 32)
    backend, backend_version = _text(fields["backend"]), _text(fields["backend_version"])
    cursor_hex, created = _text(fields["cursor_hex"]), _number(fields["created_at_unix"], 64)
    listed = fields["files"]
    if not isinstance(listed, list):
        raise ValueError("files is not a list")  # noqa: TRY004 - one kind of error for all of it
    parts = [_fields(item, ("path", "size", "blake3")) for item in listed]
    files = [ArtifactFile(_text(f["path"]), _number(f["size"], 64), _text(f["blake3"])) for f in parts]
    if version != SCHEMA_VERSION:
        raise UnsupportedError(f"artifact schema {version} is not read by this release, which reads {SCHEMA_VERSION}")
    if not HEX.fullmatch(cursor_hex) or len(cursor_hex) > 2 * TOKEN_MAX_BYTES:
        raise ValueError(f"cursor_hex {cursor_hex[:40]!r} is no cursor")
    _check_files(files)
    cursor = WatchCursor(VersionToken(bytes.fromhex(cursor_hex)))
    return ExportManifest(backend, backend_version, cursor, created, tuple(files))


def _check_files(files: Sequence[ArtifactFile]) -> None:
    """Refuse paths that leave data/, or that two readers could understand differently."""
    seen: set[str] = set()
    for file in files:
        parts = file.path.removeprefix(DATA).split("/")
        if not file.path.startswith(DATA) or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"the path {file.path!r} is not one below {DATA}")
        if "\\" in file.path or any(ord(char) < 32 for char in file.path):
            raise ValueError(f"the path {file.path!r} has a character that is no part of a name")
        if file.path in seen:
            raise ValueError(f"{file.path} is listed twice")
        if not HASH.fullmatch(file.blake3):
            raise ValueError(f"the blake3 of {file.path} is not 64 hex digits")
        seen.add(file.path)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for index, (name, _) in enumerate(pairs) if name in dict(pairs[:index]))
        raise ValueError(f"the field {twice!r} is there twice")
    return found


def _fields(found: Any, names: tuple[str, ...]) -> dict[str, Any]:
    if isinstance(found, list):
        if len(found) != len(names):
            raise ValueError(f"{len(found)} fields in an array, where there are {len(names)}")
        return dict(zip(names, found, strict=True))
    if not isinstance(found, dict):
        raise ValueError("not an object")  # noqa: TRY004
    for name in names:
        if name not in found:
            raise ValueError(f"the field {name!r} is missing")
    for name in found:
        if name not in names:
            raise ValueError(f"unknown field {name!r}")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is not a string")  # noqa: TRY004
    value.encode()  # a lone surrogate is no text
    return value


def _number(value: Any, bits: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << bits:
        raise ValueError(f"{value!r:.40} is not an unsigned number of {bits} bits")
    return value


def _integer(text: str) -> int:
    if text.startswith("-") or len(text) > 20:
        raise ValueError(f"{text[:40]} is not an unsigned number")
    return int(text)


def _refuse(text: str) -> Any:
    raise ValueError(f"{text[:40]} is not a whole number")
