"""The command line that the fuzz targets have in common."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final

__all__ = ["main"]

PIECE: Final = 100_000
"""Inputs of one call; a run that is ended from outside says how many calls it had done."""
APART: Final = 1_000_003
"""What lies between the seeds of two calls."""


def main(description: str | None, run: Callable[[int, int], str | None]) -> None:
    """Call ``run`` with how many inputs to try and the seed, and report what it returns: nothing found, if nothing."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=200_000, help="how many inputs to try")
    parser.add_argument("--seed", type=int, default=1, help="the same seed tries the same inputs")
    options = parser.parse_args()
    began, done, found = time.monotonic(), 0, None

    def report(ending: str = "") -> None:
        seconds = time.monotonic() - began
        rate, what = done / max(seconds, 1e-9), found or "nothing found"
        print(f"{Path(sys.argv[0]).stem}: {done} inputs, {what}, {seconds:.0f} s, {rate:,.0f}/s{ending}", flush=True)

    def ended(number: int, _: FrameType | None) -> None:
        report(f", ended by {signal.Signals(number).name} before {options.inputs}")
        raise SystemExit(1)

    signal.signal(signal.SIGTERM, ended)
    while done < options.inputs and found is None:
        count = min(PIECE, options.inputs - done)
        found = run(count, options.seed + APART * (done // PIECE))
        done += count
    report()
