"""Promise: without a compiler the message log works all the same, only slower."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import sys
sys.modules["penstock.kernel.messagelog"] = None  # as if it had not been built
from penstock import kernel
assert not kernel.native, "the compiled kernel was used"
from penstock.log.messagelog import MessageLog, MessageLogOptions, MessageLogReader
options = MessageLogOptions(segment_bytes=700)
with MessageLog.open(sys.argv[1], options) as log:
    log.append_many([b"%d" % n * 20 for n in range(1, 40)], sender="ann@localhost", timestamp_ns=0)
    log.append(b"one more")
with MessageLog.open(sys.argv[1], options) as log:
    assert log.append_many([memoryview(b"view")]).tolist() == [41]
with MessageLogReader(sys.argv[1]) as log:
    assert [entry.seq for entry in log.entries()] == list(range(1, 42))
    assert log.read(20, 1).to_payloads() == [b"20" * 20]
    assert list(log.verify()) == []
"""


def test_the_twin_writes_and_reads_a_log(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "log")], env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
