"""Promise: the command line shows channels as they are on disk and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from command import penstock
from typer.testing import CliRunner

from penstock.channels import FileChannelStore, channel_hash
from penstock.cli.channels import register
from penstock.errors import CorruptionError, OptionsError
from penstock.testing.channel_store_conformance import FULL
from penstock.testing.packed import lay_out, read_cases

VECTORS = Path(__file__).parents[2] / "vectors" / "narwhal-metadata"
APP = typer.Typer()
register(APP)


@APP.callback()
def _root() -> None:
    """Keep the sub-command a sub-command."""


def run(*args: str) -> Any:
    return CliRunner().invoke(APP, ["channels", *args])


def listing(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("case", read_cases(VECTORS / "server.jsonl"), ids=lambda case: str(case["name"]))
def test_ls_and_show_print_what_the_original_kept(case: dict[str, Any], tmp_path: Path) -> None:
    lay_out(case["files"], tmp_path)
    before = listing(tmp_path)
    result = run("ls", str(tmp_path), "--json")
    assert result.exit_code == 0
    expected = sorted((channel["metadata"] for channel in case["channels"]), key=lambda found: found["handler"])
    assert [json.loads(line) for line in result.stdout.splitlines()] == expected
    for metadata in expected:
        result = run("show", str(tmp_path), metadata["handler"], "--json")
        assert json.loads(result.stdout) == metadata
    assert listing(tmp_path) == before


def test_ls_goes_on_past_a_broken_channel_and_says_so(tmp_path: Path) -> None:
    store = FileChannelStore(str(tmp_path))
    store.save(FULL)
    for name in (channel_hash("broken"), channel_hash("moved")):
        (tmp_path / name).mkdir()
    (tmp_path / channel_hash("broken") / "metadata.bin").write_bytes(b"\xff")
    moved = (tmp_path / channel_hash("ops/east") / "metadata.bin").read_bytes()
    (tmp_path / channel_hash("moved") / "metadata.bin").write_bytes(moved)
    (tmp_path / ("a" * 64)).mkdir()  # stale: a reader sweeps nothing
    result = run("ls", str(tmp_path), "--json")
    assert result.exit_code == 1
    assert [json.loads(line)["handler"] for line in result.stdout.splitlines()] == ["ops/east"]
    assert "metadata.bin at byte" in result.stderr
    assert "is not that of 'ops/east'" in result.stderr
    assert (tmp_path / ("a" * 64)).exists()


def test_the_forms_for_people_name_the_same_things(tmp_path: Path) -> None:
    FileChannelStore(str(tmp_path)).save(FULL)
    assert "ops/east" in run("ls", str(tmp_path)).stdout
    shown = run("show", str(tmp_path), "ops/east").stdout
    for word in ("zoe@localhost", "max_clients=100", "example.com=*", "Fifo", "last_seq"):
        assert word in shown


def test_a_table_is_not_cut_where_there_is_no_terminal(tmp_path: Path) -> None:
    handler = "/".join(["a-rather-long-part-of-a-name"] * 5)
    FileChannelStore(str(tmp_path)).save(msgspec.structs.replace(FULL, handler=handler))
    (row,) = (line for line in penstock("channels", "ls", tmp_path).stdout.splitlines() if "a-rather" in line)
    assert row.split()[0] == handler


def test_a_wrong_place_or_name_is_wrong_use(tmp_path: Path) -> None:
    FileChannelStore(str(tmp_path)).save(FULL)
    for args in (("ls", str(tmp_path / "nowhere")), ("show", str(tmp_path), "no/such")):
        assert isinstance(run(*args).exception, OptionsError)
    (tmp_path / channel_hash("ops/east") / "metadata.bin").write_bytes(b"")
    assert isinstance(run("show", str(tmp_path), "ops/east").exception, CorruptionError)
    assert run("show", str(tmp_path)).exit_code == 2
