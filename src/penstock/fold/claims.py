"""A store belongs to one fold at a time.

Two folds on one open store would each move its cursor over what the other has not seen.  A store's lock keeps other
processes and other handles away; this keeps two folds of one handle apart.
"""

from __future__ import annotations

import threading

from penstock.errors import LockedError

__all__ = ["Claim"]

_claimed: dict[int, str] = {}
_mutex = threading.RLock()  # __del__ may run in a thread that is in here


class Claim:
    """The hold a fold has on its store, from its first step until it lets go.

    >>> store = object()
    >>> first, second = Claim(store, "routes"), Claim(store, "orders")
    >>> first.take()
    >>> second.take()
    Traceback (most recent call last):
    penstock.errors.LockedError: the store: the fold 'routes' has it; a store belongs to one fold at a time
    >>> first.release(); second.take(); second.release()
    """

    def __init__(self, store: object, name: str) -> None:
        self._store, self._name, self.held = store, name, False

    def take(self) -> None:
        """Take the store; LockedError if another fold has it."""
        if self.held:
            return
        with _mutex:
            owner = _claimed.get(id(self._store))
            if owner is not None:
                place = getattr(self._store, "path", "the store")
                raise LockedError(f"{place}: the fold {owner!r} has it; a store belongs to one fold at a time")
            _claimed[id(self._store)] = self._name
            self.held = True

    def release(self) -> None:
        """Let go of the store; calling it again does nothing."""
        with _mutex:
            if self.held:
                self.held = False
                del _claimed[id(self._store)]

    def __del__(self) -> None:
        self.release()  # a fold that was dropped half way: its store is free
