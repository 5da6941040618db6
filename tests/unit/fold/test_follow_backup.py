"""Promise: a fold notices that its log is an older one, put back, though that has the same id."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ReplacedError
from penstock.fold import follow
from penstock.fold.follow import FollowOptions, each_record
from penstock.log.detect import FORMATS, open_log, open_writer
from penstock.store import AppendLogStore
from penstock.types import KvUpdate

UPDATES = each_record(lambda record: KvUpdate.put(bytes(record.payload).decode().strip(), b"1", record.position))


def fill(path: Path, kind: str, numbers: range) -> None:
    path.parent.mkdir(exist_ok=True)
    writer: Any = open_writer(str(path), format=kind)
    for number in numbers:
        writer.append(b"key%04d" % number)
    writer.sync()
    writer.close()


async def fold(path: Path, store_path: Path, **options: Any) -> set[str]:
    with open_log(str(path)) as log, AppendLogStore.open(store_path) as store:
        await follow(log, store, UPDATES, once=True, options=FollowOptions(**options))
        return set(store.keys())


@pytest.mark.parametrize("kind", sorted(FORMATS))
async def test_a_fold_of_a_log_whose_backup_came_back_refuses_or_begins_again(kind: str, tmp_path: Path) -> None:
    path, kept, store = tmp_path / "data" / "log", tmp_path / "kept", tmp_path / "fold.snap"
    fill(path, kind, range(50))
    shutil.copytree(path.parent, kept)
    fill(path, kind, range(50, 100))
    assert len(await fold(path, store)) == 100
    fill(path, kind, range(100, 101))
    assert len(await fold(path, store)) == 101  # a log that went on is the same
    shutil.rmtree(path.parent)
    shutil.copytree(kept, path.parent)
    fill(path, kind, range(1000, 1100))
    with pytest.raises(ReplacedError, match="read from it"):
        await fold(path, store)
    assert await fold(path, store, on_replaced="restart") == {
        f"key{number:04}" for number in (*range(50), *range(1000, 1100))
    }
    assert len(await fold(path, store)) == 150
