"""Whatever happens to a file of a store, a bucket or a data directory: an answer, and nothing lost in silence.

An append log has checksums, RocksDB too; LMDB has none, and neither has the metadata of channels: there a byte that was
changed may change what is said, but it ends nothing.  The short form tries one damage in some dozens, ``make damage``
every byte and every length of every file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from damage import ANSWERS, Damage, damages, files_below
from penstock.channels import ChannelManager, FileChannelStore
from penstock.kv import EmbeddedConnection
from penstock.store import AppendLogOptions, AppendLogStore, LmdbStore, RocksStore
from penstock.store.options import RocksOptions
from penstock.types import KvUpdate, WatchCursor

ANN, BOB = "ann@localhost", "bob@localhost"
ENTRIES = {f"key{number:02}": b"%02d-" % number + b"value " * (number % 4) for number in range(24)}


def fill(store: Any) -> None:
    for number, (key, value) in enumerate(ENTRIES.items()):
        store.apply([KvUpdate.put(key, value, number + 1)], WatchCursor.of(number + 1))
    store.settle()


def used(file: str, data: bytes) -> int:
    """Return how many bytes of a file matter: what lies behind the last byte that is not zero is room."""
    return min(len(data), len(data.rstrip(b"\0")) + 2)


# --- Stores


def make_append_log(folder: Path) -> None:
    options = AppendLogOptions(sync="always", compact_threshold_bytes=1 << 30)
    with AppendLogStore.open(folder / "fold", options) as store:
        fill(store)


def look_append_log(folder: Path, *, read_only: bool) -> tuple[dict[str, bytes], bool]:
    with AppendLogStore.open(folder / "fold", read_only=read_only) as store:
        return {entry.key: entry.value for entry in store.range()}, not list(store.verify())


@pytest.mark.parametrize("read_only", [True, False])
def test_damage_of_an_append_log_is_answered(read_only: bool, tmp_path: Path, long_run: bool) -> None:
    sound, copy = tmp_path / "sound", tmp_path / "copy"
    sound.mkdir()
    make_append_log(sound)
    failures = []
    for damage in damages(sound, used, every=1 if long_run else 23):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(sound, copy)
        damage.do(copy)
        before = files_below(copy)
        try:
            found, _ = look_append_log(copy, read_only=read_only)
        except ANSWERS as exc:
            if "fold" not in str(exc):
                failures.append(f"{damage}: no file is named: {exc!r}")
            if damage.file in before and files_below(copy).get(damage.file) != before[damage.file]:
                failures.append(f"{damage}: refused, and yet {damage.file} was changed")
            continue
        if found != ENTRIES and not (damage.how == "remove" and damage.file == "fold"):
            failures.append(f"{damage}: {len(ENTRIES) - len(found)} are missing or wrong in silence")
        if read_only and files_below(copy) != before:
            failures.append(f"{damage}: reading changed a file")
    assert failures == [], f"{len(failures)} failures:\n" + "\n".join(failures[:40])


ENGINE = """
import json, sys
from pathlib import Path
from penstock.errors import PenstockError
from penstock.store import LmdbStore, RocksStore
from penstock.store.options import RocksOptions
for line in sys.stdin:
    kind, path, read_only = json.loads(line)
    said = []
    found = {}
    try:
        if kind == "lmdb":
            store = LmdbStore.open(path, read_only=read_only)
        else:
            store = RocksStore.open(path, RocksOptions(cache_bytes=0), read_only=read_only)
        try:
            for key in KEYS:
                entry = store.get(key)
                found[key] = None if entry is None else entry.value.hex()
            scanned = {entry.key: entry.value.hex() for entry in store.range()}
            said += [str(problem) for problem in store.verify()]
            if not said and scanned != {key: value for key, value in found.items() if value is not None}:
                said.append("a scan and a get differ")
        finally:
            store.close()
    except (PenstockError, OSError) as exc:
        said.append(f"raised: {exc}")
    print(json.dumps([found, said]), flush=True)
"""


class Engine:
    """A process in which stores are opened: one that ends it is noticed, and it is started again."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def look(self, kind: str, path: Path, *, read_only: bool) -> tuple[dict[str, str | None], list[str]] | str:
        """Return what a store holds and what it says, or how the process ended."""
        if self._process is None:
            code = f"KEYS = {list(ENTRIES)!r}\n{ENGINE}"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([kind, str(path), read_only]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self.close()
            return f"the process ended with {code}"
        found, said = json.loads(line)
        return found, said

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            for stream in (self._process.stdin, self._process.stdout):
                assert stream is not None
                with contextlib.suppress(OSError):
                    stream.close()
            self._process.wait()
            self._process = None


def make_engine(kind: str, folder: Path) -> None:
    store: Any = (
        LmdbStore.open(folder / "fold", map_bytes=1 << 20)
        if kind == "lmdb"
        else RocksStore.open(folder / "fold", RocksOptions(cache_bytes=0))
    )
    with store:
        fill(store)


@pytest.mark.parametrize("kind", ["lmdb", "rocksdb"])
def test_damage_of_an_engine_ends_no_process(kind: str, tmp_path: Path, long_run: bool) -> None:
    """Of files that only their engine understands: an answer, or what was written; LMDB has no checksums to tell."""
    sound, copy = tmp_path / "sound", tmp_path / "copy"
    sound.mkdir()
    make_engine(kind, sound)
    (sound / "fold" / "LOG").unlink(missing_ok=True)  # for people only
    wanted = {key: value.hex() for key, value in ENTRIES.items()}
    failures, engine, wrong = [], Engine(), 0
    try:
        for damage in damages(sound, used, every=(7 if kind == "lmdb" else 3) if long_run else 397):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(sound, copy)
            damage.do(copy)
            found = engine.look(kind, copy / "fold", read_only=True)
            if isinstance(found, str):
                failures.append(f"{damage}: {found}")
                continue
            values, said = found
            if not said and values != wanted:
                wrong += 1
                if kind == "rocksdb":
                    failures.append(f"{damage}: {sum(values[k] != wanted[k] for k in wanted)} are wrong in silence")
    finally:
        engine.close()
    assert failures == [], f"{len(failures)} failures:\n" + "\n".join(failures[:40])


# --- Buckets


async def _make_bucket(folder: Path) -> None:
    async with EmbeddedConnection(folder / "kv", sync="always") as connection:
        bucket = await connection.make("b", history=3)
        for key, value in ENTRIES.items():
            await bucket.writer.put(key, value)


async def _look_bucket(folder: Path) -> dict[str, bytes]:
    async with EmbeddedConnection(folder / "kv") as connection:
        bucket = await connection.store("b")
        found = await bucket.reader.scan("")
        return {found[index].key: found[index].value for index in range(len(found))}


def test_damage_of_a_bucket_is_answered(tmp_path: Path, long_run: bool) -> None:
    sound, copy = tmp_path / "sound", tmp_path / "copy"
    sound.mkdir()
    asyncio.run(_make_bucket(sound))
    failures = []
    for damage in damages(sound, used, every=1 if long_run else 61):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(sound, copy)
        damage.do(copy)
        before = files_below(copy)
        try:
            found = asyncio.run(_look_bucket(copy))
        except ANSWERS as exc:
            if "kv" not in str(exc) and "bucket" not in str(exc):
                failures.append(f"{damage}: no file is named: {exc!r}")
        else:
            foreign = {key for key, value in found.items() if ENTRIES.get(key) != value}
            if foreign:
                failures.append(f"{damage}: handed out what nobody wrote: {foreign}")
            if found.keys() < ENTRIES.keys():
                failures.append(f"{damage}: {len(ENTRIES) - len(found)} keys are missing in silence")
        gone = before.keys() - files_below(copy).keys()
        if gone:
            failures.append(f"{damage}: looking removed {gone}")
    assert failures == [], f"{len(failures)} failures:\n" + "\n".join(failures[:40])


# --- Channels


async def _make_channels(folder: Path) -> None:
    async with await ChannelManager.open(folder / "data") as manager:
        for name, kind in (("ops", None), ("jobs", "fifo")):
            channel = manager.channel(name)
            await channel.join(ANN)
            await channel.join(BOB)
            await channel.configure(ANN, persist=True, type=kind)  # type: ignore[arg-type]
            for value in list(ENTRIES.values())[:6]:
                await (channel.push(ANN, value) if kind else channel.broadcast(ANN, value))


async def _look_channels(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    found: dict[str, Any] = {}
    async with await ChannelManager.open(folder / "data") as manager:
        for name in ("ops", "jobs"):
            channel = manager.channel(name)
            try:
                found[name] = [entry.payload for entry in await channel.history(ANN)] if name == "ops" else []
                if name == "jobs":
                    while await channel.length(ANN):
                        found[name].append((await channel.pop(ANN)).payload)
            except Exception as exc:
                found[name] = exc
        return found, dict(manager.broken)


def test_damage_of_channels_is_answered(tmp_path: Path, long_run: bool) -> None:
    from penstock.errors import PenstockError, Refused

    sound, copy = tmp_path / "sound", tmp_path / "copy"
    sound.mkdir()
    asyncio.run(_make_channels(sound))
    wanted, failures = list(ENTRIES.values())[:6], []
    for damage in damages(sound, used, every=1 if long_run else 71):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(sound, copy)
        damage.do(copy)
        before = files_below(copy)
        try:
            found, broken = asyncio.run(_look_channels(copy))
        except ANSWERS:
            continue
        for name, answer in found.items():
            if isinstance(answer, Exception):
                if not isinstance(answer, (PenstockError, OSError)):
                    failures.append(f"{damage}: {name}: {answer!r}")
                elif isinstance(answer, Refused) and not broken and not _told(damage, answer):
                    failures.append(f"{damage}: {name}: {answer!r} and nothing is broken")
                continue
            wrong = [payload for payload in answer if payload not in wanted]
            if wrong:
                failures.append(f"{damage}: {name}: handed out what nobody wrote: {wrong}")
            if len(answer) < len(wanted) and not broken and not _passed(damage, name):
                failures.append(f"{damage}: {name}: {len(wanted) - len(answer)} are missing in silence")
        kept = b"".join(files_below(copy).values())
        for file, data in before.items():
            if file not in files_below(copy) and data.strip(b"\0") and data not in kept and file.endswith(".log"):
                failures.append(f"{damage}: looking removed {file}")
    assert failures == [], f"{len(failures)} failures:\n" + "\n".join(failures[:40])


def _passed(damage: Damage, name: str) -> bool:
    """Whether a damage looks like what is done on purpose: a cursor moved on, or the oldest messages dropped."""
    if name == "jobs" and damage.how in ("swap", "remove") and "cursor" in damage.file:
        return True
    return damage.how == "remove" and damage.file.endswith("1.log")


def _told(damage: Damage, answer: Exception) -> bool:
    """Whether who asked was told: its cursor cannot be used, or metadata, which has no checksum, says otherwise."""
    return "CURSOR_RECOVERY_REQUIRED" in str(answer) or "metadata" in damage.file


def test_metadata_of_channels_is_read_or_refused(tmp_path: Path, long_run: bool) -> None:
    """Every byte and every length, below the manager: what is read has a shape, and nothing else is raised."""
    sound, copy = tmp_path / "sound", tmp_path / "copy"
    sound.mkdir()
    asyncio.run(_make_channels(sound))
    for damage in damages(sound, used, every=1 if long_run else 11):
        if "metadata" not in damage.file:
            continue
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(sound, copy)
        damage.do(copy)
        store = FileChannelStore(str(copy / "data"))
        for digest in store.hashes():
            with contextlib.suppress(*ANSWERS):
                store.load(digest)
