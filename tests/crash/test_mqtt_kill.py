"""Promise: a broker that is killed with -9 at any moment loses and doubles nothing that it acknowledged.

Real processes and sockets: publishers and subscribers of both versions and every QoS, sessions that are left and taken
up, a shared group, retained messages, wills.  Clients lose their connections as well.  Some rounds end at a random
moment, the others at a step between two operations of the disk (fail points).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from command import PENSTOCK
from mqtt_kept import Fleet, SocketDevice

CONFIG = """
[persistence]
segment_bytes = 262144
[broker]
sys_seconds = 0.05
"""
STEPS = (
    "turn.before", "turn.after", "sync.after", "segment.created", "checkpoint.applied", "checkpoint.settled",
    "sync.before", "sync.between", "segment.headed", "segment.remove", "checkpoint.synced",
)  # fmt: skip


class Killed:
    """A broker that is started and killed again and again."""

    def __init__(self, folder: Path, fleet: Fleet) -> None:
        self.fleet, self.random = fleet, fleet.random
        (folder / "broker.toml").write_text(CONFIG)
        words = ["mqtt", "serve", "--json", "--port", "0"]
        self.command = [*PENSTOCK, *words, "--data", str(folder / "data"), "--config", str(folder / "broker.toml")]
        self.log = folder / "stderr"
        self.process: subprocess.Popen[str]
        self.port = 0

    def start(self, step: str = "") -> bool:
        """Start it; False when it came to its end before it was ready."""
        environment = dict(os.environ)
        if step:
            environment["PENSTOCK_FAIL_POINT"] = f"mqtt.{step}:{self.random.randrange(3, 40)}"
        sync = self.random.choice(("interval", "always"))
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*self.command, "--sync", sync], stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            assert self.process.wait(30) == -signal.SIGKILL, self.log.read_text()
            return False
        self.port = int(json.loads(line)["listeners"]["mqtt"].rpartition(":")[2])
        return True

    def connect(self, peer: Any) -> None:
        try:
            peer.connect(SocketDevice(self.port, peer.version))
        except OSError:
            peer.disconnect()

    def load(self, seconds: float) -> None:
        fleet, chance = self.fleet, self.random
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.process.poll() is None:
            for peer in fleet.peers:
                if peer.device is None and chance.random() < 0.2:
                    self.connect(peer)
                elif peer.up and chance.random() < 0.03:
                    peer.disconnect()
                peer.step()
            for publisher in [*fleet.publishers, *fleet.retainers]:
                if publisher.up and chance.random() < 0.5:
                    publisher.publish(chance.randrange(1, 60))

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait(30) == -signal.SIGKILL
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.fleet.lost()

    def drain(self, seconds: float = 60.0) -> None:
        """Connect everyone and wait until nothing comes any more."""
        until, quiet = time.monotonic() + seconds, 0
        while quiet < 30:
            assert time.monotonic() < until, "the broker does not come to an end"
            for peer in self.fleet.peers:
                if peer.device is None:
                    self.connect(peer)
            moved = sum(peer.step() for peer in self.fleet.peers)
            settled = all(peer.up and peer.idle for peer in self.fleet.peers)
            quiet = quiet + 1 if settled and not moved else 0
            time.sleep(0.005 if quiet else 0)

    def compare(self) -> None:
        """Everyone is connected and drained: compare what clients have seen with what was acknowledged."""
        self.fleet.check()
        for retainer in self.fleet.retainers:
            retainer.check(retained(self.port, retainer.topic))
        assert "damage" not in self.log.read_text()


@pytest.mark.timeout(7200)
def test_kill_9_at_any_moment_loses_and_doubles_nothing_acknowledged(tmp_path: Path, long_run: bool) -> None:
    fleet = Fleet(random.randrange(1 << 30) if long_run else 3)
    killed = Killed(tmp_path, fleet)
    assert killed.start()
    killed.drain()  # the subscriptions
    killed.kill()
    began = time.monotonic()
    for number in range(300 if long_run else 6):
        if killed.start(STEPS[number // 2 % len(STEPS)] if number % 2 else ""):
            killed.load(fleet.random.uniform(0.05, 0.6))
            killed.kill()
        if number % 10 == 9:  # so that a loss is seen near the kill that caused it
            assert killed.start(), f"round {number}"
            killed.drain()
            killed.compare()
            acknowledged = sum(len(peer.acked) for peer in fleet.publishers)
            print(f"round {number}: {acknowledged:,} acknowledged, {time.monotonic() - began:.0f} s", flush=True)
            killed.kill()
    assert killed.start()
    killed.drain()
    fleet.mourner.disconnect()
    killed.drain()
    killed.compare()
    assert sum(len(peer.acked) for peer in fleet.publishers) > 100
    fleet.lost()
    killed.process.terminate()
    assert killed.process.wait(30) == 0, killed.log.read_text()
    assert killed.process.stdout is not None
    killed.process.stdout.close()
    assert "damage" not in killed.log.read_text()


def retained(port: int, topic: str) -> bytes | None:
    from mqtt_kept import Subscriber

    reader = Subscriber("reader", 5, qos=0, filter=topic)
    reader.connect(SocketDevice(port, 5))
    until = time.monotonic() + 20
    while not reader.subscribed and time.monotonic() < until:
        reader.step()
    for _ in range(200):
        reader.step()
    reader.disconnect()
    return reader.got[-1] if reader.got else None
