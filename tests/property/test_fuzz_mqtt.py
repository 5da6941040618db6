"""Short runs of fuzz/mqtt_packets.py and fuzz/mqtt_conversations.py, so that they do not rot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[2] / "fuzz"


@pytest.mark.parametrize(("target", "inputs"), [("mqtt_packets.py", 20_000), ("mqtt_conversations.py", 500)])
def test_no_input_does_more_than_be_refused(target: str, inputs: int) -> None:
    done = subprocess.run(
        [sys.executable, FUZZ / target, "--inputs", str(inputs)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "nothing found" in done.stdout
