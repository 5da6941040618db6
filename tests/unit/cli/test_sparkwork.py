"""What commands on Spark share, without Spark: processes that are ended, and rows as they are printed."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator

import pytest

from penstock.cli import sparkwork
from penstock.errors import PenstockError

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
MEEK = "import time; print('meek', flush=True); time.sleep(600)"


def test_what_was_started_is_ended_whether_it_listens_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparkwork, "END_SECONDS", 0.2)
    before = sparkwork._children()
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for code in (DEAF, MEEK)]
    for process in started:
        assert process.stdout is not None
        process.stdout.readline()
    pids = {process.pid for process in started}
    assert sparkwork._children() - before == pids
    sparkwork._end(pids)
    assert not sparkwork._children() & pids
    for process in started:
        assert process.stdout is not None
        process.stdout.close()
        process.wait()


@pytest.fixture
def quiet_again() -> Iterator[None]:
    with warnings.catch_warnings():
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("quiet_again")
def test_an_interrupt_that_is_dropped_or_renamed_on_the_way_still_arrives() -> None:
    """As py4j does with what is raised in the middle of it."""

    def dropped() -> None:
        with sparkwork.Interrupt():
            with contextlib.suppress(BaseException):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)
            time.sleep(60)  # ended by the second one

    def renamed() -> None:
        with sparkwork.Interrupt():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            except BaseException:
                raise RuntimeError("lost") from None

    with pytest.raises(KeyboardInterrupt):
        dropped()
    with pytest.raises(SystemExit, match="143"):
        renamed()


def test_rows_are_printed_as_other_commands_print_them(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Times in UTC and with their zone, bytes as ``penstock cat --json`` has them."""
    east = dt.timezone(dt.timedelta(hours=5, minutes=45))
    row = {"at": dt.datetime(2026, 1, 1, 5, 45, tzinfo=east), "key": b"caf\xc3\xa9", "raw": [{"x": b"\xff"}], "n": None}
    sparkwork.print_rows([row], json=True, check="log")
    said = json.loads(capfdbinary.readouterr().out)
    expected = {"check": "log", "at": "2026-01-01T00:00:00.000000Z", "key": "café", "raw": [{"x_base64": "/w=="}]}
    assert said == {**expected, "n": None}


def test_two_columns_of_one_name_are_both_printed_and_are_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow as pa

    class Frame:  # what print_rows wants of a DataFrame
        def toArrow(self) -> pa.Table:  # noqa: N802
            return pa.table([pa.array([1]), pa.array([2])], names=["id", "id"])

    sparkwork.print_rows(Frame(), json=False)  # type: ignore[arg-type]
    assert capsys.readouterr().out.split() == ["id", "id", "1", "2"]
    with pytest.raises(PenstockError, match="rename one"):
        sparkwork.print_rows(Frame(), json=True)  # type: ignore[arg-type]
