"""Promise: a bucket can be read by who may only read, and a copy opens or says what is missing."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.disk import PosixDisk
from penstock.errors import CorruptionError, PenstockError, ReadOnlyError, ReplacedError, UnsupportedError
from penstock.kv import EmbeddedConnection, EmbeddedOptions, StoreConfig, Watch
from penstock.kv.embedded.bucket import Bucket
from penstock.kv.embedded.plan import Change
from penstock.kv.embedded.store import EmbeddedKvStore
from penstock.testing.clock import FakeClock
from penstock.types import WatchCursor

PLAIN = EmbeddedOptions(sync="none")


class ReadOnlyMount(PosixDisk):
    """A disk that cannot be written to, as a mount with ``-o ro`` answers."""

    def _refuse(self, path: str, *_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system", path)

    create = modify = rename = exchange = link = remove = make_folder = remove_folder = lock = _refuse

    def latch(self, path: str, *_: Any, **__: Any) -> Any:
        outer = self

        class Refusing:
            def take(self) -> bool:
                return bool(outer._refuse(path))

            def release(self) -> None: ...
            def close(self) -> None: ...

        return Refusing()


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    found = {str(path): path.stat() for path in sorted(folder.rglob("*"))}
    return {name: (stat.st_mtime_ns, stat.st_size) for name, stat in found.items()}


async def make(folder: Path, clock: Clock = SYSTEM_CLOCK) -> None:
    async with EmbeddedConnection(folder, PLAIN, clock=clock) as connection:
        store = await connection.store_with_config(StoreConfig(name="b", history=5))
        await store.writer.put_many((f"k.{n}", b"%d" % n) for n in range(50))
        await store.writer.put_with_ttl("lease", b"me", 0.01)
        await store.writer.delete("k.7")


async def test_a_bucket_is_read_on_a_mount_that_is_read_only(tmp_path: Path) -> None:
    clock = FakeClock()
    await make(tmp_path, clock)
    before = tree(tmp_path)
    clock.pass_(1.0)  # the lease is over; nobody here may purge it
    async with EmbeddedConnection(tmp_path, disk=ReadOnlyMount(), clock=clock) as connection:
        assert await connection.buckets() == ["b"]
        store = await connection.store("b")
        assert len(await store.reader.keys()) == 49
        assert await store.reader.get("lease") is None
        found = await store.reader.get("k.3")
        assert found is not None
        assert found.value == b"3"
        assert len(await store.reader.history("k.3")) == 1
        async with await store.watcher.watch_all_from(WatchCursor.of(51)) as watch:
            assert [update.key for update in await watch.next_batch()] == ["k.7"]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(watch.next_batch(), 0.05)
        for write in (store.writer.put("a", b"1"), store.writer.delete("k.3"), store.compact(3)):
            with pytest.raises(ReadOnlyError, match="only be read"):
                await write
        assert (await store.reader.get("k.3")) is not None
        with pytest.raises((ReadOnlyError, OSError)):
            await (await connection.store("new")).writer.put("a", b"1")
    assert tree(tmp_path) == before


AS_ANOTHER = """
import asyncio, os, sys
from penstock.errors import ReadOnlyError
from penstock.kv import EmbeddedConnection
os.setgroups([]); os.setgid(65534); os.setuid(65534)

async def main():
    async with EmbeddedConnection(sys.argv[1]) as connection:
        store = await connection.store("b")
        print(len(await store.reader.keys()), (await store.reader.get("k.3")).value.decode())
        try:
            await store.writer.put("a", b"1")
        except ReadOnlyError as exc:
            print("only read")

asyncio.run(main())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_with_read_rights_reads_a_bucket() -> None:
    folder = Path(tempfile.mkdtemp())  # the folders of pytest are its own user's
    try:
        asyncio.run(make(folder))
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        command = [sys.executable, "-c", AS_ANOTHER, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert (done.stdout, done.stderr) == ("49 3\nonly read\n", "")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def test_looking_changes_no_file(tmp_path: Path) -> None:
    await make(tmp_path)
    before = tree(tmp_path)
    async with EmbeddedConnection(tmp_path) as connection:
        store = await connection.store("b")
        await store.reader.scan()
        await store.reader.entry("k.1")
        async with await store.watcher.watch_all() as watch:
            await watch.next_batch()
        assert await connection.find("other") is None
    assert tree(tmp_path) == before


async def test_a_folder_of_buckets_is_made_with_the_first_of_them(tmp_path: Path) -> None:
    async with EmbeddedConnection(tmp_path / "buckets") as connection:
        assert await connection.buckets() == []
        store = await connection.store("b")
        assert not (tmp_path / "buckets").exists()
        await store.writer.put("a", b"1")
        assert await connection.buckets() == ["b"]


@pytest.mark.parametrize("setting", [{"storage": "memory"}, {"replicas": 3}])
async def test_what_an_embedded_bucket_cannot_be_is_refused_by_name(tmp_path: Path, setting: dict[str, Any]) -> None:
    async with EmbeddedConnection(tmp_path) as connection:
        with pytest.raises(UnsupportedError, match=next(iter(setting))):
            await connection.store_with_config(StoreConfig(name="b", **setting))
        assert await connection.buckets() == []


# --- Copies


def fill(folder: Path) -> Bucket:
    options = EmbeddedOptions(sync="none", checkpoint_bytes=20_000)
    config = StoreConfig(name="b", max_bytes=100_000, discard="old")
    return Bucket.open(str(folder), config, options, disk=PosixDisk())


def write(bucket: Bucket, start: int, count: int) -> None:
    for n in range(start, start + count):
        bucket.commit([Change("put", f"k{m}", b"%06d" % n * 20) for m in range(50)])


@pytest.mark.parametrize("late", ["log", "state.snap"])
def test_a_copy_whose_parts_are_of_different_times_opens_or_says_what_is_missing(tmp_path: Path, late: str) -> None:
    bucket = fill(tmp_path / "b")
    write(bucket, 0, 40)
    shutil.copytree(tmp_path / "b", tmp_path / "copy")
    write(bucket, 40, 100)  # retention takes the segments that the first copy of state.snap needs
    state = {bucket.entry(f"k{m}") for m in range(50)}
    bucket.close()
    if late == "log":
        shutil.rmtree(tmp_path / "copy" / "log")
        shutil.copytree(tmp_path / "b" / "log", tmp_path / "copy" / "log")
        with pytest.raises(
            CorruptionError, match=r"ends at revision \d+ and the log begins at revision \d+: the changes"
        ):
            fill(tmp_path / "copy")
    else:  # state.snap last, as the how-to says
        shutil.copy(tmp_path / "b" / "state.snap", tmp_path / "copy" / "state.snap")
        copy = fill(tmp_path / "copy")
        found = {copy.entry(f"k{m}") for m in range(50)}
        assert copy.revision >= copy._state.saved
        assert len(found & state) + 50 >= 50
        assert None not in found
        with pytest.raises(PenstockError, match="copied while it was written"):
            copy.commit([Change("put", "a", b"1")])
        copy.close()


@pytest.mark.parametrize("gone", ["log/penstock-id", "state.snap"])
def test_a_copy_without_one_of_its_files_says_which(tmp_path: Path, gone: str) -> None:
    bucket = fill(tmp_path / "b")
    write(bucket, 0, 140)
    bucket.close()
    (tmp_path / "b" / gone).unlink()
    with pytest.raises(CorruptionError, match=f"{gone}.*missing"):
        fill(tmp_path / "b")


def test_a_bucket_copied_under_load_opens_or_says_what_is_missing(tmp_path: Path) -> None:
    bucket = fill(tmp_path / "b")
    stop, rounds = threading.Event(), 0

    def writing() -> None:
        nonlocal rounds
        while not stop.is_set():
            write(bucket, rounds, 1)
            rounds += 1

    thread = threading.Thread(target=writing)
    thread.start()
    try:
        for n in range(6):
            copy = tmp_path / f"copy{n}"
            copy.mkdir()
            for path in sorted(path for path in (tmp_path / "b").rglob("*") if path.is_file()):
                target = copy / path.relative_to(tmp_path / "b")
                target.parent.mkdir(exist_ok=True)
                try:
                    shutil.copy(path, target)
                except FileNotFoundError:
                    continue  # retention was faster
            try:
                found = fill(copy)
            except CorruptionError as exc:
                assert "missing" in str(exc) or "were synced, but the log ends at" in str(exc)
            else:
                values = [int(entry.value[:6]) for m in range(50) if (entry := found.entry(f"k{m}")) is not None]
                assert values == sorted(values, reverse=True)  # as some change left it: the turns are in order
                assert max(values, default=0) - min(values, default=0) <= 1
                found.close()
    finally:
        stop.set()
        thread.join()
        bucket.close()


async def test_a_long_listing_lets_the_event_loop_have_its_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()

    def counted() -> None:
        threads.add(threading.current_thread().name)
        given.append(1)

    given: list[int] = []
    monkeypatch.setattr("penstock.kv.embedded.store.give_way", counted)
    async with EmbeddedConnection(tmp_path, PLAIN) as connection:
        store = await connection.make("b", max_bytes=-1)
        await store.writer.put_many((f"k.{n:05d}", b"x") for n in range(20_000))
        assert len(await store.reader.keys()) == 20_000
    assert len(given) >= 39
    assert threading.current_thread().name not in threads


@pytest.mark.parametrize("more", [0, 100])
def test_a_watch_is_told_that_a_backup_was_put_back(tmp_path: Path, more: int) -> None:
    async def put(folder: Path, numbers: range) -> None:
        connection = EmbeddedConnection(str(folder))
        await connection.connect()
        bucket = await connection.store_with_config(StoreConfig(name="state"))
        for number in numbers:
            await bucket.writer.put(f"k{number}", b"v%d" % number)
        await connection.shutdown()

    async def drain(watch: Watch) -> None:
        while True:
            await watch.next_batch()

    async def work() -> None:
        here, kept, other = tmp_path / "here", tmp_path / "kept", tmp_path / "other"
        await put(here, range(50))
        shutil.copytree(here, kept)
        await put(here, range(50, 100))
        shutil.copytree(kept, other)
        await put(other, range(1000, 1000 + more))
        connection = EmbeddedConnection(str(here))
        await connection.connect()
        bucket = await connection.store("state")
        watches = [await bucket.watcher.watch_all_from(WatchCursor.of(10)), await bucket.watcher.watch_all()]
        for watch in watches:
            while not watch.hydrated:
                await watch.next_batch()
        for file in sorted(other.rglob("*")):  # while the watches go on
            if file.is_file():
                shutil.copyfile(file, here / file.relative_to(other))
        for watch in watches:
            async with asyncio.timeout(60):
                with pytest.raises((ReplacedError, CorruptionError)):
                    await drain(watch)
            await watch.aclose()
        await connection.shutdown()

    asyncio.run(work())


@pytest.mark.parametrize("first", ["get", "keys", "put"])
@pytest.mark.parametrize("more", [0, 50, 100])
@pytest.mark.parametrize("way", ["over it", "in its place"])
def test_whoever_has_a_bucket_open_is_told_that_a_backup_was_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, more: int, first: str
) -> None:
    monkeypatch.setattr(
        "penstock.kv.embedded.bucket.HEAD_LOOK_SECONDS", 0.0
    )  # so long it is believed that nobody wrote

    async def put(folder: Path, numbers: range) -> None:
        async with EmbeddedConnection(str(folder)) as connection:
            bucket = await connection.store_with_config(StoreConfig(name="state"))
            for number in numbers:
                await bucket.writer.put(f"k{number}", b"v%d" % number)

    async def use(bucket: EmbeddedKvStore, what: str) -> object:
        if what == "put":
            return await bucket.writer.put("new", b"")
        return await (bucket.reader.get("k75") if what == "get" else bucket.reader.keys())

    async def work() -> None:
        here, kept = tmp_path / "here", tmp_path / "kept"
        await put(here, range(50))
        shutil.copytree(here, kept)
        async with EmbeddedConnection(str(here)) as connection:
            bucket = await connection.store("state")
            for number in range(50, 100):
                await bucket.writer.put(f"k{number}", b"v%d" % number)
            await put(kept, range(1000, 1000 + more))
            if way == "in its place":
                shutil.rmtree(here)
            shutil.copytree(kept, here, dirs_exist_ok=True)
            for what in (first, "get", "keys", "put"):
                with pytest.raises(ReplacedError, match="backup"):
                    await use(bucket, what)
            bucket = await connection.store("state")
            assert len(await bucket.reader.keys()) == 50 + more
            assert (await bucket.writer.put("k0", b"w")).as_int() == 51 + more
        async with EmbeddedConnection(str(here)) as connection:
            assert len(await (await connection.store("state")).reader.keys()) == 50 + more

    asyncio.run(work())


async def test_who_gives_up_waiting_for_a_watch_misses_nothing_and_hears_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read that went on in its thread came after another one, and put back what had been delivered."""
    async with EmbeddedConnection(tmp_path, PLAIN) as connection:
        store = await connection.store_with_config(StoreConfig(name="b"))
        async with await store.watcher.watch_all() as watch, asyncio.timeout(60):
            reads, gate, first = threading.Semaphore(0), threading.Event(), [True]
            reader = watch._bucket.reader  # type: ignore[attr-defined]
            read = reader.read

            def slowly(*args: Any) -> Any:
                batch = read(*args)
                if first and len(batch):
                    first.clear()
                    reads.release()
                    gate.wait()
                return batch

            monkeypatch.setattr(reader, "read", slowly)
            await store.writer.put("k.1", b"1")
            asked = asyncio.create_task(watch.next_batch())
            await asyncio.to_thread(reads.acquire)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            asked = asyncio.create_task(watch.next_batch())
            for _ in range(50):  # it would read by itself
                await asyncio.sleep(0.001)
            gate.set()
            assert [update.key for update in await asked] == ["k.1"]
            await asyncio.sleep(0)
            await store.writer.put("k.2", b"2")
            assert [update.key for update in await watch.next_batch()] == ["k.2"]
