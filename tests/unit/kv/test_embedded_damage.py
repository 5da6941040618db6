"""Promise: any byte of a small file of a bucket or a fold may be flipped: an answer with its name, or no harm."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from penstock.disk import PosixDisk
from penstock.errors import PenstockError
from penstock.fold import follow
from penstock.kv import EmbeddedOptions, StoreConfig
from penstock.kv.embedded.bucket import Bucket
from penstock.kv.embedded.plan import Change
from penstock.log import open_log
from penstock.store import AppendLogStore
from penstock.testing.clock import FakeClock

OPTIONS = EmbeddedOptions(sync="none", checkpoint_bytes=1)
CONFIG = StoreConfig(name="b", max_age_seconds=100, history=3)


def opened(folder: Path, clock: FakeClock) -> Bucket:
    return Bucket.open(str(folder), CONFIG, OPTIONS, disk=PosixDisk(), clock=clock)


def state_of(bucket: Bucket) -> list[object]:
    return [bucket.config, bucket.scan("")[0].to_pylist(), bucket.entry("lease")]


@pytest.mark.parametrize(
    "name", ["bucket.json", "expiry.json", "ages.json", "head", "state.snap", "log/penstock-first"]
)
def test_a_flipped_byte_of_a_bucket_is_answered_or_does_no_harm(tmp_path: Path, name: str) -> None:
    clock = FakeClock()
    bucket = opened(tmp_path / "b", clock)
    bucket.commit([Change("put", "lease", b"me", ttl_ns=10**10), Change("put", "a", b"1")])
    bucket.compact(1)
    wanted, first = state_of(bucket), bucket.first_revision()
    bucket.close()
    data = (tmp_path / "b" / name).read_bytes()
    bad = tmp_path / "bad"
    shutil.copytree(tmp_path / "b", bad)
    for at in range(min(len(data), 200)):
        for flip in (0x01, 0x80):
            (bad / name).write_bytes(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])
            try:
                found = opened(bad, clock)
            except PenstockError as exc:
                assert name in str(exc)
                continue
            try:
                assert state_of(found) == wanted
                assert found.first_revision() >= min(first, 1)
            except PenstockError as exc:
                assert name in str(exc)
            finally:
                found.close()


def test_a_flipped_byte_of_a_note_of_a_fold_is_answered_or_does_no_harm(tmp_path: Path) -> None:
    clock = FakeClock()
    bucket = opened(tmp_path / "b", clock)
    bucket.commit([Change("put", "a", b"1"), Change("put", "b", b"2")])
    bucket.close()
    with open_log(tmp_path / "b" / "log") as log, AppendLogStore.open(tmp_path / "fold.snap") as store:
        asyncio.run(follow(log, store, once=True))
        for note in ("fold.snap.penstock-source", "fold.snap.penstock-seen"):
            data = (tmp_path / note).read_bytes()
            for at in range(0, min(len(data), 600), 3):
                (tmp_path / note).write_bytes(data[:at] + bytes([data[at] ^ 0x11]) + data[at + 1 :])
                try:
                    asyncio.run(follow(log, store, once=True))
                except PenstockError as exc:
                    assert note in str(exc)
                assert store.count() == 2
            (tmp_path / note).write_bytes(data)
