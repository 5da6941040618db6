"""How one channel is written."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import OptionsError
from penstock.log.options import SYNC_SECONDS, SyncMode, check_sync
from penstock.log.xchannel.files import page_size
from penstock.log.xchannel.format import FIRST_SLOT, MAX_FILE_BYTES, SLOT_BYTES, footprint

__all__ = ["WriterOptions"]

DEFAULT_REGION_BYTES = 1 << 20
LARGEST_REGION = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """How one channel is written.  Given to Writer.open(); it cannot change afterwards.

    >>> WriterOptions(region_bytes=8192, roll_bytes=1 << 20).largest_message(8192)
    8160
    """

    # --- What the channel promises

    sync: SyncMode = "none"
    """When records survive a power cut; ``none`` still survives the death of any process."""

    sync_seconds: float = SYNC_SECONDS
    """With ``interval``: how long a record may stay undurable."""

    keep_files: int = 0
    """How many files stay after a roll, the newest included; 0 keeps all.  It needs ``roll_bytes``."""

    max_message_bytes: int = 0
    """The largest message that is accepted; 0 accepts whatever a region holds."""

    content: str | None = None
    """``raw`` or ``envelope/1``; noted beside a new channel for those who read it, and refused where it is another.
    None: the channel's own, ``raw`` for a new one."""

    # --- How it is laid out

    region_bytes: int | None = None
    """Size of a region, a multiple of the page size; None: the channel's own, 1 MiB for a new one.
    Larger regions take larger messages and fewer steps; a file grows by one region at a time."""

    roll_bytes: int = 0
    """Begin a new file rather than grow past this, at most 1 TiB; 0 keeps to one file up to that size."""

    def __post_init__(self) -> None:
        check_sync(self.sync, self.sync_seconds)
        if self.region_bytes is not None and (
            self.region_bytes <= 0 or self.region_bytes % page_size or self.region_bytes > LARGEST_REGION
        ):
            raise OptionsError(
                f"region_bytes={self.region_bytes}: must be a multiple of the page size ({page_size}) below 4 GiB"
            )
        for name in ("roll_bytes", "max_message_bytes", "keep_files"):
            if getattr(self, name) < 0:
                raise OptionsError(f"{name}={getattr(self, name)}: must not be negative")
        if self.keep_files and not self.roll_bytes:
            raise OptionsError(f"keep_files={self.keep_files}: a channel without roll_bytes has one file and keeps it")
        smallest = FIRST_SLOT + footprint(0) + SLOT_BYTES
        if 0 < self.roll_bytes < smallest:
            raise OptionsError(f"roll_bytes={self.roll_bytes}: no record fits a file of less than {smallest} bytes")
        if self.roll_bytes > MAX_FILE_BYTES:
            raise OptionsError(f"roll_bytes={self.roll_bytes}: a position names a byte of a file of at most 1 TiB")

    def largest_message(self, region_bytes: int) -> int:
        """Return the largest payload that can ever be written with these options."""
        largest = region_bytes - footprint(0) - SLOT_BYTES
        if self.roll_bytes:
            first = min(self.roll_bytes, region_bytes) - FIRST_SLOT
            later = min(self.roll_bytes - region_bytes, region_bytes)
            room = max(first, later)
            largest = (room - SLOT_BYTES) // 8 * 8 - SLOT_BYTES
        if self.max_message_bytes:
            largest = min(largest, self.max_message_bytes)
        return largest
