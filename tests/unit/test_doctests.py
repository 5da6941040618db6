"""Promise: every example in a docstring runs and says what happens."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from importlib.machinery import EXTENSION_SUFFIXES

import pytest

import penstock


def modules() -> list[str]:
    """Return every module that is written in Python; compiled ones keep their examples in their callers."""
    return [
        module.name
        for module in pkgutil.walk_packages(penstock.__path__, "penstock.")
        if not str(getattr(module.module_finder.find_spec(module.name, None), "origin", "")).endswith(  # type: ignore[call-arg]
            tuple(EXTENSION_SUFFIXES)
        )
    ]


def test_the_modules_are_found() -> None:
    assert {"penstock.errors", "penstock.log.xchannel.writer", "penstock.testing.faulty"} <= set(modules())


@pytest.mark.parametrize("name", ["penstock", *modules()])
def test_the_examples_of_a_module_run(name: str) -> None:
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL)
    assert failed == 0
