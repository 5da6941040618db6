"""Parts are started in order of need, started again with back-off, and never silently dead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import OptionsError
from penstock.lifecycle import Health, State
from penstock.node.supervisor import FIRST_SECONDS, LAST_SECONDS, Spec, Supervisor, in_order
from penstock.testing.clock import FakeClock


class Room:
    """What happened to the parts, and a sleep that a test wakes."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.parts: dict[str, list[Fake]] = {}
        self.slept: list[float] = []
        self.wake = asyncio.Event()
        self.clock = FakeClock()
        self.refuse: dict[str, int] = {}

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self.wake.wait()

    def make(self, name: str) -> Callable[[], Fake]:
        return lambda: Fake(self, name)

    def last(self, name: str) -> Fake:
        return self.parts[name][-1]


class Fake:
    def __init__(self, room: Room, name: str) -> None:
        self.name, self.room = name, room
        room.parts.setdefault(name, []).append(self)
        self.state = State.NEW
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        if self.room.refuse.get(self.name, 0):
            self.room.refuse[self.name] -= 1
            raise OSError(98, "Address already in use")
        self.room.events.append(f"start {self.name}")
        self.state = State.READY

    async def ready(self) -> None:
        pass

    async def drain(self, seconds: float) -> None:
        self.room.events.append(f"drain {self.name}")

    async def stop(self) -> None:
        self.room.events.append(f"stop {self.name}")
        self.state = State.STOPPED

    async def wait(self) -> None:
        await asyncio.shield(self.failure)

    def health(self) -> Health:
        return Health(self.state)

    def describe(self) -> dict[str, Any]:
        return {"tries": len(self.room.parts[self.name])}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


def supervisor(room: Room, *specs: Spec) -> Supervisor:
    return Supervisor(specs, clock=room.clock, sleep=room.sleep)


async def test_parts_start_after_what_they_need_and_stop_before_it() -> None:
    room = Room()
    runs = supervisor(room, Spec("tap", room.make("tap"), ("mqtt",)), Spec("mqtt", room.make("mqtt")))
    await runs.start()
    assert room.events == ["start mqtt", "start tap"]
    await runs.stop(1.0)
    assert room.events[-2:] == ["stop tap", "stop mqtt"]


async def test_a_part_that_cannot_start_is_tried_again_and_the_rest_serves() -> None:
    room = Room()
    room.refuse = {"mqtt": 1}
    runs = supervisor(room, Spec("mqtt", room.make("mqtt")), Spec("http", room.make("http")))
    await runs.start()
    assert "Address already in use" in runs.failures["mqtt"]
    assert runs.health()["mqtt"].state is State.FAILED
    assert runs.health()["http"].state is State.READY
    room.wake.set()
    await until(lambda: "mqtt" not in runs.failures)
    assert runs.describe()["mqtt"] == {"state": "ready", "reason": "", "restarts": 1, "tries": 2}
    await runs.stop(1.0)


async def test_a_part_that_fails_is_stopped_and_started_again() -> None:
    room = Room()
    runs = supervisor(room, Spec("mqtt", room.make("mqtt")))
    await runs.start()
    room.wake.set()
    room.last("mqtt").failure.set_exception(OSError(28, "No space left on device"))
    await until(lambda: room.events.count("start mqtt") == 2)
    assert room.events[:3] == ["start mqtt", "stop mqtt", "start mqtt"]
    await runs.stop(1.0)


async def test_a_part_that_ends_without_a_word_counts_as_failed() -> None:
    room = Room()
    runs = supervisor(room, Spec("tap", room.make("tap")))
    await runs.start()
    room.last("tap").failure.set_result(None)
    await until(lambda: "tap" in runs.failures)
    assert runs.failures["tap"] == "it stopped by itself"
    await runs.stop(1.0)


async def test_delays_double_up_to_a_bound_and_begin_again_after_a_good_minute() -> None:
    room = Room()
    room.refuse = {"mqtt": 9}
    room.wake.set()
    runs = supervisor(room, Spec("mqtt", room.make("mqtt")))
    await runs.start()
    await until(lambda: "mqtt" not in runs.failures)
    assert room.slept[0] == FIRST_SECONDS
    assert room.slept == sorted(room.slept)
    assert room.slept[-1] == LAST_SECONDS
    room.clock.pass_(3600)
    room.last("mqtt").failure.set_result(None)
    await until(lambda: len(room.slept) == 10)
    assert room.slept[-1] == FIRST_SECONDS
    await runs.stop(1.0)


async def test_who_needs_a_part_that_is_away_waits_for_it() -> None:
    room = Room()
    runs = supervisor(room, Spec("mqtt", room.make("mqtt")), Spec("tap", room.make("tap"), ("mqtt",)))
    await runs.start()
    room.last("mqtt").failure.set_result(None)
    await until(lambda: "tap" in runs.failures)
    assert runs.failures["tap"] == "mqtt, which it needs, is away"
    room.wake.set()
    await until(lambda: not runs.failures)
    assert room.events[-2:] == ["start mqtt", "start tap"]
    await runs.stop(1.0)


async def test_who_needs_a_part_that_cannot_start_holds_nobody_up() -> None:
    room = Room()
    room.refuse = {"mqtt": 1}
    runs = supervisor(
        room,
        Spec("mqtt", room.make("mqtt")),
        Spec("meeting", room.make("meeting"), ("mqtt",)),
        Spec("http", room.make("http")),
    )
    async with asyncio.timeout(20):
        await runs.start()
    assert runs.health()["http"].state is State.READY
    assert runs.health()["meeting"] == Health(State.STARTING, "mqtt, which it needs, does not serve")
    assert set(runs.failures) == {"mqtt", "meeting"}
    assert set(runs.failed) == {"mqtt"}
    room.wake.set()
    await until(lambda: not runs.failures)
    assert runs.health()["meeting"].state is State.READY
    await runs.stop(1.0)


async def test_who_waits_for_a_part_that_a_reload_mends_is_started() -> None:
    room = Room()
    room.refuse = {"fold": 1}
    specs = [Spec("fold", room.make("fold")), Spec("export", room.make("export"), ("fold",))]
    runs = supervisor(room, *specs)
    async with asyncio.timeout(20):
        await runs.start()
        assert set(runs.failures) == {"fold", "export"}
        await runs.change(specs, {"fold"}, 1.0)
    await until(lambda: not runs.failures)
    assert room.events[-2:] == ["start fold", "start export"]
    await runs.stop(1.0)


def test_parts_that_need_each_other_are_refused() -> None:
    def nothing() -> Any:
        return None

    with pytest.raises(OptionsError, match="a → b → a"):
        in_order([Spec("a", nothing, ("b",)), Spec("b", nothing, ("a",))])
    with pytest.raises(OptionsError, match="needs x, which is not there"):
        in_order([Spec("a", nothing, ("x",))])
    with pytest.raises(OptionsError, match="two parts are called a"):
        in_order([Spec("a", nothing), Spec("a", nothing)])


def test_a_part_that_serves_as_well_as_it_can_holds_nobody_up() -> None:
    async def run() -> None:
        room = Room()

        class Waiting(Fake):
            async def start(self) -> None:
                await super().start()
                self.state = State.DEGRADED

            async def ready(self) -> None:
                await asyncio.Event().wait()  # for a log that nobody has written yet

        runs = supervisor(room, Spec("ship", lambda: Waiting(room, "ship")), Spec("http", room.make("http")))
        async with asyncio.timeout(20):
            await runs.start()
        assert room.events == ["start ship", "start http"]
        assert runs.failures == {}
        await runs.stop(1)

    asyncio.run(run())
