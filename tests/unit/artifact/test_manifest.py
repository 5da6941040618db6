"""The manifest has the bytes of the reference, and nothing else is read as one."""

from __future__ import annotations

from typing import Any

import pytest
from artifact_vectors import load, read

from penstock.artifact import ArtifactFile, ExportManifest, decode_manifest, encode_manifest, payload_name
from penstock.errors import CorruptionError, PenstockError, UnsupportedError
from penstock.types import VersionToken, WatchCursor

REFERENCE = read("artifacts/reference/MANIFEST.json")
REFUSED_HERE = {
    # The reference takes these; nobody writes them, and two readers could take them for different files.
    "array form, files as arrays", "cursor plus signs", "path dot inside", "path dot at end", "path double slash",
    "path trailing slash", "path nul", "path data slash slash", "path newline", "path data dot", "same file twice",
    "digest not hex",
}  # fmt: skip


def text_of(case: dict[str, Any]) -> bytes:
    data = bytes.fromhex(case["hex"]) if "hex" in case else case["text"].encode("utf-8", "surrogatepass")
    return data.ljust(case.get("pad", 0))


@pytest.mark.parametrize("artifact", load("artifacts/artifacts.json")["artifacts"], ids=lambda a: a["artifact"])
def test_a_manifest_of_the_reference_is_written_again_byte_for_byte(artifact: dict[str, Any]) -> None:
    data = read(f"artifacts/{artifact['artifact']}/MANIFEST.json")
    manifest = decode_manifest(data)
    assert encode_manifest(manifest) == data
    assert payload_name(data, manifest.rank) == artifact["payload_name"]
    assert manifest.cursor.token.raw.hex() == artifact["cursor"]


@pytest.mark.parametrize("case", load("transport/manifests.json")["cases"], ids=lambda case: case["name"])
def test_a_manifest_gets_the_verdict_of_the_reference_or_a_safer_one(case: dict[str, Any]) -> None:
    data, wanted = text_of(case), case["parse"]
    if len(data) > 1 << 20:  # the pointer is not even read: tests of the transport
        return
    try:
        found = decode_manifest(data)
    except PenstockError:
        assert wanted["result"] == "error" or case["name"] in REFUSED_HERE
        return
    assert wanted["result"] == "ok"
    assert found.cursor.token.raw.hex() == wanted["cursor"]
    assert [{"path": f.path, "size": f.size, "blake3": f.blake3} for f in found.files] == [
        {name: file[name] for name in ("path", "size", "blake3")} for file in wanted["files"]
    ]


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ((b'"schema_version": 1', b'"schema_version": 2'), UnsupportedError, "schema 2"),
        ((b'"backend": "append-log"', b'"backend": "append-log", "scope": [""]'), CorruptionError, "scope"),
        ((b'"backend": "append-log"', b'"backend": "append-log", "backend": "x"'), CorruptionError, "backend"),
        ((b'"created_at_unix": 1765400000', b'"created_at_unix": 1.0'), CorruptionError, "whole number"),
        ((b'"created_at_unix": 1765400000', b'"created_at_unix": -0'), CorruptionError, "unsigned"),
        ((b'"created_at_unix": 1765400000', b'"created_at_unix": true'), CorruptionError, "unsigned"),
        ((b"data/fold.snap", b"data/../fold.snap"), CorruptionError, "below data/"),
        ((b"data/fold.snap", b"/etc/passwd"), CorruptionError, "below data/"),
        ((b'"cursor_hex": "0000000000000003"', b'"cursor_hex": "%s"' % (b"0" * 26)), CorruptionError, "no cursor"),
    ],
)  # fmt: skip
def test_what_is_no_manifest_is_refused_by_name(change: tuple[bytes, bytes], error: type[Exception], says: str) -> None:
    assert change[0] in REFERENCE
    with pytest.raises(error, match=says):
        decode_manifest(REFERENCE.replace(*change))


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(CorruptionError):
        decode_manifest(b"[" * 100_000)


def test_files_with_names_of_any_language_are_written_as_they_are() -> None:
    files = (ArtifactFile("data/é\"'😀", 1, "ab" * 32),)
    manifest = ExportManifest("append-log", "2", WatchCursor(VersionToken(bytes(10))), 2**64 - 1, files)
    data = encode_manifest(manifest)
    assert 'é\\"'.encode() in data
    assert decode_manifest(data) == manifest
