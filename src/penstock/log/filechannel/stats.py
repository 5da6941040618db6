"""Where a queue and its receivers stand."""

from __future__ import annotations

import msgspec

from penstock.log.filechannel.retain import Retention
from penstock.log.filechannel.segments import Folder
from penstock.log.filechannel.spool import Spool
from penstock.log.sidecar import Sidecar

__all__ = ["ChannelStats", "stats_of"]


class ChannelStats(msgspec.Struct, frozen=True):
    """Where a channel and its receivers stand; positions are exclusive bounds.

    >>> ChannelStats(0, 22, 22, None, 1, 86, {"billing": 11}, {"billing": 11}, None).lag_bytes
    {'billing': 11}
    """

    first_position: int
    write_position: int
    visible_position: int
    durable_position: int | None
    segments: int
    disk_bytes: int
    receivers: dict[str, int]
    """What each named receiver, open or away, and each open one without a name holds from."""
    lag_bytes: dict[str, int]
    error: str | None
    """Why nothing more can be sent."""


def stats_of(folder: Folder, spool: Spool, retention: Retention, sidecar: Sidecar) -> ChannelStats:
    """Return where a queue stands, as its writer sees it."""
    receivers = retention.holding()
    end = spool.end
    return ChannelStats(
        first_position=folder.first_position(),
        write_position=end,
        visible_position=spool.visible,
        durable_position=sidecar.durable_position(),
        segments=len(folder.files()),
        disk_bytes=retention.measure(),
        receivers=receivers,
        lag_bytes={name: max(0, end - position) for name, position in receivers.items()},
        error=spool.error,
    )
