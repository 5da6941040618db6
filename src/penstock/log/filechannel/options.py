"""How one channel behaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from penstock.errors import OptionsError
from penstock.log.options import SYNC_SECONDS, SyncMode, check_sync

__all__ = ["ChannelOptions", "Compression", "Policy"]

Compression = Literal["snappy", "gzip", "none"]
Policy = Literal["refuse", "block", "drop_oldest"]

DEFAULT_SEGMENT_BYTES: Final = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelOptions:
    """How one channel behaves.  Given to FileChannel.open(); it cannot change afterwards.

    >>> ChannelOptions(segment_bytes=1 << 20, keep_bytes=64 << 20).policy
    'refuse'
    >>> ChannelOptions(segment_bytes=1 << 20, keep_bytes=1 << 20)
    Traceback (most recent call last):
    penstock.errors.OptionsError: keep_bytes=1048576: must be at least twice segment_bytes
    """

    # --- What the channel promises

    sync: SyncMode = "interval"
    """When messages survive a power cut.  All of them survive the death of the process at once."""

    sync_seconds: float = SYNC_SECONDS
    """With ``interval``: how long a message may stay undurable."""

    flush_seconds: float = 0.0
    """0: a send returns when its message is visible.  Above: sends gather in memory for up to this long and a
    killed process loses them; that is how the original works, with 0.0001."""

    keep_bytes: int = 0
    """How large all segments together may grow; 0 sets no bound.  At least twice ``segment_bytes``."""

    keep_seconds: float = 0.0
    """How old the oldest sealed segment may grow; 0 sets no bound.  Its age is what has gone by since it was sealed, on
    a clock that nobody can set (filechannel/ages.py): time during which the machine was off does not count."""

    policy: Policy = "refuse"
    """What a send does at those bounds: ``refuse`` (Backpressure), ``block`` until receivers have made room (or
    Timeout), or ``drop_oldest`` segments, read or not."""

    collect: bool = True
    """Remove segments that every receiver has passed.  Without it only ``gc`` by hand, and a bound, removes any."""

    # --- How it is laid out

    segment_bytes: int = DEFAULT_SEGMENT_BYTES
    """A segment that has this many frame bytes is sealed by the next send.  Smaller: sooner collected."""

    compression: Compression = "snappy"
    """How sealed segments are compressed, all but the newest sealed one; ``none`` leaves them plain."""

    content: str = "raw"
    """``raw`` or ``envelope/1``; noted beside a new channel for those who read it."""

    create: bool = True
    """Make the folder if it is not there."""

    def __post_init__(self) -> None:
        check_sync(self.sync, self.sync_seconds)
        for name, kind in (("compression", Compression), ("policy", Policy)):
            if getattr(self, name) not in get_args(kind):
                raise OptionsError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(get_args(kind))}")
        for name in ("flush_seconds", "keep_bytes", "keep_seconds"):
            if getattr(self, name) < 0:
                raise OptionsError(f"{name}={getattr(self, name)}: must not be negative")
        if self.segment_bytes < 1:
            raise OptionsError(f"segment_bytes={self.segment_bytes}: must be at least 1")
        if 0 < self.keep_bytes < 2 * self.segment_bytes:
            raise OptionsError(f"keep_bytes={self.keep_bytes}: must be at least twice segment_bytes")
