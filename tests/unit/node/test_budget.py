"""The disk budget: an alarm before, an order of sacrifice, refusal at the end; and when that will be."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import msgspec
import pytest

from penstock.errors import Refused
from penstock.lifecycle import Part, State
from penstock.log.messagelog import MessageLog
from penstock.mqtt import Client
from penstock.mqtt.server import MqttServer
from penstock.node import budget as budget_module
from penstock.node.budget import BudgetPart, Trend, level_of
from penstock.node.config import check_config
from penstock.node.ingest.server import IngestPart
from penstock.node.options import DiskOptions, NodeConfig
from penstock.testing.clock import FakeClock


def config_for(folder: Path, text: str) -> NodeConfig:
    (folder / "d" / "logs").mkdir(parents=True, exist_ok=True)
    found, mistakes = check_config(f'data = "{folder}/d"\n{text}', {})
    assert found is not None, mistakes
    return found


@pytest.mark.parametrize(
    ("used", "free", "level"),
    [(10, 10**6, "ok"), (80, 10**6, "alarm"), (90, 10**6, "sacrifice"), (100, 10**6, "full"), (10, 49, "full")],
)
def test_levels_go_by_the_budget_and_by_what_is_free(used: int, free: int, level: str) -> None:
    assert level_of(DiskOptions(budget_bytes=100, reserve_bytes=60), used, free)[0] == level


def test_a_trend_foretells_when_a_bound_is_reached() -> None:
    trend = Trend()
    for second in range(20):
        trend.note(second, 5.0 * second)
    assert trend.reaches(195.0) == pytest.approx(20, rel=0.01)
    for second in range(20, 60):
        trend.note(second, 95.0)
    assert trend.reaches(195.0) > 10_000
    trend.note(61, 50.0)
    assert trend.reaches(195.0) == math.inf


def test_channels_go_in_their_order_and_ingest_is_refused_at_the_end(tmp_path: Path) -> None:
    channels = "".join(
        f'[[channel]]\nname = "{name}"\nsegment_bytes = 20000\nsacrifice = {number}\n'
        for name, number in (("kept", 0), ("second", 1), ("first", 2))
    )
    config = config_for(tmp_path, channels)
    for channel in config.channel:
        with MessageLog.open(channel.path(config.data), segment_bytes=20_000) as log:
            log.append_many([bytes(1000)] * 200)

    async def run() -> None:
        ingest = IngestPart(config)
        now = config

        def part(name: str) -> Part | None:
            return ingest if name == "ingest" else None

        budget = BudgetPart(lambda: now, part, clock=FakeClock())
        await budget.look()
        assert (budget.level, ingest.refusal) == ("ok", "")
        whole = budget.used

        async def with_budget(size: int) -> None:
            nonlocal now
            now = config_for(tmp_path, f"[disk]\nbudget_bytes = {size}\n{channels}")
            await budget.look()

        await with_budget(int(whole / 0.85))
        assert (budget.level, budget.sacrificed) == ("alarm", 0)
        assert budget.health().state is State.NEW
        await with_budget(int(whole))
        sizes = {one.name: _records(one.path(config.data)) for one in config.channel}
        assert sizes["kept"] == sizes["second"] == 200
        assert sizes["first"] < 200
        await with_budget(int(whole * 0.55))
        sizes = {one.name: _records(one.path(config.data)) for one in config.channel}
        assert sizes["kept"] == 200
        assert sizes["second"] < 200
        await with_budget(100_000)
        assert budget.level == "full"
        assert "nothing more is taken" in ingest.refusal
        await with_budget(0)
        assert (budget.level, ingest.refusal) == ("ok", "")

    asyncio.run(run())


def test_many_segments_go_at_once_so_that_no_producer_fills_the_disk_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A walk through the data directory for each segment took longer than a producer needs to write the next one."""
    channel = '[[channel]]\nname = "readings"\nsegment_bytes = 20000\nsacrifice = 1\n'
    config = config_for(tmp_path, channel)
    (one,) = config.channel
    ingest, walks = IngestPart(config), 0

    def measured(data: str) -> tuple[int, int, float]:
        nonlocal walks
        walks += 1
        with MessageLog.open(one.path(data), segment_bytes=20_000) as log:  # who is as fast as the node looks
            log.append_many([bytes(1000)] * 20)
        return measure(data)

    measure = budget_module._measure
    monkeypatch.setattr(budget_module, "_measure", measured)
    with MessageLog.open(one.path(config.data), segment_bytes=20_000) as log:
        log.append_many([bytes(1000)] * 4000)
    budget = BudgetPart(lambda: config, lambda name: ingest if name == "ingest" else None, clock=FakeClock())
    asyncio.run(budget.look())
    assert (walks, budget.sacrificed) == (1, 0)
    config = config_for(tmp_path, f"[disk]\nbudget_bytes = {budget.used // 10}\nreserve_bytes = 0\n{channel}")
    with caplog.at_level("WARNING", logger="penstock.node"):
        asyncio.run(budget.look())
    assert walks == 3
    assert budget.level != "full"
    assert ingest.refusal == ""
    assert 180 < budget.sacrificed < 220
    told = [record.getMessage() for record in caplog.records if "given up" in record.getMessage()]
    assert told == [f"disk: the {budget.sacrificed} oldest segments of channel readings were given up"]


def test_no_more_is_given_up_because_others_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two walks what the disk has less free counts as used, whoever took it."""
    channel = '[[channel]]\nname = "readings"\nsegment_bytes = 20000\nsacrifice = 1\n'
    config = config_for(tmp_path, channel)
    with MessageLog.open(config.channel[0].path(config.data), segment_bytes=20_000) as log:
        log.append_many([bytes(1000)] * 4000)
    budget = BudgetPart(lambda: config, lambda _: None, clock=FakeClock())
    asyncio.run(budget.look())
    used = budget.used
    config = config_for(tmp_path, f"[disk]\nbudget_bytes = {int(used / 0.92)}\nreserve_bytes = 0\n{channel}")
    budget.level, budget._walk = "sacrifice", (used, budget.free, math.inf)
    monkeypatch.setattr(budget, "_guess", lambda _: (int(used * 1.05), budget.free))
    asyncio.run(budget.look(again=True))
    assert budget.used <= 0.9 * budget.budget
    assert 0 < budget.sacrificed < 10  # a fiftieth of it, and not a tenth


def test_time_to_loss_of_a_consumer_is_foretold(tmp_path: Path) -> None:
    config = config_for(tmp_path, '[[channel]]\nname = "readings"\nmax_messages = 1000\n')
    clock = FakeClock()

    async def run() -> None:
        budget = BudgetPart(lambda: config, lambda _: None, clock=clock)
        with MessageLog.open(config.channel[0].path(config.data), max_messages=1000) as log:
            log.append_many([b"x"] * 100)
            log._sidecar.write_cursor("billing", 50)
            for _ in range(5):
                await budget.look()
                log.append_many([b"x"] * 10)
                clock.pass_(1.0)
        (found,) = budget.consumers
        assert (found.channel, found.consumer, found.behind) == ("readings", "billing", 91)
        assert found.seconds == pytest.approx((50 - (141 - 1000)) / 10, rel=0.05)
        (room,) = budget.channels
        assert (room.channel, room.records, room.limit) == ("readings", 140, 1000)
        assert room.seconds == pytest.approx((1000 - 140) / 10, rel=0.05)
        assert msgspec.to_builtins(budget.describe())["channels"][0]["channel"] == "readings"

    asyncio.run(run())


def _records(path: str) -> int:
    with MessageLog.open(path) as log:
        return log.last_seq - log.first_seq + 1


def test_a_broker_refuses_what_it_would_have_to_keep_when_the_disk_budget_is_used_up(tmp_path: Path) -> None:
    async def run() -> None:
        server = MqttServer(port=0, data=str(tmp_path / "d" / "mqtt"))
        await server.start()
        now = config_for(tmp_path, "")
        budget = BudgetPart(lambda: now, lambda name: server if name == "mqtt" else None)
        try:
            async with Client(f"mqtt://{server.addresses['mqtt']}") as client:
                await budget.look()
                await client.publish("plant/7", b"fits", qos=1)
                now = config_for(tmp_path, "[disk]\nbudget_bytes = 1")
                await budget.look()
                assert server.health().state is State.DEGRADED
                with pytest.raises(Refused, match="QUOTA"):
                    await client.publish("plant/7", b"does not", qos=1)
                now = config_for(tmp_path, "")
                await budget.look()
                await client.publish("plant/7", b"fits again", qos=1)
        finally:
            await server.stop()

    asyncio.run(run())
