"""How one message log is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from penstock.errors import OptionsError
from penstock.log.options import SYNC_SECONDS, SyncMode, check_sync

__all__ = ["MessageLogOptions", "RetainBy"]

LARGEST_SEGMENT: Final = 1 << 40
RetainBy = Literal["count", "fifo"]
"""How old segments go: ``count`` beyond ``max_messages``, after each append; ``fifo`` only by ``drop_before``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLogOptions:
    """How one message log is written.  Given to MessageLog.open().

    >>> MessageLogOptions(max_messages=1000).retention
    'count'
    >>> MessageLogOptions(segment_bytes=0)
    Traceback (most recent call last):
    penstock.errors.OptionsError: segment_bytes=0: must be above 0
    """

    # --- What the log promises

    sync: SyncMode = "interval"
    """When entries survive a power cut; ``none`` still survives the death of any process."""

    sync_seconds: float = SYNC_SECONDS
    """With ``interval``: how long an entry may stay undurable."""

    retention: RetainBy = "count"
    """How old segments go."""

    max_messages: int = 0
    """With ``count``: whole segments below the newest ``max_messages`` numbers go; 0 keeps everything."""

    max_payload_bytes: int = 65_536
    """The largest payload ``append`` takes.  What is stored is kept whatever its size.  The original throws stored
    entries away that are larger than its own limit (65536 unless configured): go higher only where it never opens
    the log."""

    content: str = "raw"
    """``raw`` or ``envelope/1``; noted beside a new log for those who read it."""

    # --- How it is laid out

    segment_bytes: int = 128 << 20
    """A segment longer than this, at most 1 TiB, is sealed.  The original has this size built in."""

    def __post_init__(self) -> None:
        check_sync(self.sync, self.sync_seconds)
        check_retention(self.retention, self.max_messages)
        if self.segment_bytes <= 0:
            raise OptionsError(f"segment_bytes={self.segment_bytes}: must be above 0")
        if self.segment_bytes > LARGEST_SEGMENT:
            raise OptionsError(f"segment_bytes={self.segment_bytes}: must be at most 1 TiB")
        if not 0 <= self.max_payload_bytes < 1 << 32:
            raise OptionsError(f"max_payload_bytes={self.max_payload_bytes}: must be between 0 and 4 GiB")


def check_retention(retention: str, max_messages: int) -> None:
    """Refuse what is no retention.

    >>> check_retention("lifo", 0)
    Traceback (most recent call last):
    penstock.errors.OptionsError: retention='lifo': must be one of count, fifo
    """
    if retention not in get_args(RetainBy):
        raise OptionsError(f"retention={retention!r}: must be one of {', '.join(get_args(RetainBy))}")
    if max_messages < 0:
        raise OptionsError(f"max_messages={max_messages}: must not be negative")
