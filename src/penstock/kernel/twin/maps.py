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

    @property
    def length(self) -> int:
        """How many bytes are mapped."""
        return len(self)


def view_of(data: Any) -> memoryview:
    """Return the bytes of anything that has some."""
    return memoryview(data).cast("B")
