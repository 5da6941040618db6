"""How a process uses embedded buckets."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import OptionsError
from penstock.log.options import SYNC_SECONDS, SyncMode, check_sync

__all__ = ["EmbeddedOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedOptions:
    """How a process uses embedded buckets.  What a bucket keeps is in its StoreConfig.

    >>> EmbeddedOptions().sync
    'interval'
    """

    # --- What is promised

    sync: SyncMode = "interval"
    """When a change survives a power cut; with ``none`` it still survives the death of any process."""

    sync_seconds: float = SYNC_SECONDS
    """With ``interval``: how long a change may stay undurable."""

    turn_seconds: float = 10.0
    """How long a writer waits for its turn before it gives up with Timeout."""

    # --- How fast it is

    checkpoint_bytes: int = 4 << 20
    """Write state.snap when this much log, and more than the live keys take, is not covered by it.  Less: a
    bucket opens faster, and writers pause more often."""

    def __post_init__(self) -> None:
        check_sync(self.sync, self.sync_seconds)
        if self.turn_seconds <= 0:
            raise OptionsError(f"turn_seconds={self.turn_seconds}: must be positive")
        if self.checkpoint_bytes < 1:
            raise OptionsError(f"checkpoint_bytes={self.checkpoint_bytes}: must be positive")
