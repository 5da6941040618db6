"""The event loop servers run on."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

__all__ = ["run"]

T = TypeVar("T")

# Names of malloc.h and what they are set to: what a server frees at the end of a turn it needs again in the next.
_HEAP: Final = {-1: 64 << 20, -2: 16 << 20, -3: 8 << 20}  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on uvloop, or on asyncio's own loop where uvloop is not there.

    >>> async def main(): return type(asyncio.get_running_loop()).__module__
    >>> run(main())
    'uvloop'
    """
    _keep_heap()
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
