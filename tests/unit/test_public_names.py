"""Promise: what a package lists is there, says what it is, and shows how it is used."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import typing
from pathlib import Path
from typing import Any

import pytest

import penstock


def packages() -> list[str]:
    found = [module.name for module in pkgutil.walk_packages(penstock.__path__, "penstock.") if module.ispkg]
    return ["penstock", *found, "penstock.errors", "penstock.types", "penstock.batch", "penstock.metrics"]


def public() -> list[tuple[str, str]]:
    return [
        (package, name)
        for package in packages()
        if not package.startswith("penstock.kernel")  # compiled: its stubs and twins speak for it
        for name in getattr(importlib.import_module(package), "__all__", ())
    ]


def has_example(thing: Any) -> bool:
    return any(test.examples for test in doctest.DocTestFinder(recurse=True).find(thing))


def test_there_are_public_names() -> None:
    assert ("penstock.log.xchannel", "Writer") in public()


@pytest.mark.parametrize("package", packages())
def test_every_listed_name_exists(package: str) -> None:
    module = importlib.import_module(package)
    names = getattr(module, "__all__", ())
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(module, name)] == []


@pytest.mark.parametrize(("package", "name"), public(), ids=lambda value: value)
def test_a_public_name_has_a_docstring_and_an_example(package: str, name: str) -> None:
    thing = getattr(importlib.import_module(package), name)
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        return  # a constant or an alias is documented where it is written
    assert inspect.getdoc(thing), f"{package}.{name} has no docstring"
    if typing.is_protocol(thing) if hasattr(typing, "is_protocol") else getattr(thing, "_is_protocol", False):
        return  # nothing can be made of a protocol: its implementations show it
    assert has_example(thing), f"{package}.{name} has no example"


def test_the_package_exports_what_the_readme_names() -> None:
    """Promise: what the README tells a newcomer to use is one import away."""
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    table = readme.split("## What is in it")[1].split("##")[0]
    named = {
        name for row in table.splitlines() if row.count("|") > 3 for name in re.findall(r"`(\w+)`", row.split("|")[2])
    }
    assert "FileChannel" in named
    assert named - {*penstock.__all__} == set()


def test_a_class_name_means_one_thing_in_the_whole_package() -> None:
    """Promise: one name, one idea; each server's client is met with the name of its package before it."""
    homes: dict[str, list[str]] = {}
    source = Path(penstock.__file__).parent
    for path in sorted(source.rglob("*.py")):
        if "twin" in path.parts:  # the same classes as in the kernel, on purpose
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(source)))
    assert len(homes) > 500
    assert {name: where for name, where in homes.items() if len(where) > 1} == {
        "Client": ["channels/wire/client.py", "mqtt/client.py"]
    }


def test_the_name_of_a_type_or_of_an_interval_means_one_thing_in_the_whole_package() -> None:
    """Promise: one name, one idea, also for what is not a class: Literals and unions, and how often someone looks."""
    homes: dict[str, list[str]] = {}
    source = Path(penstock.__file__).parent
    for path in sorted(source.rglob("*.py")):
        place = path.relative_to(source)
        if "twin" in place.parts or place.parts[0] == "cli":  # commands call their arguments by what they are there
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if isinstance(target, ast.Name) and re.fullmatch(r"[A-Z][A-Za-z]*[a-z]\w*|LOOK_SECONDS", target.id):
                    homes.setdefault(target.id, []).append(str(place))
    assert len(homes) > 50
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
