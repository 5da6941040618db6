"""Promises of the append log beyond the contract: rewriting aside, reading without owning, small memory."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from penstock.batch import UpdateBatch
from penstock.disk import MemoryDisk, PosixDisk
from penstock.errors import ClosedError, LockedError, OptionsError
from penstock.kernel import Fold, native
from penstock.store import AppendLogOptions, AppendLogStore, SnapshotWriter, digest_entries, load, logfile
from penstock.testing.faulty import FaultyDisk
from penstock.testing.log_conformance import fingerprints
from penstock.types import KvUpdate, WatchCursor

ALWAYS = AppendLogOptions(compact_threshold_bytes=0)


def puts(start: int, stop: int, value: bytes = b"v" * 50) -> list[KvUpdate]:
    return [KvUpdate.put(f"k{n:05}", value, n) for n in range(start, stop)]


def test_an_apply_never_rewrites_the_file_itself() -> None:
    disk = FaultyDisk(MemoryDisk())
    store = AppendLogStore.open("fold.snap", ALWAYS, disk=disk)
    owner, renamed = threading.get_ident(), []
    disk.on_call = lambda operation, path: renamed.append(threading.get_ident()) if operation == "rename" else None
    for number in range(1, 40):
        store.apply(puts(0, 20, b"%d" % number), WatchCursor.of(number))
    store._wait()
    disk.on_call = None
    assert renamed
    assert owner not in renamed
    store.close()


def test_rewriting_aside_keeps_the_file_near_its_live_size_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "fold.snap"
    rng, model = random.Random(3), {}
    with AppendLogStore.open(path, AppendLogOptions(compact_threshold_bytes=20_000)) as store:
        for number in range(1, 300):
            batch = [KvUpdate.put(f"k{rng.randrange(300)}", rng.randbytes(60), number) for _ in range(30)]
            batch += [KvUpdate.delete(f"k{rng.randrange(300)}", number) for _ in range(5)]
            store.apply(UpdateBatch.of(batch), WatchCursor.of(number))
            for update in batch:
                if update.op:
                    model.pop(update.key, None)
                else:
                    model[update.key] = update.value
            if number % 50 == 0:
                assert {entry.key: entry.value for entry in store.range()} == model
        store.settle()
        assert store.stat()["bytes"] < 100_000  # of 1.2 MB appended
        digest = store.digest()
        assert digest == digest_entries(store.range())
    with AppendLogStore.open(path) as store:
        assert {entry.key: entry.value for entry in store.range()} == model
        assert store.digest() == digest


def test_applies_during_a_rewrite_are_carried_over(tmp_path: Path) -> None:
    path = tmp_path / "fold.snap"
    store = AppendLogStore.open(path, AppendLogOptions(compact_threshold_bytes=1 << 40))
    store.apply(UpdateBatch.of(puts(0, 20_000)), WatchCursor.of(1))
    rewriting = threading.Thread(target=store.compact)
    rewriting.start()
    number = 1
    while rewriting.is_alive():
        number += 1
        store.apply(
            [KvUpdate.put(f"new{number}", b"1", number), KvUpdate.delete(f"k{number:05}", number)],
            WatchCursor.of(number),
        )
    rewriting.join()
    before = store.range(), store.cursor(), store.digest()
    assert before[2] == digest_entries(before[0])
    assert list(store.verify()) == []
    store.close()
    with AppendLogStore.open(path) as store:
        assert (store.range(), store.cursor(), store.digest()) == before


def test_closing_waits_for_a_rewrite_of_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its file would take the place of that of whoever has opened the store meanwhile."""
    path = tmp_path / "fold.snap"
    store = AppendLogStore.open(path, AppendLogOptions(compact_threshold_bytes=1 << 40))
    store.apply(UpdateBatch.of(puts(0, 100)), WatchCursor.of(1))
    real, reached, go = logfile.write_compacted, threading.Event(), threading.Event()

    def held_up(*args: Any, **given: Any) -> Any:
        reached.set()
        assert go.wait(60)
        return real(*args, **given)

    monkeypatch.setattr(logfile, "write_compacted", held_up)
    rewriting, closing = threading.Thread(target=store.compact), threading.Thread(target=store.close)
    rewriting.start()
    assert reached.wait(60)
    closing.start()
    closing.join(0.2)
    waits = closing.is_alive()
    go.set()
    closing.join()
    rewriting.join()
    assert waits
    with AppendLogStore.open(path) as again:
        assert again.count() == 100


def test_who_settles_while_a_rewrite_is_being_started_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting, go, start = threading.Event(), threading.Event(), threading.Thread.start

    def slow(thread: threading.Thread) -> None:
        if thread.name.startswith("penstock-compact"):
            starting.set()
            assert go.wait(60)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slow)
    with AppendLogStore.open(tmp_path / "fold.snap", ALWAYS) as store, ThreadPoolExecutor(2) as pool:
        store.apply(puts(0, 10), WatchCursor.of(1))
        applied = pool.submit(store.apply, puts(0, 10, b"new"), WatchCursor.of(2))
        assert starting.wait(60)
        settled = pool.submit(store.settle)
        wait([settled], 0.1)
        go.set()
        applied.result(60)
        settled.result(60)
        assert store.count() == 10


def test_a_compacted_file_is_sorted_and_nothing_else(tmp_path: Path) -> None:
    one, two = tmp_path / "one.snap", tmp_path / "two.snap"
    updates = puts(0, 500)
    for path, seed in ((one, 1), (two, 2)):
        random.Random(seed).shuffle(updates)
        with AppendLogStore.open(path) as store:
            store.apply(updates, WatchCursor.of(3))
            store.apply([KvUpdate.put("k00007", b"last", 4)], WatchCursor.of(4))
            store.compact()
    assert one.read_bytes() == two.read_bytes()


def test_reading_takes_no_lock_and_changes_no_file_while_another_writes(tmp_path: Path) -> None:
    path = tmp_path / "fold.snap"
    with AppendLogStore.open(path) as store:
        store.apply(puts(0, 10), WatchCursor.of(1))
        store.apply(puts(0, 10, b"again"), WatchCursor.of(2))  # something to tidy
        before = fingerprints(str(tmp_path))
        with AppendLogStore.open(path, read_only=True) as reader:
            assert reader.range() == store.range()
        snapshot = load(path)
        assert snapshot is not None
        assert len(snapshot.entries) == 10
        assert fingerprints(str(tmp_path)) == before
        with pytest.raises(LockedError):
            SnapshotWriter.open(path)


def test_a_reader_with_half_an_apply_before_it_sees_what_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "fold.snap"
    with AppendLogStore.open(path) as store:
        store.apply(puts(0, 3), WatchCursor.of(1))
        size = path.stat().st_size
        store.apply(puts(3, 6), WatchCursor.of(2))
    whole = path.read_bytes()
    for cut in range(size, len(whole)):
        path.write_bytes(whole[:cut])
        with AppendLogStore.open(path, AppendLogOptions(unfinished="drop"), read_only=True) as reader:
            assert (reader.count(), reader.cursor()) == (3, WatchCursor.of(1))
        with AppendLogStore.open(path, read_only=True) as reader:
            assert 3 <= reader.count() <= 6
            assert reader.cursor() == WatchCursor.of(1)


def test_a_scan_outlives_a_rewrite(tmp_path: Path) -> None:
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        store.apply(puts(0, 100), WatchCursor.of(1))
        scan = store.scan(limit=10)
        first = next(scan)
        store.apply(puts(0, 100, b"new"), WatchCursor.of(2))
        store.compact()
        store.apply(puts(0, 100, b"newer"), WatchCursor.of(3))
        values = {update.value for batch in (first, *scan) for update in batch}
        assert values == {b"v" * 50}


def test_the_batches_of_a_scan_are_over_the_mapped_file() -> None:
    with AppendLogStore.open("fold.snap", disk=MemoryDisk()) as store:
        store.apply(puts(0, 100), WatchCursor.of(1))
        (batch,) = store.scan()
        assert len(batch.buffer) == store.stat()["bytes"]
        assert batch.to_arrow().column("key").to_pylist() == [b"k%05d" % n for n in range(100)]


def test_prefixes_are_found_among_sorted_and_unsorted_keys() -> None:
    rng = random.Random(5)
    with AppendLogStore.open("fold.snap", disk=MemoryDisk()) as store:
        keys = [f"{n:06}" for n in range(12_000)]
        rng.shuffle(keys)
        live: set[str] = set()
        for start in range(0, 12_000, 1500):
            part = keys[start : start + 1500]
            store.apply([KvUpdate.put(key, b"") for key in part], WatchCursor.of(start))
            gone = rng.sample(sorted(live), min(len(live), 200))
            store.apply([KvUpdate.delete(key) for key in gone], WatchCursor.of(start))
            live = (live | set(part)) - set(gone)
            for prefix in ("", "00", "0051", "011999", "9"):
                assert list(store.keys(prefix)) == sorted(key for key in live if key.startswith(prefix))
            if start == 6000:
                store.compact()


@pytest.mark.filterwarnings("ignore:This process")
def test_the_child_of_a_fork_cannot_use_the_store_and_the_parent_still_can(tmp_path: Path) -> None:
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        store.apply(puts(0, 3), WatchCursor.of(1))
        pid = os.fork()
        if pid == 0:
            try:
                store.apply(puts(3, 4), WatchCursor.of(2))
            except ClosedError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        store.apply(puts(3, 4), WatchCursor.of(2))
        with pytest.raises(LockedError):
            AppendLogStore.open(tmp_path / "fold.snap")
        assert store.count() == 4


def test_a_key_costs_an_offset_and_a_place_in_the_index() -> None:
    """The index holds no key, value or version: they stay in the mapped file."""
    fold = Fold()
    with AppendLogStore.open("fold.snap", disk=MemoryDisk()) as store:
        store.apply(puts(0, 10), WatchCursor.of(1))
        view = store._view()[: store._fold.size]
        fold.attach(view, len(view))
        assert fold.index(6, True) == (len(view), 0, 0)
        at = fold.find(b"k00003")
        assert bytes(view[at + 7 : at + 13]) == b"k00003"


@pytest.mark.parametrize("sync", ["interval", "always"])
def test_a_synced_store_has_synced_when_it_is_closed(sync: str) -> None:
    disk = FaultyDisk(MemoryDisk())
    disk.sync_folder(".")
    store = AppendLogStore.open("fold.snap", AppendLogOptions(sync=sync), disk=disk)  # type: ignore[arg-type]
    store.apply(puts(0, 5), WatchCursor.of(1))
    store.close()
    disk.cut_power(keep=0)
    with AppendLogStore.open("fold.snap", read_only=True, disk=disk) as store:
        assert store.count() == 5


def test_a_rewrite_that_fails_aside_is_told_by_settle_and_not_tried_at_every_apply() -> None:
    disk = FaultyDisk(MemoryDisk())
    store = AppendLogStore.open("fold.snap", AppendLogOptions(compact_threshold_bytes=1000), disk=disk)
    for _ in range(99):
        disk.fail("create", OSError(28, "No space left on device"), path="compact")
    for number in range(1, 60):
        store.apply(puts(0, 5, b"%03d" % number), WatchCursor.of(number))
        store._wait()
    tries = sum(1 for call in disk.calls if call == ("create", "fold.snap.penstock-compact"))
    assert 1 < tries < 20
    with pytest.raises(OSError, match="No space"):
        store.settle()
    assert store.count() == 5
    store.close()


def test_an_empty_file_is_no_store_for_a_reader_and_a_new_one_for_an_owner() -> None:
    disk = MemoryDisk()
    disk.create("fold.snap").close()
    with pytest.raises(OptionsError, match="no store here"):
        AppendLogStore.open("fold.snap", read_only=True, disk=disk)
    with AppendLogStore.open("fold.snap", disk=disk) as store:
        assert store.count() == 0


def test_a_store_works_without_the_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock import kernel
    from penstock.kernel.twin import foldindex, pgss
    from penstock.store import appendlog, logfile, pgss as format_module

    monkeypatch.setattr(kernel, "native", False)
    for module in (appendlog, logfile, format_module):
        monkeypatch.setattr(module, "pgss", pgss)
    monkeypatch.setattr(logfile, "Fold", foldindex.Fold)
    disk = MemoryDisk()
    with AppendLogStore.open("fold.snap", disk=disk) as store:
        store.apply(puts(0, 20), WatchCursor.of(1))
        store.apply(UpdateBatch.of([*puts(5, 8, b"new"), KvUpdate.delete("k00001", 2)]), WatchCursor.of(2))
        store.compact()
        store.apply(puts(30, 31), WatchCursor.of(3))
        before = store.range(), store.digest(), store.cursor()
    monkeypatch.undo()
    with AppendLogStore.open("fold.snap", disk=disk) as store:
        assert (store.range(), store.digest(), store.cursor()) == before
        assert store.count() == 20


@pytest.mark.parametrize("compacted", [False, True])
def test_an_unfinished_apply_is_dropped_also_where_there_is_no_cursor(compacted: bool) -> None:
    disk, options = MemoryDisk(), AppendLogOptions(unfinished="drop")
    with AppendLogStore.open("fold.snap", options, disk=disk) as store:
        if compacted:
            store.apply(puts(0, 3), WatchCursor())
            store.compact()
        before = store.range()
        size = store.stat()["bytes"]
        store.apply(puts(3, 6), WatchCursor())
    with disk.open("fold.snap") as file:
        whole = file.read_at(0, 9999)
    for cut in range(size, len(whole)):
        part = MemoryDisk()
        part.create("fold.snap").write_at(0, whole[:cut])
        with AppendLogStore.open("fold.snap", options, disk=part) as store:
            assert store.range() == before
    with AppendLogStore.open("fold.snap", options, disk=disk) as store:
        assert store.count() == len(before) + 3


def test_what_a_rewrite_cut_short_left_is_removed_by_the_next_owner(tmp_path: Path) -> None:
    (tmp_path / "fold.snap.penstock-compact").write_bytes(b"half")
    AppendLogStore.open(tmp_path / "fold.snap").close()
    assert not (tmp_path / "fold.snap.penstock-compact").exists()


def test_many_keys_written_again_and_deleted_fold_to_the_same_as_a_dict() -> None:
    """More keys than the cache holds: from here on the memory of many records is fetched ahead."""
    rng, count, expected = random.Random(4), 50_000, {}
    with AppendLogStore.open("fold.snap", disk=MemoryDisk()) as store:
        for step, numbers in enumerate((range(count), rng.choices(range(count), k=10_000))):
            updates = [
                KvUpdate.delete(f"k.{n}", step) if step and n % 3 == 0 else KvUpdate.put(f"k.{n}", b"%d" % step, step)
                for n in numbers
            ]
            store.apply(UpdateBatch.of(updates), WatchCursor.of(step))
            expected.update((update.key, None if update.op else update.value) for update in updates)
        expected = {key: value for key, value in expected.items() if value is not None}
        assert {entry.key: entry.value for entry in store.range()} == expected
        assert list(store.verify()) == []


def test_a_rewrite_between_the_two_halves_of_a_sort_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AppendLogStore.open(tmp_path / "fold.snap", sync="none") as store:
        keys = [f"key{number * 7919 % 20_000:05}" for number in range(20_000)]
        store.apply([KvUpdate.put(key, b"v", 1) for key in keys], WatchCursor.of(1))
        assert len(store.range()) == 20_000  # it is in order once, as the index of a rewrite is
        store.apply([KvUpdate.delete(key) for key in keys[:15_000]], WatchCursor.of(2))
        real, calls = logfile.pgss.sort_records, []

        def sort_records(*arguments: Any) -> None:
            real(*arguments)
            if not calls:
                calls.append(True)
                store.compact()  # another thread's; it replaces the index

        monkeypatch.setattr(logfile.pgss, "sort_records", sort_records)
        store.apply([KvUpdate.put(key, b"w", 2) for key in keys[:9000]], WatchCursor.of(3))
        assert [entry.key for entry in store.range()] == sorted({*keys[15_000:], *keys[:9000]})
        assert calls
        assert list(store.verify()) == []


@pytest.mark.skipif(not native, reason="the twin keeps no slots")
def test_slots_of_another_index_are_refused() -> None:
    with pytest.raises(ValueError, match="of another index"):
        Fold().adopt(np.arange(3, dtype=np.uint32))


class BusyFile:
    """A file whose owner appends and syncs right after somebody has read it."""

    def __init__(self, file: Any, then: Callable[[], None]) -> None:
        self._file, self._then = file, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read_into(self, offset: int, target: memoryview) -> int:
        count: int = self._file.read_into(offset, target)
        self._then()
        return count


def test_a_reader_is_not_told_of_damage_when_the_owner_syncs_between_two_looks(tmp_path: Path) -> None:
    class BusyDisk(PosixDisk):
        def open(self, name: str) -> Any:
            file = super().open(name)
            return BusyFile(file, more) if name == path else file

    def more() -> None:
        owner.apply([KvUpdate.put("k", b"2")], WatchCursor.of(2))
        owner.sync()

    path = str(tmp_path / "fold.snap")
    with AppendLogStore.open(path, sync="always") as owner:
        owner.apply([KvUpdate.put("k", b"1")], WatchCursor.of(1))
        with AppendLogStore.open(path, read_only=True, disk=BusyDisk()) as reader:
            assert reader.cursor() == WatchCursor.of(1)


@pytest.mark.parametrize("lives", [True, False])
def test_a_reader_sees_an_apply_that_is_being_written_whole_or_as_it_was_left(tmp_path: Path, lives: bool) -> None:
    class BusyDisk(PosixDisk):
        def open(self, name: str) -> Any:
            file = super().open(name)
            return BusyFile(file, more) if name == path else file

    def more() -> None:
        if lives and rest:
            with open(path, "ab") as file:
                file.write(rest.pop())

    path = str(tmp_path / "fold.snap")
    with AppendLogStore.open(path) as owner:
        owner.apply([KvUpdate.put("a", b"1"), KvUpdate.put("b", b"1")], WatchCursor.of(1))
        first = os.path.getsize(path)
        owner.apply([KvUpdate.put("a", b"2"), KvUpdate.put("b", b"2")], WatchCursor.of(2))
        data = Path(path).read_bytes()
    middle = first + (len(data) - first) // 3 + 1  # one update of two
    rest = [data[middle:]]
    Path(path).write_bytes(data[:middle])
    with AppendLogStore.open(path, read_only=True, disk=BusyDisk()) as reader:
        found = [bytes(entry.value) for entry in reader.range()], reader.cursor()
    assert found == (([b"2", b"2"], WatchCursor.of(2)) if lives else ([b"2", b"1"], WatchCursor.of(1)))
