"""Whether a fold still equals its bucket: keys that went without a change are found by comparing.

A NATS bucket drops keys by age, when it is full (``discard="old"``) and when an administrator purges it.  Only some of
that is told (markers, on servers that have them), so a fold looks now and then whether the bucket has lost anything
(``KvReader.traces``); when it has, the keys and revisions of both are compared.

What must stay true, whatever is written meanwhile:

1. A key goes only if the bucket did not have it at the time of the listing and nothing newer of it was folded.
2. What is beyond the cursor is left to the watch: it will deliver it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.batch import UpdateBatch
from penstock.fold.face import FoldStore
from penstock.types import Op, WatchCursor

__all__ = ["KnownKeys", "differences", "revisions_of"]


class KnownKeys:
    """Keys and revisions of a fold that has no store: what a comparison needs, and nothing else.

    >>> from penstock.types import KvUpdate
    >>> known = KnownKeys()
    >>> known.apply(UpdateBatch.of([KvUpdate.put("a", b"1", 7), KvUpdate.delete("b", 8)]), WatchCursor.of(8))
    >>> list(known.keys()), known.revisions()
    (['a'], {'a': 7})
    """

    def __init__(self) -> None:
        self._revisions: dict[str, int | None] = {}
        self._cursor = WatchCursor()

    def apply(self, updates: UpdateBatch, cursor: WatchCursor) -> None:
        """Take note of the keys that are there now."""
        for update in updates:
            if update.op is Op.PUT:
                self._revisions[update.key] = update.version.as_int()
            else:
                self._revisions.pop(update.key, None)
        self._cursor = cursor

    def cursor(self) -> WatchCursor:
        """Return the cursor of the last apply."""
        return self._cursor

    def keys(self, prefix: str = "") -> Iterable[str]:
        """Yield the keys below a prefix."""
        return [key for key in self._revisions if key.startswith(prefix)]

    def revisions(self, prefix: str = "") -> dict[str, int | None]:
        """Return the keys below a prefix with their revisions."""
        return {key: revision for key, revision in self._revisions.items() if key.startswith(prefix)}


def revisions_of(store: FoldStore | KnownKeys, prefixes: Iterable[str]) -> dict[str, int | None]:
    """Return the keys a fold has with their revisions; None for those that are not known.

    >>> from penstock.types import KvUpdate
    >>> known = KnownKeys()
    >>> known.apply(UpdateBatch.of([KvUpdate.put("node.a", b"1", 7)]), WatchCursor.of(8))
    >>> revisions_of(known, ["node.", "svc."])
    {'node.a': 7}
    """
    found: dict[str, int | None] = {}
    scan: Any = getattr(store, "scan", None)
    for prefix in prefixes:
        if isinstance(store, KnownKeys):
            found.update(store.revisions(prefix))
        elif scan is not None:
            for batch in scan(prefix):
                found.update(listed(batch))
        else:  # a store of the caller's own, which need not be able to tell
            found.update(dict.fromkeys(store.keys(prefix)))
    return found


def listed(batch: UpdateBatch) -> dict[str, int | None]:
    """Return the keys of a batch with their revisions."""
    keys = [bytes(key).decode() for key in batch.keys.to_list(batch.buffer)]
    if keys and not (batch.versions.lengths == 8).all():
        return {update.key: update.version.as_int() for update in batch}
    return dict(zip(keys, batch.revisions().tolist(), strict=True))


def differences(
    ours: Mapping[str, int | None], theirs: Mapping[str, int | None], touched: set[str], last: int, applied: int
) -> tuple[list[str], list[str]]:
    """Return the keys to remove from a fold and those to read again, sorted.

    ``theirs`` was listed when the bucket's newest revision was at least ``last``; ``touched`` are the keys that were
    folded since then; ``applied`` is the fold's cursor.

    >>> ours = {"same": 1, "gone": 2, "back": 5, "new": 9}
    >>> theirs = {"same": 1, "back": 3, "missing": 4, "later": 12}
    >>> differences(ours, theirs, {"new"}, 8, 9)
    (['gone'], ['back', 'missing'])
    """
    gone, other = [], []
    for key, revision in ours.items():
        if key in touched or (revision is not None and revision > last):
            continue
        if key not in theirs:
            gone.append(key)
        elif revision is not None and revision != (theirs[key] or 0) <= applied:
            other.append(key)
    for key, revision in theirs.items():
        if key not in ours and key not in touched and (revision or 0) <= applied:
            other.append(key)
    return sorted(gone), sorted(other)
