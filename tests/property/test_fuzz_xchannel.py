"""A short run of fuzz/xchannel_scan.py, so that it does not rot, and proof that its guard bites."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

FUZZ = Path(__file__).parents[2] / "fuzz" / "xchannel_scan.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("xchannel_scan", FUZZ)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_scanner_stays_inside_the_file_and_meets_every_reason_to_stop() -> None:
    stops = load().run(20_000, seed=11)
    assert sum(stops.values()) == 20_000
    assert set(stops) == {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}


def test_a_byte_past_the_file_kills_the_process() -> None:
    code = (
        "import ctypes, sys; sys.path.insert(0, sys.argv[1]); from xchannel_scan import Guarded\n"
        "view = Guarded(4096).tail(8); at = ctypes.addressof(ctypes.c_char.from_buffer(view))\n"
        "assert ctypes.string_at(at, 8) == bytes(8); print('inside', flush=True); ctypes.string_at(at + 8, 1)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(FUZZ.parent)], capture_output=True, timeout=60, check=False)
    assert done.stdout == b"inside\n"
    assert done.returncode in (-signal.SIGSEGV, -signal.SIGBUS)
