"""The command line that the fuzz targets have in common."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["main"]


def main(description: str | None, run: Callable[[int, int], str | None]) -> None:
    """Call ``run`` with how many inputs to try and the seed, and report what it returns: nothing found, if nothing."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=200_000, help="how many inputs to try")
    parser.add_argument("--seed", type=int, default=1, help="the same seed tries the same inputs")
    options = parser.parse_args()
    began = time.monotonic()
    found = run(options.inputs, options.seed) or "nothing found"
    seconds = time.monotonic() - began
    rate = options.inputs / max(seconds, 1e-9)
    print(f"{Path(sys.argv[0]).stem}: {options.inputs} inputs, {found}, {seconds:.0f} s, {rate:,.0f}/s")
