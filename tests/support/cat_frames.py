"""What ``penstock cat --json`` prints, to be held against what Spark reads; and logs worth comparing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xchannel_vectors

from penstock.batch import payload_text
from penstock.log.detect import open_writer

VECTORS = Path(__file__).parents[1] / "vectors"
TOO_BIG = {"big_numbers"}  # numbers that no position can express
CHUNK = 500_000


def restore_vectors(root: Path) -> list[Path]:
    """Put every sound log of the vectors below a folder and return their paths."""
    found = []
    for name in xchannel_vectors.names(hand_made=False):
        (root / "xchannel" / name).mkdir(parents=True)
        found.append(xchannel_vectors.restore(name, root / "xchannel" / name))
    for case in sorted((VECTORS / "filechannel").iterdir()):
        if case.is_dir() and not case.name.startswith("damage-"):
            target = root / "filechannel" / case.name
            shutil.copytree(case / "channel", target)
            found.append(target)
    for case in sorted((VECTORS / "messagelog" / "log").iterdir()):
        if case.name not in TOO_BIG:
            target = root / "messagelog" / case.name
            target.mkdir(parents=True)
            for file in (case / "data").iterdir():
                shutil.copy(file, target / file.name)
            found.append(target)
    return found


def cat(path: Path, into: Path | None = None) -> list[dict[str, Any]]:
    """Return what the command prints, or write it to a file."""
    command = [sys.executable, "-m", "penstock.cli.main", "cat", "--json", str(path)]
    if into is not None:
        with into.open("wb") as sink:
            subprocess.run(command, check=True, stdout=sink)
        return []
    printed = subprocess.run(command, check=True, capture_output=True).stdout
    return [json.loads(line) for line in printed.splitlines()]


def printed_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the DataFrame as the command prints it."""
    ready: dict[str, Any] = {}
    for name, value in row.items():
        if name in ("channel", "timestamp") or (value is None and name not in ("timestamp_ns", "kind")):
            continue
        if isinstance(value, bytes | bytearray):
            form, text = payload_text(bytes(value))
            ready[form.replace("payload", name)] = text
        elif name == "timestamp_ns" and value is not None:
            ready[name] = value % (1 << 64)
        else:
            ready[name] = value
    return ready


def generate(path: Path, format: str, records: int) -> None:
    """Write records of many lengths, text and not, with kinds and times where the format has them."""
    writer = open_writer(str(path), format=format)
    for start in range(0, records, CHUNK):
        numbers = np.arange(start, min(start + CHUNK, records), dtype=np.int64)
        text = pc.utf8_lpad(pa.array(numbers).cast(pa.string()), 12, "0").cast(pa.binary())
        tail = pc.binary_repeat(pa.array([b"\xff\x00"] * len(numbers)), pa.array(np.where(numbers % 7 == 0, 3, 0)))
        more = pc.binary_repeat(pa.array([b"reading "] * len(numbers)), pa.array(numbers % 11))
        payloads = pc.binary_join_element_wise(text, more, tail, b"")
        kinds = numbers % 5 if format == "xchannel" else 0
        times = numbers * 1_000_000 + 1_700_000_000_000_000_000 if writer.has_times else None
        writer.append_many(payloads, kind=kinds, timestamp_ns=times)
    writer.sync()
    writer.close()
