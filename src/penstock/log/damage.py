"""What a reader stepped over, each place once, within a bound whatever a file holds."""

from __future__ import annotations

import errno
import logging
from typing import Final

from penstock.errors import OptionsError
from penstock.types import Problem

__all__ = ["SHORTAGES", "DamageMet", "check_on_damage", "log_skipped"]

logger = logging.getLogger(__name__)

SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR})
"""What says nothing about a file: an error for whoever reads, who may try again, and never damage to step over."""

MOST: Final = 1000
"""How many places are listed; further ones are counted."""
MOST_KNOWN: Final = 100_000
"""How many places are told apart.  Behind that a place that is met again counts again."""


def log_skipped(problem: Problem) -> None:
    """Log a place that was stepped over, where commands do not say it a second time.

    >>> log_skipped(Problem("jobs/segment.0", 64, "the message at position 0 fails its checksum"))
    """
    logger.warning("%s; skipped", problem)


class DamageMet:
    """The places a reader has stepped over.  Used under its lock.

    >>> met = DamageMet()
    >>> met.add(Problem("chan", 112, "commit byte is 2")), met.add(Problem("chan", 112, "commit byte is 2"))
    (True, False)
    >>> met.count, len(met.problems)
    (1, 1)
    """

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.count = 0
        self._known: set[tuple[str, int]] = set()

    def add(self, problem: Problem) -> bool:
        """Note a place and log it; False when it was known."""
        place = (problem.file, problem.byte)
        if place in self._known:
            return False
        if len(self._known) < MOST_KNOWN:
            self._known.add(place)
        self.count += 1
        if len(self.problems) < MOST:
            self.problems.append(problem)
            logger.warning("%s", problem)
        return True


def check_on_damage(on_damage: str) -> None:
    """Refuse what is no way to deal with damage.

    >>> check_on_damage("ignore")
    Traceback (most recent call last):
    penstock.errors.OptionsError: on_damage='ignore': must be raise or skip
    """
    if on_damage not in ("raise", "skip"):
        raise OptionsError(f"on_damage={on_damage!r}: must be raise or skip")
