"""A disk of objects reads what a folder would, in few requests, and never mixes two versions of an object."""

from __future__ import annotations

import multiprocessing
import os
import threading
import uuid
from collections.abc import Callable
from io import UnsupportedOperation
from pathlib import Path
from typing import Any

import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore, S3Store

from penstock.disk import object_store_for, read_disk_for, view_of
from penstock.disk.folderstore import FolderStore
from penstock.disk.objects import ObjectDisk, ObjectDiskOptions
from penstock.disk.objectstore import (
    ObjectOptions,
    Obstore,
    Tag,
    check_conditions,
    make_store,
    publish,
)
from penstock.errors import (
    AlreadyExists,
    ConflictError,
    OptionsError,
    ReplacedError,
    RetryError,
    RevisionMismatch,
    UnsupportedError,
)
from penstock.log.detect import open_log
from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.log.xchannel import Writer
from penstock.store import AppendLogStore, open_store
from penstock.types import KvUpdate, WatchCursor


class Counting:
    """A store that counts what it is asked for."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.ranges: list[tuple[int, int]] = []
        self._mutex = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get_range(self, key: str, start: int, end: int, tag: Tag | None = None) -> Any:
        with self._mutex:
            self.ranges.append((start, end))
        return self._store.get_range(key, start, end, tag)


def memory() -> Obstore:
    return Obstore(MemoryStore(), "memory://")


def disk_with(data: bytes, **options: int) -> tuple[ObjectDisk, Counting]:
    store = Counting(memory())
    store.put("logs/a", data)
    return ObjectDisk(store, "memory://", ObjectDiskOptions(**options)), store  # type: ignore[arg-type]


def test_names_sizes_and_bytes_are_those_of_the_objects() -> None:
    disk, store = disk_with(b"hello")
    store.put("logs/sub/b", b"")
    assert disk.list("memory:///logs") == ["a", "sub"]
    assert disk.list("memory:///logs/") == ["a", "sub"]
    with pytest.raises(FileNotFoundError):
        disk.list("memory:///nowhere")
    stat, folder = disk.stat("memory:///logs/a"), disk.stat("memory:///logs/sub")
    assert stat is not None
    assert folder is not None
    assert (stat.size, stat.is_folder, folder.is_folder) == (5, False, True)
    assert disk.stat("memory:///logs/none") is None
    with disk.open("memory:///logs/a") as file:
        assert file.stat() == stat
        assert (file.read_at(1, 3), file.read_at(3, 100), file.read_at(5, 1), file.read_at(99, 1)) == (
            b"ell",
            b"lo",
            b"",
            b"",
        )
        target = bytearray(4)
        assert (file.read_into(1, memoryview(target)), bytes(target)) == (4, b"ello")
    with pytest.raises(FileNotFoundError):
        disk.open("memory:///logs/none")
    with pytest.raises(FileNotFoundError):
        disk.open("memory:///logs/../secret")
    with disk.open("memory:///logs/sub/b") as empty:
        assert empty.read_at(0, 10) == b""


def test_an_object_cannot_be_mapped_and_is_read_instead() -> None:
    disk, _ = disk_with(bytes(range(200)))
    with disk.open("memory:///logs/a") as file:
        with pytest.raises(UnsupportedOperation):
            file.map(0, 10)
        assert bytes(view_of(file, 190, 4096)) == bytes(range(190, 200))
        assert bytes(view_of(file, 500, 10)) == b""


def test_who_reads_on_gets_blocks_ahead_and_nothing_is_asked_for_twice() -> None:
    data = os.urandom(100 * 100)
    disk, store = disk_with(data, block_bytes=100, ahead_blocks=8)
    with disk.open("memory:///logs/a") as file:
        assert b"".join(file.read_at(at, 37) for at in range(0, len(data), 37)) == data
    assert len(store.ranges) == len(set(store.ranges)) == 100
    assert all(end - start == 100 for start, end in store.ranges)


def test_a_look_here_and_there_reads_nothing_ahead() -> None:
    disk, store = disk_with(bytes(10_000), block_bytes=100, ahead_blocks=8)
    with disk.open("memory:///logs/a") as file:
        for at in (5000, 200, 9000, 7000):
            file.read_at(at, 10)
    assert len(store.ranges) == 4


def test_what_is_kept_is_bounded() -> None:
    disk, store = disk_with(bytes(10_000), block_bytes=100, cache_bytes=1000)
    with disk.open("memory:///logs/a") as file:
        for _ in range(2):
            for at in range(0, 10_000, 100):
                file.read_at(at, 100)
    assert disk._kept_bytes <= 1000
    assert len(store.ranges) > 150  # the second time most of it was gone


def test_an_object_replaced_while_it_is_read_is_noticed() -> None:
    disk, store = disk_with(bytes(1000), block_bytes=100)
    with disk.open("memory:///logs/a") as file:
        file.read_at(0, 10)
        store.put("logs/a", bytes(1001))
        with pytest.raises(ReplacedError):
            file.read_at(500, 10)
    disk._known.clear()
    with disk.open("memory:///logs/a") as again:
        assert again.stat().size == 1001
        assert again.stat().identity != file.stat().identity


# --- Logs and folds by URL


def xchannel(path: str) -> None:
    with Writer.open(path, region_bytes=8192, roll_bytes=65536) as writer:
        for number in range(3000):
            writer.append(b"record %d" % number * 4)


def messagelog(path: str) -> None:
    with MessageLog.open(path, MessageLogOptions(segment_bytes=20_000)) as writer:
        writer.append_many([b"record %d" % number * 4 for number in range(3000)])


def filechannel(path: str) -> None:
    with FileChannel.open(path, ChannelOptions(segment_bytes=20_000)) as channel:
        for start in range(0, 3000, 100):
            channel.append_many([b"record %d" % number * 4 for number in range(start, start + 100)])


@pytest.mark.parametrize("write", [xchannel, messagelog, filechannel])
@pytest.mark.parametrize("by", ["memory", "file"])
def test_every_log_is_read_by_url_as_from_its_folder(write: Callable[[str], None], by: str, tmp_path: Path) -> None:
    write(str(tmp_path / "log"))
    name = uuid.uuid4().hex
    url = f"file://{tmp_path}/log"
    if by == "memory":
        url = f"memory://{name}/logs/log"
        store = object_store_for(f"memory://{name}/logs")
        for info in FolderStore(str(tmp_path)).objects():
            store.put(info.key, (tmp_path / info.key).read_bytes())
    with open_log(str(tmp_path / "log")) as local, open_log(url) as remote:
        assert remote.format == local.format
        assert (remote.first_position, remote.next_position) == (local.first_position, local.next_position)
        at, found = remote.first_position, []
        while len(batch := remote.read(at, 500)):
            found += batch.to_payloads()
            at = batch.next_position
        assert found == [b"record %d" % number * 4 for number in range(3000)]
        assert remote.stat()["log_id"] == local.stat()["log_id"]
        assert list(remote.verify()) == list(local.verify()) == []
        middle = local.read(local.first_position, 1500).next_position
        assert remote.read(middle, 10).positions.tolist() == local.read(middle, 10).positions.tolist()
        cuts = getattr(remote, "cut")(local.first_position, local.next_position, 30_000)  # noqa: B009
        assert cuts == getattr(local, "cut")(local.first_position, local.next_position, 30_000)  # noqa: B009


def test_a_fold_is_read_by_url() -> None:
    name = uuid.uuid4().hex
    url = f"memory://{name}/folds/routes.snap"
    from penstock.disk import MemoryDisk

    disk = MemoryDisk()
    with AppendLogStore.open("fold.snap", disk=disk) as store:
        store.apply([KvUpdate.put("a", b"1", 1)], WatchCursor.of(1))
    with disk.open("fold.snap") as file:
        object_store_for(f"memory://{name}").put("folds/routes.snap", file.read_at(0, 1000))
    with open_store(url) as fold:
        assert (fold.count(), fold.cursor(), fold.stat()["backend"]) == (1, WatchCursor.of(1), "append-log")
    with pytest.raises(UnsupportedError):
        open_store(url, read_only=False)


# --- Object stores


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return memory() if request.param == "memory" else FolderStore(str(tmp_path / "objects"))


def test_a_conditional_put_has_one_winner(store: Any) -> None:
    tag = store.create("head", b"0")
    with pytest.raises(AlreadyExists):
        store.create("head", b"1")
    newer = store.swap("head", b"1", tag)
    with pytest.raises(RevisionMismatch):
        store.swap("head", b"2", tag)
    assert store.swap("head", b"2", newer) != newer
    won: list[int] = []

    def race(number: int, tag: Tag) -> None:
        try:
            publish(store, "head", b"race %d" % number, tag)
        except ConflictError:
            return
        won.append(number)

    for _ in range(10):
        won.clear()
        _, info = store.get("head")
        threads = [threading.Thread(target=race, args=(number, info.tag)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert store.get("head")[0] == b"race %d" % won[0]


def test_a_store_is_probed_for_conditions(store: Any) -> None:
    check_conditions(store, "probe")
    assert store.head("probe") is None

    class Careless:
        url = "careless://"

        def create(self, key: str, data: bytes) -> Tag:
            store.put(key, data)
            return Tag("always the same")

        def swap(self, key: str, data: bytes, tag: Tag) -> Tag:
            return self.create(key, data)

        def get(self, key: str) -> Any:
            return store.get(key)

        def delete(self, keys: Any) -> None:
            store.delete(keys)

    with pytest.raises(UnsupportedError, match="ignores conditions"):
        check_conditions(Careless(), "probe")  # type: ignore[arg-type]


class Trouble:
    """A store whose library meets its own writes, or that lets nobody remove anything."""

    def __init__(self, store: Any, trouble: str) -> None:
        self._store, self._trouble, self._met = store, trouble, set[bytes]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create(self, key: str, data: bytes) -> Tag:
        return self._again(self._store.create(key, data), data, AlreadyExists)

    def swap(self, key: str, data: bytes, tag: Tag) -> Tag:
        return self._again(self._store.swap(key, data, tag), data, RevisionMismatch)

    def _again(self, tag: Tag, data: bytes, answer: type[Exception]) -> Tag:
        if self._trouble == "own writes":
            raise answer("it was written by the request whose answer was lost")
        return tag

    def delete(self, keys: Any) -> None:
        if self._trouble == "no removal":
            raise OptionsError("access denied")
        self._store.delete(keys)


@pytest.mark.parametrize("trouble", ["own writes", "no removal"])
def test_a_probe_is_not_taken_in_by_lost_answers_and_needs_no_right_to_remove(store: Any, trouble: str) -> None:
    check_conditions(Trouble(store, trouble), "probe")  # type: ignore[arg-type]
    assert (store.head("probe") is None) is (trouble == "own writes")


@pytest.mark.parametrize("left", ["-" + "0" * 32, "lock", "0123456789abcdef" * 2])
def test_what_a_killed_writer_left_in_a_folder_goes_once_it_is_old(left: str, tmp_path: Path) -> None:
    place = tmp_path / "objects" / "a"
    place.mkdir(parents=True)
    old, young = place / f".penstock-{left}", place / f".penstock-{'f' * 32}"
    for file in (old, young):
        file.write_bytes(b"half of a segment")
    os.utime(old, (1, 1))
    FolderStore(str(tmp_path / "objects")).put("a/b", b"hello")
    assert old.exists() is (len(left) != 32)
    assert young.exists()


def test_a_put_that_never_reached_the_store_is_told_as_such(store: Any) -> None:
    class Away:
        url = "away://"

        def create(self, key: str, data: bytes) -> Tag:
            raise RetryError("the network is away")

        def get(self, key: str) -> Any:
            return store.get(key)

    with pytest.raises(RetryError, match="away"):
        publish(Away(), "head", b"1", None)  # type: ignore[arg-type]


def test_what_is_not_there_is_told_apart(store: Any) -> None:
    with pytest.raises(FileNotFoundError):
        store.get("none")
    with pytest.raises(FileNotFoundError):
        store.get_range("none", 0, 1)
    assert store.head("none") is None
    store.delete(["none"])
    assert store.folder("none") == ([], [])


def test_a_stream_that_fails_leaves_no_object(store: Any) -> None:
    def pieces() -> Any:
        yield b"1" * 1000
        raise KeyError("the source broke")

    with pytest.raises(Exception, match="the source broke"):
        store.put("a", pieces())
    assert store.head("a") is None


@pytest.mark.parametrize("endpoint", ["http://storage.example.com", "http://8.8.8.8:9000"])
def test_plain_http_to_a_public_address_is_refused_unless_asked_for(endpoint: str) -> None:
    config = {
        "aws_endpoint_url_s3": endpoint,
        "aws_access_key_id": "a",
        "aws_secret_access_key": "b",
        "aws_region": "x",
    }
    with pytest.raises(OptionsError, match="plain http"):
        make_store("s3://bucket/x", ObjectOptions(config=config))
    make_store("s3://bucket/x", ObjectOptions(config=config, allow_http=True))
    make_store("s3://bucket/x", ObjectOptions(config={**config, "aws_endpoint_url_s3": "http://127.0.0.1:1"}))


@pytest.mark.parametrize(
    ("url", "variable"), [("az://box/x", "AZURE_STORAGE_ENDPOINT"), ("gs://box/x", "GOOGLE_BASE_URL")]
)
def test_plain_http_is_refused_by_the_address_of_its_own_kind_of_store(
    url: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # that of another store says nothing
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "someone")
    monkeypatch.setenv(variable, "http://storage.example.com")
    with pytest.raises(OptionsError, match="plain http"):
        make_store(url)
    monkeypatch.setenv(variable, "http://user:hidden@8.8.8.8")
    with pytest.raises(OptionsError, match="plain http") as raised:
        make_store(url)
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize("address", ["", "minio:9000", "127.0.0.1:9000", "nonsense", "http://", "ftp://x", "http:// x"])
@pytest.mark.parametrize(
    ("url", "variable"),
    [("s3://box/x", "AWS_ENDPOINT_URL"), ("az://box/x", "AZURE_STORAGE_ENDPOINT"), ("gs://box/x", "GOOGLE_BASE_URL")],
)
def test_an_address_that_is_none_is_refused_by_its_variable(
    url: str, variable: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "someone")
    monkeypatch.setenv(variable, address)
    with pytest.raises(OptionsError, match=f"{variable}=.*http"):
        make_store(url)


def test_a_panic_of_the_library_is_an_error_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "aws_region": "x"}
    store = make_store("s3://box", ObjectOptions(config=config))
    monkeypatch.setattr(store, "_store", S3Store("box", config={**config, "aws_endpoint_url_s3": "nonsense"}))
    with pytest.raises(UnsupportedError, match="panicked"):
        store.head("a")


@pytest.mark.parametrize("url", ["s3://AKIA:hidden@bucket/x", "gs://hidden@bucket/x", "abfss://me:hidden@box/x"])
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    for use in (read_disk_for, object_store_for):
        with pytest.raises(OptionsError, match="credentials come from the environment") as raised:
            use(url)
        assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "config"),
    [
        ("s3://box/x", {"aws_access_key_id": "a", "aws_secret_access_key": "hidden", "aws_region": "x",
                        "aws_endpoint_url_s3": "http://user:hidden@127.0.0.1:9"}),
        ("az://box/x", {"azure_storage_account_name": "a", "azure_storage_sas_key": "sv=2022-11-02&sig=hidden",
                        "azure_storage_endpoint": "http://127.0.0.1:9"}),
    ],
)  # fmt: skip
def test_an_error_of_a_store_repeats_no_key(url: str, config: dict[str, str]) -> None:
    """The library repeats addresses, and users and shared keys may be part of those."""
    store = make_store(url, ObjectOptions(config=config, retry_seconds=0.01))
    for ask in (lambda: store.get("a"), lambda: store.put("a", b"1"), lambda: list(store.objects())):
        with pytest.raises((RetryError, OptionsError)) as raised:
            ask()
        assert "hidden" not in str(raised.value) + repr(raised.value)


@pytest.mark.parametrize("url", ["ftp://x/y", "s3://", "file://host/x"])
def test_a_url_of_no_store_is_refused(url: str) -> None:
    with pytest.raises((UnsupportedError, OptionsError)):
        read_disk_for(url)


def _use(result: Any) -> None:
    try:
        object_store_for("memory://fork").head("a")
        result.put("worked")
    except BaseException as exc:
        result.put(type(exc).__name__)


def test_a_fork_after_a_request_is_told_and_does_not_hang() -> None:
    object_store_for("memory://fork").head("a")
    context = multiprocessing.get_context("fork")
    result = context.Queue()
    child = context.Process(target=_use, args=(result,))
    child.start()
    assert result.get(timeout=60) == "ClosedError"
    child.join()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("gs://bucket/fleet", "GOOGLE_APPLICATION_CREDENTIALS is not set"),
        ("az://container/fleet", "set AZURE_STORAGE_ACCOUNT_NAME"),
        ("abfss://container@account.dfs.core.windows.net/fleet", "AZURE_STORAGE_ACCOUNT_KEY are not set"),
        ("s3://bucket/fleet", "AWS_SECRET_ACCESS_KEY are not set"),
    ],
)
def test_a_store_without_credentials_says_which_are_missing(
    url: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)

    def asked(*_: object, **__: object) -> None:
        raise GenericError("Error performing token request: Error performing GET http://169.254.169.254/x - 403")

    def look() -> None:
        store = object_store_for(url, ObjectOptions())
        monkeypatch.setattr(store, "_store", type("Refused", (), {"head": asked})())  # as obstore says it, no network
        store.head("ticks.shipped.json")

    with pytest.raises((OptionsError, RetryError), match=said):
        look()
