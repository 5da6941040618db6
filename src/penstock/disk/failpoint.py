"""Named places between two steps where a test ends the process, or does something else, as a crash would.

``PENSTOCK_FAIL_POINT=ship.put.after:3`` in the environment of a process kills it with SIGKILL when it comes to that
place for the third time.  Inside of one process ``arm`` has a function called.  Unarmed, a fail point is a look at an
empty dict.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Final

__all__ = ["fail_point", "arm"]

_armed: Final[dict[str, Callable[[], None]]] = {}


def fail_point(name: str) -> None:
    """Come to a named place.

    >>> with arm("nowhere", lambda: print("here")):
    ...     fail_point("nowhere")
    here
    """
    if _armed and (act := _armed.get(name)) is not None:
        act()


@contextlib.contextmanager
def arm(name: str, act: Callable[[], None]) -> Iterator[None]:
    """Have ``act`` called whenever this process comes to that place."""
    _armed[name] = act
    try:
        yield
    finally:
        _armed.pop(name, None)


def _arm_from_environment(text: str) -> None:
    name, _, count = text.partition(":")
    left = [int(count or 1)]

    def die() -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    _armed[name] = die


if "PENSTOCK_FAIL_POINT" in os.environ:
    _arm_from_environment(os.environ["PENSTOCK_FAIL_POINT"])
