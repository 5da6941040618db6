"""Promise: what has a life in the background, and is started and stopped, follows one lifecycle."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import penstock
from penstock.channels.wire.remote import ModulatorServer
from penstock.errors import ClosedError
from penstock.lifecycle import Part, State

STEPS = {name for name, _ in inspect.getmembers(Part, inspect.isfunction) if not name.startswith("_")}
OTHERS = {
    "Node", "Supervisor",  # they run parts
    "Attached",  # the parts of one broker, which is a part
    "Client",  # a connection of the caller's
}  # fmt: skip


def test_whatever_is_started_and_stopped_is_a_part() -> None:
    source, parts, wrong = Path(penstock.__file__).parent, set(), {}
    for path in source.rglob("*.py"):
        if {"testing", "cli"} & {*path.relative_to(source).parts}:  # child processes of tests and of the demo
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name not in OTHERS:
                methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
                if {"start", "stop"} <= methods:
                    parts.add(node.name)
                    wrong[node.name] = STEPS - methods
    assert {"MqttServer", "ChannelServer", "ShipPart", "ModulatorServer"} <= parts
    assert {name: missing for name, missing in wrong.items() if missing} == {}


async def test_a_modulator_server_is_a_part() -> None:
    class Door:
        def authenticate(self, token: str) -> str:
            return token

    server = ModulatorServer(Door(), "127.0.0.1:0", secret="s")
    assert isinstance(server, Part)
    with pytest.raises(ClosedError, match="is new"):
        await server.ready()
    await server.start()
    await server.ready()
    assert server.health().state is State.READY
    assert list(server.describe()["addresses"]) == ["s2m"]
    await server.drain(5)
    assert server.health().state is State.DRAINING
    await server.stop()
    await server.wait()
    await server.stop()
    assert server.health().state is State.STOPPED
