"""Whether a queue still has the message that somebody saw last: a backup that was put back has others there."""

from __future__ import annotations

from penstock.errors import CorruptionError, ExpiredError, ReplacedError
from penstock.log.filechannel.ends import QueueEnd
from penstock.log.filechannel.receiver import begins_or_damaged
from penstock.log.filechannel.segments import Walk
from penstock.log.fingerprint import Fingerprint, fingerprint_of
from penstock.log.sidecar import Sidecar

__all__ = ["check_seen", "fingerprint_at"]


def fingerprint_at(end: QueueEnd, position: int) -> Fingerprint | None:
    """Return the fingerprint of the message at a position; None when it is gone or was stepped over."""
    walk = Walk(end.folder)
    try:
        found = fingerprint_of(walk.read(position, 1, end.visible), 0)
    except (CorruptionError, ExpiredError):
        return None
    finally:
        walk.close()
    return found if found is not None and found.position == position else None


def check_seen(end: QueueEnd, sidecar: Sidecar, cursor: str, whose: str, anew: str) -> Fingerprint | None:
    """Return the fingerprint that a cursor has; ReplacedError if the message is another now, or is not there.

    ``whose`` says who has seen it, as in ``receiver 'billing' has acknowledged``; ``anew`` what to do about it.
    """
    seen = sidecar.cursor_seen(cursor)
    if seen is None or seen.position < end.folder.first_position():
        return None
    behind = end.end()
    if seen.position >= behind:
        if not sidecar.kept_power():
            return None  # a power cut took it
        reason = f"it ends at {behind}, before the message at {seen.position} that {whose}"
        raise ReplacedError(end.path, f"{reason}; {anew}")
    walk = Walk(end.folder)
    try:
        found = fingerprint_of(walk.read(seen.position, 1, end.visible), 0)
    except ExpiredError:
        return None
    except CorruptionError:
        if begins_or_damaged(end.folder, seen.position, end.visible):
            return None  # it was damaged since: whoever reads there says so
        found = None
    finally:
        walk.close()
    if found != seen:
        raise ReplacedError(end.path, f"the message at {seen.position} is not the one that {whose}; {anew}")
    return seen
