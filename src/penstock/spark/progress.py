"""How far Spark has come with what it is doing, from its own events: tasks done of tasks there are.

A session in this process is asked through its status tracker, which knows the stages under way.  A session behind
Spark Connect reports by itself to a handler.  Streams have their own measure, positions: ``pipelines.run.follow``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Tasks", "watch_tasks"]

POLL_SECONDS: Final = 0.2


class Tasks(msgspec.Struct, frozen=True):
    """Tasks of the stages Spark has begun so far: done of total.

    >>> Tasks.of([(1, 4, 4), (2, 1, 8)])
    Tasks(done=5, total=12)
    """

    done: int = 0
    total: int = 0

    @classmethod
    def of(cls, stages: Iterable[tuple[int, int, int]]) -> Tasks:
        """Add up stages, each a number, its done and its total tasks."""
        done = total = 0
        for _, finished, there in stages:
            done += min(finished, there)
            total += there
        return cls(done, total)


@contextlib.contextmanager
def watch_tasks(spark: SparkSession, show: Callable[[Tasks], None]) -> Iterator[None]:
    """Call ``show`` whenever more is done, while the block runs.

    >>> with watch_tasks(spark, print):  # doctest: +SKIP
    ...     frame.count()
    Tasks(done=3, total=8)
    """
    if hasattr(spark, "registerProgressHandler") and not hasattr(spark, "_jsparkSession"):
        with _watch_remote(spark, show):
            yield
        return
    stop, tracker = threading.Event(), spark.sparkContext.statusTracker()
    stages: dict[int, tuple[int, int, int]] = {}

    def poll() -> None:
        shown = Tasks()
        while not stop.wait(POLL_SECONDS):
            active = set(tracker.getActiveStageIds())
            for number in active | set(stages):
                info = tracker.getStageInfo(number)
                if info is not None:
                    stages[number] = (number, info.numCompletedTasks, info.numTasks)
            found = Tasks.of(stages.values())
            if found != shown:
                shown = found
                show(found)

    thread = threading.Thread(target=poll, name="penstock-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)


@contextlib.contextmanager
def _watch_remote(spark: Any, show: Callable[[Tasks], None]) -> Iterator[None]:
    operations: dict[str, Tasks] = {}

    def handle(stages: Any, inflight_tasks: int, operation_id: str, done: bool) -> None:  # noqa: ARG001
        known = Tasks.of((stage.stage_id, stage.num_completed_tasks, stage.num_tasks) for stage in stages or ())
        operations[operation_id] = known if known.total else operations.get(operation_id, known)
        total = Tasks.of((0, item.done, item.total) for item in operations.values())
        if total.total:
            show(total)

    spark.registerProgressHandler(handle)
    try:
        yield
    finally:
        spark.removeProgressHandler(handle)
