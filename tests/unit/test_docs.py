"""The docs are current with the code: links lead somewhere, promises name tests that exist, commands exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
NAMED_TEST = re.compile(r"`(tests/[\w/.-]+\.py)(?:::([\w:]+)(?:\[[^`\n]*\])?)?`")


@functools.cache
def names_in(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page}: {target}"


def test_every_page_is_reached_by_a_link() -> None:
    targets = {(page.parent / target).resolve() for page in PAGES for target in LINK.findall(page.read_text())}
    alone = [str(page) for page in PAGES if page not in targets and page.parent not in targets]
    assert alone == [str(ROOT / "README.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_tests_exist(page: Path) -> None:
    suites = [names_in(path) for path in (ROOT / "src/penstock/testing").glob("*.py")]
    inherited = set().union(*suites)
    for file, name in NAMED_TEST.findall(page.read_text()):
        assert (ROOT / file).exists(), f"{page}: {file}"
        if name:
            *classes, last = name.split("::")
            known = names_in(ROOT / file)
            assert {*classes} <= known, f"{page}: {file}::{name}"
            assert last in (known | inherited if classes else known), f"{page}: {file}::{name}"


def test_a_named_test_is_named_by_its_whole_path() -> None:
    """What does not begin with tests/ is not looked at by the test above."""
    for page in PAGES:
        for named in re.findall(r"`([^`\n]*test_\w+\.py[^`\n]*)`", page.read_text()):
            assert NAMED_TEST.fullmatch(f"`{named}`"), f"{page}: {named}"


def test_every_part_with_promises_is_listed() -> None:
    index = (ROOT / "docs/promises.md").read_text()
    for page in (ROOT / "docs/promises").glob("*.md"):
        assert f"promises/{page.name}" in index


def test_python_in_the_docs_is_python() -> None:
    for page in PAGES:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            ast.parse(block)


def test_pages_open_files_of_their_own() -> None:
    """Who tries one page after another in one folder meets nothing of another page."""
    opened = re.compile(r"""\b(?:open|share|attach|Connection|connect|open_log)\(\s*"([\w./-]+)\"""")
    homes: dict[str, set[str]] = {}
    for page in [ROOT / "README.md", *(ROOT / "docs/howto").glob("*.md")]:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            for name in opened.findall(block):
                homes.setdefault(name, set()).add(page.name)
    assert len(homes) > 15
    assert {name: pages for name, pages in homes.items() if len(pages) > 1} == {}


def test_every_decision_is_in_the_index() -> None:
    index = (ROOT / "docs/decisions/README.md").read_text()
    pages = {page.name for page in (ROOT / "docs/decisions").glob("[0-9]*.md")}
    assert {name for name in pages if f"({name})" not in index} == set()
    numbers = [name[:3] for name in pages]
    assert sorted(numbers) == sorted(set(numbers)), "two decisions have one number"


def test_promises_are_numbered_and_each_names_a_test() -> None:
    numbers: list[str] = []
    for page in sorted((ROOT / "docs/promises").glob("*.md")):
        for table in re.findall(r"^\| number \|.*\n\|[-| ]+\n((?:\|.*\n)+)", page.read_text() + "\n", re.MULTILINE):
            for row in table.splitlines():
                number = row.split("|")[1].strip()
                assert re.fullmatch(r"[A-Z][0-9]+", number), f"{page.name}: {row[:80]}"
                assert NAMED_TEST.search(row), f"{page.name}: {number} names no test"
                numbers.append(number)
    assert len(numbers) == len(set(numbers)) > 300
