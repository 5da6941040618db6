"""Export and import: a store becomes an artifact and an artifact becomes a store, or nothing is there afterwards."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from artifact_vectors import load, unpack

from penstock.artifact import decode_manifest, export_store, import_artifact, read_manifest, verify_artifact
from penstock.disk.failpoint import arm
from penstock.errors import CorruptionError, OptionsError, PenstockError, UnsupportedError
from penstock.store import AppendLogStore, LmdbStore, RocksOptions, RocksStore
from penstock.testing.clock import FakeClock
from penstock.types import KvUpdate, WatchCursor

BACKENDS = ["append-log", "rocksdb", "lmdb"]


def make(backend: str, path: Path) -> Any:
    if backend == "append-log":
        return AppendLogStore.open(path)
    return RocksStore.open(path, RocksOptions(cache_bytes=0)) if backend == "rocksdb" else LmdbStore.open(path)


def fill(store: Any, count: int = 50) -> None:
    store.apply([KvUpdate.put(f"key.{n:04d}", b"v%d" % n * 5, n + 1) for n in range(count)], WatchCursor.of(count))
    store.apply(
        [KvUpdate.delete("key.0001", count + 1), KvUpdate.put("empty", b"", count + 2)], WatchCursor.of(count + 2)
    )


def contents(store: Any) -> list[tuple[str, bytes, bytes]]:
    return [(entry.key, entry.value, entry.version.raw) for entry in store.range()]


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    with AppendLogStore.open(tmp_path / "small.snap") as store:
        store.apply([KvUpdate.put("a", b"1", 1), KvUpdate.put("b", b"22", 2)], WatchCursor.of(2))
        export_store(store, tmp_path / "artifact", clock=FakeClock())
    return tmp_path / "artifact"


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_imported_store_is_the_one_that_was_exported(backend: str, tmp_path: Path) -> None:
    with make(backend, tmp_path / "fold") as store:
        fill(store)
        manifest = export_store(store, tmp_path / "artifact")
        wanted, digest = contents(store), store.digest()
        fill(store, 10)  # the artifact does not follow
    assert (manifest.backend, manifest.rank) == (backend, 52)
    assert verify_artifact(tmp_path / "artifact") == []
    assert import_artifact(tmp_path / "artifact", tmp_path / "copy") == manifest
    with make(backend, tmp_path / "copy") as copy:
        assert (contents(copy), copy.digest(), copy.cursor()) == (wanted, digest, WatchCursor.of(52))
        copy.apply([KvUpdate.put("tail", b"1", 53)], WatchCursor.of(53))
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith(".penstock-")) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_artifact_that_is_taken_becomes_the_store_without_a_copy(backend: str, tmp_path: Path) -> None:
    with make(backend, tmp_path / "fold") as store:
        fill(store)
        export_store(store, tmp_path / "artifact")
        wanted = contents(store)
    (tmp_path / "artifact/data/stray").write_bytes(b"x")
    with pytest.raises(CorruptionError):
        import_artifact(tmp_path / "artifact", tmp_path / "copy", take=True)
    (tmp_path / "artifact/data/stray").unlink()
    import_artifact(tmp_path / "artifact", tmp_path / "copy", take=True)
    with make(backend, tmp_path / "copy") as copy:
        assert contents(copy) == wanted
    assert not (tmp_path / "artifact/data").exists()


@pytest.mark.parametrize("take", [True, False])
def test_an_import_where_a_longer_store_was_removed_can_be_opened(take: bool, artifact: Path, tmp_path: Path) -> None:
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        store.apply([KvUpdate.put("old", bytes(5000), 1)], WatchCursor.of(1))
        store.sync()
    (tmp_path / "fold.snap").unlink()
    assert (tmp_path / "fold.snap.penstock-mark").exists()
    import_artifact(artifact, tmp_path / "fold.snap", take=take)
    for read_only in (True, False):
        with AppendLogStore.open(tmp_path / "fold.snap", read_only=read_only) as store:
            assert store.cursor() == WatchCursor.of(2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_store_can_be_exported(backend: str, tmp_path: Path) -> None:
    with make(backend, tmp_path / "fold") as store:
        manifest = export_store(store, tmp_path / "artifact")
    assert manifest.cursor.at_start
    import_artifact(tmp_path / "artifact", tmp_path / "copy")
    with make(backend, tmp_path / "copy") as copy:
        assert (copy.count(), copy.cursor()) == (0, WatchCursor())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_store_on_another_file_system_than_the_artifact_is_exported(backend: str, tmp_path: Path) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system here")
    folder = other / f"penstock-{os.getpid()}-{backend}"
    folder.mkdir()
    try:
        with make(backend, tmp_path / "fold") as store:
            fill(store)
            export_store(store, folder / "artifact")
        import_artifact(folder / "artifact", tmp_path / "copy")
        with make(backend, tmp_path / "copy") as copy:
            assert copy.count() == 50
    finally:
        shutil.rmtree(folder)


def test_an_export_is_exact_at_its_cursor_while_others_apply(tmp_path: Path) -> None:
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        done = threading.Event()

        def churn() -> None:
            number = 0
            while not done.is_set():
                number += 1
                store.apply([KvUpdate.put(f"k{number % 7}", b"%d" % number, number)], WatchCursor.of(number))

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            for turn in range(10):
                manifest = export_store(store, tmp_path / f"a{turn}")
                import_artifact(tmp_path / f"a{turn}", tmp_path / f"c{turn}")
                with AppendLogStore.open(tmp_path / f"c{turn}", read_only=True) as copy:
                    newest = max((entry.version.as_int() or 0 for entry in copy.range()), default=0)
                    assert newest == manifest.rank
        finally:
            done.set()
            thread.join()


@pytest.mark.parametrize(
    "name", ["abc", "fixture", "random", "empty", "versionstamp", "none_cursor", "cursor_only", "random600"]
)
def test_an_artifact_of_the_reference_is_imported_and_exported_to_the_same_bytes(name: str, tmp_path: Path) -> None:
    theirs = unpack(tmp_path) / "artifacts" / name
    manifest = import_artifact(theirs, tmp_path / "fold.snap")
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        ours = export_store(store, tmp_path / "ours", clock=FakeClock(now_ns=manifest.created_at_unix * 10**9))
    assert ours == manifest
    assert (tmp_path / "ours/MANIFEST.json").read_bytes() == (theirs / "MANIFEST.json").read_bytes()
    assert (tmp_path / "ours/data/fold.snap").read_bytes() == (theirs / "data/fold.snap").read_bytes()


@pytest.mark.parametrize("case", load("artifacts/import.json")["cases"], ids=lambda case: case["name"])
def test_an_import_ends_as_the_reference_does(case: dict[str, Any], tmp_path: Path) -> None:
    theirs = unpack(tmp_path) / "artifacts" / case["artifact"]
    destination = tmp_path / "place" / "fold.snap"
    destination.parent.mkdir()
    for step in case["mutations"]:
        change(theirs, destination, step)
    before = sorted(os.listdir(destination.parent))
    try:
        import_artifact(theirs, destination)
    except (PenstockError, OSError) as exc:
        assert case["import"]["result"] == "error"
        assert ".penstock-import-" not in str(exc)  # what is named is still there
        assert sorted(os.listdir(destination.parent)) == before
        return
    assert case["import"]["result"] == "ok"
    with AppendLogStore.open(destination) as store:
        assert (store.count(), store.cursor().token.raw.hex()) == (case["import"]["entries"], case["import"]["cursor"])


def change(artifact: Path, destination: Path, step: dict[str, Any]) -> None:
    path = artifact / step.get("path", "")
    match step["do"]:
        case "flip":
            data = bytearray(path.read_bytes())
            data[step["offset"]] ^= 0xFF
            path.write_bytes(data)
        case "remove":
            path.unlink()
        case "write":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes.fromhex(step["hex"]))
        case "text":
            path.write_text(step["text"])
        case "mkdir":
            path.mkdir(parents=True)
        case "symlink":
            path.symlink_to(step["to"])
        case "replace":
            text = path.read_text()
            assert step["from"] in text
            path.write_text(text.replace(step["from"], step["to"]))
        case "rehash":
            rehash(artifact, step["path"])
        case "dest_file":
            destination.write_bytes(b"here")
        case "dest_dir":
            destination.mkdir()
        case other:
            raise AssertionError(other)


def test_tables_of_a_newer_engine_are_not_called_damaged(tmp_path: Path) -> None:
    """Those of the reference are newer than what rocksdict reads."""
    with make("rocksdb", tmp_path / "fold") as store:
        fill(store)
        export_store(store, tmp_path / "artifact")
    for table in (tmp_path / "artifact/data").glob("*.sst"):
        data = bytearray(table.read_bytes())
        data[-12:-8] = (7).to_bytes(4, "little")  # in its footer, in front of the magic number
        table.write_bytes(data)
        rehash(tmp_path / "artifact", f"data/{table.name}")
    with pytest.raises(UnsupportedError, match="format_version: 7") as caught:
        import_artifact(tmp_path / "artifact", tmp_path / "again")
    assert str(caught.value).startswith(f"{tmp_path}/artifact/data/")
    assert not (tmp_path / "again").exists()
    (problem,) = verify_artifact(tmp_path / "artifact")
    assert "format_version: 7" in problem.reason


def rehash(artifact: Path, name: str) -> None:
    from blake3 import blake3

    manifest = json.loads((artifact / "MANIFEST.json").read_text())
    data = (artifact / name).read_bytes()
    for file in manifest["files"]:
        if file["path"] == name:
            file.update(size=len(data), blake3=blake3(data).hexdigest())
    (artifact / "MANIFEST.json").write_text(json.dumps(manifest, indent=2))


def test_no_single_flipped_byte_of_an_artifact_becomes_a_store(artifact: Path, tmp_path: Path) -> None:
    """Of the manifest only ``created_at_unix`` can change and be read: it says nothing about the fold."""
    for name in ("MANIFEST.json", "data/fold.snap"):
        path = artifact / name
        good = path.read_bytes()
        free = range(good.find(b"created_at_unix"), good.find(b'"files"')) if name == "MANIFEST.json" else range(0)
        for at in range(len(good)):
            for bit in (1, 0x80):
                path.write_bytes(good[:at] + bytes((good[at] ^ bit,)) + good[at + 1 :])
                copy = tmp_path / "copy.snap"
                try:
                    import_artifact(artifact, copy)
                except (PenstockError, OSError):
                    assert not copy.exists(), (name, at)
                    continue
                assert name == "MANIFEST.json", at
                assert at in free or same_meaning(good, path.read_bytes()), (at, path.read_bytes())
                copy.unlink()
        path.write_bytes(good)


def same_meaning(good: bytes, changed: bytes) -> bool:
    """Whether two manifests say the same: white space may change, and hex digits of the cursor their case."""
    return decode_manifest(good) == decode_manifest(changed)


def test_no_truncated_artifact_becomes_a_store(artifact: Path, tmp_path: Path) -> None:
    for name in ("MANIFEST.json", "data/fold.snap"):
        path = artifact / name
        good = path.read_bytes()
        for length in range(len(good)):
            path.write_bytes(good[:length])
            with pytest.raises((CorruptionError, UnsupportedError)):
                import_artifact(artifact, tmp_path / "copy.snap")
            assert not (tmp_path / "copy.snap").exists()
            assert verify_artifact(artifact) != []
        path.write_bytes(good)


def test_nothing_is_put_where_something_is(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"mine")
    with pytest.raises(OptionsError, match="something is here"):
        import_artifact(artifact, tmp_path / "taken")
    with AppendLogStore.open(tmp_path / "fold.snap") as store, pytest.raises(OptionsError, match="something is here"):
        export_store(store, artifact)
    assert (tmp_path / "taken").read_bytes() == b"mine"
    assert verify_artifact(artifact) == []


def test_a_destination_that_appears_at_the_last_moment_is_left_alone(artifact: Path, tmp_path: Path) -> None:
    taken = tmp_path / "copy.snap"
    with arm("artifact.import.checked", lambda: taken.write_bytes(b"mine")), pytest.raises(OptionsError):
        import_artifact(artifact, taken)
    assert taken.read_bytes() == b"mine"


@pytest.mark.parametrize("backend", ["fjall", "sled"])
def test_an_artifact_of_another_backend_is_refused_by_name(backend: str, artifact: Path, tmp_path: Path) -> None:
    path = artifact / "MANIFEST.json"
    path.write_text(path.read_text().replace("append-log", backend))
    with pytest.raises(UnsupportedError, match=backend):
        import_artifact(artifact, tmp_path / "copy")


def test_a_manifest_of_a_later_schema_is_refused_by_name(artifact: Path, tmp_path: Path) -> None:
    path = artifact / "MANIFEST.json"
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(UnsupportedError, match="schema 2"):
        read_manifest(artifact)


@pytest.mark.parametrize("where", ["artifact.export.written", "artifact.export.staged"])
def test_an_export_that_fails_leaves_nothing(where: str, tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("the disk is full")

    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        with arm(where, fail), pytest.raises(OSError, match="full"):
            export_store(store, tmp_path / "artifact")
        assert not any("artifact" in name for name in os.listdir(tmp_path))
        export_store(store, tmp_path / "artifact")


@pytest.mark.parametrize("other", ["at another cursor", "with an entry less"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_that_is_not_what_the_store_is_becomes_no_artifact(backend: str, other: str, tmp_path: Path) -> None:
    with make(backend, tmp_path / "other") as store:
        fill(store, 50 if other == "at another cursor" else 49)
        store.apply([], WatchCursor.of(60 if other == "at another cursor" else 52))
        export_store(store, tmp_path / "torn")

    def tear() -> None:
        (data,) = tmp_path.glob(".penstock-artifact-*/artifact/data")
        shutil.rmtree(data)
        shutil.copytree(tmp_path / "torn" / "data", data)

    with make(backend, tmp_path / "fold") as store:
        fill(store)
        with arm("artifact.export.written", tear), pytest.raises(CorruptionError, match="the copy"):
            export_store(store, tmp_path / "artifact")
        assert not any("artifact" in name for name in os.listdir(tmp_path))
        assert export_store(store, tmp_path / "artifact").cursor == WatchCursor.of(52)
