"""Dead letters: messages that failed too often, each with why, when and how often, in a queue of their own.

The queue of dead letters is a channel with envelopes (``content`` is ``envelope/1``): the key is the position the
message had, the time is when it was buried, and the headers say the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.disk import Backoff, Disk
from penstock.errors import CorruptionError, LockedError
from penstock.log.envelope import CONTENT, Envelope, decode_envelope, encode_envelope
from penstock.log.filechannel.options import ChannelOptions

if TYPE_CHECKING:
    from penstock.log.filechannel.channel import FileChannel

__all__ = ["DeadLetter", "bury", "dead_letters", "dead_path", "open_when_free"]

FREE_SECONDS: Final = 5.0
"""How long a dead letter waits for others who write there."""
REASON_BYTES: Final = 4096


class DeadLetter(msgspec.Struct, frozen=True):
    """A message that failed too often.

    >>> letter = DeadLetter(b"resize 7.jpg", 24, 5, "ValueError: no such picture", 0, "resizers")
    >>> DeadLetter.decode(letter.encode()) == letter
    True
    """

    payload: bytes
    position: int
    """Where it was in its queue."""
    tries: int
    reason: str
    time_ns: int
    """When it was given up, nanoseconds since 1970."""
    group: str

    def encode(self) -> bytes:
        """Return the record of the letter."""
        headers = {
            "reason": self.reason.encode("utf-8", "replace")[:REASON_BYTES],
            "tries": b"%d" % self.tries,
            "group": self.group.encode(),
        }
        key = b"%d" % self.position
        return encode_envelope(Envelope(key, self.payload, event_time_ns=self.time_ns, headers=headers))

    @classmethod
    def decode(cls, record: bytes) -> DeadLetter:
        """Return the letter of a record; CorruptionError when it is none."""
        envelope = decode_envelope(record)
        try:
            headers = envelope.headers
            reason = headers["reason"].decode("utf-8", "replace")
            tries, group = int(headers["tries"]), headers["group"].decode()
            return cls(envelope.payload, int(envelope.key), tries, reason, envelope.event_time_ns, group)
        except (KeyError, ValueError) as exc:
            raise CorruptionError("dead letter", 0, f"not the record of a dead letter: {exc!r}") from None


def dead_path(queue: str, group: str) -> str:
    """Return where the dead letters of a group are: beside its queue.

    >>> dead_path("jobs", "resizers")
    'jobs-dead-resizers'
    """
    return f"{queue}-dead-{group}"


def bury(disk: Disk, path: str, letters: Sequence[DeadLetter]) -> None:
    """Append to the queue of dead letters, durably."""
    options = ChannelOptions(sync="always", compression="none", content=CONTENT)
    with open_when_free(path, options, disk) as dead:
        dead.append_many([letter.encode() for letter in letters])


def dead_letters(disk: Disk, path: str) -> Iterator[tuple[int, DeadLetter]]:
    """Yield the letters that were not sent again yet, each with its position among the dead ones."""
    from penstock.log.filechannel.log import FileChannelLog

    if disk.stat(path) is None:
        return
    with FileChannelLog(path, disk) as log:
        at = log.stat()["cursors"].get(REDRIVEN, log.first_position)
        while len(batch := log.read(at)):
            for position, record in zip(batch.positions.tolist(), batch.to_payloads(), strict=True):
                yield position, DeadLetter.decode(record)
            at = batch.next_position


REDRIVEN: Final = "redrive"
"""The named receiver under which dead letters are sent again."""


def open_when_free(path: str, options: ChannelOptions, disk: Disk) -> FileChannel:
    """Open a channel that others have open, each for a moment; LockedError when one has it for longer."""
    from penstock.log.filechannel.channel import FileChannel

    deadline, backoff = time.monotonic() + FREE_SECONDS, Backoff()
    while True:
        try:
            return FileChannel.open(path, options, disk=disk)
        except LockedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(backoff.delay())
