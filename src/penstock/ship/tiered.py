"""A log that is partly shipped and partly here, read as one: positions are the same in both.

    [ shipped ……………………………… )
                    [ here …………………………………… )        what both have is read here

The head is read after the local log was opened: whatever retention takes here was shipped before, so a second look at
the head always finds what is missing between the two.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from penstock.batch import Batch
from penstock.disk import ClosingHandle, LoopWait, read_disk_for
from penstock.errors import ExpiredError, ReplacedError
from penstock.log.detect import open_log
from penstock.log.face import OnDamage
from penstock.log.options import DEFAULT_LIMIT
from penstock.log.sidecar import identity_of
from penstock.ship.remote import ShippedLog
from penstock.types import Problem

__all__ = ["TieredLog"]


class TieredLog(ClosingHandle):
    """Shipped segments and the live local log behind one face.

    >>> import tempfile
    >>> from penstock.disk import object_store_for
    >>> from penstock.log.xchannel import Writer
    >>> from penstock.ship import Shipper
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Writer.open(folder.name + "/ticks") as writer:
    ...     position = writer.append(b"shipped"); writer.roll(); position = writer.append(b"here")
    >>> with Shipper(folder.name + "/ticks", object_store_for(folder.name + "/up")) as shipper:
    ...     done = shipper.step()
    >>> with TieredLog(folder.name + "/ticks", folder.name + "/up/ticks") as log:
    ...     [payload for batch in log.tail(log.first_position, timeout=0) for payload in batch.to_payloads()]
    [b'shipped', b'here']
    >>> folder.cleanup()
    """

    def __init__(
        self, path: str | os.PathLike[str], place: str | os.PathLike[str], *, on_damage: OnDamage | None = None
    ) -> None:
        super().__init__()
        self._local = open_log(os.fspath(path), on_damage=on_damage)
        try:
            self._shipped = ShippedLog(place, on_damage=on_damage)
            mine = identity_of(read_disk_for(path), self._local.path)
            if (self._shipped.format, self._shipped.head.log_id) != (self._local.format, mine):
                raise ReplacedError(os.fspath(path), f"{self._shipped.path} holds another log")
        except BaseException:
            self._local.close()
            raise
        self.path, self.format, self.origin = self._local.path, self._local.format, self._local.origin
        self.has_kinds, self.on_damage = self._local.has_kinds, self._local.on_damage

    @property
    def content(self) -> str:
        """``raw``, or ``envelope/1`` if its writer said so."""
        return self._shipped.content

    @property
    def first_position(self) -> int:
        """Where the oldest record is, here or shipped."""
        return min(self._shipped.first_position, self._local.first_position)

    @property
    def next_position(self) -> int:
        """Behind the newest record that is visible here."""
        return max(self._local.next_position, self._shipped.next_position)

    @property
    def durable_position(self) -> int | None:
        """What survives a power cut here, or is shipped."""
        here = self._local.durable_position
        return self._shipped.next_position if here is None else max(here, self._shipped.next_position)

    @property
    def damage(self) -> list[Problem]:
        """What reading has stepped over so far, shipped or here."""
        return [*self._shipped.damage, *self._local.damage][:1000]

    @property
    def damage_count(self) -> int:
        """How many places reading has stepped over so far."""
        return self._shipped.damage_count + self._local.damage_count

    def skip_damage(self, position: int) -> tuple[int, Problem] | None:
        """Return where reading goes on behind damage at ``position``, and what it is; None if there is none."""
        here = position >= self._local.first_position
        return self._local.skip_damage(position) if here else self._shipped.skip_damage(position)

    def keeps(self, position: int) -> bool:
        """Whether nothing at or behind ``position`` was removed."""
        return position >= self.first_position or self._local.keeps(position)

    def gaps(self, expected: int | None, batch: Batch) -> int:
        """Return at how many places records are missing in a batch and in front of it."""
        return self._local.gaps(expected, batch)

    def read(self, position: int, limit: int = DEFAULT_LIMIT) -> Batch:
        """Return records from ``position`` on, from here if it is here."""
        for _ in range(2):
            if self._local.keeps(position):
                try:
                    return self._local.read(position, limit)
                except ExpiredError:
                    pass  # retention took it just now
            first = self._local.first_position
            if position < self._shipped.next_position:
                batch = self._shipped.read(position, limit)
                if len(batch):
                    return batch
                position = self._shipped.next_position
                if position >= first:
                    continue
            self._shipped.refresh()
        raise ExpiredError(self.path, position, self._local.first_position)

    def tail(
        self, position: int | None = None, *, limit: int = DEFAULT_LIMIT, timeout: float | None = None
    ) -> Iterator[Batch]:
        """Yield batches from ``position`` (or from the end) on and wait for more."""
        at = self.next_position if position is None else position
        while True:
            batch = self.read(at, limit)
            at = batch.next_position
            if len(batch):
                yield batch
                continue
            try:  # what is new comes from here, and it wakes who waits
                for batch in self._local.tail(at, limit=limit, timeout=timeout):
                    yield batch
                    at = batch.next_position
                return
            except ExpiredError:
                pass  # retention was faster than the reader: what is gone here is shipped

    def waiter(self) -> LoopWait:
        """Return what waits for more records on an event loop: they come from here."""
        return self._local.waiter()

    def verify(self) -> Iterator[Problem]:
        """Yield every problem, of what is shipped and of what is here."""
        yield from self._shipped.verify()
        yield from self._local.verify()

    def stat(self) -> dict[str, Any]:
        """Return what there is to say about the log here, and about what was shipped."""
        return {**self._local.stat(), "first_position": self.first_position, "shipped": self._shipped.stat()}

    def close(self) -> None:
        """Let go of both."""
        self._shipped.close()
        self._local.close()
