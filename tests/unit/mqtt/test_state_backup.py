"""Promise: a backup of a running broker is what it held at one turn; a copy that differs is refused."""

from __future__ import annotations

import asyncio

import pytest
from mqtt_kept import Fleet, KeptWorld
from mqtt_use import ManualLoop

from penstock.errors import CorruptionError, NotFoundError, OptionsError
from penstock.mqtt.state_backup import Backup, back_up, put_back, verify
from penstock.mqtt.state_open import KeptBroker


def make(world: KeptWorld, folder: str) -> Backup:
    async def both() -> Backup:
        task = asyncio.ensure_future(back_up(world.kept, folder, world.disk))
        while not task.done():
            world.loop.run()
            await asyncio.sleep(0.001)
        return await task

    return asyncio.run(both())


@pytest.mark.parametrize("seed", range(3))
def test_a_backup_in_the_middle_of_load_is_what_the_broker_held(seed: int) -> None:
    fleet = Fleet(seed)
    world = KeptWorld(fleet)
    world.everyone()
    for turn in range(6):
        for _ in range(3):
            world.some_load()
        made = make(world, f"backup-{turn}")
        assert made.sessions == len(fleet.peers) - (fleet.mourner.lives == 0)
        verify(f"backup-{turn}", world.disk)
        put_back(f"backup-{turn}", f"copy-{turn}", world.disk)
    world.finish()
    world.kept.close()


def test_what_is_no_backup_or_damaged_or_in_the_way_is_refused() -> None:
    world = KeptWorld(Fleet(0))
    world.everyone()
    for retainer in world.fleet.retainers:
        retainer.publish(3)
    world.run()
    make(world, "backup")
    with pytest.raises(OptionsError, match="not empty"):
        make(world, "backup")
    with pytest.raises(NotFoundError, match="no backup"):
        put_back("data/journal", "copy", world.disk)
    put_back("backup", "copy", world.disk)
    with pytest.raises(OptionsError, match="already"):
        put_back("backup", "copy", world.disk)
    segment = next(name for name in world.disk.list("backup/journal") if name.endswith(".turns"))
    with world.disk.modify(f"backup/journal/{segment}") as file:
        at = file.read_at(0, 1 << 20).rindex(b"kept/r5")
        file.write_at(at, b"kept/r6")
    with pytest.raises(CorruptionError):
        put_back("backup", "other", world.disk)
    world.kept.close()


def test_what_was_put_back_in_part_is_not_opened_and_can_be_put_back_again() -> None:
    world = KeptWorld(Fleet(0))
    world.everyone()
    world.some_load()
    make(world, "backup")
    for after in range(1, 100):  # the first file is the mark
        copy = f"copy-{after}"
        world.disk.fail("create", KeyboardInterrupt(), path=copy + "/", after=after)
        try:
            put_back("backup", copy, world.disk)
        except KeyboardInterrupt:
            with pytest.raises(OptionsError, match="put it back again"):
                KeptBroker(copy, loop=ManualLoop(), disk=world.disk)
            put_back("backup", copy, world.disk)
        else:
            break
        kept = KeptBroker(copy, loop=ManualLoop(), disk=world.disk)
        assert kept.problems == []
        kept.close()
    assert after > 2
    world.kept.close()
