"""Every exception penstock raises, sorted by what the caller should do next.

    PenstockError
    ├── OptionsError (ValueError)      fix the argument or the configuration
    │   └── NotFoundError (FileNotFoundError)   there is nothing at that path
    ├── UnsupportedError               a format, version or feature this release does not read, by name
    ├── CorruptionError                stop: the bytes on disk are not what was written
    ├── ProtocolError                  drop the peer: it broke the wire format
    ├── Refused                        the rules of a channel say no: ask for something else
    ├── ConflictError                  someone was first: read again and decide
    │   ├── AlreadyExists
    │   ├── RevisionMismatch
    │   └── LeaseLost
    ├── ExpiredError                   the position or cursor is gone: resync from what it names
    ├── ReplacedError                  the log or stream was recreated: start over
    ├── LockedError                    another process owns it
    ├── ReadOnlyError                  an earlier I/O error latched: mend its cause, reopen
    ├── ClosedError                    reopen
    └── RetryError                     later: nothing was lost
        ├── Backpressure
        ├── NotConnected
        └── Timeout (TimeoutError)

All of them survive pickling, because Spark workers pickle what they raise: every argument of a
constructor goes to Exception as it is.
"""

from __future__ import annotations

import re

__all__ = [
    "PenstockError",
    "OptionsError",
    "NotFoundError",
    "UnsupportedError",
    "CorruptionError",
    "ProtocolError",
    "Refused",
    "ConflictError",
    "AlreadyExists",
    "RevisionMismatch",
    "LeaseLost",
    "ExpiredError",
    "ReplacedError",
    "LockedError",
    "ReadOnlyError",
    "ClosedError",
    "RetryError",
    "Backpressure",
    "NotConnected",
    "Timeout",
]


_SECRETS = re.compile(r"\b((?!abfss?://)[A-Za-z][A-Za-z0-9+.-]*://)[^/@\s]+@|(://)[^/@\s:]+:[^/@\s]+@")
"""Who an address says it is; what is in front of the @ of abfss:// is the name of a container."""


def without_secrets(text: str) -> str:
    """Return a text without the users, passwords and tokens of the addresses in it.

    >>> without_secrets("nats://me:secret@localhost:4222: away"), without_secrets("data/ticks")
    ('nats://localhost:4222: away', 'data/ticks')
    """
    return _SECRETS.sub(lambda found: found[1] or found[2], text) if "@" in text else text


class PenstockError(Exception):
    """The root of everything penstock raises.  What it prints has no password of an address in it.

    >>> issubclass(CorruptionError, PenstockError)
    True
    >>> str(OptionsError("s3://key:secret@bucket/x: there is nothing here"))
    's3://bucket/x: there is nothing here'
    """

    def __init_subclass__(cls) -> None:
        own = cls.__dict__.get("__str__")
        if own is not None:
            cls.__str__ = lambda self: without_secrets(own(self))  # type: ignore[method-assign]

    def __str__(self) -> str:
        return without_secrets(super().__str__())

    def __repr__(self) -> str:
        return without_secrets(super().__repr__())


class OptionsError(PenstockError, ValueError):
    """An argument or a setting contradicts itself or the data: fix the call.

    >>> str(OptionsError("region_bytes=5: must be a multiple of the page size"))
    'region_bytes=5: must be a multiple of the page size'
    """


class NotFoundError(OptionsError, FileNotFoundError):
    """There is nothing at that path: mend the path, or wait for who makes it.

    >>> issubclass(NotFoundError, FileNotFoundError), str(NotFoundError("jobs: there is no channel here"))
    (True, 'jobs: there is no channel here')
    """


class UnsupportedError(PenstockError):
    """A format, version or feature this release does not read, called by its name.

    >>> raise UnsupportedError("chan: xchannel format v4 is not read by this release")
    Traceback (most recent call last):
    penstock.errors.UnsupportedError: chan: xchannel format v4 is not read by this release
    """


class CorruptionError(PenstockError):
    """Bytes fail their own check.  Never retried, never skipped in silence.

    >>> str(CorruptionError("chan", 112, "commit byte is 2"))
    'chan at byte 112: commit byte is 2'
    """

    def __init__(self, file: str, byte: int, reason: str) -> None:
        super().__init__(file, byte, reason)
        self.file, self.byte, self.reason = file, byte, reason

    def __str__(self) -> str:
        return f"{self.file} at byte {self.byte}: {self.reason}"


class ProtocolError(PenstockError):
    """A peer broke the wire format: drop it.

    >>> str(ProtocolError("127.0.0.1:4001", "CONNECT", "protocol level 9"))
    '127.0.0.1:4001 in CONNECT: protocol level 9'
    """

    def __init__(self, peer: str, packet: str, reason: str) -> None:
        super().__init__(peer, packet, reason)
        self.peer, self.packet, self.reason = peer, packet, reason

    def __str__(self) -> str:
        return f"{self.peer} in {self.packet}: {self.reason}"


class Refused(PenstockError):
    """The rules of a channel say no; ``reason`` is the word the channel protocol has for it.

    >>> str(Refused("FORBIDDEN", "persistence requires auth")), str(Refused("QUEUE_EMPTY"))
    ('FORBIDDEN: persistence requires auth', 'QUEUE_EMPTY')
    """

    def __init__(self, reason: str, detail: str | None = None) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return self.reason if self.detail is None else f"{self.reason}: {self.detail}"


class ConflictError(PenstockError):
    """Someone was first: read again and decide.

    >>> issubclass(RevisionMismatch, ConflictError)
    True
    """


class AlreadyExists(ConflictError):
    """What was to be created is there already.

    >>> raise AlreadyExists("devices/7")
    Traceback (most recent call last):
    penstock.errors.AlreadyExists: devices/7
    """


class RevisionMismatch(ConflictError):
    """A compare-and-set named a revision that is no longer the newest.

    >>> raise RevisionMismatch("devices/7")
    Traceback (most recent call last):
    penstock.errors.RevisionMismatch: devices/7
    """


class LeaseLost(ConflictError):
    """A message is no longer this worker's: its lease ended and it was given back, or to another worker.

    >>> raise LeaseLost("jobs: the message at position 24 was given to another worker of group 'resizers'")
    Traceback (most recent call last):
    penstock.errors.LeaseLost: jobs: the message at position 24 was given to another worker of group 'resizers'
    """


class ExpiredError(PenstockError):
    """The position is gone; what is left begins at ``first``.

    >>> str(ExpiredError("orders", 12, 4096))
    'orders: position 12 has expired, the log begins at 4096'
    """

    def __init__(self, log: str, position: int, first: int) -> None:
        super().__init__(log, position, first)
        self.log, self.position, self.first = log, position, first

    def __str__(self) -> str:
        return f"{self.log}: position {self.position} has expired, the log begins at {self.first}"


class ReplacedError(PenstockError):
    """The log was deleted or recreated under the same name: start over.

    >>> str(ReplacedError("orders", "its log id changed"))
    'orders was replaced: its log id changed'
    """

    def __init__(self, log: str, reason: str) -> None:
        super().__init__(log, reason)
        self.log, self.reason = log, reason

    def __str__(self) -> str:
        return f"{self.log} was replaced: {self.reason}"


class LockedError(PenstockError):
    """Another process, or another handle of this one, owns it.

    >>> raise LockedError("orders: another writer has it open")
    Traceback (most recent call last):
    penstock.errors.LockedError: orders: another writer has it open
    """


class ReadOnlyError(PenstockError):
    """An earlier I/O error latched: nothing more is written until it is mended and reopened.

    >>> raise ReadOnlyError("orders: an earlier write failed: No space left on device")
    Traceback (most recent call last):
    penstock.errors.ReadOnlyError: orders: an earlier write failed: No space left on device
    """


class ClosedError(PenstockError):
    """The handle was closed, or belongs to the process this one was forked from.

    >>> raise ClosedError("orders: the writer is closed")
    Traceback (most recent call last):
    penstock.errors.ClosedError: orders: the writer is closed
    """


class RetryError(PenstockError):
    """Call again later: nothing was lost.

    >>> issubclass(Timeout, RetryError) and issubclass(Timeout, TimeoutError)
    True
    """


class Backpressure(RetryError):
    """The receiving side is full for now.

    >>> raise Backpressure("orders: 65536 messages wait")
    Traceback (most recent call last):
    penstock.errors.Backpressure: orders: 65536 messages wait
    """


class NotConnected(RetryError):
    """There is no connection at the moment.

    >>> raise NotConnected("nats: reconnecting")
    Traceback (most recent call last):
    penstock.errors.NotConnected: nats: reconnecting
    """


class Timeout(RetryError, TimeoutError):
    """The time given ran out before there was an answer.

    >>> raise Timeout("orders: no record within 0.5 s")
    Traceback (most recent call last):
    penstock.errors.Timeout: orders: no record within 0.5 s
    """
