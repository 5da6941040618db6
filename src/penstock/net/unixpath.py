"""Paths of unix sockets: an address holds about a hundred bytes of one, and data directories may lie deeper."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

__all__ = ["short_path"]

MOST_BYTES: Final = 100
"""Of a path that goes into an address as it is; Linux has room for 107, others for a few less."""


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """Yield a path to the same file that fits into an address, good while the block runs.

    A long one is reached through the descriptor of its folder, where the system shows descriptors as files.

    >>> with short_path("/run/penstock.sock") as path: path
    '/run/penstock.sock'
    """
    if len(os.fsencode(path)) <= MOST_BYTES or not os.path.isdir("/proc/self/fd"):
        yield path
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
