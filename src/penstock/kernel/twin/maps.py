"""The twin of maps.pyx."""

from __future__ import annotations

import mmap
from typing import Any, Self


class Mapping(mmap.mmap):
    """A piece of a file in memory, never past its end; see maps.pyx."""

    def __new__(cls, fd: int, offset: int, length: int, writable: bool = False) -> Self:
        """Map for reading: the twin never writes."""
        if writable:
            raise ValueError("the Python twin maps for reading only")
        return super().__new__(cls, fd, length, access=mmap.ACCESS_READ, offset=offset)

    torn = False  # nobody notices here

    @property
    def length(self) -> int:
        """How many bytes are mapped."""
        return len(self)


class Guard:
    """The twin installs no handler: a cut file still ends the process."""

    torn = False

    def __init__(self, address: int, length: int, writable: bool = False, head: bytes = b"") -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


def view_of(data: Any) -> memoryview:
    """Return the bytes of anything that has some."""
    return memoryview(data).cast("B")
