"""Short runs of the fuzz targets of the channel protocol, so that they do not rot."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FUZZ = Path(__file__).parents[2] / "fuzz"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FUZZ))
    spec = importlib.util.spec_from_file_location(name, FUZZ / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_no_mutated_frame_is_taken_for_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    load("channel_frames", monkeypatch).run(3_000, 7)


def test_no_mutated_conversation_breaks_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    load("channel_conversations", monkeypatch).run(1_500, 7)
