"""A message in work: what a worker of a group is handed."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from penstock.disk import in_disk_thread
from penstock.errors import LeaseLost

if TYPE_CHECKING:
    from penstock.log.filechannel.group.group import Group

__all__ = ["Job", "Jobs", "reason_of"]


class Job:
    """One message that is this worker's own while its lease lasts.

    ``ack`` it after the work, or ``fail`` it; a ``with`` block does either, by how it ends.  Who drops it without a
    word gives it back when its lease ends.

    >>> import tempfile
    >>> from penstock.log.filechannel import FileChannel
    >>> folder = tempfile.TemporaryDirectory()
    >>> queue = FileChannel.open(folder.name)
    >>> position = queue.append(b"resize 7.jpg")
    >>> job = queue.group("resizers").take()
    >>> job.payload, job.position, job.tries
    (b'resize 7.jpg', 0, 1)
    >>> job.ack(); queue.close(); folder.cleanup()
    """

    __slots__ = ("__weakref__", "_group", "lost", "payload", "position", "settled", "taken_at", "token", "tries")

    def __init__(self, group: Group, payload: bytes, position: int, tries: int, token: int, taken_at: float) -> None:
        self._group = group
        self.payload = payload
        self.position = position
        """Where the message is in its queue."""
        self.tries = tries
        """How often it was handed out, this time included."""
        self.token, self.taken_at = token, taken_at
        self.settled = False
        """Whether it was acknowledged, failed or given back."""
        self.lost = False
        """Whether its lease ended before that: another worker may have it."""

    def ack(self) -> None:
        """Say that the work is done, for ever; LeaseLost when the message was given to another worker meanwhile."""
        self._group.ack([self])

    def fail(self, delay: float | None = None, reason: str = "") -> None:
        """Say that the work failed: the message comes again after ``delay`` seconds, or the group's growing delay.

        After ``max_tries`` it goes to the dead letters instead, with the reason.
        """
        self._group.fail([self], delay, reason)

    def renew(self) -> None:
        """Let the lease begin anew; the heartbeat does it otherwise."""
        self._group.renew([self])

    async def aack(self) -> None:
        """Say from asyncio that the work is done."""
        await in_disk_thread(self.ack)

    async def afail(self, delay: float | None = None, reason: str = "") -> None:
        """Say from asyncio that the work failed."""
        await in_disk_thread(self.fail, delay, reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._group.leave([self], exc)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await in_disk_thread(self._group.leave, [self], exc)

    def __repr__(self) -> str:
        state = "settled" if self.settled else "lost" if self.lost else "in work"
        return f"<Job at {self.position}, try {self.tries}, {state}>"


class Jobs(list[Job]):
    """Messages that were taken together; a ``with`` block acknowledges what is left of them, or fails it.

    >>> import tempfile
    >>> from penstock.log.filechannel import FileChannel
    >>> folder = tempfile.TemporaryDirectory()
    >>> queue = FileChannel.open(folder.name)
    >>> positions = queue.append_many([b"7.jpg", b"8.jpg"])
    >>> with queue.group("resizers").take_many(10) as jobs:
    ...     [job.payload for job in jobs]
    [b'7.jpg', b'8.jpg']
    >>> queue.close(); folder.cleanup()
    """

    def __init__(self, group: Group, jobs: Iterable[Job]) -> None:
        super().__init__(jobs)
        self._group = group

    def ack(self) -> None:
        """Say that the work on all that are left is done: one turn for all of them."""
        self._group.ack([job for job in self if not job.settled])

    def fail(self, delay: float | None = None, reason: str = "") -> None:
        """Say that the work on all that are left failed."""
        self._group.fail([job for job in self if not job.settled], delay, reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._group.leave(self, exc)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await in_disk_thread(self._group.leave, self, exc)


def reason_of(exc: BaseException) -> str:
    """Return an exception in one line.

    >>> reason_of(ValueError("no such picture"))
    'ValueError: no such picture'
    """
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__


def lost_message(path: str, group: str, lost: list[int]) -> LeaseLost:
    """Return the error about messages that are no longer a worker's."""
    where = ", ".join(map(str, lost[:5])) + (" …" if len(lost) > 5 else "")
    return LeaseLost(f"{path}: the lease of group {group!r} on the message at position {where} has ended")
