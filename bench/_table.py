"""What benchmarks share: the machine's name, memory that is at hand, markdown tables, rates for people."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path


def machine() -> str:
    """Return what was measured on, in one line."""
    model = platform.processor() or platform.machine()
    try:
        info = Path("/proc/cpuinfo").read_text()
        model = re.search(r"model name\s*:\s*(.+)", info)[1]  # type: ignore[index]
    except (OSError, TypeError):
        pass
    return f"{os.cpu_count()} × {model}, {platform.system()} {platform.release()}, Python {platform.python_version()}"


def touch_memory(size: int) -> None:
    """Make free memory of that size be at hand: a virtual machine has to ask its host for what was never touched.

    Whoever comes first would pay for it, up to 2 s a gigabyte.
    """
    _ = b"\1" * size


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a markdown table; the first column is text, the others are figures."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def rate(per_second: float) -> str:
    """Return a rate that people can compare."""
    for scale, unit in ((1e6, "M/s"), (1e3, "k/s")):
        if per_second >= scale:
            return f"{per_second / scale:.3g} {unit}"
    return f"{per_second:.3g} /s"
