"""Promise: a process that lives long holds no more memory, descriptors, threads or disk than a young one."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from long_life import Sample, live, slope

HOUR = 3600.0
FIGURES = ("memory_bytes", "descriptors", "threads", "disk_bytes")


def show(samples: list[Sample]) -> str:
    lines = ["seconds   rounds   memory MiB   descriptors   threads   disk MiB"]
    lines += [
        f"{one.seconds:7.0f}  {one.rounds:7}  {one.memory_bytes / 2**20:11.1f}  {one.descriptors:12}  {one.threads:8}"
        f"  {one.disk_bytes / 2**20:9.2f}"
        for one in samples
    ]
    return "\n".join(lines)


@pytest.mark.timeout(2 * HOUR)
def test_a_long_life_is_flat(tmp_path: Path, long_run: bool) -> None:
    # An hour, or as long as SOAK_SECONDS says; the short form is a number of rounds.
    seconds = float(os.environ.get("SOAK_SECONDS", "3600")) if long_run else 0.0
    pause = float(os.environ.get("SOAK_PAUSE_SECONDS", "0"))
    samples = asyncio.run(live(tmp_path, seconds, 0 if long_run else 200, 60 if long_run else 8, pause))
    settled = samples[len(samples) // 4 :]  # the first quarter fills caches
    if long_run:
        print(show(samples))
        for figure in FIGURES:
            print(f"{figure}: {slope(settled, figure):+,.1f} an hour, over the last {len(settled)} samples")
    first, last = settled[0], settled[-1]
    assert last.descriptors <= first.descriptors + 4, show(samples)
    assert last.threads <= first.threads + 4, show(samples)
    assert last.disk_bytes < 1.5 * max(one.disk_bytes for one in settled[: len(settled) // 2]), show(samples)
    assert last.memory_bytes < first.memory_bytes + (48 << 20), show(samples)
    if long_run:
        grown = slope(settled, "memory_bytes") * (last.seconds - first.seconds) / HOUR
        assert grown < 16 << 20, f"memory grew by {grown / 2**20:.1f} MiB\n{show(samples)}"
