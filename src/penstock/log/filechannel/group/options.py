"""How one group behaves."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from penstock.errors import OptionsError
from penstock.log.face import OnDamage
from penstock.log.options import Start

__all__ = ["GroupOptions", "KeyOf", "check_group_name"]

GROUP_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,57}(?<!\.bad)")
KeyOf = Callable[[bytes], bytes | str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """How one worker takes part in a group: the arguments of ``queue.group()``.

    >>> GroupOptions(lease_seconds=30, max_tries=5).delay_after(tries=3)
    4.0
    >>> GroupOptions(lease_seconds=0)
    Traceback (most recent call last):
    penstock.errors.OptionsError: lease_seconds=0: must be above 0 and below 1e9
    """

    # --- What the group promises

    start: Start | int = "earliest"
    """Where a new group begins: ``earliest``, ``latest`` or a position.  One that was there before goes on."""

    lease_seconds: float = 30.0
    """For how long a message is a worker's own, unless its heartbeat renews that.  It is also how long the messages of
    a worker that was killed wait for another one."""

    heartbeat: bool = True
    """Renew the leases of messages in work, from a thread, three times in each ``lease_seconds``."""

    work_seconds: float = 0.0
    """For how long at most the heartbeat renews the lease of one message, so that a worker that hangs gives it back; 0
    sets no bound."""

    key: KeyOf | None = None
    """What order to keep: messages for whose payload this gives the same key go one at a time, in their order.  Those
    for which it gives None keep no order.  All workers of a group must agree."""

    any_order: bool = False
    """Take part without knowing whether the group keeps an order of keys: to settle, redrive and look, not to take."""

    # --- What happens to messages that fail

    max_tries: int = 0
    """A message that was handed out so often and failed again goes to the dead letters; 0: never."""

    retry_seconds: float = 1.0
    """How long a message waits after it failed the first time, twice as long after the second, and so on."""

    retry_seconds_max: float = 300.0
    """How long it waits at most."""

    on_damage: OnDamage = "raise"
    """What to do where bytes of the queue are damaged: ``raise`` CorruptionError, or ``skip`` and note it in
    ``problems``."""

    # --- How much it holds

    max_unfinished: int = 65_536
    """How many messages may be out, delayed or held back by their key at once; nothing new is taken beyond."""

    worker: str = ""
    """The name under which this worker is shown; made of machine and process unless given."""

    def __post_init__(self) -> None:
        if not 0 < self.lease_seconds < 1e9:  # what a thread can wait for
            raise OptionsError(f"lease_seconds={self.lease_seconds}: must be above 0 and below 1e9")
        for name in ("work_seconds", "max_tries", "retry_seconds", "retry_seconds_max"):
            if not getattr(self, name) >= 0:
                raise OptionsError(f"{name}={getattr(self, name)}: must not be negative")
        if self.max_unfinished < 1:
            raise OptionsError(f"max_unfinished={self.max_unfinished}: must be at least 1")
        if self.on_damage not in ("raise", "skip"):
            raise OptionsError(f"on_damage={self.on_damage!r}: must be raise or skip")

    def is_spent(self, tries: int) -> bool:
        """Whether a message that failed after so many tries goes to the dead letters."""
        return 0 < self.max_tries <= tries

    def delay_after(self, tries: int) -> float:
        """Return how long a message waits that failed for the ``tries``-th time."""
        doubled = self.retry_seconds * 2.0 ** min(tries - 1, 64)
        return min(doubled, self.retry_seconds_max)


def check_group_name(name: str) -> None:
    """Refuse what cannot be the name of a group; files are called by it.

    >>> check_group_name("a/b")
    Traceback (most recent call last):
    penstock.errors.OptionsError: group name 'a/b': use 1 to 58 of letters, digits, dots, dashes and underscores
    """
    if not GROUP_NAME.fullmatch(name):
        raise OptionsError(
            f"group name {name!r}: use 1 to 58 of letters, digits, dots, dashes and underscores"
            + ("" if name[:1].isalnum() and not name.endswith(".bad") else ", a letter or digit first and no .bad last")
        )
