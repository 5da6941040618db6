"""A named cursor: where a reader goes on the next time it is opened."""

from __future__ import annotations

import contextlib
import logging

from penstock.disk import Disk, Lock
from penstock.errors import CorruptionError, ExpiredError, LockedError, OptionsError, ReplacedError
from penstock.log.fingerprint import Fingerprint, fingerprint_of
from penstock.log.sidecar import Sidecar
from penstock.log.xchannel.place import Place
from penstock.log.xchannel.rows import Rows

__all__ = ["NamedCursor"]

logger = logging.getLogger(__name__)


class NamedCursor:
    """The cursor of one name beside a channel: ``<base>.penstock-cursor-<name>``, for one reader at a time."""

    def __init__(self, disk: Disk, base: str, name: str) -> None:
        self.name, self._base = name, base
        self._sidecar = Sidecar(disk, base + ".penstock-")
        self._seen: Fingerprint | None = None
        try:
            self._known = self._sidecar.read_cursor(name)
            if self._known is not None:
                self._seen = self._sidecar.cursor_seen(name)
        except CorruptionError as exc:
            logger.warning("%s; reader %r starts anew", exc, name)
            disk.remove(exc.file)
            self._known = None
        try:
            self._lock: Lock = disk.lock(f"{self._sidecar.prefix}lock-{name}")
        except LockedError:
            raise LockedError(f"{base}: another reader is named {name!r} at the moment") from None

    def go_on(self, place: Place) -> bool:
        """Stand where the last reader of this name had acknowledged; False for a new name.

        ReplacedError if the record it saw last is not there, or is another one.
        """
        if self._known is None:
            return False
        self._check_seen(place)
        try:
            place.go_to(self._known)
        except ExpiredError as exc:
            logger.warning("%s; reader %r goes on there", exc, self.name)
            place.go_first()
        except (OptionsError, CorruptionError) as exc:  # a power cut took the end of the channel
            logger.warning("%s; reader %r goes on at the end", exc, self.name)
            place.go_live()
        return True

    def _check_seen(self, place: Place) -> None:
        seen = self._seen
        if seen is None:
            return
        anew = f"to begin anew, remove {self._sidecar.prefix}cursor-{self.name}"
        try:
            place.go_to(seen.position)
            found = fingerprint_of(Rows().scan(place.cursor, 1), 0)
        except ExpiredError:
            return  # retention took it
        except (OptionsError, CorruptionError) as exc:
            reason = f"reader {self.name!r} has read a record at {seen.position}, and none is there ({exc}); {anew}"
            raise ReplacedError(self._base, reason) from None
        if found != seen:
            reason = f"the record at {seen.position} is not the one that reader {self.name!r} has read; {anew}"
            raise ReplacedError(self._base, reason)

    def write(self, position: int, *, sync: bool, seen: Fingerprint | None) -> None:
        """Note that everything below ``position`` is done; ``seen`` is the last record before it, if that is known."""
        if seen is not None:
            self._seen = seen
        elif self._seen is not None and self._seen.position >= position:
            self._seen = None
        self._sidecar.write_cursor(self.name, position, sync=sync, seen=self._seen)

    def close(self) -> None:
        """Let another reader have the name."""
        self._sidecar.close()
        with contextlib.suppress(OSError):
            self._lock.release()
