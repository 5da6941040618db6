"""Waiting for records that are not there yet.  Numbers in comments are those of the original's own suites (facts 6)."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from xchannels import taken

from penstock.errors import ReplacedError, Timeout
from penstock.log.xchannel import Reader, Writer


def test_a_read_with_a_timeout_gives_up(path: Path) -> None:  # 28, 31
    Writer.precreate(path)
    with Reader.open(path) as reader:
        began = time.monotonic()
        with pytest.raises(Timeout, match=r"no record within 0\.05 s"):
            reader.read(timeout=0.05)
        assert time.monotonic() - began >= 0.045
        assert reader.wait(0) is False
        assert reader.wait(0.01) is False
        assert list(reader.records(timeout=0.01)) == []
        assert list(reader.batches(timeout=0.01)) == []


def test_a_read_returns_what_is_written_meanwhile(path: Path) -> None:  # 29, 90
    with Writer.open(path, region_bytes=4096) as writer, Reader.open(path) as reader:

        def write() -> None:
            writer.roll()
            writer.append(b"later")

        thread = threading.Timer(0.025, write)
        thread.start()
        assert bytes(reader.read(timeout=60).payload) == b"later"
        thread.join()


def test_wait_takes_nothing(path: Path) -> None:  # 18, 19, 30
    with Writer.open(path) as writer, Reader.open(path) as reader:
        assert reader.wait(0) is False
        writer.append(b"x")
        assert reader.wait(0)
        assert reader.wait(0)
        assert taken(reader) == b"x"


def test_wait_steps_over_a_skip(path: Path) -> None:  # 32
    with Writer.open(path, region_bytes=4096) as writer, Reader.open(path) as reader:
        writer.append(b"x" * 3000)
        taken(reader)
        writer.append(b"y" * 3000)
        assert reader.wait(0)
        assert reader.position == 4096


def test_records_are_awaited_without_blocking_the_loop(path: Path) -> None:
    async def follow(reader: Reader) -> list[bytes]:
        found = []
        async for record in reader:
            found.append(bytes(record.payload))
            if len(found) == 3:
                return found
        return found

    async def both() -> list[bytes]:
        with Writer.open(path) as writer, Reader.open(path) as reader:
            task = asyncio.ensure_future(follow(reader))
            for payload in (b"one", b"two", b"three"):
                await asyncio.sleep(0.002)
                writer.append(payload)
            return await asyncio.wait_for(task, 60)

    assert asyncio.run(both()) == [b"one", b"two", b"three"]


@pytest.mark.parametrize("live", [False, True])
def test_an_idle_reader_sleeps(live: bool, path: Path) -> None:
    """Its time on the processor, which does not depend on what else runs: at most a tenth of the wait."""
    with Writer.open(path) as writer:
        writer.append(b"x")
        with Reader.open(path, "latest" if live else "earliest") as reader:
            list(reader.records(timeout=0))
            began = time.thread_time()
            assert reader.wait(0.5) is False
            assert time.thread_time() - began < 0.05


def poll(reader: Reader) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert reader.try_read() is None


def test_a_polling_reader_still_looks_around(path: Path) -> None:
    """Polling decides from what the reader knows; every few milliseconds it has a look at the files all the same."""
    with Writer.open(path, region_bytes=4096) as writer:
        writer.append(b"x")
    with Reader.open(path) as reader:
        assert taken(reader) == b"x"
        assert reader.try_read() is None
        path.unlink()
        with pytest.raises(ReplacedError, match="its files are gone"):
            poll(reader)
