"""Being told by Linux that a folder changes (inotify).

Closing such a descriptor waits for the kernel (10 to 20 ms were seen), which no event loop and no receiver can afford
between two messages.  So a descriptor that is done with is kept, without its watch, for the next one who waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import sys
from functools import cache
from typing import Any, Final

__all__ = ["FolderWatch"]

# IN_MODIFY, IN_ATTRIB, IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE, IN_DELETE_SELF, IN_MOVE_SELF
EVENTS: Final = 0x2 | 0x4 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800
MOST_SPARE: Final = 32

_spare: list[int] = []


class FolderWatch:
    """One inotify descriptor on one folder.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     watch = FolderWatch.begin(folder)
    ...     pathlib.Path(folder, "news").touch()
    ...     watch is None or watch.wait(10.0)
    ...     watch is None or watch.close()
    True
    """

    def __init__(self, fd: int, watch: int) -> None:
        self.fd, self._watch = fd, watch
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    @classmethod
    def begin(cls, folder: str) -> FolderWatch | None:
        """Listen to a folder; None where that cannot be had."""
        library = _library()
        if library is None:
            return None
        fd = _spare.pop() if _spare else library.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if fd < 0:
            return None
        watch = library.inotify_add_watch(fd, os.fsencode(folder), ctypes.c_uint32(EVENTS))
        if watch < 0:
            _keep(fd)
            return None
        return cls(fd, watch)

    def wait(self, seconds: float) -> bool:
        """Wait until something changes; whether it did."""
        if not self._poll.poll(seconds * 1000):
            return False
        self.drain()
        return True

    def drain(self) -> None:
        """Forget what has changed so far."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.fd, 1 << 16)) > 1 << 15:
                pass

    def close(self) -> None:
        """Listen no longer; twice is fine."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        library = _library()
        if library is not None:
            library.inotify_rm_watch(fd, self._watch)
        with contextlib.suppress(BlockingIOError):
            while os.read(fd, 1 << 16):
                pass
        _keep(fd)


def _keep(fd: int) -> None:
    if len(_spare) < MOST_SPARE:
        _spare.append(fd)
    else:
        os.close(fd)


def _forked() -> None:
    while _spare:
        os.close(_spare.pop())  # the parent has them too: this is a number less and no more


@cache
def _library() -> Any:
    """Return the C library where it has inotify."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None, use_errno=True)
    return library if hasattr(library, "inotify_init1") else None


os.register_at_fork(after_in_child=_forked)
