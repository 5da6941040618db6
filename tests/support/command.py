"""The command line as a user runs it: a process, two streams and an exit code."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

PENSTOCK = [sys.executable, "-W", "error", "-m", "penstock.cli.main"]


def penstock(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*PENSTOCK, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, **options)
