"""Reference data packed small: one JSON case a line, files inside as base64 of zlib."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["read_cases", "unpack", "lay_out"]


def read_cases(path: Path) -> list[dict[str, Any]]:
    """Return the cases of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def unpack(text: str) -> bytes:
    """Return the bytes of a packed file.

    >>> unpack(base64.b64encode(zlib.compress(b"hello")).decode())
    b'hello'
    """
    return zlib.decompress(base64.b64decode(text))


def lay_out(files: Mapping[str, str], root: Path) -> None:
    """Write packed files below ``root``."""
    root.mkdir(parents=True, exist_ok=True)
    for name, packed in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(unpack(packed))
