"""Publishing: payloads never change, the pointer only goes forward, and what is fetched is what was published."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from artifact_vectors import load, unpack
from obstore.store import LocalStore, MemoryStore

from penstock.artifact import Transport, encode_manifest, import_artifact, read_manifest, transport_for
from penstock.artifact.export import hash_file
from penstock.artifact.keys import ArtifactNames
from penstock.artifact.manifest import ArtifactFile, rank_of
from penstock.artifact.tar import pack, unpack as unpack_tar
from penstock.disk.failpoint import arm
from penstock.disk.folderstore import FolderStore
from penstock.disk.objectstore import ObjectInfo, Obstore, Tag, publish
from penstock.errors import CorruptionError, OptionsError, PenstockError, RetryError, UnsupportedError
from penstock.store import AppendLogStore
from penstock.testing.clock import FakeClock
from penstock.types import VersionToken, WatchCursor

Make = Callable[..., Path]


def memory() -> Obstore:
    return Obstore(MemoryStore(), "memory://")


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return memory() if request.param == "memory" else FolderStore(str(tmp_path / "objects"))


def cursor_of(text: str) -> WatchCursor:
    return WatchCursor(VersionToken(bytes.fromhex(text)))


# --- Keys


@pytest.mark.parametrize("case", load("transport/object_keys.json")["cases"])
def test_objects_have_the_names_the_reference_gives_them(case: dict[str, Any]) -> None:
    place = ArtifactNames(case["prefix"], case["key"])
    name = f"{rank_of(cursor_of(case['cursor'])):016x}-{{hash16}}.tar"
    encoded = place.payload(name).replace("%7Bhash16%7D", "{hash16}")
    assert sorted([place.pointer, encoded]) == sorted(case["objects"])


# --- Round trips


def test_what_was_published_is_downloaded(store: Any, make_artifact: Make, tmp_path: Path) -> None:
    transport = Transport(store, "folds~x")
    artifact = make_artifact(7)
    moved: list[int] = []
    assert transport.upload(artifact, "edge/latest", moved.append).result == "published"
    assert sum(moved) == read_manifest(artifact).total_bytes
    assert transport.manifest("edge/latest") == read_manifest(artifact)
    assert transport.download("edge/latest", tmp_path / "copy") == read_manifest(artifact)
    import_artifact(tmp_path / "copy", tmp_path / "fold.snap")
    with AppendLogStore.open(tmp_path / "fold.snap") as fold:
        assert fold.cursor() == WatchCursor.of(7)


@pytest.mark.parametrize("tree", load("transport/trees.json")["trees"], ids=lambda tree: tree["tree"])
def test_an_object_tree_of_the_reference_is_downloaded(tree: dict[str, Any], tmp_path: Path) -> None:
    root = unpack(tmp_path / "v") / "transport" / "store" / tree["tree"]
    transport = Transport(FolderStore(str(root)), tree["prefix"])
    for number, wanted in enumerate(tree["downloads"]):
        target = tmp_path / f"copy{number}"
        if wanted["download"]["result"] != "ok":
            with pytest.raises((PenstockError, OSError)):
                transport.download(wanted["key"], target)
            continue
        manifest = transport.download(wanted["key"], target)
        assert manifest.cursor.token.raw.hex() == wanted["download"]["cursor"]
        assert [file.blake3 for file in manifest.files] == [file["blake3"] for file in wanted["download"]["files"]]


@pytest.mark.parametrize(
    "case", load("transport/downloads.json")["cases"], ids=lambda c: f"{c['do']}-{c.get('keep', '')}"
)
def test_a_changed_tree_is_downloaded_only_if_it_can_be_imported(case: dict[str, Any], tmp_path: Path) -> None:
    root = unpack(tmp_path / "v") / "transport" / "store" / case["tree"]
    pointer = root / "folds/edge/latest.manifest.json"
    (payload,) = (root / "folds/edge/latest.payloads").iterdir()
    good = payload.read_bytes()
    match case["do"]:
        case "remove_payload":
            payload.unlink()
        case "remove_pointer":
            pointer.unlink()
        case "pointer_extra_newline":
            pointer.write_bytes(pointer.read_bytes() + b"\n")
        case "pointer_extra_newline_and_payload_renamed":
            from penstock.artifact import payload_name

            pointer.write_bytes(pointer.read_bytes() + b"\n")
            payload.rename(payload.parent / payload_name(pointer.read_bytes(), 3))
        case "payload_truncated":
            payload.write_bytes(good[: case["keep"]])
        case "payload_empty":
            payload.write_bytes(b"")
        case "payload_junk":
            payload.write_bytes(b"junk" * 300)
        case "payload_byte":
            at = good.index(b"PGSS") + 20
            payload.write_bytes(good[:at] + bytes((good[at] ^ 0xFF,)) + good[at + 1 :])
        case "payload_padding":
            payload.write_bytes(good + bytes(10240))
    transport = Transport(FolderStore(str(root)), case["prefix"])
    if case["import_remote"]["result"] == "ok":
        transport.download(case["key"], tmp_path / "copy")
        import_artifact(tmp_path / "copy", tmp_path / "fold.snap")
    else:
        with pytest.raises((PenstockError, FileNotFoundError)):
            transport.download(case["key"], tmp_path / "copy")
        assert not (tmp_path / "copy").exists()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".penstock-")]


# --- The pointer


@pytest.mark.parametrize("sequence", load("transport/publish.json")["sequences"])
def test_candidates_are_published_or_superseded_as_by_the_reference(
    sequence: dict[str, Any], make_artifact: Make
) -> None:
    objects = memory()
    transport = Transport(objects, "p")
    for salt, step in enumerate(sequence["steps"]):
        artifact = make_artifact(0 if step["candidate"] else None, salt)
        manifest = read_manifest(artifact)
        # The cursor alone decides, so the files may stay as they are.
        import msgspec

        (artifact / "MANIFEST.json").write_bytes(
            encode_manifest(msgspec.structs.replace(manifest, cursor=cursor_of(step["candidate"])))
        )
        outcome = transport.upload(artifact, "k")
        assert (
            outcome.result == {"Published": "published", "SupersededByNewer": "superseded"}[step["outcome"]["result"]]
        )
        if outcome.remote_cursor is not None:
            assert outcome.remote_cursor.token.raw.hex() == step["outcome"]["remote_cursor"]
        assert transport.manifest("k").cursor.token.raw.hex() == step["pointer_cursor_after"]
        assert len(list(objects.objects())) == step["objects_after"]


@pytest.mark.parametrize("kept", ["everything", "nothing else", "an array"])
def test_a_pointer_of_a_later_schema_is_left_alone_by_its_name(kept: str, make_artifact: Make) -> None:
    objects = memory()
    transport = Transport(objects)
    transport.upload(make_artifact(9), "k")
    found = json.loads(objects.get("k.manifest.json")[0])
    later: Any = {**found, "schema_version": 2, "scope": [""]}
    if kept == "nothing else":
        later = {"schema_version": 2, "cursor": 9}
    elif kept == "an array":
        later = list(later.values())
    objects.put("k.manifest.json", json.dumps(later, indent=2).encode())
    before = {info.key: info.tag for info in objects.objects()}
    artifact = make_artifact(5)
    with pytest.raises(UnsupportedError, match="schema 2"):
        transport.upload(artifact, "k")
    with pytest.raises(UnsupportedError, match="schema 2"):
        transport.manifest("k")
    with pytest.raises(UnsupportedError, match="schema 2"):
        transport.download("k", artifact.parent / "copy")
    assert transport.prune("k", 0) == []
    assert {info.key: info.tag for info in objects.objects() if info.key in before} == before


@pytest.mark.parametrize("case", load("transport/manifests.json")["cases"], ids=lambda case: case["name"])
def test_a_pointer_that_is_there_is_replaced_only_where_the_reference_would(
    case: dict[str, Any], make_artifact: Make
) -> None:
    data = bytes.fromhex(case["hex"]) if "hex" in case else case["text"].encode("utf-8", "surrogatepass")
    objects = memory()
    objects.put("k.manifest.json", data.ljust(case.get("pad", 0)))
    try:
        outcome = Transport(objects).upload(make_artifact(5), "k").result
    except UnsupportedError:
        return  # a schema this release does not know is not replaced by it
    except CorruptionError:
        assert case["publish_rank_5_over_it"]["result"] == "error"
        return
    if outcome == "published":
        assert case["publish_rank_5_over_it"]["result"] in ("Published", "SupersededByNewer")
        if case["name"] != "cursor plus signs":
            assert case["publish_rank_5_over_it"]["result"] == "Published"
    else:
        assert case["publish_rank_5_over_it"]["result"] == "SupersededByNewer"


def test_of_many_publishers_at_once_the_newest_stays(store: Any, make_artifact: Make, tmp_path: Path) -> None:
    artifacts = [make_artifact(revision) for revision in range(1, 7)]
    transport, outcomes = Transport(store, "p"), {}

    def run(number: int) -> None:
        while number not in outcomes:
            try:
                outcomes[number] = transport.upload(artifacts[number], "k").result
            except RetryError:
                continue

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(artifacts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert transport.manifest("k").rank == 6
    assert outcomes[5] == "published"
    assert transport.download("k", tmp_path / "copy").rank == 6


class Between:
    """A store in which something happens before the next conditional put."""

    def __init__(self, store: Any, act: Callable[[], None], times: int) -> None:
        self._store, self._act, self._left = store, act, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _before(self) -> None:
        if self._left:
            self._left -= 1
            self._act()

    def create(self, key: str, data: bytes) -> Tag:
        self._before()
        return self._store.create(key, data)  # type: ignore[no-any-return]

    def swap(self, key: str, data: bytes, tag: Tag) -> Tag:
        self._before()
        return self._store.swap(key, data, tag)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("others", "ends"), [(7, "published"), (8, "gives up")])
def test_the_pointer_is_tried_eight_times(others: int, ends: str, make_artifact: Make) -> None:
    objects = memory()
    artifact, same = make_artifact(9), make_artifact(5)
    rivals = iter([make_artifact(5, salt) for salt in range(1, 10)])
    plain = Transport(objects, "p")
    plain.upload(same, "k")
    transport = Transport(Between(objects, lambda: plain.upload(next(rivals), "k"), others), "p")  # type: ignore[arg-type,func-returns-value]
    if ends == "published":
        assert transport.upload(artifact, "k").result == "published"
    else:
        with pytest.raises(RetryError, match="tried 8 times"):
            transport.upload(artifact, "k")
        assert plain.manifest("k").rank == 5


def test_a_newer_artifact_that_comes_between_supersedes(make_artifact: Make) -> None:
    objects = memory()
    plain, newer = Transport(objects, "p"), make_artifact(12)
    transport = Transport(Between(objects, lambda: plain.upload(newer, "k"), 1), "p")  # type: ignore[arg-type,func-returns-value]
    outcome = transport.upload(make_artifact(9), "k")
    assert (outcome.result, outcome.remote_cursor) == ("superseded", WatchCursor.of(12))


class Answers(Between):
    """A store that does what is asked and then says that it did not know."""

    def create(self, key: str, data: bytes) -> Tag:
        self._store.create(key, data)
        raise RetryError("no answer")

    def swap(self, key: str, data: bytes, tag: Tag) -> Tag:
        self._store.swap(key, data, tag)
        raise RetryError("no answer")


def test_a_put_whose_answer_was_lost_counts_as_done(make_artifact: Make) -> None:
    transport = Transport(Answers(memory(), print, 0), "p")  # type: ignore[arg-type]
    assert transport.upload(make_artifact(1), "k").result == "published"
    assert transport.upload(make_artifact(2), "k").result == "published"
    assert transport.manifest("k").rank == 2


def test_a_lost_answer_is_found_out_by_reading_back() -> None:
    objects = memory()
    lossy: Any = Answers(objects, print, 0)
    first = publish(lossy, "head", b"1", None)
    assert publish(lossy, "head", b"2", first) == objects.get("head")[1].tag


def test_a_store_without_conditions_is_refused_unless_told_otherwise(make_artifact: Make, tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    plain = Obstore(LocalStore(tmp_path / "objects"), "file://")
    transport = Transport(plain, "p")
    assert transport.upload(make_artifact(1), "k").result == "published"
    with pytest.raises(UnsupportedError, match="allow_non_atomic_pointer"):
        transport.upload(make_artifact(2), "k")
    assert transport.manifest("k").rank == 1
    assert Transport(plain, "p", allow_non_atomic_pointer=True).upload(make_artifact(3), "k").result == "published"
    assert transport.manifest("k").rank == 3


def test_a_crash_between_payload_and_pointer_leaves_the_old_artifact(
    store: Any, make_artifact: Make, tmp_path: Path
) -> None:
    transport = Transport(store, "p")
    transport.upload(make_artifact(1), "k")

    def crash() -> None:
        raise KeyboardInterrupt

    for where in ("artifact.upload.before", "artifact.upload.payload", "artifact.pointer.seen"):
        with arm(where, crash), pytest.raises(KeyboardInterrupt):
            transport.upload(make_artifact(2), "k")
        assert transport.download("k", tmp_path / where).rank == 1
    assert transport.upload(make_artifact(3), "k").result == "published"


# --- Prune


@pytest.mark.parametrize("case", load("transport/prune.json")["cases"])
def test_what_is_pruned_is_what_the_reference_prunes(case: dict[str, Any], make_artifact: Make) -> None:
    objects = memory()
    transport = Transport(objects, "p")
    if "pointer_text" in case:
        objects.put("p/k.manifest.json", case["pointer_text"].encode())
    elif "pointer_cursor" in case:
        import msgspec

        artifact = make_artifact(0)
        manifest = msgspec.structs.replace(read_manifest(artifact), cursor=cursor_of(case["pointer_cursor"]))
        (artifact / "MANIFEST.json").write_bytes(encode_manifest(manifest))
        transport.upload(artifact, "k")
    for name in case["planted"]:
        objects.put(name, b"x")
    assert sorted(transport.prune("k", case["grace_s"])) == sorted(case["deleted_objects"])
    left = {info.key for info in objects.objects()}
    assert left.isdisjoint(case["deleted_objects"])
    assert set(case["planted"]) - set(case["deleted_objects"]) <= left


def test_a_young_payload_stays_until_the_grace_is_over(store: Any, make_artifact: Make, tmp_path: Path) -> None:
    import time

    clock = FakeClock(now_ns=time.time_ns())
    transport = Transport(store, "p", clock=clock)
    transport.upload(make_artifact(1), "k")
    transport.upload(make_artifact(2), "k")
    assert transport.prune("k", 3600) == []
    clock.pass_(3700)
    assert len(transport.prune("k", 3600)) == 1
    assert transport.download("k", tmp_path / "copy").rank == 2


# --- Hostile tars


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
    import subprocess

    import msgspec

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
    import msgspec

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


def test_a_payload_that_shrank_while_it_went_up_is_not_published(make_artifact: Make) -> None:
    artifact = make_artifact(3)
    (artifact / "data/fold.snap").write_bytes(b"PGSS")
    objects = memory()
    with pytest.raises(CorruptionError):
        Transport(objects, "p").upload(artifact, "k")
    assert list(objects.objects()) == []


def test_a_pointer_longer_than_a_mebibyte_is_refused(store: Any, tmp_path: Path) -> None:
    store.put("k.manifest.json", bytes((1 << 20) + 1))
    with pytest.raises(CorruptionError):
        Transport(store).download("k", tmp_path / "copy")


@pytest.mark.parametrize("url", ["gopher://x/y", "s3://"])
def test_a_url_that_names_no_store_is_refused(url: str) -> None:
    with pytest.raises((UnsupportedError, OptionsError)):
        transport_for(url)


def test_listing_objects_gives_what_a_store_knows(store: Any) -> None:
    store.put("a/b", b"12")
    (info,) = store.objects("a")
    assert isinstance(info, ObjectInfo)
    assert (info.key, info.size) == ("a/b", 2)


@pytest.mark.parametrize("how", ["folders", "names", "holes"])
def test_a_tar_of_folders_names_or_holes_without_end_is_refused(how: str, tmp_path: Path) -> None:
    """All of that is kept in memory; the contents of files are not."""
    from penstock.artifact.manifest import ExportManifest

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
