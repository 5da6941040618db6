"""Promises of the append log when the power goes, calls fail, or a rewrite is cut short."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from penstock.disk import MemoryDisk
from penstock.errors import CorruptionError, ReadOnlyError
from penstock.store import AppendLogOptions, AppendLogStore, SnapshotWriter, load
from penstock.testing.faulty import FaultyDisk
from penstock.testing.store_conformance import model_of
from penstock.types import KvUpdate, WatchCursor

PATH = "fold.snap"


def new_disk() -> FaultyDisk:
    disk = FaultyDisk(MemoryDisk())
    disk.sync_folder(".")
    return disk


def state(store: Any) -> tuple[dict[str, bytes], int]:
    return {entry.key: entry.value for entry in store.range()}, store.cursor().token.as_int() or 0


def batch_of(number: int, keys: int, size: int) -> list[KvUpdate]:
    return [KvUpdate.put(f"k{n % (keys + 1)}", bytes([number % 256]) * size, number) for n in range(keys)] + [
        KvUpdate.delete(f"k{number % 7}", number)
    ]


def states_of(batches: list[list[KvUpdate]]) -> list[tuple[dict[str, bytes], int]]:
    """Return what the store holds after each of the batches, and before the first."""
    return [({key: entry.value for key, entry in model_of(batches[:n]).items()}, n) for n in range(len(batches) + 1)]


shapes = st.lists(st.tuples(st.integers(0, 30), st.sampled_from([0, 10, 600])), min_size=1, max_size=8)


@given(shapes, st.integers(0, 1000), st.floats(0, 1), st.sampled_from([0, 2000, 1 << 40]))
@settings(max_examples=60, deadline=None)
def test_a_synced_apply_survives_a_power_cut(shape: Any, seed: int, keep: float, threshold: int) -> None:
    disk = new_disk()
    options = AppendLogOptions(sync="always", unfinished="drop", compact_threshold_bytes=threshold)
    store = AppendLogStore.open(PATH, options, disk=disk)
    batches = [batch_of(number + 1, *spec) for number, spec in enumerate(shape)]
    for number, batch in enumerate(batches):
        store.apply(batch, WatchCursor.of(number + 1))
    store._wait()
    disk.cut_power(seed=seed, keep=keep)
    store.forked()  # its handles are dead
    with AppendLogStore.open(PATH, options, disk=disk) as store:
        assert state(store) == states_of(batches)[-1]
        assert list(store.verify()) == []


@given(shapes, st.integers(0, 1000), st.floats(0, 1), st.integers(0, 8))
@settings(max_examples=80, deadline=None)
def test_after_a_power_cut_the_store_is_as_some_apply_left_it(shape: Any, seed: int, keep: float, synced: int) -> None:
    disk = new_disk()
    options = AppendLogOptions(unfinished="drop")
    store = AppendLogStore.open(PATH, options, disk=disk)
    batches = [batch_of(number + 1, *spec) for number, spec in enumerate(shape)]
    settled = 0
    for number, batch in enumerate(batches):
        store.apply(batch, WatchCursor.of(number + 1))
        if number == synced:
            store.settle()
            settled = number + 1
    disk.cut_power(seed=seed, keep=keep)
    store.forked()
    with AppendLogStore.open(PATH, options, disk=disk) as store:
        found = state(store)
        assert found in states_of(batches)[settled:]
        store.apply([KvUpdate.put("later", b"1", 99)], WatchCursor.of(99))
    with AppendLogStore.open(PATH, options, disk=disk) as store:
        assert state(store) == ({**found[0], "later": b"1"}, 99)


@given(shapes, st.integers(0, 400))
@settings(max_examples=80, deadline=None)
def test_a_log_cut_at_any_byte_is_a_prefix_of_its_history(shape: Any, drop: int) -> None:
    disk = MemoryDisk()
    store = AppendLogStore.open(PATH, disk=disk)
    batches = [batch_of(number + 1, *spec) for number, spec in enumerate(shape)]
    for number, batch in enumerate(batches):
        store.apply(batch, WatchCursor.of(number + 1))
    store.close()
    with disk.modify(PATH) as file:
        size = max(6, file.stat().size - drop)
        file.truncate(size)
    flat = [update for batch in batches for update in batch]
    prefixes = [{k: e.value for k, e in model_of([flat[:n]]).items()} for n in range(len(flat) + 1)]
    with AppendLogStore.open(PATH, AppendLogOptions(unfinished="drop"), read_only=True, disk=disk) as store:
        whole = state(store)
    with AppendLogStore.open(PATH, disk=disk) as store:
        found, cursor = state(store)
    assert found in prefixes  # the data may be ahead of the cursor
    if cursor:
        assert whole == states_of(batches)[cursor]  # and without the unfinished apply it is exact


def test_behind_the_durable_mark_damage_of_a_power_cut_is_set_aside() -> None:
    disk = new_disk()
    store = AppendLogStore.open(PATH, disk=disk)
    store.apply([KvUpdate.put("a", b"1", 1)], WatchCursor.of(1))
    store.close()
    AppendLogStore.open(PATH, disk=disk).close()  # opening syncs, and notes how far
    store = AppendLogStore.open(PATH, disk=disk)
    store.apply([KvUpdate.put("b", b"2" * 9000, 2)], WatchCursor.of(2))
    store.close()
    disk.cut_power(keep=1)
    with disk.modify(PATH) as file:  # a page that never reached the device, with later ones that did
        file.write_at(200, bytes(300))
        file.sync()
    with AppendLogStore.open(PATH, disk=disk) as store:
        assert state(store) == ({"a": b"1"}, 1)
    assert disk.stat(PATH + ".bad") is not None


def test_what_was_set_aside_is_not_replaced_by_what_the_next_power_cut_damages() -> None:
    disk = new_disk()
    for key in ("b", "c"):
        AppendLogStore.open(PATH, disk=disk).close()  # opening syncs, and notes how far
        with AppendLogStore.open(PATH, disk=disk) as store:
            begin = disk.open(PATH).stat().size
            store.apply([KvUpdate.put(key, key.encode() * 9000, 2)], WatchCursor.of(2))
        disk.cut_power(keep=1)
        with disk.modify(PATH) as file:
            file.write_at(begin + 100, bytes(300))
            file.sync()
    AppendLogStore.open(PATH, disk=disk).close()
    kept = b"".join(disk.open(PATH + name).read_at(0, 1 << 20) for name in (".bad", ".1.bad"))
    assert b"b" * 8000 in kept
    assert b"c" * 8000 in kept


def test_damage_without_a_power_cut_is_refused_and_nothing_is_touched() -> None:
    disk = new_disk()
    with AppendLogStore.open(PATH, disk=disk) as store:
        for number in range(1, 4):
            store.apply([KvUpdate.put(f"k{number}", b"x" * 50, number)], WatchCursor.of(number))
    with disk.modify(PATH) as file:
        before = file.read_at(0, 9999)
        file.write_at(30, b"\xff")
        damaged = file.read_at(0, 9999)
    assert damaged != before
    for read_only in (False, True):
        with pytest.raises(CorruptionError, match=r"fold.snap at byte 6"):
            AppendLogStore.open(PATH, read_only=read_only, disk=disk)
    assert disk.open(PATH).read_at(0, 9999) == damaged


@pytest.mark.parametrize("operation", ["create", "write_at", "sync", "rename"])
def test_a_rewrite_that_fails_leaves_the_store_as_it_was(operation: str) -> None:
    disk = new_disk()
    store = AppendLogStore.open(PATH, disk=disk)
    for number in range(1, 5):
        store.apply(batch_of(number, 10, 30), WatchCursor.of(number))
    before = state(store)
    disk.fail(operation, OSError(errno.ENOSPC, "No space left on device"), path="compact")
    with pytest.raises(OSError, match="No space"):
        store.compact()
    assert state(store) == before
    store.apply([KvUpdate.put("later", b"1", 9)], WatchCursor.of(9))
    store.compact()
    store.close()
    with AppendLogStore.open(PATH, disk=disk) as store:
        assert state(store) == ({**before[0], "later": b"1"}, 9)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_write_that_failed_is_taken_back_and_may_be_tried_again(code: int) -> None:
    disk = new_disk()
    store = AppendLogStore.open(PATH, disk=disk)
    store.apply([KvUpdate.put("a", b"1", 1)], WatchCursor.of(1))
    with disk.open(PATH) as file:
        before = file.read_at(0, 4096)
    disk.fail("write_at", OSError(code, os.strerror(code)))
    with pytest.raises(OSError, match=os.strerror(code)):
        store.apply([KvUpdate.put("b", b"2", 2)], WatchCursor.of(2))
    assert state(store) == ({"a": b"1"}, 1)
    with disk.open(PATH) as file:
        assert file.read_at(0, 4096) == before
    store.apply([KvUpdate.put("b", b"2", 2)], WatchCursor.of(2))  # there is room again
    store.close()
    with AppendLogStore.open(PATH, disk=disk) as store:
        assert state(store) == ({"a": b"1", "b": b"2"}, 2)


def test_after_a_write_that_cannot_be_taken_back_nothing_more_is_written_until_a_reopen() -> None:
    disk = new_disk()
    store = AppendLogStore.open(PATH, disk=disk)
    store.apply([KvUpdate.put("a", b"1", 1)], WatchCursor.of(1))
    disk.fail("write_at", OSError(errno.ENOSPC, "No space left on device"))
    disk.fail("truncate", OSError(errno.EIO, "Input/output error"))
    with pytest.raises(OSError, match="No space"):
        store.apply([KvUpdate.put("b", b"2", 2)], WatchCursor.of(2))
    assert state(store) == ({"a": b"1"}, 1)
    with pytest.raises(ReadOnlyError, match="No space"):
        store.apply([], WatchCursor.of(3))
    store.close()
    with AppendLogStore.open(PATH, disk=disk) as store:
        assert state(store) == ({"a": b"1"}, 1)


def test_a_sync_that_failed_is_told_by_the_next_apply_and_is_final() -> None:
    disk = new_disk()
    store = AppendLogStore.open(PATH, AppendLogOptions(sync="interval", sync_seconds=0.001), disk=disk)
    disk.fail("sync", OSError(errno.EIO, "Input/output error"), path=PATH)
    store.apply([KvUpdate.put("a", b"1", 1)], WatchCursor.of(1))
    deadline = time.monotonic() + 60
    while store._committer is not None and store._committer.error is None and time.monotonic() < deadline:
        time.sleep(0.001)
    for number in (2, 3):
        with pytest.raises(ReadOnlyError, match="Input/output"):
            store.apply([KvUpdate.put("b", b"2", 2)], WatchCursor.of(number))
    with pytest.raises(ReadOnlyError):
        store.close()
    with AppendLogStore.open(PATH, disk=disk) as store:
        assert state(store) == ({"a": b"1"}, 1)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_log_that_is_shorter_than_its_durable_mark_is_refused_and_left_alone(read_only: bool) -> None:
    disk = MemoryDisk()
    with AppendLogStore.open(PATH, AppendLogOptions(sync="always"), disk=disk) as store:
        for number in range(20):
            store.apply([KvUpdate.put(f"k{number}", b"x" * 50, number)], WatchCursor.of(number))
    with disk.open(PATH) as file:
        whole = file.read_at(0, 1 << 20)
    for size in range(len(whole)):
        with disk.modify(PATH) as file:
            file.truncate(size)
        names = disk.list(".")
        with pytest.raises(CorruptionError, match=PATH):
            AppendLogStore.open(PATH, disk=disk, read_only=read_only)
        with pytest.raises(CorruptionError, match=PATH):
            load(PATH, disk=disk)
        with disk.modify(PATH) as file:
            assert file.read_at(0, 1 << 20) == whole[:size]
            file.write_at(0, whole)
        assert disk.list(".") == names
    with AppendLogStore.open(PATH, disk=disk) as store:
        assert store.count() == 20


def test_a_rewrite_that_is_cut_short_anywhere_leaves_a_mark_that_fits() -> None:
    for after in range(60):
        disk = new_disk()
        store = AppendLogStore.open(PATH, AppendLogOptions(sync="always"), disk=disk)
        for number in range(10):
            store.apply([KvUpdate.put("k", b"x" * 50, number)], WatchCursor.of(number))
        left = after

        def stop(operation: str, path: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.EIO, "Input/output error")

        disk.on_call = stop
        with contextlib.suppress(OSError):
            store.compact()
        disk.on_call = None
        with contextlib.suppress(OSError, ReadOnlyError):
            store.close()
        with AppendLogStore.open(PATH, disk=disk) as store:
            assert state(store) == ({"k": b"x" * 50}, 9)
        if left >= 0:
            return
    pytest.fail("the rewrite takes more than 60 calls")


def test_a_poisoned_writer_refuses_every_later_call() -> None:
    disk = new_disk()
    writer = SnapshotWriter.open(PATH, disk=disk)
    writer.write_update(KvUpdate.put("a", b"1", 1))
    writer.checkpoint(WatchCursor.of(1))
    disk.fail("sync_folder", OSError(errno.EIO, "Input/output error"))
    with pytest.raises(OSError, match="Input"):
        writer.compact()
    for use in (writer.flush, writer.compact, lambda: writer.checkpoint(WatchCursor.of(2))):
        with pytest.raises(ReadOnlyError, match="poisoned"):
            use()
    writer.close()
    snapshot = load(PATH, disk=disk)
    assert snapshot is not None
    assert snapshot.cursor == WatchCursor.of(1)


@given(shapes, st.integers(0, 1000), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_a_power_cut_anywhere_in_a_rewrite_loses_nothing_that_was_synced(shape: Any, seed: int, calls: int) -> None:
    class Cut(Exception):
        pass

    disk = new_disk()
    options = AppendLogOptions(unfinished="drop", compact_threshold_bytes=1 << 40)
    store = AppendLogStore.open(PATH, options, disk=disk)
    batches = [batch_of(number + 1, *spec) for number, spec in enumerate(shape)]
    for number, batch in enumerate(batches):
        store.apply(batch, WatchCursor.of(number + 1))
    store.settle()
    left = [calls]

    def count(operation: str, path: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Cut

    disk.on_call = count
    try:
        store.compact()
    except Cut:
        pass
    disk.on_call = None
    disk.cut_power(seed=seed)
    store.forked()
    with AppendLogStore.open(PATH, options, disk=disk) as store:
        assert state(store) == states_of(batches)[-1]
