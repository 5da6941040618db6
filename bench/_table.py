"""What every benchmark shares: the machine's name, markdown tables, and their place in docs/benchmarks.md."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"


def machine() -> str:
    """Return what was measured on, in one line."""
    model = platform.processor() or platform.machine()
    try:
        info = Path("/proc/cpuinfo").read_text()
        model = re.search(r"model name\s*:\s*(.+)", info)[1]  # type: ignore[index]
    except (OSError, TypeError):
        pass
    return f"{os.cpu_count()} × {model}, {platform.system()} {platform.release()}, Python {platform.python_version()}"


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


def publish(name: str, text: str, *, write: bool) -> None:
    """Print a section, and put it into docs/benchmarks.md if asked to."""
    print(text)
    if not write:
        return
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    page = PAGE.read_text()
    if begin not in page:
        sys.exit(f"{PAGE} has no place for {name}: add {begin} and {end}")
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{after}")
