"""Waiting for the records of a channel on an event loop.

Stores to memory wake nobody, so someone has to look.  On the loop that is a dozen lines of Python each time; a thread
does it below Python (``Cursor.doze``) for next to nothing, as it does for readers without a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from penstock.disk import LoopWait, doze_in_thread
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.log.xchannel.reader import Reader

__all__ = ["ChannelWait"]

DOZE_SECONDS: Final = 0.25
"""How long a thread dozes at most: what was cancelled, and a process that ends, wait for it."""


class ChannelWait(LoopWait):
    """Waits with a reader of its own, which ``opener`` opens at the end of the channel."""

    def __init__(self, opener: Callable[[], Reader]) -> None:
        super().__init__()
        self._opener = opener
        self._reader: Reader | None = None

    async def long_pause(self, seconds: float) -> None:
        """Sleep until a record comes, once the delays have become long."""
        if self._reader is None:
            self._reader = self._opener()
            return  # something may have come before: look once more
        if not await doze_in_thread(lambda: self._doze(min(seconds, DOZE_SECONDS))):
            await self.until_woken(min(seconds, self._last))

    def _doze(self, seconds: float) -> None:
        reader = self._reader
        if reader is None:
            return
        try:
            if reader.wait(seconds, patient=True):
                reader.seek_live()  # before anyone looks: what comes after that is waited for
        except (PenstockError, OSError):
            self._reader = None  # whoever looks says why
            reader.close()

    def close(self) -> None:
        """Let go of the reader."""
        super().close()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
