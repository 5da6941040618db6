"""Room made ready on a second core while the writer fills the present region: the next one, or that of the next file.

A file is then one region longer than its records need, for as long as its writer goes on; what was not used is
cut off when the file is rolled or closed.  A writer that is killed leaves that region behind: zeros after the last
slot, which readers never reach and the next writer uses.  The next file is a draft (draft.py) until it is rolled to.
What a roll leaves behind, mapped pages and files that are too old, is cleared away on the same core.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Final

from penstock.disk import ReadFile, start_thread
from penstock.disk.posix import PosixFile
from penstock.kernel import Mapping
from penstock.log.xchannel.draft import Draft
from penstock.log.xchannel.files import ChannelFile

__all__ = ["Ahead"]

SMALLEST: Final = 256 << 10
"""A smaller region or file is made by its writer in less time than it takes to ask for it."""

REGIONS_BEFORE: Final = 2
"""How many regions a writer fills before a thread is worth starting for it."""


class Ahead:
    """Belongs to one writer, which calls it under its lock."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._end: Any = None
        self._asked: tuple[ChannelFile | Draft, int] | None = None
        self._crossed = 0

    def should_prepare(self, size: int) -> bool:
        """Whether a writer that has come to another region should have something of that size made ready."""
        self._crossed += 1
        return self._crossed >= REGIONS_BEFORE and size >= SMALLEST

    def ask(self, file: ChannelFile | Draft, window: Mapping, start: int, offset: int) -> None:
        """Have the region at ``offset`` made ready, if it lies in the window that begins at ``start``."""
        if offset + file.region_bytes > start + len(window) or not isinstance(file.file, PosixFile):
            return
        if self._worker is None:
            self._begin()
        if self._worker is None:
            return
        self._asked = file, offset
        self._worker.ask(file.file.fd, offset, window, offset - start, file.region_bytes)

    def take(self, file: ChannelFile | Draft, offset: int) -> int:
        """Return up to where the region at ``offset`` is mapped, ``offset`` if it only exists, -1 if it does not."""
        if self._asked is None or self._asked[0] is not file or self._asked[1] != offset:
            return -1
        self._asked = None
        made = self._worker.settle()
        return -1 if made == 0 else offset if made == 1 else offset + file.region_bytes

    def give_back(self, file: ChannelFile) -> None:
        """Cut off what was made ready and not taken: before the file is left."""
        if self._asked is None or self._asked[0] is not file:
            return
        offset, self._asked = self._asked[1], None
        if self._worker.settle():
            with contextlib.suppress(OSError):
                file.file.truncate(offset)  # type: ignore[attr-defined]  # a PosixFile opened by modify

    def tidy(self, window: Mapping, *files: ReadFile) -> None:
        """Close files that were left or removed; a thread that is there gives back what they and the window hold."""
        if self._worker is not None:
            self._worker.tidy(window, *(file.fd for file in files if isinstance(file, PosixFile)))
        for file in files:
            file.close()

    def close(self) -> None:
        """Let the thread go."""
        if self._end is not None:
            self._end()
        self._worker = self._end = None

    def forked(self) -> None:
        """Forget the thread, which stayed with the parent, and its lock, which may be held for ever here."""
        if self._end is not None:
            self._end.detach()
        self._worker = self._end = self._asked = None

    def _begin(self) -> None:
        from penstock.kernel.ahead import Ahead as Worker

        worker = Worker()
        if start_thread(worker.run, "penstock-ahead") is None:
            return  # or the interpreter is on its way out: the writer does it all
        self._worker = worker
        self._end = weakref.finalize(self, worker.end)  # also when nobody closes the writer
