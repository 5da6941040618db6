"""What every open handle has in common: it ends with a fork, and it does not travel by pickle."""

from __future__ import annotations

import logging
import os
import weakref
from types import TracebackType
from typing import NoReturn, Self

__all__ = ["Handle", "ClosingHandle"]

logger = logging.getLogger(__name__)

_open: weakref.WeakSet[Handle] = weakref.WeakSet()


class Handle:
    """The base of readers, writers, receivers and stores.

    A child process must not use what its parent opened: descriptors, locks and mappings are shared,
    and two writers would write over each other.  After a fork ``forked`` is called in the child; a
    handle closes itself there without touching the disk.

    >>> import pickle
    >>> pickle.dumps(Handle())
    Traceback (most recent call last):
    TypeError: a Handle cannot be pickled: open it again where it is needed
    """

    def __init__(self) -> None:
        _open.add(self)

    def forked(self) -> None:
        """Close in the child of a fork, leaving everything on disk alone."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be pickled: open it again where it is needed")


class ClosingHandle(Handle):
    """A handle that a ``with`` block closes.

    >>> class Door(ClosingHandle):
    ...     def close(self) -> None:
    ...         print("closed")
    >>> with Door():
    ...     print("inside")
    inside
    closed
    """

    def close(self) -> None:
        """Let go of everything; twice is fine."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _after_fork() -> None:
    for handle in list(_open):
        try:
            handle.forked()
        except Exception:  # one that fails must not leave the others open
            logger.exception("%r could not be closed in the child of a fork", handle)


os.register_at_fork(after_in_child=_after_fork)
