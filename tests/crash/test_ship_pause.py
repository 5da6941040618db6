"""A shipper that is stopped (SIGSTOP) between two steps while another one ships, and goes on later: it is shut out.

Whatever it still does, every record is shipped once, in order, and none is removed here before it is there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ship_use import FORMATS, fill, open_writer, read_all

from penstock.ship.remote import ShippedLog
from penstock.ship.tiered import TieredLog

WORKER = Path(__file__).parents[1] / "support" / "ship_worker.py"
PAUSED = """
import os, runpy, signal, sys
from penstock.disk import failpoint
seen = []
def stop():
    seen.append(1)
    if len(seen) == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGSTOP)
failpoint._armed[sys.argv[3]] = stop
runpy.run_path(sys.argv[5], run_name="__main__")
"""
POINTS = ["ship.put.before", "ship.put.after", "ship.page.after", "ship.swap.before", "ship.cursor.before",
          "ship.drop.before", "ship.fence.before"]  # fmt: skip


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_shipper_that_was_stopped_while_another_one_shipped_wins_nothing(
    format: str, point: str, tmp_path: Path, long_run: bool
) -> None:
    if not long_run and FORMATS.index(format) != POINTS.index(point) % len(FORMATS):
        pytest.skip("the short form tries each step with one format")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    log, place = str(tmp_path / "log"), str(tmp_path / "up")
    # The fence is taken once; every other step comes again, and by the second time there is something to lose.
    paused = [sys.executable, "-c", PAUSED, log, place, point, "1" if "fence" in point else "2", str(WORKER)]
    plain = [sys.executable, str(WORKER), log, place]
    with open_writer(format, log) as writer:
        wanted = [p for start in range(0, 200, 20) for p in fill(format, writer, start, 20)]
        first = subprocess.Popen(paused, env=environment, stderr=subprocess.PIPE)
        try:
            _, status = os.waitpid(first.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), "it ended before it came there"
            wanted += fill(format, writer, 200, 20)
            subprocess.run(plain, env=environment, timeout=120, check=True)
            os.kill(first.pid, signal.SIGCONT)
            _, said = first.communicate(timeout=120)
        finally:
            if first.poll() is None:
                first.kill()
                first.wait()
        # Who had not taken over yet may; who finds nothing left to ship ends; any other says why.
        assert first.returncode == 0 or b"another shipper has taken over" in said
        if point in ("ship.put.after", "ship.swap.before"):
            assert first.returncode != 0
        with TieredLog(log, f"{place}/log") as both:
            assert read_all(both) == wanted
        wanted += fill(format, writer, 220, 20)
        subprocess.run(plain, env=environment, timeout=120, check=True)
    with ShippedLog(f"{place}/log") as shipped:
        assert read_all(shipped) == wanted
        assert list(shipped.verify()) == []
        assert shipped.head.records == len(wanted)
