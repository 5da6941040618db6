"""Lines of stdin, as they come."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from typing import Final

from penstock.disk import start_thread

__all__ = ["lines_of_stdin"]

MOST_BYTES: Final = 64 << 10


async def lines_of_stdin() -> AsyncIterator[list[bytes]]:
    """Yield the lines that are there, at least one at a time, without their ends.

    Whoever is interrupted does not wait for the next line: nothing that is ended with the process waits for it either.
    """
    begun: list[bytes] = []
    while data := await _some_bytes():
        first, end, others = data.partition(b"\n")
        begun.append(first)
        if end:
            *lines, last = others.split(b"\n")
            yield [b"".join(begun), *lines]
            begun = [last]
    if any(begun):
        yield [b"".join(begun)]


async def _some_bytes() -> bytes:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[bytes] = loop.create_future()

    def done(data: bytes, error: BaseException | None) -> None:
        if not future.done():
            if error is None:
                future.set_result(data)
            else:
                future.set_exception(error)

    def work() -> None:
        data, error = b"", None
        try:
            data = _read()
        except BaseException as exc:  # noqa: BLE001 - it belongs to whoever waits
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(done, data, error)

    if start_thread(work, "penstock-stdin") is None:
        return _read()
    return await future


def _read() -> bytes:
    """Read what is there: below Python's own buffer, whose lock a thread that is left behind would keep."""
    try:
        descriptor = sys.stdin.fileno()
    except (OSError, ValueError):
        return sys.stdin.buffer.read(MOST_BYTES)
    return os.read(descriptor, MOST_BYTES)
