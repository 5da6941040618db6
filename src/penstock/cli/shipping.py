"""What ``penstock ship run`` does: a shipper for each log, until everything is shipped or someone interrupts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from penstock.cli.output import progress_bar
from penstock.errors import NotFoundError, OptionsError
from penstock.lifecycle import State
from penstock.ship import ShipOptions, ShipPart

__all__ = ["ship_logs"]

DRAIN_SECONDS = 10.0
ONCE_TRIES = 2
"""How often a store that is away is tried with --once; each try goes on for a minute by itself."""


def ship_logs(
    logs: list[str], url: str, node: str, options: ShipOptions, *, once: bool, roll_seconds: float | None
) -> tuple[list[dict[str, Any]], Exception | None]:
    """Ship logs below a URL; return what there is to say about each at the end, and what made the first of them fail.

    One that fails keeps no other from being shipped.
    """
    names = [os.path.basename(path.rstrip("/")) for path in logs]
    if len(set(names)) < len(names):
        raise OptionsError("two logs have the same name, and each goes under its own: ship them to different places")
    if once and roll_seconds is None:
        roll_seconds = 0.0  # everything that is there now: a log that nobody has open has nothing to wait for
    parts = [
        ShipPart(path, url, node=node or socket.gethostname(), options=options, roll_seconds=roll_seconds)
        for path in logs
    ]
    return asyncio.run(_run(parts, once=once))


async def _run(parts: list[ShipPart], *, once: bool) -> tuple[list[dict[str, Any]], Exception | None]:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # not in every thread
            loop.add_signal_handler(number, stop.set)
    for number, change in ((signal.SIGUSR1, ShipPart.pause), (signal.SIGUSR2, ShipPart.resume)):
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
            loop.add_signal_handler(number, _all, change, parts)
    started: list[ShipPart] = []
    try:
        for part in parts:
            await part.start()
            started.append(part)
        with progress_bar("shipping", "bytes") as bar:
            task = bar.add_task("", total=None)
            while not stop.is_set() and not await _finished(parts, once=once):
                bar.update(task, completed=sum(part.sent_bytes for part in parts))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await stop.wait()
        over = [part for part in parts if _is_over(part, once=once and not stop.is_set())]
        if stop.is_set():
            await asyncio.gather(*(part.drain(DRAIN_SECONDS) for part in parts if part not in over))
        problem = await _problem_of(over[0]) if over else None
        return await asyncio.to_thread(_describe, [part for part in parts if part not in over]), problem
    finally:
        for part in started:
            await part.stop()


async def _problem_of(part: ShipPart) -> Exception:
    try:
        if part.health().state is State.FAILED:
            await part.wait()
    except Exception as exc:  # noqa: BLE001 - it is for whoever called
        return exc
    return part.failures[-1]


def _describe(parts: list[ShipPart]) -> list[dict[str, Any]]:
    return [part.describe() for part in parts]


def _all(change: Callable[[ShipPart], None], parts: list[ShipPart]) -> None:
    for part in parts:
        change(part)


def _given_up(part: ShipPart) -> bool:
    """Whether there is no use in going on: a log or a bucket that is not there, a store that stays away."""
    failures = list(part.failures)
    return len(failures) >= ONCE_TRIES or any(isinstance(one, NotFoundError) for one in failures)


def _is_over(part: ShipPart, *, once: bool) -> bool:
    return part.health().state is State.FAILED or (once and _given_up(part))


async def _finished(parts: list[ShipPart], *, once: bool) -> bool:
    left = [part for part in parts if not _is_over(part, once=once)]
    if not left or not once:
        return not left
    if not all(part.idle for part in left):
        return False  # a status looks at every file that waits
    found = await asyncio.to_thread(lambda: [part.status() for part in left])
    return not any(status is None or status.backlog_segments for status in found)
