"""Which test holds which normative statement: ``@statement("3.1.0-1")`` above a test, and the table made of them.

``python tests/support/mqtt_statements.py`` writes docs/mqtt-statements.md.  Numbers are those of the OASIS standards;
one that only MQTT 3.1.1 has, or has under another number, is given in ``v3``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["statement", "found", "table", "PAGE"]

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/unit/mqtt", "tests/unit/net")
PAGE = ROOT / "docs" / "mqtt-statements.md"
F = TypeVar("F", bound=Callable[..., Any])


def statement(*numbers: str, v3: tuple[str, ...] | str = ()) -> Callable[[F], F]:
    """Name the statements a test holds."""
    for number in (*numbers, *((v3,) if isinstance(v3, str) else v3)):
        assert re.fullmatch(r"\d+\.\d+\.\d+-\d+", number), number
    return lambda test: test


def found() -> dict[tuple[str, str], list[str]]:
    """Return (version, number) → tests, read out of the source."""
    tests: dict[tuple[str, str], list[str]] = {}
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "statement":
                    name = f"{path.relative_to(ROOT)}::{node.name}"
                    for argument in call.args:
                        tests.setdefault(("5.0", ast.literal_eval(argument)), []).append(name)
                    for keyword in call.keywords:
                        value = ast.literal_eval(keyword.value)
                        for number in (value,) if isinstance(value, str) else value:
                            tests.setdefault(("3.1.1", number), []).append(name)
    return tests


def _order(key: tuple[str, str]) -> tuple[str, list[int]]:
    return key[0], [int(part) for part in re.split(r"[.-]", key[1])]


def table() -> str:
    """Return the page."""
    lines = [
        "# Normative statements and their tests",
        "",
        "Numbers as in the OASIS standards of MQTT 5.0 and 3.1.1 (`MQTT-` left out). Made by",
        "`python tests/support/mqtt_statements.py`; `tests/unit/mqtt/test_statements.py` fails when it is out of date.",
        "Statements that bind only a client are not listed, nor 3.3.4-5 of MQTT 5.0, which is the other choice to",
        "3.3.4-2 to 3.3.4-4.",
        "",
    ]
    tests = found()
    for version in ("5.0", "3.1.1"):
        keys = sorted((key for key in tests if key[0] == version), key=_order)
        lines += [f"## MQTT {version}: {len(keys)} statements", "", "| statement | test |", "|---|---|"]
        lines += [f"| {key[1]} | {'<br>'.join(f'`{name}`' for name in tests[key])} |" for key in keys]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(table())
