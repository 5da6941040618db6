"""Promise: with sync=always nothing acknowledged is lost when the power goes between any two operations of the disk.

The broker runs without sockets on a disk that forgets what no sync protected.  At a random operation the disk stops to
answer; what then would be acknowledged never leaves.  Power is cut, the broker opened again, and the books of all
clients are compared: lost, doubled, out of order, retained, wills.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from mqtt_kept import Fleet, KeptWorld

from penstock.disk.failpoint import arm
from penstock.mqtt import state_log


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_a_power_cut_at_any_operation_loses_and_doubles_nothing_acknowledged(seed: int, long_run: bool) -> None:
    fleet = Fleet(seed)
    world = KeptWorld(fleet)
    world.everyone()  # the subscriptions
    for _ in range(120 if long_run else 12):
        world.left = world.random.randrange(1, 60)
        for _ in range(6):
            world.some_load()
            if world.dead:
                break
        world.crash(keep=world.random.choice((0.0, 0.5, 1.0)))
    world.finish()
    assert sum(len(publisher.acked) for publisher in fleet.publishers) > 100
    world.kept.close()


STEPS = (
    "mqtt.turn.before", "mqtt.turn.after", "mqtt.sync.before", "mqtt.sync.between", "mqtt.sync.after",
    "mqtt.segment.created", "mqtt.segment.headed", "mqtt.segment.remove",
    "mqtt.checkpoint.synced", "mqtt.checkpoint.applied", "mqtt.checkpoint.settled",
    "mqtt.renew.copied", "mqtt.renew.headed",
)  # fmt: skip


def test_the_steps_are_all_there_are() -> None:
    source = Path(state_log.__file__).parent
    found = {
        name for path in source.glob("state*.py") for name in re.findall(r'fail_point\("([a-z.]+)"\)', path.read_text())
    }
    assert found == set(STEPS)


@pytest.mark.parametrize("step", STEPS)
def test_the_power_goes_at_every_step_between_two_operations(step: str) -> None:
    fleet = Fleet(7)
    world = KeptWorld(fleet)
    world.everyone()
    hits = 0
    for turn in range(4):
        after = [1 + 2 * turn]

        def off(after: list[int] = after) -> None:
            nonlocal hits
            after[0] -= 1
            if after[0] <= 0:
                hits, world.dead = hits + 1, True

        if step.startswith("mqtt.renew"):
            world.disk.fail("sync", OSError(5, "Input/output error"), path="turns")
        with arm(step, off):
            until = time.monotonic() + (30 if not turn else 0.5)
            while not world.dead and time.monotonic() < until:
                world.some_load()
                world.clock.pass_(10)  # segments are looked for every few seconds
                world.loop.run(later=step.startswith("mqtt.renew"))
        world.crash(keep=(0.0, 1.0, 0.5, 0.3)[turn])
    assert hits, f"{step} was never come to"
    world.finish()
    world.kept.close()
