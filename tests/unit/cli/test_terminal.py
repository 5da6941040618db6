"""Promise: whatever a command prints, names and payloads are data: a terminal acts upon none of it."""

from __future__ import annotations

import io
import logging
import os
import pty
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command import PENSTOCK
from rich.table import Table

from penstock.cli.ledger import _screen
from penstock.cli.mqtt_work import Printer
from penstock.cli.output import Plain
from penstock.mqtt.client import Message
from penstock.node.serve import JsonLines, set_up_logging

EVIL = "evil\x1b[2J\x9b5m\u202e\nFORGED"
ACTED_UPON = set("\x1b\x9b\u202e\r")


def harmless(shown: str) -> bool:
    return not set(shown) & ACTED_UPON and "\nFORGED" not in shown and "FORGED" in shown


def console() -> tuple[Plain, io.StringIO]:
    made, sink = Plain(), io.StringIO()
    made.file = sink
    return made, sink


def test_every_line_and_every_cell_of_a_console_is_escaped() -> None:
    table = Table(EVIL, title=EVIL)
    table.add_row(EVIL)
    for thing in (EVIL, table):
        plain, sink = console()
        plain.print(thing)
        assert harmless(sink.getvalue()), sink.getvalue()


def test_what_top_shows_of_a_node_is_escaped() -> None:
    seam = {"seam": EVIL, "came": 1, "went": 1, "waiting": 0, "lost": {}, "ok": True}
    disk: dict[str, Any] = {
        "level": "fine", "used_bytes": 1, "budget_bytes": 2, "full_seconds": None,
        "channels": [{"channel": EVIL, "records": 1, "limit": 2, "seconds": None}],
        "consumers": [{"channel": EVIL, "consumer": EVIL, "behind": 1, "seconds": None}],
        "sessions": [{"session": EVIL, "queued": 1, "seconds": None}],
    }  # fmt: skip
    part = {"state": "serves", "restarts": 0, "reason": EVIL}
    plain, sink = console()
    plain.print(_screen({"parts": {EVIL: part}, "disk": disk, "ledger": [seam]}, EVIL))
    assert harmless(sink.getvalue()), sink.getvalue()
    assert sink.getvalue().count("FORGED") == 8


@pytest.mark.parametrize("options", [{"json": True, "format": None}, {"json": False, "format": "%j"}])
def test_json_of_messages_has_no_direction_characters(options: Any) -> None:
    line = Printer(verbose=False, newline=True, live=False, **options).line
    assert harmless(line(Message("a", EVIL.encode())).decode())


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_name_in_a_line_of_the_log_forges_no_other(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("penstock")
    before = logger.handlers[:], logger.level, logger.propagate
    try:
        set_up_logging(format)
        logging.getLogger("penstock.node").warning("session %s ended", EVIL)
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
    told = capsys.readouterr().err
    assert harmless(told)
    assert told.count("\n") == 1


def test_a_traceback_in_the_log_keeps_its_lines() -> None:
    from penstock.shown import PlainFormatter

    try:
        raise ValueError(EVIL)
    except ValueError as exc:
        record = logging.LogRecord("penstock", logging.ERROR, "", 0, EVIL, (), (type(exc), exc, exc.__traceback__))
    told = PlainFormatter().format(record)
    assert not set(told) & ACTED_UPON
    assert told.count("\n") > 2
    assert "FORGED" in JsonLines().format(record)


def on_a_terminal(*words: object) -> str:
    outer, inner = pty.openpty()
    try:
        environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1"}
        command = [*PENSTOCK, *map(str, words)]
        subprocess.run(command, stdout=inner, stderr=inner, timeout=180, check=False, env=environment)
        return os.read(outer, 1 << 16).decode().replace("\r\n", "\n")
    finally:
        os.close(outer)
        os.close(inner)


def test_names_of_files_are_escaped_in_what_commands_say(tmp_path: Path) -> None:
    folder = tmp_path / EVIL
    folder.mkdir()
    assert harmless(on_a_terminal("init", folder / "penstock.toml"))
    assert harmless(on_a_terminal("check", folder / "penstock.toml"))
    assert harmless(on_a_terminal("cat", folder / "ticks", folder / "more"))  # as from cat *
    assert harmless(on_a_terminal("fold", "stat", folder / "fold"))


def test_a_configuration_has_its_lines_on_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text('data = "here"\n\n[mqtt]\nport = 0\n')
    assert "\n[mqtt]\nport = 0\n" in on_a_terminal("config", "--config", path)
