"""A thread that renews the leases of one worker while it has any."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from penstock.disk import start_thread
from penstock.errors import ClosedError, PenstockError

__all__ = ["Heartbeat"]

logger = logging.getLogger(__name__)


class Heartbeat:
    """Calls ``beat`` every ``seconds`` as long as that says there is something to renew; sleeps otherwise."""

    def __init__(self, beat: Callable[[], bool], seconds: float) -> None:
        self._beat, self._seconds = beat, seconds
        self._wanted, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Say that there is something to renew; without a thread to be had a lease lasts as long as it was given."""
        if self._thread is None:
            self._thread = start_thread(self._run, "penstock-heartbeat")
            if self._thread is None:
                logger.warning("no thread for heartbeats can be started: leases are not renewed")
        if not self._wanted.is_set():
            self._wanted.set()

    def close(self) -> None:
        """Stop the thread."""
        self._closing.set()
        self._wanted.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            if self._closing.wait(self._seconds):
                return
            self._wanted.clear()
            if self._closing.is_set():  # said just before that: nobody says it again
                return
            try:
                if self._beat():
                    self._wanted.set()
            except ClosedError:
                return
            except (PenstockError, OSError) as exc:  # the next beat may do; a lease that ends is no loss of a message
                logger.warning("a heartbeat failed: %s", exc)
                self._wanted.set()
