"""Run every benchmark, or those named, and put their tables into docs/benchmarks.md.

python bench/_all.py [NAME …]
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import _table

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "benchmarks.md"


def put(name: str, text: str) -> None:
    """Replace the section of one benchmark."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    page = PAGE.read_text()
    if begin not in page:
        sys.exit(f"{PAGE} has no place for {name}: add {begin} and {end}")
    before, _, rest = page.partition(begin)
    PAGE.write_text(f"{before}{begin}\n{text.strip()}\n{end}{rest.partition(end)[2]}")


def main() -> None:
    wanted = sys.argv[1:] or sorted(path.stem for path in HERE.glob("*.py") if not path.name.startswith("_"))
    for name in wanted:
        print(f"== {name}", flush=True)
        run = subprocess.run(
            [sys.executable, str(HERE / f"{name}.py")], stdout=subprocess.PIPE, text=True, check=True, cwd=HERE.parent
        )
        print(run.stdout)
        put(name, f"Measured on {time.strftime('%Y-%m-%d')} on {_table.machine()}.\n\n{run.stdout}")


if __name__ == "__main__":
    main()
