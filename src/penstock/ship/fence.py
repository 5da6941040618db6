"""The head of a shipped log in the hands of one shipper: read, taken over, swapped.

What must stay true: of two shippers of one log at most one writes.  Taking over puts a higher epoch and an id of its
own into the head; whoever was before then fails by its tag, sees a higher epoch, and stops.

Who tidies up beside a shipper (``change_head``) leaves epoch and id as they are and says nothing new of the log: the
shipper's next swap fails by its tag, sees that it is still the one, and is made again on what is there now.

A swap whose answer was lost is found out by reading the head back.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.clock import Clock
from penstock.disk import ObjectStore
from penstock.disk.failpoint import fail_point
from penstock.disk.objectstore import Tag, publish
from penstock.errors import ConflictError, LockedError, OptionsError, PenstockError, RetryError
from penstock.ship.manifest import MANIFEST_BYTES, Head, decode_head, encode_head, head_key

__all__ = ["Fence", "change_head", "read_head"]

TRIES = 16
Change = Callable[[Head], dict[str, Any] | None]
"""What becomes of some fields of a head; None for nothing.  It may be asked again, for a head that came between."""


def read_head(store: ObjectStore, channel: str) -> tuple[Head, Tag] | None:
    """Return the head of a channel with its tag, None when nothing was shipped."""
    key = head_key(channel)
    try:
        data, info = store.get(key, most=MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    return decode_head(data, f"{store.url}/{key}", channel), info.tag


def change_head(store: ObjectStore, channel: str, change: Change, clock: Clock) -> Head:
    """Swap the head beside a shipper that may be running, which goes on undisturbed; return what is there then."""
    for _ in range(TRIES):
        found = read_head(store, channel)
        if found is None:
            raise OptionsError(f"{store.url}: nothing was shipped of {channel}")
        head, tag = found
        changes = change(head)
        if changes is None:
            return head
        head = _next(head, clock, **changes)
        fail_point("ship.prune.before")
        try:
            publish(store, head_key(channel), encode_head(head), tag)
        except ConflictError:
            continue
        return head
    raise RetryError(f"{store.url}: others kept on changing what was shipped of {channel!r}")


class Fence:
    """The right to swap the head of one channel."""

    def __init__(self, store: ObjectStore, channel: str, clock: Clock) -> None:
        self.store, self._channel, self._clock = store, channel, clock
        self.shipper = uuid.uuid4().hex
        self.head: Head | None = None
        self._tag: Tag | None = None

    def take_over(self, fresh: Head) -> Head:
        """Become the one shipper: of what is there, or of ``fresh`` where nothing is."""
        for _ in range(TRIES):
            found = read_head(self.store, self._channel)
            base, tag = found if found is not None else (fresh, None)
            head = _next(base, self._clock, shipper=self.shipper, epoch=base.epoch + 1)
            fail_point("ship.fence.before")
            try:
                self._tag = publish(self.store, head_key(self._channel), encode_head(head), tag)
            except ConflictError:
                continue  # another one takes over at the same time: the later of us stays
            self.head = head
            fail_point("ship.fence.after")
            return head
        raise RetryError(f"{self.store.url}: others kept on taking over {self._channel!r}")

    def swap(self, change: Change) -> Head:
        """Write a head with this change and return what is there then; LockedError once another one has taken over.

        Where an earlier swap of ours turns out to have been done after all, that is what is there.
        """
        for _ in range(TRIES):
            if self.head is None:
                raise LockedError(f"{self.store.url}/{head_key(self._channel)}: another shipper has taken over")
            before = self.head
            head = _next(before, self._clock, **(change(before) or {}))
            fail_point("ship.swap.before")
            try:
                self._tag = publish(self.store, head_key(self._channel), encode_head(head), self._tag)
            except ConflictError as exc:
                self.look_again(exc)
                if self.head.next != before.next:
                    return self.head
                continue
            self.head = head
            fail_point("ship.swap.after")
            return head
        raise RetryError(f"{self.store.url}: others kept on changing what was shipped of {self._channel!r}")

    def look_again(self, exc: PenstockError) -> None:
        """Go on from what is there, if it is still ours to change; otherwise LockedError, which explains ``exc``."""
        found = read_head(self.store, self._channel)
        if (
            self.head is not None
            and found is not None
            and (found[0].shipper, found[0].epoch) == (self.shipper, self.head.epoch)
        ):
            self.head, self._tag = found
            return
        self.head = None
        other = "nobody" if found is None else found[0].shipper
        raise LockedError(
            f"{self.store.url}/{head_key(self._channel)}: another shipper has taken over ({other[:8]}): {exc}"
        ) from exc


def _next(base: Head, clock: Clock, **changes: Any) -> Head:
    return msgspec.structs.replace(base, generation=base.generation + 1, written_ns=clock.now_ns(), **changes)
