"""Promise: what has a life in the background, and is started and stopped, follows one lifecycle."""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.artifact import ExportPart
from penstock.channels.wire.remote import ModulatorServer
from penstock.errors import ClosedError
from penstock.lifecycle import Part, State
from penstock.log.messagelog import MessageLog
from penstock.mqtt import Bridge, BridgeRule, BridgeSpec, Broker, Feed, FeedSpec, Mirror, MirrorSpec, RemoteSpec
from penstock.mqtt.gate import TurnGate
from penstock.node.budget import BudgetPart
from penstock.node.folding import FoldPart
from penstock.node.ledger.part import LedgerPart
from penstock.node.options import FoldOptions, NodeConfig
from penstock.ship import ShipPart

STEPS = {name for name, _ in inspect.getmembers(Part, inspect.isfunction) if not name.startswith("_")}
OTHERS = {
    "Node", "Supervisor",  # they run parts
    "Attached", "KeptPart",  # the parts of one broker, which is a part
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


class Surprise(Exception):
    """What nobody expected."""


async def surprised(*_: Any, **__: Any) -> None:
    raise Surprise("nobody expected this")


def mirror(folder: Path) -> Part:
    return Mirror(MirrorSpec(place=str(folder / "buckets"), bucket="devices"), Broker(), str(folder / "mirrors"))


def bridge(folder: Path) -> Part:
    spec = BridgeSpec(name="hub", remote=RemoteSpec(url="mqtt://127.0.0.1:1"), receive=(BridgeRule(filter="a"),))
    return Bridge(spec, Broker(), str(folder / "bridges"))


def sending(folder: Path) -> Part:
    spec = BridgeSpec(name="hub", remote=RemoteSpec(url="mqtt://127.0.0.1:1"), send=(BridgeRule(filter="a"),))
    return Bridge(spec, Broker(gate=TurnGate(asyncio.get_running_loop())), str(folder / "bridges"))


def fold(folder: Path) -> Part:
    MessageLog.open(folder / "log", content="envelope/1").close()
    return FoldPart(FoldOptions(name="latest", log=str(folder / "log"), store=str(folder / "latest.snap")))


def ledger(folder: Path) -> Part:
    return LedgerPart(lambda: NodeConfig(data=str(folder)))


def budget(folder: Path) -> Part:
    return BudgetPart(lambda: NodeConfig(data=str(folder)), lambda _: None)


def ship(folder: Path) -> Part:
    return ShipPart(folder / "log", str(folder / "up"))


def feed(folder: Path) -> Part:
    return Feed(FeedSpec(log=str(folder / "log")), broker=Broker())


def export(folder: Path) -> Part:
    return ExportPart(lambda: None, str(folder / "up"), "routes")


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (ship, "penstock.ship.part.ShipPart._roll_here"),
        (export, "penstock.artifact.part.ExportPart._run"),
        (feed, "penstock.mqtt.feed.Feed.step"),
        (mirror, "penstock.mqtt.mirror.Mirror._bucket"),
        (mirror, "penstock.mqtt.mirror.Mirror._work"),
        (bridge, "penstock.mqtt.bridge.Bridge._receive"),
        (sending, "penstock.mqtt.feed.Feed.step"),
        (fold, "penstock.node.folding.Follow.run"),
        (ledger, "penstock.node.ledger.part.LedgerPart._run"),
        (budget, "penstock.node.budget.BudgetPart._run"),
    ],
)
async def test_a_part_whose_work_breaks_says_so(
    tmp_path: Path, make: Callable[[Path], Part], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, surprised)
    part = make(tmp_path)
    await part.start()
    async with asyncio.timeout(30):
        with pytest.raises(Surprise):
            await part.wait()
    health = part.health()
    assert (health.state, "nobody expected this" in health.reason) == (State.FAILED, True)
    await part.drain(1)
    await part.stop()
    await part.stop()
