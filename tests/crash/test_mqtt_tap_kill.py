"""Promise: whenever the broker is killed, the logs of its taps and the brokers behind its bridges have what was
acknowledged, in order; and a QoS 2 message once.

Short form: a few rounds.  Long form (``--long``): 300.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

from command import PENSTOCK, penstock

from penstock.log import open_log
from penstock.log.envelope import decode_envelope
from penstock.mqtt import Client, ClientOptions, Outbox, RemoteSpec


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Process:
    """``penstock mqtt serve`` that is killed and comes again under the same address."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.port = free_port()
        self.command = [*PENSTOCK, "mqtt", "serve", "--json", "--port", str(self.port), "--data", str(folder), *words]
        self.process: subprocess.Popen[bytes]

    async def start(self, step: str = "") -> None:
        environment = {**os.environ, "PENSTOCK_FAIL_POINT": step} if step else None
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        assert self.process.stdout is not None
        line = await asyncio.to_thread(self.process.stdout.readline)
        assert json.loads(line)["event"] == "ready"
        self.process.stdout.close()

    async def end(self, number: int = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        return await asyncio.to_thread(self.process.wait, 60)


class Load:
    """Clients that publish as fast as they are answered, and remember what was acknowledged."""

    def __init__(self, port: int, clients: int) -> None:
        self.port, self.clients = port, clients
        self.acked: dict[str, int] = {}
        self.ending = False
        self.connected = 0
        self.everyone = asyncio.Event()

    async def run(self) -> None:
        await asyncio.gather(*(self._publish(f"dev-{number}", number % 3) for number in range(self.clients)))

    async def _publish(self, name: str, kind: int) -> None:
        qos = 2 if kind == 2 else 1
        options = ClientOptions(
            client_id=name, version=4 if kind == 1 else 5, clean=False, session_expiry=3600,
            reconnect_seconds=(0.01, 0.1), keep_alive=5,
        )  # fmt: skip
        number = 0
        async with Client(f"127.0.0.1:{self.port}", options) as client:
            self.connected += 1
            if self.connected == self.clients:
                self.everyone.set()
            while not self.ending:
                count = random.choice((1, 1, 5, 40))
                payloads = [b"%d" % (number + each) for each in range(count)]
                await client.publish_many(f"plant/{name}", payloads, qos=qos)
                number += count
                self.acked[name] = number


def found_in(path: Path) -> dict[str, list[int]]:
    """Return the numbers in a log by device, in the order of the log."""
    found: dict[str, list[int]] = {}
    with open_log(str(path)) as log:
        assert list(log.verify()) == []
        at = log.first_position
        while len(batch := log.read(at)):
            for record in map(decode_envelope, batch.to_payloads()):
                found.setdefault(record.key.decode().removeprefix("plant/"), []).append(int(record.payload))
            at = batch.next_position
    return found


def check(acked: dict[str, int], found: dict[str, list[int]], once: tuple[str, ...]) -> None:
    for name, count in acked.items():
        numbers = found.get(name, [])
        first = list(dict.fromkeys(numbers))
        assert first == list(range(len(first))), f"{name}: the order"
        assert len(first) >= count, f"{name}: {count} acknowledged, {len(first)} in the log"
        if name in once:
            assert len(numbers) == len(first), f"{name}: QoS 2 twice"


async def kill_loop(broker: Process, load: Load, rounds: int, others: list[Process]) -> None:
    for each in [broker, *others]:
        await each.start()
    running = asyncio.create_task(load.run())
    async with asyncio.timeout(60):
        await load.everyone.wait()  # a client that was never let in does not try again
    for _ in range(rounds):
        victim = random.choice([broker, *others])
        await asyncio.sleep(random.uniform(0.05, 0.4))
        assert not running.done(), running.result()
        await victim.end()
        await victim.start()
    before = dict(load.acked)
    async with asyncio.timeout(120):
        while any(load.acked.get(name, 0) <= count for name, count in before.items()):
            await asyncio.sleep(0.02)  # everyone goes on after the last kill
        load.ending = True
        await running


TAP_STEPS = (
    "mqtt.tap.written", "mqtt.tap.kept", "mqtt.tap.noted",
    "mqtt.tap.before", "mqtt.turn.before", "mqtt.turn.after",
)  # fmt: skip


async def test_a_kill_at_every_step_of_a_tap_leaves_a_qos_2_message_in_the_log_once(
    tmp_path: Path, long_run: bool
) -> None:
    broker = Process(tmp_path / "state", "--tap", f"plant/#={tmp_path}/log")
    options = ClientOptions(client_id="dev", clean=False, session_expiry=3600, reconnect_seconds=(0.01, 0.1))
    acked, ending = 0, False

    async def publish() -> None:
        nonlocal acked
        async with Client(f"127.0.0.1:{broker.port}", options) as client:
            while not ending:
                await client.publish("plant/dev", b"%d" % acked, qos=2)
                acked += 1

    running: asyncio.Task[None] | None = None
    for step in TAP_STEPS if long_run else TAP_STEPS[:3]:
        await broker.start(f"{step}:12")
        running = running or asyncio.create_task(publish())
        while broker.process.poll() is None:
            assert not running.done(), running.result()
            await asyncio.sleep(0.005)
        assert broker.process.returncode == -signal.SIGKILL, step
    assert running is not None
    await broker.start()
    until = acked + 3
    while acked < until:
        await asyncio.sleep(0.005)
    ending = True
    await running
    assert await broker.end(signal.SIGTERM) == 0
    assert found_in(tmp_path / "log") == {"dev": list(range(acked))}


async def test_what_a_tapped_broker_acknowledged_is_in_the_log_after_any_kill(tmp_path: Path, long_run: bool) -> None:
    for path in ("one", "by/dev-0", "by/dev-2"):
        assert not (tmp_path / path).exists()
    taps = ("--tap", f"plant/#={tmp_path}/one", "--tap", f"plant/+={tmp_path}/by/{{client}}")
    broker = Process(tmp_path / "state", *taps)
    load = Load(broker.port, 6)
    await kill_loop(broker, load, 300 if long_run else 4, [])
    assert await broker.end(signal.SIGTERM) == 0
    check(load.acked, found_in(tmp_path / "one"), ("dev-2", "dev-5"))  # those that publish with QoS 2
    for name, count in load.acked.items():
        check({name: count}, found_in(tmp_path / "by" / name), ("dev-2", "dev-5"))


def bridge_config(folder: Path, port: int) -> Path:
    config = folder / "bridge.toml"
    config.write_text(
        f'[[bridges]]\nname = "hub"\nremote = {{url = "mqtt://127.0.0.1:{port}", reconnect_seconds = [0.01, 0.1]}}\n'
        'send = [{filter = "plant/#"}]\n'
    )
    return config


async def test_what_a_bridged_broker_acknowledged_reaches_the_other_one_with_both_killed(
    tmp_path: Path, long_run: bool
) -> None:
    hub = Process(tmp_path / "hub", "--tap", f"plant/#={tmp_path}/there")
    edge = Process(tmp_path / "edge", "--config", str(bridge_config(tmp_path, hub.port)))
    load = Load(edge.port, 2)
    await kill_loop(edge, load, 300 if long_run else 4, [hub])
    async with asyncio.timeout(120):
        while True:
            found = found_in(tmp_path / "there")
            if all(len(set(found.get(name, []))) >= count for name, count in load.acked.items()):
                break
            await asyncio.sleep(0.1)
    assert await edge.end(signal.SIGTERM) == 0
    assert await hub.end(signal.SIGTERM) == 0
    for name, count in load.acked.items():  # at least once: what was under way comes again, behind what came
        assert set(range(count)) <= set(found_in(tmp_path / "there")[name])


async def test_an_outbox_and_its_broker_are_killed_and_nothing_published_is_lost(
    tmp_path: Path, long_run: bool
) -> None:
    broker = Process(tmp_path / "state", "--tap", f"plant/#={tmp_path}/log")
    await broker.start()
    writer = Path(__file__).parents[1] / "support" / "outbox_writer.py"
    kept = 0
    for round_ in range(60 if long_run else 3):
        command = [PENSTOCK[0], str(writer), str(tmp_path / "outbox"), str(broker.port), str(kept)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        target = kept + random.randint(20, 300)
        while kept < target:
            kept = int(await asyncio.to_thread(process.stdout.readline)) + 1
        process.kill()
        process.wait()
        kept += len(process.stdout.read().splitlines())
        process.stdout.close()
        if round_ % 2 == 0:
            await broker.end()
            await broker.start()
    with Outbox(f"{tmp_path}/outbox", RemoteSpec(url=f"mqtt://127.0.0.1:{broker.port}")) as outbox:
        assert await asyncio.to_thread(outbox.flush, 60)
    assert await broker.end(signal.SIGTERM) == 0
    numbers = found_in(tmp_path / "log")["out"]
    assert set(range(kept)) <= set(numbers)


async def test_a_feed_that_is_killed_goes_on_and_publishes_everything(tmp_path: Path, long_run: bool) -> None:
    from penstock.log.envelope import Envelope, encode_envelope
    from penstock.log.xchannel import Writer

    count = 20_000
    with Writer.open(f"{tmp_path}/source", content="envelope/1") as writer:
        writer.append_many([encode_envelope(Envelope(b"plant/f", b"%d" % number)) for number in range(count)])
    broker = Process(tmp_path / "state", "--tap", f"plant/#={tmp_path}/log")
    await broker.start()
    words: list[Any] = ["mqtt", "feed", tmp_path / "source", "--to", f"mqtt://127.0.0.1:{broker.port}"]
    for _ in range(30 if long_run else 2):
        process = subprocess.Popen([*PENSTOCK, *map(str, words)], stderr=subprocess.DEVNULL)
        await asyncio.sleep(random.uniform(0.5, 1.5))
        process.kill()
        process.wait()
    done = await asyncio.to_thread(penstock, *words, "--once", "--json")
    assert done.returncode == 0, done.stderr
    assert await broker.end(signal.SIGTERM) == 0
    numbers = found_in(tmp_path / "log")["f"]
    assert list(dict.fromkeys(numbers)) == list(range(count))
