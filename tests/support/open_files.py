"""Which files this process has open: those of one folder only, since anything else may come and go meanwhile."""

from __future__ import annotations

import os
from pathlib import Path


def open_files(folder: Path) -> list[str]:
    """Return where descriptors of this process lead, if that is a folder or below it; [] where there is no /proc."""
    found = []
    for entry in os.scandir("/proc/self/fd") if os.path.exists("/proc/self/fd") else ():
        try:
            target = os.readlink(entry.path).removesuffix(" (deleted)")
        except FileNotFoundError:  # the one of the scan, or of another thread
            continue
        if target == str(folder) or target.startswith(f"{folder}/"):
            found.append(target)
    return found
