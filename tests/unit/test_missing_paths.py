"""Promise: a path at which nothing is, or in a folder that is not there, is one error everywhere: NotFoundError."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import (
    AppendLogStore,
    FileChannel,
    LmdbStore,
    MessageLog,
    PenstockError,
    Reader,
    RocksStore,
    Writer,
    embedded_connect,
    find_logs,
    open_log,
    open_store,
    open_writer,
)
from penstock.log.messagelog.shared import SharedLog


def make_bucket(path: Path) -> None:
    async def work() -> None:
        async with await embedded_connect(path) as connection:
            await connection.make("routes")

    asyncio.run(work())


def read_only(store: Any) -> Callable[[Path], Any]:
    return lambda path: store.open(path, read_only=True)


READERS = {
    "Reader.open": Reader.open,
    "open_log": open_log,
    "find_logs": find_logs,
    "FileChannel.attach": FileChannel.attach,
    "FileChannel.open, create=False": lambda path: FileChannel.open(path, create=False),
    "open_store": open_store,
    **{f"{store.__name__}, read_only": read_only(store) for store in (AppendLogStore, RocksStore, LmdbStore)},
}
MAKERS = {
    "Writer.open": Writer.open,
    "FileChannel.open": FileChannel.open,
    "FileChannel.share": FileChannel.share,
    "MessageLog.open": MessageLog.open,
    "SharedLog.open": SharedLog.open,
    "open_writer": open_writer,
    "AppendLogStore.open": AppendLogStore.open,
    "RocksStore.open": RocksStore.open,
    "LmdbStore.open": LmdbStore.open,
    "bucket": make_bucket,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("place", ["nothing", "nowhere/nothing"])
def test_reading_what_is_not_there_is_a_file_not_found_error_with_the_path(
    tmp_path: Path, name: str, place: str
) -> None:
    with pytest.raises(FileNotFoundError, match="nothing") as caught:
        READERS[name](tmp_path / place)
    assert isinstance(caught.value, PenstockError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", MAKERS)
def test_making_something_in_a_folder_that_is_not_there_is_the_same_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere/made: the folder does not exist") as caught:
        MAKERS[name](tmp_path / "nowhere/made")
    assert isinstance(caught.value, PenstockError)
    assert list(tmp_path.iterdir()) == []


WAITERS: dict[str, tuple[Callable[..., Any], Callable[[Path], Any]]] = {
    "Reader.open": (Reader.open, Writer.open),
    "open_log, xchannel": (open_log, Writer.open),
    "open_log, messagelog": (open_log, MessageLog.open),
    "open_log, filechannel": (open_log, FileChannel.open),
    "FileChannel.attach": (FileChannel.attach, FileChannel.share),
}


@pytest.mark.parametrize("name", WAITERS)
def test_a_reader_may_wait_for_its_writer(tmp_path: Path, name: str) -> None:
    read, make = WAITERS[name]
    with pytest.raises(FileNotFoundError, match="late"):
        read(tmp_path / "late", timeout=0.01)
    opened: list[Any] = []
    reader = threading.Thread(target=lambda: opened.append(read(tmp_path / "late", timeout=60)))
    reader.start()
    with make(tmp_path / "late") as writer:
        writer.append(b"hello")
        reader.join()
    with opened[0] as log:
        assert "late" in str(log.path)
