"""What ``penstock fold follow`` does: fold a log or a bucket into a store, with a line that says how far it is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rich.live import Live

from penstock.artifact import BootstrapReport, Window, bucket_window, log_window
from penstock.cli.buckets import bucket_folder, connection_of, find_bucket, is_nats
from penstock.cli.output import say_plain, stderr
from penstock.cli.records import open_any_log
from penstock.errors import OptionsError, UnsupportedError
from penstock.fold import AppliedWatch, Follow, FollowOptions, WatchScope
from penstock.log.envelope import CONTENT
from penstock.store import AppendLogOptions, AppendLogStore, LmdbStore, RocksStore, open_store
from penstock.types import WatchCursor

__all__ = ["FoldProgress", "fold_into"]

LINE_SECONDS = 0.25
Store = AppendLogStore | RocksStore | LmdbStore


class FoldProgress:
    """How far a fold is: read from it four times a second."""

    def __init__(
        self,
        cursor: Callable[[], WatchCursor],
        lag: Callable[[], int | None],
        report: BootstrapReport | None = None,
    ) -> None:
        self._cursor, self._lag, self.folded, self._report = cursor, lag, 0, report
        self._seen: list[tuple[float, int]] = [(time.monotonic(), 0)]

    def line(self) -> str:
        """Return the line, with the rate of the last two seconds."""
        now = time.monotonic()
        self._seen = [*self._seen[-8:], (now, self.folded)]
        (then, before), (_, after) = self._seen[0], self._seen[-1]
        rate = (after - before) / max(now - then, 1e-9)
        cursor, lag = self._cursor().token.as_int(), self._lag()
        shown = ["-" if value is None else f"{value:,}" for value in (cursor, lag)]
        return f"cursor {shown[0]}  lag {shown[1]}  folded {self.folded:,}  {rate:,.0f}/s"

    def result(self) -> dict[str, Any]:
        """Return the end, ready for JSON."""
        found = {"cursor": self._cursor().token.as_int(), "lag": self._lag(), "folded": self.folded}
        report = self._report
        return found if report is None else {**found, "way": report.way, "reason": report.reason}


def fold_into(
    store: str, source: str, bucket: str | None, options: FollowOptions, *, once: bool, artifact: str | None = None
) -> FoldProgress:
    """Fold a log, or a bucket, into the store at a path, made if it is not there; return how far it came.

    With an ``artifact``, the URL or path of a published one, the store begins with that where it is not here or has
    expired.
    """
    place = None if is_nats(source) else bucket_folder(source)
    if place is not None:
        source, bucket = place
    if is_nats(source) and bucket is None:
        raise OptionsError("a server has many buckets: name one with --bucket")
    if bucket is None:
        return asyncio.run(_follow_log(source, store, options, once=once, artifact=artifact))
    return asyncio.run(_follow_bucket(source, bucket, store, once=once, artifact=artifact))


async def _begin(store: str, window: Window, artifact: str | None) -> BootstrapReport | None:
    """Bring the store to where it can go on, if there is an artifact to begin with; say which way that was."""
    if artifact is None:
        return None
    from penstock.artifact import bootstrap, transport_for
    from penstock.artifact.here import split_artifact

    place, key = split_artifact(artifact)
    report = await bootstrap(store, window, transport_for(place), key)
    say_plain(f"{store}: {report.way}: {report.reason}")
    return report


async def _follow_log(
    source: str, store: str, options: FollowOptions, *, once: bool, artifact: str | None
) -> FoldProgress:
    stop = asyncio.Event()
    with open_any_log(source) as log:
        if log.content != CONTENT:
            raise OptionsError(f"{source}: its records are no envelopes; in Python, penstock.fold.follow takes any log")
        report = await _begin(store, log_window(log), artifact)
        with _open(store) as target:
            fold = Follow(log, target, options=options, stop=stop)
            progress = FoldProgress(lambda: fold.cursor, lambda: fold.lag, report)
            async with _shown(progress, stop, lambda: fold.records):
                await fold.run(once=once)
            target.settle()
    return progress


async def _follow_bucket(source: str, bucket: str, store: str, *, once: bool, artifact: str | None) -> FoldProgress:
    stop, folded = asyncio.Event(), 0

    def count(batch: object) -> None:
        nonlocal folded
        folded += len(batch)  # type: ignore[arg-type]

    async with connection_of(source) as connection:
        found = await find_bucket(connection, source, bucket)
        if found.watcher is None:
            raise UnsupportedError(f"{bucket}: this backend cannot watch")
        report = await _begin(store, bucket_window(found.watcher), artifact)
        with _open(store) as target:
            fold = AppliedWatch(
                found.watcher, WatchScope.all(), apply=count, store=target, reader=found.reader, stop=stop, name=bucket
            )
            progress = FoldProgress(lambda: fold.applied, lambda: fold.lag, report)
            async with _shown(progress, stop, lambda: folded):
                running = asyncio.create_task(fold.run())
                while not running.done():
                    await asyncio.wait([running], timeout=0.01)
                    if once and fold.hydrated:
                        stop.set()
                await running
            target.settle()
    return progress


@asynccontextmanager
async def _shown(progress: FoldProgress, stop: asyncio.Event, folded: Callable[[], int]) -> AsyncIterator[None]:
    """Show the line while the block runs; an interrupt ends the fold and not the process."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # not in every thread
        loop.add_signal_handler(signal.SIGINT, stop.set)

    async def refresh(live: Live | None) -> None:
        while True:
            await asyncio.sleep(LINE_SECONDS)
            progress.folded = folded()
            if live is not None:
                live.update(progress.line(), refresh=True)

    shown = Live(console=stderr, transient=True, auto_refresh=False) if stderr.is_terminal else None
    with shown if shown is not None else contextlib.nullcontext():
        task = asyncio.create_task(refresh(shown))
        try:
            yield
        finally:
            task.cancel()
            progress.folded = folded()
            with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
                loop.remove_signal_handler(signal.SIGINT)


def _open(path: str) -> Store:
    if os.path.exists(path):
        return open_store(path, read_only=False)
    return AppendLogStore.open(path, AppendLogOptions())
