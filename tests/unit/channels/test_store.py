"""Promises: a save is all or nothing at every step; a wrong data directory loses nothing."""

from __future__ import annotations

import contextlib
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.channels.ids import Nid
from penstock.channels.model import ChannelType, PersistedChannel
from penstock.channels.postcard import MAX_METADATA_BYTES, encode
from penstock.channels.store import FileChannelStore, channel_hash
from penstock.disk import MemoryDisk
from penstock.errors import CorruptionError
from penstock.metrics import REGISTRY
from penstock.testing.faulty import FaultyDisk
from penstock.testing.packed import lay_out, read_cases

VECTORS = Path(__file__).parents[2] / "vectors" / "narwhal-metadata"
OLD = PersistedChannel("jobs", members=(Nid("ann", "localhost"),), channel_type=ChannelType.FIFO)
NEW = PersistedChannel("jobs", members=(Nid("ann", "localhost"), Nid("bob", "localhost")))
HASH = channel_hash("jobs")
FOLDER = f"data/{HASH}"
SAVING = [
    ("create", f"{FOLDER}/metadata.bin.tmp"),
    ("write_at", f"{FOLDER}/metadata.bin.tmp"),
    ("sync", f"{FOLDER}/metadata.bin.tmp"),
    ("rename", f"{FOLDER}/metadata.bin.tmp"),
    ("sync_folder", FOLDER),
]


class PowerCut(BaseException):
    """Not an OSError: nothing may catch it and go on."""


def disk_with_old() -> FaultyDisk:
    disk = FaultyDisk(MemoryDisk())
    FileChannelStore("data", disk).save(OLD)
    disk.calls.clear()
    return disk


def die_after(disk: FaultyDisk, operation: str) -> None:
    """Let the disk answer up to and with ``operation``, and nothing after it."""
    done = False

    def on_call(name: str, path: str) -> None:
        nonlocal done
        if done:
            raise PowerCut
        done = name == operation

    disk.on_call = on_call


def test_a_save_is_write_sync_rename_sync_in_that_order() -> None:
    disk = disk_with_old()
    FileChannelStore("data", disk).save(NEW)
    assert [call for call in disk.calls if call[0] != "remove"] == SAVING


def test_the_folder_of_a_new_channel_is_made_durable_before_the_first_file() -> None:
    disk = FaultyDisk(MemoryDisk())
    FileChannelStore("data", disk).save(OLD)
    assert [call for call in disk.calls if call[0] != "remove"] == [
        ("make_folder", "data"),
        ("sync_folder", "."),
        ("make_folder", FOLDER),
        ("sync_folder", "data"),
        *SAVING,
    ]


# The table of the design: what a restart finds when the process dies right after each step.
@pytest.mark.parametrize(
    ("after", "process_dies", "power_goes"),
    [
        ("create", {"old"}, {"old"}),
        ("write_at", {"old"}, {"old"}),
        ("sync", {"old"}, {"old"}),
        ("rename", {"new"}, {"old", "new"}),
        ("sync_folder", {"new"}, {"new"}),
    ],
)
def test_a_crash_after_each_step_leaves_the_old_or_the_new(
    after: str, process_dies: set[str], power_goes: set[str]
) -> None:
    def crash(power: bool, seed: int, keep: float) -> str:
        disk = disk_with_old()
        die_after(disk, after)
        try:
            FileChannelStore("data", disk).save(NEW)
        except PowerCut:
            assert after != "sync_folder"
        disk.on_call = None
        if power:
            disk.cut_power(seed=seed, keep=keep)
        store = FileChannelStore("data", disk)
        assert store.hashes() == [HASH]  # a leftover tmp is no channel and harms none
        found = store.load(HASH)
        assert store.save(NEW) == HASH  # and the next save goes over it
        assert store.load(HASH) == NEW
        return "old" if found == OLD else "new" if found == NEW else "torn"

    assert {crash(power=False, seed=0, keep=1)} == process_dies
    seen = {crash(power=True, seed=seed, keep=keep) for seed in range(20) for keep in (0.0, 0.5, 1.0)}
    assert seen == power_goes


@pytest.mark.parametrize("after", ["make_folder", "create", "write_at", "sync"])
def test_a_crash_while_a_channel_is_first_saved_leaves_no_channel(after: str) -> None:
    disk = FaultyDisk(MemoryDisk())
    disk.make_folder("data")
    die_after(disk, after)
    with pytest.raises(PowerCut):
        FileChannelStore("data", disk).save(NEW)
    disk.on_call = None
    disk.cut_power(seed=1)
    assert FileChannelStore("data", disk).hashes() == []
    assert disk.list("data") == []  # swept


@pytest.mark.parametrize("operation", ["create", "write_at", "sync", "rename"])
def test_a_save_that_fails_leaves_the_old_metadata_and_no_tmp(operation: str) -> None:
    disk = disk_with_old()
    disk.fail(operation, OSError(28, "No space left on device"))
    before = saves()
    with pytest.raises(OSError, match="No space"):
        FileChannelStore("data", disk).save(NEW)
    assert FileChannelStore("data", disk).load(HASH) == OLD
    assert disk.list(FOLDER) == ["metadata.bin"]
    assert saves() == (before[0], before[1] + 1)


def test_a_save_whose_last_sync_fails_is_an_error() -> None:
    disk = disk_with_old()
    disk.fail("sync_folder", OSError(5, "Input/output error"))
    with pytest.raises(OSError, match="Input/output"):
        FileChannelStore("data", disk).save(NEW)


def saves() -> tuple[float, float]:
    counter = REGISTRY.counter("store_saves", "saves of channel metadata", labels=("result",))
    return counter.value(result="success"), counter.value(result="failure")


def test_saves_and_loads_are_counted_and_timed() -> None:
    disk = disk_with_old()
    before = saves()
    store = FileChannelStore("data", disk)
    store.save(NEW)
    store.load(HASH)
    assert saves() == (before[0] + 1, before[1])
    names = {sample.name for sample in REGISTRY.samples()}
    assert {"store_saves", "store_save_duration_seconds", "store_loads", "store_load_duration_seconds"} <= names


# --- Deleting


def laid_out(disk: Any) -> FileChannelStore:
    """Return a store with one channel that has everything a channel can have."""
    store = FileChannelStore("data", disk)
    store.save(OLD)
    for name in ("00000000000000000001.log", "00000000000000000001.idx", "cursor.bin", "metadata.bin.tmp", "notes.txt"):
        disk.create(f"{FOLDER}/{name}").close()
    disk.sync_folder(FOLDER)
    return store


def test_delete_removes_every_file_and_the_folder() -> None:
    disk = MemoryDisk()
    laid_out(disk).delete(HASH)
    assert disk.list("data") == []


def test_a_channel_is_taken_out_then_its_log_goes_then_the_metadata() -> None:
    disk = FaultyDisk(MemoryDisk())
    store = laid_out(disk)
    disk.calls.clear()
    store.delete(HASH, lambda: disk.remove(f"{FOLDER}/00000000000000000001.log"))
    assert [(name, os.path.basename(path)) for name, path in disk.calls if name != "list"] == [
        ("rename", "metadata.bin"),
        ("sync_folder", HASH),
        ("remove", "00000000000000000001.log"),
        ("remove", "00000000000000000001.idx"),
        ("remove", "cursor.bin"),
        ("remove", "notes.txt"),
        ("remove", "metadata.bin.tmp"),
        ("remove_folder", HASH),
        ("sync_folder", "data"),
    ]


def test_a_crash_anywhere_in_a_delete_never_brings_back_half_a_channel() -> None:
    """Either the channel is whole, log and all, or it is gone."""
    outcomes = set()
    for step in range(12):
        for seed in range(6):
            disk = FaultyDisk(MemoryDisk())
            store = laid_out(disk)
            left = step

            def on_call(name: str, path: str) -> None:
                nonlocal left
                if left == 0:
                    raise PowerCut
                left -= 1

            disk.on_call = on_call
            with contextlib.suppress(PowerCut):
                store.delete(HASH, partial(disk.remove, f"{FOLDER}/00000000000000000001.log"))
            disk.on_call = None
            if seed:
                disk.cut_power(seed=seed)
            again = FileChannelStore("data", disk)
            if again.hashes() == [HASH]:
                assert again.load(HASH) == OLD
                assert "00000000000000000001.log" in disk.list(FOLDER)
                outcomes.add("whole")
            else:
                outcomes.add("gone")
    assert outcomes == {"whole", "gone"}


def test_a_delete_that_cannot_be_decided_leaves_the_channel() -> None:
    for operation in ("rename", "sync_folder"):
        disk = FaultyDisk(MemoryDisk())
        store = laid_out(disk)
        disk.fail(operation, OSError(5, "Input/output error"))
        with pytest.raises(OSError, match="Input/output"):
            store.delete(HASH)
        assert store.hashes() == [HASH]
        assert "00000000000000000001.log" in disk.list(FOLDER)


def test_a_failed_delete_does_not_come_back() -> None:
    disk = FaultyDisk(MemoryDisk())
    store = laid_out(disk)
    disk.remove(f"{FOLDER}/notes.txt")
    disk.fail("remove", OSError(1, "Operation not permitted"), path=".log")
    with pytest.raises(OSError, match="not permitted"):
        store.delete(HASH)
    assert disk.list(FOLDER)
    assert FileChannelStore("data", disk).hashes() == []
    assert disk.list("data") == []


# --- Enumerating and loading

DIFFERENT = {"stale_with_subdir"}  # docs/decisions/082: a folder with anything foreign in it is left alone


@pytest.mark.parametrize("case", read_cases(VECTORS / "store.jsonl"), ids=lambda case: str(case["name"]))
def test_a_data_directory_is_enumerated_and_swept_like_the_original_does(case: dict[str, Any], tmp_path: Path) -> None:
    root = tmp_path / "data"
    lay_out(case["files"], root)
    for name in case["make_dirs"]:
        (root / name).mkdir()
    before = listing(root)
    assert FileChannelStore(str(root)).hashes() == sorted(case["enumerate"])
    assert listing(root) == (before if case["name"] in DIFFERENT else case["after"])


def listing(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_a_wrong_data_directory_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A home folder, a folder of git objects, a folder that only looks like a channel."""
    for name in (
        "Documents/letter.txt",
        "a" * 64 + "/letter.txt",
        "b" * 64 + "/00000000000000000001.log.orig",
        "c" * 64 + "/cursor.bin/inside",
        "d" * 63 + "/cursor.bin",
        "e" * 64 + "/metadata.bin.tmp/x",
        "F" * 64 + "/cursor.bin",
        "notes.md",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    before = listing(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert FileChannelStore(str(tmp_path)).hashes() == []
    assert listing(tmp_path) == before
    assert "not ours" in caplog.text


def test_a_missing_data_directory_has_no_channels(tmp_path: Path) -> None:
    assert FileChannelStore(str(tmp_path / "nowhere")).hashes() == []


def test_a_sweep_that_fails_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    disk = FaultyDisk(MemoryDisk())
    store = laid_out(disk)
    disk.remove(f"{FOLDER}/metadata.bin")
    disk.remove(f"{FOLDER}/notes.txt")
    disk.fail("remove", OSError(1, "Operation not permitted"))
    assert store.hashes() == []
    assert "could not be removed" in caplog.text


def test_a_corrupt_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    store = FileChannelStore(str(tmp_path))
    store.save(OLD)
    path = tmp_path / HASH / "metadata.bin"
    path.write_bytes(b"not valid postcard")
    with pytest.raises(CorruptionError, match=r"metadata\.bin at byte 1"):
        store.load(HASH)
    path.unlink()
    path.mkdir()
    with pytest.raises(CorruptionError, match="a folder stands"):
        store.load(HASH)
    with pytest.raises(IsADirectoryError):
        store.save(NEW)


def test_an_oversized_file_is_refused_unread(tmp_path: Path) -> None:
    store = FileChannelStore(str(tmp_path))
    store.save(OLD)
    path = tmp_path / HASH / "metadata.bin"
    os.truncate(path, MAX_METADATA_BYTES)
    assert store.load(HASH) == OLD  # 64 MiB, nearly all of it behind the type
    os.truncate(path, MAX_METADATA_BYTES + 1)
    with pytest.raises(CorruptionError, match="more than 67108864"):
        store.load(HASH)


def test_channels_loaded_together_are_those_loaded_one_by_one(tmp_path: Path) -> None:
    """Good ones, old ones, large ones, and every kind that cannot be read: the same channels and the same words."""
    store = FileChannelStore(str(tmp_path))
    members = tuple(Nid(f"user{number:06}", "localhost") for number in range(10_000))
    digests = [str(saved) for saved in store.save_many([PersistedChannel(f"ops/{number}") for number in range(1100)])]
    digests.append(store.save(PersistedChannel("large", members=members)))
    kinds = {"cut": b"\x05ab", "empty": b"", "old": encode(OLD)[:-1], "queue": encode(OLD)[:-1]}
    for handler, data in kinds.items():
        digests.append(store.save(PersistedChannel(handler)))
        (tmp_path / digests[-1] / "metadata.bin").write_bytes(data)
    (tmp_path / channel_hash("queue") / "cursor.bin").write_bytes(bytes(16))
    digests.append(store.save(PersistedChannel("huge")))
    os.truncate(tmp_path / digests[-1] / "metadata.bin", MAX_METADATA_BYTES + 1)
    digests.append(channel_hash("folder"))
    (tmp_path / digests[-1] / "metadata.bin").mkdir(parents=True)
    digests.append(channel_hash("missing"))

    def alone(digest: str) -> Any:
        try:
            return store.load(digest)
        except (CorruptionError, OSError) as exc:
            return str(exc)

    found = store.load_many(digests)
    assert [str(one) if isinstance(one, Exception) else one for one in found] == [alone(digest) for digest in digests]
    assert sum(isinstance(one, Exception) for one in found) == 6
    assert [type(one) for one in found[-2:]] == [CorruptionError, FileNotFoundError]


def test_the_layout_of_0_6_is_read_as_pubsub_unless_a_queue_lies_beside_it(tmp_path: Path) -> None:
    store = FileChannelStore(str(tmp_path))
    plain = msgspec.structs.replace(OLD, channel_type=ChannelType.PUBSUB)
    store.save(plain)
    (tmp_path / HASH / "metadata.bin").write_bytes(encode(plain)[:-1])
    assert store.load(HASH) == plain
    (tmp_path / HASH / "cursor.bin").write_bytes(bytes(16))
    with pytest.raises(CorruptionError, match="type is missing"):
        store.load(HASH)


def test_the_hash_is_of_the_handler_alone() -> None:
    assert channel_hash("ops/east") == "a2b8af6174488a84d9dd39d1b495570a2a77f6302924e673c212e2e60b29f97a"
    assert channel_hash("ops/east") != channel_hash("ops/west")
