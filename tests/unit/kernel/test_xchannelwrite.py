"""Promise: a record is published in the order that readers and crashes rely on.

Each step of a publication stores to memory.  Let one of them fall on a page that the file does not have, and the
process dies right there: what is in the file then is what was stored before.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = 4096
SLOT = 80
SCRIPT = """
import os, sys
import numpy as np
from penstock.kernel import Mapping
from penstock.kernel.xchannelwrite import Appender
folder, way, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
files = [os.open(folder + name, os.O_RDWR) for name in ("/records", "/head")]
window, head = Mapping(files[0], 0, 16384, True), Mapping(files[1], 0, 4096, True)
appender = Appender(lambda length: sys.exit(3), 12000)  # what it calls when the file was cut
appender.attach(window, head, 80, 16384, 1 << 40, 16384, 0, 0)
appender.resume()
payload, positions = b"x" * length, np.zeros(1, np.int64)
if way == "append":
    appender.append(payload, 7, 9)
elif way == "bytearray":
    appender.append(bytearray(payload), 7, 9)
elif way == "list":
    appender.append_list([payload], 0, 7, 9, positions)
elif way == "spans":
    columns = np.zeros(1, np.int64), np.full(1, length, np.int64)
    appender.append_spans(payload, *columns, 0, np.full(1, 7, np.uint16), np.full(1, 9, np.uint64), positions)
else:
    appender.reserve(length)[:] = payload
    appender.commit(length, 7, 9)
"""


def publish(folder: Path, way: str, length: int, *, records: int = 16384, head: int = PAGE) -> tuple[int, bytes, bytes]:
    """Publish one record into files of that size; return the exit code and what is in them."""
    (folder / "records").write_bytes(bytes(records))
    (folder / "head").write_bytes(bytes(head))
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(folder), way, str(length)], check=False)
    return done.returncode, (folder / "records").read_bytes(), (folder / "head").read_bytes()


@pytest.mark.parametrize("way", ["append", "bytearray", "list", "spans", "commit"])
def test_a_record_is_published_in_order(way: str, tmp_path: Path) -> None:
    code, records, head = publish(tmp_path, way, 4000)
    assert code == 0
    header = struct.pack("<BBHIQ", 1, 1, 7, 4000, 9)
    assert records[SLOT : PAGE + 16] == header + b"x" * 4000 + struct.pack("<BBHIQ", 0, 1, 0, 0, 0)
    assert struct.unpack("<QQ", head[16:32]) == (PAGE + 16, 1)

    # the payload comes first: where it cannot be stored nothing is committed
    code, records, head = publish(tmp_path, way, 6000, records=PAGE)
    assert (code, records[SLOT], any(head)) == (3, 0, False)

    # then the next header: where that cannot be laid nothing is committed, though the payload is there
    code, records, head = publish(tmp_path, way, 4000, records=PAGE)
    assert (code, records[SLOT], any(head)) == (3, 0, False)
    assert records[SLOT + 16 : PAGE] == b"x" * 4000

    # then the commit: where the counters cannot be stored the record is there all the same
    code, records, _ = publish(tmp_path, way, 4000, head=0)
    assert code == 0
    assert records[SLOT : SLOT + 16] == header
