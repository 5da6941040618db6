"""How a store behaves, backend by backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from penstock.errors import OptionsError
from penstock.log.options import SYNC_SECONDS, SyncMode, check_sync

__all__ = ["AppendLogOptions", "RocksOptions", "LmdbOptions", "Unfinished"]

Unfinished = Literal["keep", "drop"]
"""What to do on opening with records behind the last cursor record, which an interrupted apply leaves:

``keep``  take them, as the original does: the data may be ahead of the cursor
``drop``  forget them: what is read is exactly what some apply left
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendLogOptions:
    """How an append log behaves.  Given to AppendLogStore.open(); it cannot change afterwards.

    >>> AppendLogOptions(compact_threshold_bytes=-1)
    Traceback (most recent call last):
    penstock.errors.OptionsError: compact_threshold_bytes=-1: must not be negative
    """

    # --- What the store promises

    sync: SyncMode = "none"
    """When an apply survives a power cut; ``none`` still survives the death of the process."""

    sync_seconds: float = SYNC_SECONDS
    """With ``interval``: how long an apply may stay undurable."""

    unfinished: Unfinished = "keep"
    """Whether the records of an apply that was cut short count; see Unfinished."""

    # --- How fast it is

    compact_threshold_bytes: int = 10_485_760
    """Rewrite the file when more than this, and more than its live bytes, is out of date.  Less: a
    smaller file, more rewriting.  The rewrite runs on a thread of its own."""

    def __post_init__(self) -> None:
        check_sync(self.sync, self.sync_seconds)
        if self.unfinished not in get_args(Unfinished):
            raise OptionsError(f"unfinished={self.unfinished!r}: must be keep or drop")
        if self.compact_threshold_bytes < 0:
            raise OptionsError(f"compact_threshold_bytes={self.compact_threshold_bytes}: must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class RocksOptions:
    """How a RocksDB store behaves.

    >>> RocksOptions(sync="always").cache_bytes
    1073741824
    """

    sync: SyncMode = "none"
    """When an apply survives a power cut; ``none`` still survives the death of the process.  True and False, the
    former spelling, are ``always`` and ``none``."""

    sync_seconds: float = SYNC_SECONDS
    """With ``interval``: how long an apply may stay undurable."""

    cache_bytes: int = 1 << 30
    """How much memory blocks, indexes and filters may use; 0 leaves it to the engine (32 MiB)."""

    running_digest: bool = True
    """Whether count and digest are kept up to date by every apply, which reads the entries it replaces.  Without
    it apply only writes, and both are computed by a scan when someone asks."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sync", _spelled(self.sync))
        check_sync(self.sync, self.sync_seconds)
        if self.cache_bytes < 0:
            raise OptionsError(f"cache_bytes={self.cache_bytes}: must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class LmdbOptions:
    """How an LMDB store behaves.

    >>> LmdbOptions(map_bytes=1)
    Traceback (most recent call last):
    penstock.errors.OptionsError: map_bytes=1: must be at least 65536
    """

    sync: SyncMode = "always"
    """``always``: an apply that returned survives a power cut.  ``none``: LMDB itself does not survive one, the whole
    store may be lost, so say that only for state that can be built again.  There is no ``interval``, for the same
    reason.  True and False, the former spelling, are ``always`` and ``none``."""

    map_bytes: int = 1 << 30
    """Where the map begins; it doubles by itself when it is full."""

    running_digest: bool = True
    """Whether count and digest are kept up to date by every apply, which reads the entries it replaces.  Without
    it apply only writes, and both are computed by a scan when someone asks."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sync", _spelled(self.sync))
        if self.sync not in ("none", "always"):
            raise OptionsError(
                f"sync={self.sync!r}: must be none or always; between its syncs LMDB survives no power cut"
            )
        if self.map_bytes < 65536:
            raise OptionsError(f"map_bytes={self.map_bytes}: must be at least 65536")


def _spelled(sync: SyncMode | bool) -> SyncMode:
    """Return a sync mode that may be spelled as it was before there were modes."""
    return ("always" if sync else "none") if isinstance(sync, bool) else sync
