"""Promise: a signal ends a command on Spark in one line, wherever it comes."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal, time
from penstock.cli.sparkwork import Interrupt

class Callback:
    def __del__(self):  # as a hook at a fork: whatever is raised in it is printed, and goes no further
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(10):
            time.sleep(0.001)

with Interrupt():
    Callback()
    while True:
        time.sleep(0.05)
"""


def test_a_signal_within_a_callback_is_said_once_and_ends_the_block() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (143, "")
    assert done.stderr == "ended by SIGTERM; what was done is done, and the next run goes on\n"
