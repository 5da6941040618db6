"""A tap and the state of its broker: which QoS 2 messages were taken stands in both, and a kill may come in between."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest
from mqtt_state_use import Kept
from mqtt_use import Device

from penstock.log import open_log
from penstock.log.envelope import decode_envelope
from penstock.mqtt import packets as p
from penstock.mqtt.link import Link
from penstock.mqtt.metered import MeteredLink
from penstock.mqtt.packets import Kind
from penstock.mqtt.tap import Tap, TapSpec
from penstock.mqtt.tapped import _note_of


def attached(kept: Kept, path: str) -> Tap:
    tap = Tap(TapSpec(filter="#", path=path, on_failure="refuse"), kept.broker)
    tap.attach()
    return tap


def payloads(path: str) -> list[bytes]:
    with open_log(path) as log:
        return [decode_envelope(payload).payload for payload in log.read(log.first_position).to_payloads()]


def no_room(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_refused_message_is_a_new_one_when_it_comes_again_after_a_kill(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    kept = Kept()
    tap = attached(kept, path)
    pub = kept.device("pub", version=4)
    tap._open = no_room  # type: ignore[method-assign]
    pub.publish("a", b"1", 2, 7)
    kept.kept.gate.end_turn()  # the turn is written; the process dies before the next one
    tap._close_logs()
    kept.kill()
    tap = attached(kept, path)
    pub = kept.device("pub", version=4)
    pub.publish("a", b"1", 2, 7, dup=True)
    kept.settle()
    assert pub.read() == [p.Ack(Kind.PUBREC, 7)]
    assert payloads(path) == [b"1"]
    tap._detach()
    tap._close_logs()
    kept.kept.close()


def test_what_a_power_cut_took_from_a_log_stays_forgotten_after_a_kill(tmp_path: Path) -> None:
    path = f"{tmp_path}/log"
    kept = Kept()
    tap = attached(kept, path)
    pub = kept.device("pub")
    for number in (3, 4, 9):
        pub.publish("a", b"%d" % number, 2, number)
    kept.settle()
    assert kept.broker.sessions["pub"].received == {3, 4, 9}
    tap._close_logs()
    kept.kill()
    note = _note_of(path)
    note.write(bytes(16), 1 << 40, sync=False)  # of another boot: the log was longer then
    note.close()
    tap = attached(kept, path)
    tap._close_logs()
    kept.settle()
    kept.kill()
    assert kept.broker.sessions["pub"].received == set()
    kept.kept.close()


@pytest.mark.parametrize("version", [4, 5])
def test_a_message_whose_sync_failed_is_in_the_log_once_when_it_comes_again(tmp_path: Path, version: int) -> None:
    path = f"{tmp_path}/log"
    kept = Kept()
    tap = Tap(TapSpec(filter="#", path=path, sync="always"), kept.broker)
    tap._loop = cast("asyncio.AbstractEventLoop", kept.loop)
    tap.attach()
    pub = kept.device("pub", version=version)
    log = tap._logs[path]
    sync = log.sync
    log.sync = no_room  # type: ignore[method-assign]
    for number in (1, 2):
        pub.publish("a", b"%d" % number, 2, number)
    for _ in range(2):  # twice
        answers = answered(kept, tap, pub)
        assert answers == ([p.Ack(Kind.PUBREC, number, 0x97) for number in (1, 2)] if version == 5 else [])
        assert kept.broker.sessions["pub"].received == set()
        pub = kept.device("pub", version=version)
        for number in (1, 2):
            pub.publish("a", b"%d" % number, 2, number, dup=True)
    answered(kept, tap, pub)
    log.sync = sync  # type: ignore[method-assign]
    pub = kept.device("pub", version=version)
    for number in (1, 2):
        pub.publish("a", b"%d" % number, 2, number, dup=True)
    assert answered(kept, tap, pub) == [p.Ack(Kind.PUBREC, number) for number in (1, 2)]
    assert payloads(path) == [b"1", b"2"]
    tap._detach()
    tap._close_logs()
    kept.kept.close()


def answered(kept: Kept, tap: Tap, device: Device) -> list[p.Packet]:
    """Return what a device got when its tap has nothing to sync any more."""
    kept.settle()
    until = time.monotonic() + 20
    while tap._syncing or tap._unsynced:
        assert time.monotonic() < until
        time.sleep(0.0005)
        kept.loop.run()
    kept.settle()
    return device.read()


def test_what_a_log_never_takes_is_counted_by_few_reasons(tmp_path: Path) -> None:
    """Each reason is a series of metrics: a size in it would be one for each size that a client thinks of."""
    kept = Kept()
    tap = attached(kept, f"{tmp_path}/log")
    pub = kept.device("pub")
    for more in range(3):
        pub.publish("a", bytes((5 << 20) + more))
    kept.settle()
    assert list(tap.lost.values()) == [3]
    tap._detach()
    tap._close_logs()
    kept.kept.close()


@pytest.mark.parametrize("kind", [Link, MeteredLink])
def test_who_is_held_is_read_again_when_every_tap_that_holds_it_can_be_written_or_is_gone(
    tmp_path: Path, kind: type[Link]
) -> None:
    kept = Kept()
    taps = [Tap(TapSpec(filter="#", path=f"{tmp_path}/{name}"), kept.broker) for name in ("one", "two")]
    for tap in taps:
        tap.attach()
        tap._open = no_room  # type: ignore[method-assign]
    device = Device(kept.broker)
    device.link = kind(kept.broker)
    device.link.opened(device.wire)
    device.send(p.Connect("pub", 5))
    kept.settle()
    device.read()
    device.publish("a", b"1", 1, packet_id=1)
    kept.settle()
    assert (device.read(), device.wire.reading) == ([], False)
    asyncio.run(taps[0].stop())
    kept.settle()
    assert (device.read(), device.wire.reading) == ([], False)  # the other one waits still
    asyncio.run(taps[1].stop())
    kept.settle()
    assert (device.read(), device.wire.reading) == ([p.Ack(Kind.PUBACK, 1, 0x97)], True)
    assert device.wire.deadline == 90
    kept.kept.close()
