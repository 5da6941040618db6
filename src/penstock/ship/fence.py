"""The head of a shipped log in the hands of one shipper: read, taken over, swapped.

What must stay true: of two shippers of one log at most one writes.  Taking over puts a higher epoch and an id of its
own into the head; whoever was before then fails by its tag, sees a higher epoch, and stops.

A swap whose answer was lost is found out by reading the head back.
"""

from __future__ import annotations

import uuid

import msgspec

from penstock.clock import Clock
from penstock.disk import ObjectStore
from penstock.disk.failpoint import fail_point
from penstock.disk.objectstore import Tag, publish
from penstock.errors import ConflictError, LockedError, RetryError
from penstock.ship.manifest import MANIFEST_BYTES, Head, decode_head, encode_head, head_key

__all__ = ["Fence", "read_head"]

TAKE_OVERS = 16


def read_head(store: ObjectStore, channel: str) -> tuple[Head, Tag] | None:
    """Return the head of a channel with its tag, None when nothing was shipped."""
    key = head_key(channel)
    try:
        data, info = store.get(key, most=MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    return decode_head(data, f"{store.url}/{key}", channel), info.tag


class Fence:
    """The right to swap the head of one channel."""

    def __init__(self, store: ObjectStore, channel: str, clock: Clock) -> None:
        self._store, self._channel, self._clock = store, channel, clock
        self.shipper = uuid.uuid4().hex
        self.head: Head | None = None
        self._tag: Tag | None = None

    def take_over(self, fresh: Head) -> Head:
        """Become the one shipper: of what is there, or of ``fresh`` where nothing is."""
        for _ in range(TAKE_OVERS):
            found = read_head(self._store, self._channel)
            base, tag = found if found is not None else (fresh, None)
            head = self._next(base, epoch=base.epoch + 1)
            fail_point("ship.fence.before")
            try:
                self._tag = publish(self._store, head_key(self._channel), encode_head(head), tag)
            except ConflictError:
                continue  # another one takes over at the same time: the later of us stays
            self.head = head
            fail_point("ship.fence.after")
            return head
        raise RetryError(f"{self._store.url}: others kept on taking over {self._channel!r}")

    def swap(self, **changes: object) -> Head:
        """Write a head with these changes; LockedError once another shipper has taken over."""
        assert self.head is not None
        head = self._next(self.head, **changes)
        fail_point("ship.swap.before")
        try:
            self._tag = publish(self._store, head_key(self._channel), encode_head(head), self._tag)
        except ConflictError as exc:
            found = read_head(self._store, self._channel)
            other = "nobody" if found is None else found[0].shipper
            self.head = None
            raise LockedError(
                f"{self._store.url}/{head_key(self._channel)}: another shipper has taken over ({other[:8]}): {exc}"
            ) from exc
        self.head = head
        fail_point("ship.swap.after")
        return head

    def _next(self, base: Head, **changes: object) -> Head:
        return msgspec.structs.replace(
            base,
            generation=base.generation + 1,
            shipper=self.shipper,
            written_ns=self._clock.now_ns(),
            **changes,
        )
