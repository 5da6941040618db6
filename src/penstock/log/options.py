"""What all logs let you choose."""

from __future__ import annotations

from typing import Final, Literal, get_args

from penstock.errors import OptionsError

__all__ = ["SyncMode", "Start", "DEFAULT_LIMIT", "check_sync"]

SyncMode = Literal["none", "interval", "always"]
"""When a record becomes durable (survives power loss):

``none``      when the operating system gets to it; ``sync()`` by hand works
``interval``  within ``sync_seconds`` of being appended
``always``    before the append returns; one sync serves everyone who waits for it
"""

Start = Literal["earliest", "latest"]
"""Where reading begins: at the oldest record there is, or behind the newest.  A position is the third way."""

SYNC_SECONDS: Final = 0.1
DEFAULT_LIMIT: Final = 65_536
"""How many records a batch holds unless the caller says otherwise."""


def check_sync(sync: str, sync_seconds: float) -> None:
    """Refuse what is no sync mode.

    >>> check_sync("sometimes", 0.1)
    Traceback (most recent call last):
    penstock.errors.OptionsError: sync='sometimes': must be one of none, interval, always
    """
    if sync not in get_args(SyncMode):
        raise OptionsError(f"sync={sync!r}: must be one of {', '.join(get_args(SyncMode))}")
    if not sync_seconds > 0:
        raise OptionsError(f"sync_seconds={sync_seconds}: must be above 0")
