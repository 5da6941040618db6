"""Promise: logs can be followed from asyncio without blocking the loop."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.batch import Batch
from penstock.errors import Timeout
from penstock.log import open_log
from penstock.log.aio import poll, tail
from penstock.log.xchannel import Writer


async def test_poll_waits_for_something_or_gives_up() -> None:
    looks = iter([None, None, None, "found"])
    assert await poll(lambda: next(looks)) == "found"
    with pytest.raises(Timeout, match=r"within 0\.01 s"):
        await poll(lambda: None, timeout=0.01)
    assert await poll(lambda: 0) == 0  # only None means nothing


async def test_tail_yields_what_is_there_and_what_comes(tmp_path: Path) -> None:
    path = str(tmp_path / "chan")
    found: list[bytes] = []
    with Writer.open(path, region_bytes=4096) as writer, open_log(path) as log:
        writer.append_many([b"one", b"two"])

        async def follow() -> None:
            async for batch in tail(log, log.first_position, limit=1):
                assert len(batch) == 1
                found.extend(batch.to_payloads())
                if len(found) == 4:
                    return

        task = asyncio.ensure_future(follow())
        await asyncio.sleep(0.02)
        writer.roll()
        writer.append_many([b"three", b"four"])
        await asyncio.wait_for(task, 60)
    assert found == [b"one", b"two", b"three", b"four"]


async def test_tail_from_the_end_sees_only_what_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "chan")
    with Writer.open(path) as writer, open_log(path) as log:
        writer.append(b"before")
        looked, read = threading.Event(), log.read

        def look(*args: Any) -> Batch:
            batch = read(*args)
            looked.set()
            return batch

        monkeypatch.setattr(log, "read", look)
        stream = tail(log)
        first = asyncio.ensure_future(anext(stream))
        assert await asyncio.to_thread(looked.wait, 60)  # only now it stands at the end
        writer.append(b"after")
        assert (await asyncio.wait_for(first, 60)).to_payloads() == [b"after"]
        await stream.aclose()
