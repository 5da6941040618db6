"""Files that a library maps by itself, watched for being cut while they are open."""

from __future__ import annotations

import os
from typing import Final

from penstock import kernel
from penstock.disk.posix import PosixDisk
from penstock.errors import CorruptionError

__all__ = ["CutWatch"]

MAPS: Final = "/proc/self/maps"


class CutWatch:
    """Watches one file: every look compares its size, and a touch of what is gone gives zeros instead of a signal.

    ``page`` is how a page begins that stands in for one that is gone, for a library that ends the process when it meets
    zeros.  What such a library makes of it is not to be used: ``check`` belongs behind every call that reads, before
    anything of it is handed out or written.  Where mappings cannot be found (not on Linux) only sizes are compared.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as made:
    ...     done = made.write(b"12345"), made.flush()
    ...     watch = CutWatch(made.name); watch.check()
    ...     done = made.truncate(3)
    ...     watch.check()
    Traceback (most recent call last):
    penstock.errors.CorruptionError: ... at byte 3: it was cut while it was open, and had 5 bytes
    """

    def __init__(self, path: str, page: bytes = b"") -> None:
        self._path, self._page = path, page
        self._file = PosixDisk().open(path)
        self._size = self._file.stat().size
        self._guards: list[kernel.maps.Guard] = []
        self._cut: CorruptionError | None = None
        self.look()

    def look(self) -> None:
        """Guard what is mapped now: after the library has mapped it, or mapped it anew."""
        old, self._guards = self._guards, []
        for guard in old:
            guard.release()
        self._guards = [
            kernel.maps.Guard(start, end - start, writable, self._page) for start, end, writable in self._mapped()
        ]

    def check(self) -> None:
        """Raise CorruptionError if the file was cut since it was opened, now and from then on."""
        known = self._size  # before the look: another thread may see the file grow, and note that, in between
        size = self._file.stat().size
        if size < known or any(guard.torn for guard in self._guards):
            reason = f"it was cut while it was open, and had {known} bytes"
            self._cut = self._cut or CorruptionError(self._path, size, reason)
        elif size > self._size:
            self._size = size
        if self._cut is not None:
            raise CorruptionError(self._cut.file, self._cut.byte, self._cut.reason)

    def close(self) -> None:
        """Watch no more: right after the library has unmapped it."""
        for guard in self._guards:
            guard.release()
        self._guards = []
        self._file.close()

    def _mapped(self) -> list[tuple[int, int, bool]]:
        device, inode = self._file.stat().identity
        found = []
        try:
            with open(MAPS, encoding="utf-8", errors="replace") as file:
                for line in file:
                    parts = line.split(None, 5)
                    if len(parts) > 5 and parts[4] == str(inode) and parts[3] == _device(device):
                        start, _, end = parts[0].partition("-")
                        found.append((int(start, 16), int(end, 16), "w" in parts[1]))
        except OSError:
            return []
        return found


def _device(number: int) -> str:
    return f"{os.major(number):02x}:{os.minor(number):02x}"
