"""Whether and how a broker keeps its state."""

from __future__ import annotations

import msgspec

from penstock.errors import OptionsError
from penstock.log.options import SyncMode, check_sync

__all__ = ["PersistenceOptions"]


class PersistenceOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table ``[persistence]``; ``enabled``, ``path`` and ``sync_interval_secs`` are mqlite's names.

    >>> PersistenceOptions(sync="sometimes")
    Traceback (most recent call last):
    penstock.errors.OptionsError: sync='sometimes': must be one of none, interval, always
    """

    enabled: bool | None = None
    """Whether state outlives the process; unless said, where there is a ``path``."""
    path: str | None = None
    """The data directory; ``--data`` wins.  ``enabled`` without a path is ``./data``."""
    sync: SyncMode = "interval"
    """When a change survives a power cut.  It survives the death of the process in every mode, before its answer
    leaves.  ``always``: the answer waits for the disk as well; ``none``: the device is never asked."""
    sync_interval_secs: float = 30.0
    """With ``interval``: how long a change may stay undurable.  0 as mqlite has it, no timer: the device is asked when
    the store is written and at the end."""
    segment_bytes: int = 64 << 20
    """The journal goes on in a new segment after this many bytes, and what is dirty goes to the store."""
    checkpoint_seconds: float = 300.0
    """How long a change stays in the journal alone.  Less: a quicker start, more writing."""
    reserve_bytes: int = 16 << 20
    """Room that is kept on the disk for the day it is full, so that clients can still fetch what waits for them and
    thereby make room.  It should hold what clients send at one moment.  0: none is kept."""

    def __post_init__(self) -> None:
        check_sync(self.sync, 1.0)
        if not self.sync_interval_secs >= 0:
            raise OptionsError(f"sync_interval_secs={self.sync_interval_secs}: must be 0 or above")
        if self.segment_bytes < 4096:
            raise OptionsError(f"segment_bytes={self.segment_bytes}: must be at least 4096")
        if not self.checkpoint_seconds > 0:
            raise OptionsError(f"checkpoint_seconds={self.checkpoint_seconds}: must be above 0")
        if self.reserve_bytes < 0:
            raise OptionsError(f"reserve_bytes={self.reserve_bytes}: must be 0 or above")

    @property
    def seconds(self) -> float | None:
        """The interval between two syncs, where there is one."""
        return self.sync_interval_secs or None
