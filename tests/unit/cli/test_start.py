"""Promise: a command loads what it works with and nothing else, so that the shell does not wait for the rest."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock import Writer

HEAVY = {"numpy", "pyarrow", "pandas", "pyspark", "deltalake", "rocksdict", "lmdb", "nats", "cramjam", "obstore"}
LIGHT = {"penstock", "penstock.errors", "penstock.shown", "penstock.types"}

LOADED = """
import json, sys
from penstock.cli.main import main
sys.argv[0] = "penstock"
try:
    main() if len(sys.argv) > 1 else None
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def loaded_by(*words: str) -> set[str]:
    """Return the modules a fresh process has after a command, or after importing the command line."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *words], capture_output=True, text=True, timeout=60, check=True
    )
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.fixture
def ticks(tmp_path: Path) -> str:
    path = tmp_path / "ticks"
    with Writer.open(path) as writer:
        writer.append(b"one")
    return str(path)


@pytest.mark.parametrize("words", ["", "--version", "--help", "fold --help", "pipeline ingest --help"])
def test_no_floor_is_loaded_before_a_command_runs(words: str) -> None:
    loaded = loaded_by(*words.split())
    assert not loaded & HEAVY
    ours = {name for name in loaded if name.split(".")[0] == "penstock"}
    assert {name for name in ours if not name.startswith("penstock.cli")} == LIGHT


@pytest.mark.parametrize("command", ["cat", "tail", "stat", "verify"])
def test_a_look_into_a_channel_needs_numpy_and_the_log_only(ticks: str, command: str) -> None:
    loaded = loaded_by(command, ticks)
    assert loaded & HEAVY == {"numpy"}
    floors = {name.split(".")[1] for name in loaded if name.startswith("penstock.")}
    assert not floors & {"store", "kv", "fold", "channels", "spark"}
    assert not loaded & {"penstock.log.messagelog", "penstock.log.filechannel"}


def test_an_embedded_bucket_needs_no_server_and_no_engine(tmp_path: Path) -> None:
    assert loaded_by("kv", "put", str(tmp_path), "b", "k", "v") & HEAVY == {"numpy"}


def test_importing_penstock_loads_a_name_when_it_is_asked_for() -> None:
    code = "import sys, penstock as p; print('numpy' in sys.modules, p.Batch is not None, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False True True\n"


def test_type_checkers_see_every_name_at_the_place_it_comes_from() -> None:
    assert penstock.__file__ is not None
    tree = ast.parse(Path(penstock.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {name.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert seen == penstock._HOMES  # type: ignore[attr-defined,unused-ignore]
    assert set(seen) == set(penstock.__all__) - {"__version__"}


def test_a_name_that_is_not_there_is_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Riter'"):
        penstock.Riter  # type: ignore[attr-defined]  # noqa: B018
    assert set(penstock.__all__) <= set(dir(penstock))
