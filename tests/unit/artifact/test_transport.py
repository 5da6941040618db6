"""Publishing: payloads never change, the pointer only goes forward, and what is fetched is what was published."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from artifact_vectors import load, unpack
from obstore.store import LocalStore, MemoryStore

from penstock.artifact import Transport, encode_manifest, import_artifact, read_manifest, transport_for
from penstock.artifact.keys import ArtifactNames
from penstock.artifact.manifest import rank_of
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


POINTER = "p/k.manifest.json"


class Between:
    """A store in which something happens before the next conditional put of the pointer."""

    def __init__(self, store: Any, act: Callable[[], None], times: int) -> None:
        self._store, self._act, self._left = store, act, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _before(self, key: str) -> None:
        if self._left and key == POINTER:
            self._left -= 1
            self._act()

    def create(self, key: str, data: bytes) -> Tag:
        self._before(key)
        return self._store.create(key, data)  # type: ignore[no-any-return]

    def swap(self, key: str, data: bytes, tag: Tag) -> Tag:
        self._before(key)
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
        return self._lost(key, self._store.create(key, data))

    def swap(self, key: str, data: bytes, tag: Tag) -> Tag:
        return self._lost(key, self._store.swap(key, data, tag))

    def _lost(self, key: str, tag: Tag) -> Tag:
        if key in (POINTER, "head"):
            raise RetryError("no answer")
        return tag


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


class Careless(Obstore):
    """A store that takes conditions and does not look at them, as some servers do."""

    def create(self, key: str, data: bytes) -> Tag:
        self.put(key, data)
        return self.get(key)[1].tag

    def swap(self, key: str, data: bytes, tag: Tag) -> Tag:
        return self.create(key, data)


@pytest.mark.parametrize("kind", ["cannot", "does not"])
def test_a_store_without_conditions_is_refused_unless_told_otherwise(
    kind: str, make_artifact: Make, tmp_path: Path
) -> None:
    (tmp_path / "objects").mkdir()
    plain = (
        Obstore(LocalStore(tmp_path / "objects"), "file://") if kind == "cannot" else Careless(MemoryStore(), "m://")
    )
    transport = Transport(plain, "p")
    with pytest.raises(UnsupportedError, match="allow_non_atomic_pointer"):
        transport.upload(make_artifact(2), "k")
    assert list(plain.objects()) == []
    told = Transport(plain, "p", allow_non_atomic_pointer=True)
    assert told.upload(make_artifact(1), "k").result == "published"
    with pytest.raises(UnsupportedError, match="allow_non_atomic_pointer"):
        transport.upload(make_artifact(2), "k")
    assert transport.manifest("k").rank == 1
    assert told.upload(make_artifact(3), "k").result == "published"
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


# --- Trouble


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
