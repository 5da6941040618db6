"""Promise: a command that a page names exists, and has the options it is shown with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from penstock.cli.main import app

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
A_LINE = re.compile(r"^(?:\$ )?penstock ([^#\n]*)", re.MULTILINE)
INDENTED = re.compile(r"^    penstock ([^#\n]*)", re.MULTILINE)
IN_TEXT = re.compile(r"`penstock ([a-z-][^`]*)`")
PENSTOCK: Any = get_command(app)
OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


def command_of(words: list[str]) -> Any:
    """Return the command that the words begin with, or None."""
    found = PENSTOCK
    for word in words:
        if not hasattr(found, "commands"):
            return found
        if word.startswith("-"):
            return found
        found = found.commands.get(word.strip(",."))
        if found is None:
            return None
    return found


def shown_in(page: Path) -> list[str]:
    text = page.read_text()
    blocks = "".join(block for language, block in FENCED.findall(text) if language in {"", "sh"})
    rest = FENCED.sub("", text)
    return [*A_LINE.findall(blocks), *INDENTED.findall(rest), *IN_TEXT.findall(rest)]


def test_commands_are_found_in_pages() -> None:
    for page, count in (("README.md", 6), ("docs/howto/spark.md", 20), ("docs/howto/buckets.md", 5)):
        assert len(shown_in(ROOT / page)) >= count


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_command_that_a_page_names_exists(page: Path) -> None:
    for shown in shown_in(page):
        command = command_of(shown.split())
        assert command is not None, f"penstock {shown}"
        known = {"--help", *(name for parameter in command.params for name in parameter.opts)}
        assert set(OPTION.findall(shown)) <= known, f"penstock {shown}"


def commands_below(command: Any, words: tuple[str, ...] = ("penstock",)) -> Iterator[tuple[str, Any]]:
    """Yield every command with its whole name, groups too."""
    yield " ".join(words), command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands_below(inner, (*words, name))


@pytest.mark.parametrize(("name", "command"), list(commands_below(PENSTOCK)), ids=lambda value: str(value)[:40])
def test_the_help_of_a_command_has_an_example_that_could_be_run(name: str, command: Any) -> None:
    found = re.search(r"Examples?: ([^;\n]*)", f"{command.help or ''}\n{command.epilog or ''}")
    assert found is not None, f"{name} --help shows no example"
    assert name in found[1]
    shown = found[1][found[1].index("penstock ") :].removeprefix("penstock ").split("|")[0].split("&&")[0]
    meant = command_of(shown.split())
    known = {"--help", *(option for parameter in meant.params for option in parameter.opts)}
    assert set(OPTION.findall(re.sub("'[^']*'", "", shown))) <= known, shown


@pytest.mark.parametrize(("name", "command"), list(commands_below(PENSTOCK)), ids=lambda value: str(value)[:40])
def test_every_word_of_a_command_is_explained_and_shown_in_one_form(name: str, command: Any) -> None:
    assert "Example" not in (command.help or ""), f"{name} --help shows its example twice, or before its options"
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{name} --help does not say what {parameter.name} is"
        if parameter.param_type_name == "argument":
            assert re.fullmatch(r"[^a-z\[\]{}]+", parameter.metavar or parameter.name), f"{name} {parameter.name}"
