"""A spool that waits for room at a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.disk import Backoff
from penstock.errors import Backpressure, Timeout
from penstock.log.filechannel.spool import Spool

__all__ = ["PatientSpool"]

T = TypeVar("T")
ROOM_SECONDS: Final = 0.05
"""How often a send that waits for room looks again."""


class PatientSpool(Spool):
    """A spool whose sends wait for room at a bound instead of being refused."""

    def append(self, payload: Any, timeout: float | None = None) -> int:
        """Append one message when there is room; Timeout, and nothing is sent, when that takes too long."""
        return self._patiently(super().append, payload, timeout)

    def append_many(self, payloads: Any, timeout: float | None = None) -> NDArray[np.int64]:
        """Append many messages when there is room for all of them."""
        return self._patiently(super().append_many, payloads, timeout)

    def _patiently(self, send: Callable[[Any, float | None], T], what: Any, timeout: float | None) -> T:
        deadline, backoff = None if timeout is None else time.monotonic() + timeout, Backoff(last=ROOM_SECONDS)
        while True:
            remaining = None if deadline is None else deadline - time.monotonic()
            try:
                return send(what, remaining)
            except Backpressure as exc:
                if remaining is not None and remaining <= 0:
                    raise Timeout(f"{exc}; nothing was sent within {timeout} s") from None
            time.sleep(backoff.delay(remaining))
