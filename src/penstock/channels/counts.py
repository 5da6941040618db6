"""What channels count, under the names the original uses, with its buckets.

Times are in seconds from 0.1 ms on, doubling; a recovery starts at 1 ms.  ``result`` is success or failure; what is
asked of a queue also counts each reason for a refusal.  The message log itself counts what happens to its segments.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from penstock.channels import commands as c
from penstock.errors import Refused
from penstock.metrics import REGISTRY, Metric

__all__ = ["count_command", "timed"]

SECONDS: Final = tuple(0.0001 * 2**k for k in range(16))
RECOVERY_SECONDS: Final = tuple(0.001 * 2**k for k in range(16))
ENTRIES: Final = tuple(float(2**k) for k in range(11))


def _results(name: str, help: str) -> Metric:
    return REGISTRY.counter(name, help, labels=("result",))


def _seconds(name: str, help: str, bounds: tuple[float, ...] = SECONDS) -> Metric:
    return REGISTRY.histogram(name, help, bounds=bounds)


# --- Channels

ACTIVE = REGISTRY.gauge("channels_active", "channels that are alive")
JOINS = _results("channel_joins", "joins of channels")
LEAVES = REGISTRY.counter("channel_leaves", "members that left a channel")
DELETED = REGISTRY.counter("channels_deleted", "channels that ended because their owner said so")
QUEUE = {
    kind: _results(f"fifo_{word}", f"{word} on queues")
    for kind, word in ((c.Push, "pushes"), (c.Pop, "pops"), (c.Clear, "clears"))
}
CURSOR_SECONDS = _seconds("fifo_cursor_fsync_seconds", "how long it takes to move the cursor of a queue")

FAILURES = REGISTRY.counter(
    "channel_receiver_failures", "sinks and listeners that raised and were shielded from the others", labels=("who",)
)

# --- The store

SAVES = _results("store_saves", "saves of channel metadata")
SAVE_SECONDS = _seconds("store_save_duration_seconds", "how long a save of channel metadata takes")
DELETES = _results("store_deletes", "deletions of channels on disk")
LOADS = _results("store_loads", "loads of channel metadata, and enumerations of what there is")
LOAD_SECONDS = _seconds("store_load_duration_seconds", "how long a load of channel metadata takes")

# --- The logs of channels

APPEND_SECONDS = _seconds("message_log_append_duration_seconds", "how long an append to the log of a channel takes")
FLUSHES = _results("message_log_flushes", "flushes of the logs of channels")
FLUSH_SECONDS = _seconds("message_log_flush_duration_seconds", "how long a flush of the log of a channel takes")
READS = _results("message_log_reads", "reads of the logs of channels")
READ_SECONDS = _seconds("message_log_read_duration_seconds", "how long a read of the log of a channel takes")
ENTRIES_RETURNED = REGISTRY.histogram("message_log_entries_returned", "entries a read returned", bounds=ENTRIES)
LOG_DELETES = _results("message_log_deletes", "logs deleted with their channels")
RECOVERY = _seconds("message_log_recovery_duration_seconds", "how long a log takes to open", RECOVERY_SECONDS)

T = TypeVar("T")


def timed(work: Callable[[], T], results: Metric, seconds: Metric | None = None) -> T:
    """Do some work, counting how it ended and, when it ended well, how long it took.

    >>> timed(lambda: 7, READS, READ_SECONDS)
    7
    """
    started = time.perf_counter()
    try:
        found = work()
    except BaseException:
        results.add(result="failure")
        raise
    results.add(result="success")
    if seconds is not None:
        seconds.observe(time.perf_counter() - started)
    return found


def count_command(command: c.Command, error: Exception | None) -> None:
    """Count a command by how it ended."""
    kind = type(command)
    if kind is c.Join:
        JOINS.add(result="success" if error is None else "failure")
    elif kind in QUEUE:
        refused = error.reason.lower() if isinstance(error, Refused) else "failure"
        QUEUE[kind].add(result="success" if error is None else refused)
    elif error is None and kind is c.Leave:
        LEAVES.add()
    elif error is None and kind is c.Delete:
        DELETED.add()
