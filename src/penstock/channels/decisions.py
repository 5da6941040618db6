"""What the core decides: steps for the disk, then a change in memory, then what members hear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.channels import commands as c
from penstock.channels.ids import ChannelId
from penstock.channels.model import PersistedChannel

__all__ = [
    "Decision", "Step", "Save", "Remove", "Append", "Flush", "Take", "WriteCursor", "ReadLog", "ReadRange", "Evict",
    "Reopen",
    "NoteQueue",
]  # fmt: skip


class Step(msgspec.Struct, frozen=True, tag=True):
    """Something the shell does on disk for one channel.  The kinds are below."""


class Save(Step, frozen=True):
    """Save this metadata."""

    channel: PersistedChannel


class Remove(Step, frozen=True):
    """Delete everything the channel has on disk; ``first_time`` when it should have nothing yet."""

    first_time: bool = False


class Append(Step, frozen=True):
    """Append entries to the log, numbered in a row from ``seq`` on, durable before the next step when ``sync``."""

    seq: int
    timestamp: int
    sender: str
    payloads: tuple[bytes, ...]
    sync: bool
    keep: int
    """How many entries retention must keep; 0 in a queue, whose cursor decides."""


class Flush(Step, frozen=True):
    """Make the log durable."""


class Take(Step, frozen=True):
    """Read the entry at the head of the queue, then move the cursor behind it, durably."""

    seq: int


class WriteCursor(Step, frozen=True):
    """Put the queue's cursor, durably; ``first_time`` when the channel is only becoming a queue."""

    next_seq: int
    first_time: bool = False


class NoteQueue(Step, frozen=True):
    """Take away the note that the channel is only becoming a queue: its metadata says so by now."""


class ReadLog(Step, frozen=True):
    """Read entries; they are the answer."""

    from_seq: int
    limit: int


class ReadRange(Step, frozen=True):
    """Tell the first and last number of the log, and ``spent`` behind them when it is given; they are the answer."""

    spent: int | None = None


class Evict(Step, frozen=True):
    """Drop whole segments below this number."""

    below: int


class Reopen(Step, frozen=True):
    """The log goes on under other settings: as a queue, or with another flush interval."""

    fifo: bool
    flush_interval: int


def nothing() -> None:
    """Change nothing."""


class Decision(msgspec.Struct):
    """What is to be done for one command: steps for the disk, then a change in memory, then what members hear.

    >>> Decision(ChannelId("ops", "localhost"), (Flush(),)).steps
    (Flush(),)
    """

    channel: ChannelId
    steps: tuple[Step, ...] = ()
    apply: Callable[[], None] = nothing
    undo: Callable[[], None] = nothing
    events: tuple[c.Delivery, ...] = ()
    answer: Any = None
    after: tuple[Step, ...] = ()
    """Steps that may fail: the command is done without them."""
