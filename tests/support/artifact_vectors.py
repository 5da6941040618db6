"""What slipstream wrote, unpacked where a test wants it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

ZIP = Path(__file__).parent.parent / "vectors" / "slipstream_artifacts" / "artifacts.zip"


def unpack(folder: Path) -> Path:
    with zipfile.ZipFile(ZIP) as packed:
        packed.extractall(folder)
    return folder


def load(name: str) -> Any:
    with zipfile.ZipFile(ZIP) as packed:
        return json.loads(packed.read(name))


def read(name: str) -> bytes:
    with zipfile.ZipFile(ZIP) as packed:
        return packed.read(name)
