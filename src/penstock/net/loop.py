"""The event loop servers run on."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import resource
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

__all__ = ["run"]

T = TypeVar("T")

# Names of malloc.h and what they are set to: what a server frees at the end of a turn it needs again in the next.
_HEAP: Final = {-1: 64 << 20, -2: 16 << 20, -3: 8 << 20}  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD

OPEN_FILES: Final = 1 << 20
"""What a process asks for at the most: more than any server here lets in."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on uvloop, or on asyncio's own loop where uvloop is not there.

    >>> async def main(): return type(asyncio.get_running_loop()).__module__
    >>> run(main())
    'uvloop'
    """
    _keep_heap()
    _allow_open_files()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def _keep_heap() -> None:
    """Have malloc keep up to 64 MiB that were freed, instead of giving a read's buffer back and asking for it again."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    for name, value in _HEAP.items():
        mallopt(name, value)


def _allow_open_files() -> None:
    """Take as many open files as the system allows: the usual 1,024 are a tenth of the clients a server lets in."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
