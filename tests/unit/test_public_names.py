"""Promise: what a package lists is there, says what it is, and shows how it is used."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import typing
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
