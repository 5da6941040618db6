"""How a manager of channels behaves."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.channels.ids import is_domain
from penstock.channels.model import Limits
from penstock.errors import OptionsError

__all__ = ["ManagerOptions"]


class ManagerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a manager behaves.  Given to ChannelManager.open(); it cannot change afterwards.

    >>> ManagerOptions(domain="nodot")
    Traceback (most recent call last):
    penstock.errors.OptionsError: domain='nodot': not a domain
    """

    # --- What the channels promise

    domain: str = "localhost"
    """The domain served here; channels of others are refused."""
    limits: Limits = Limits()
    """What no channel and no client may exceed."""
    authenticated: bool = True
    """Whether members are who they say.  Without it nothing is restored and no channel may be persistent."""

    sync: Literal["always", "interval", "none"] = "always"
    """``always``: the flush interval of each channel counts.  ``interval``: messages of all channels become durable
    100 ms later at the most, never sooner.  ``none``: when the machine sees fit, and at close."""

    # --- How fast they are

    sync_on_loop_seconds: float = 0.002
    """A lone message is made durable on the event loop, without a change of threads, while that takes no longer than
    this.  Longer: quicker on slower disks, and the loop stands still as long.  0: always in a thread."""
    shards: int = 8
    """Parts the channels are divided into by the hash of their handler; a restore loads them side by side."""
    max_open_logs: int = 256
    """Logs kept open; the one used longest ago is closed for the next.  Each takes about six descriptors."""
    segment_bytes: int = 128 << 20
    """Size of a log segment.  History goes by whole segments, so smaller ones honour small caps better."""

    @property
    def flush_floor(self) -> int:
        """Milliseconds that the messages of every channel may wait for the disk at the least."""
        return {"always": 0, "interval": 100, "none": 1 << 31}[self.sync]

    def __post_init__(self) -> None:
        if not is_domain(self.domain):
            raise OptionsError(f"domain={self.domain!r}: not a domain")
        if self.sync_on_loop_seconds < 0:
            raise OptionsError(f"sync_on_loop_seconds={self.sync_on_loop_seconds}: must not be negative")
        for field in ("shards", "max_open_logs", "segment_bytes"):
            if getattr(self, field) < 1:
                raise OptionsError(f"{field}={getattr(self, field)}: must be at least 1")
