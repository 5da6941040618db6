"""The docs are current with the code: links lead somewhere, promises name tests that exist, commands exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
NAMED_TEST = re.compile(r"`(tests/[\w/.-]+\.py)(?:::([\w:]+))?`")


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_tests_exist(page: Path) -> None:
    suites = [names_in(path) for path in (ROOT / "src/penstock/testing").glob("*.py")]
    inherited = set().union(*suites)
    for file, name in NAMED_TEST.findall(page.read_text()):
        assert (ROOT / file).exists(), f"{page}: {file}"
        if name:
            last = name.split("::")[-1]
            assert last in names_in(ROOT / file) | inherited, f"{page}: {file}::{name}"


def test_every_part_with_promises_is_listed() -> None:
    index = (ROOT / "docs/promises.md").read_text()
    for page in (ROOT / "docs/promises").glob("*.md"):
        assert f"promises/{page.name}" in index


def test_python_in_the_docs_is_python() -> None:
    for page in PAGES:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            ast.parse(block)
