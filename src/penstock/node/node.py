"""The node: the parts a configuration names, in one process, on one data directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import Any, Final

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.disk import Lock, disk_for, in_disk_thread
from penstock.disk.doors import refuse_foreign
from penstock.disk.plain import make_folders
from penstock.errors import LockedError, OptionsError, PenstockError
from penstock.lifecycle import Health, Part
from penstock.mqtt.deliveries import DeliveryTotals, measure
from penstock.mqtt.server import MqttServer
from penstock.mqtt.state_open import KeptBroker
from penstock.mqtt.tap import Tap
from penstock.node.budget import BudgetPart
from penstock.node.config import NodeConfig, hide_secrets, needs_restart
from penstock.node.http import HttpServer
from penstock.node.ingest.server import IngestPart
from penstock.node.ledger.book import Figures
from penstock.node.ledger.part import LedgerPart
from penstock.node.routes import node_routes
from penstock.node.specs import parts_of
from penstock.node.supervisor import Spec, Supervisor
from penstock.node.telemetry import Telemetry
from penstock.node.version import check_version

__all__ = ["Node"]

LOCK: Final = "penstock-node-lock"
PROBE: Final = "penstock-node-probe"
PROBE_SECONDS: Final = 2.0
"""How old the answer of ``/readyz`` may be: a probe costs an fsync."""
PROBE_WAIT_SECONDS: Final = 5.0
"""How long ``/readyz`` waits for the disk before it says that the disk does not answer."""


class Node:
    """Runs what a configuration names.

    >>> import tempfile
    >>> from penstock.node.config import load_config
    >>> async def demo(folder):
    ...     node = Node(load_config(None, {"data": folder, "mqtt.port": 0, "channels.port": 0, "http.port": 0}))
    ...     await node.start()
    ...     try:
    ...         return sorted(node.addresses), node.failures
    ...     finally:
    ...         await node.stop()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(demo(folder))
    (['channels', 'http', 'ingest', 'mqtt'], {})
    """

    def __init__(self, config: NodeConfig, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.config, self._clock = config, clock
        self._lock: Lock | None = None
        telemetry = config.telemetry
        self._telemetry = Telemetry(telemetry.endpoint) if telemetry.enabled else None
        self._ports: dict[str, int] = {}
        self._supervisor = Supervisor(self._specs(config), clock=clock)
        self._probed: tuple[float, str] | None = None
        self._probing: asyncio.Task[str] | None = None
        self._changing = asyncio.Lock()
        self._draining = False
        self._delivered: tuple[KeptBroker, int, DeliveryTotals, int] | None = None

    # --- Life

    async def start(self) -> None:
        """Take the data directory and start every part; LockedError if another node has it.

        With ``on_failure = "stop"`` a part that cannot start ends everything with its reason.
        """
        async with self._changing:
            self._lock = await in_disk_thread(self._take)
            await self._supervisor.start()
        failed = self._supervisor.failed
        if self.config.on_failure == "stop" and failed:
            await self.stop()
            raise PenstockError("; ".join(f"{name}: {reason}" for name, reason in failed.items()))

    async def stop(self) -> None:
        """Drain within the configured time, stop every part and let go of the data directory."""
        self._draining = True
        await self._supervisor.stop(self.config.drain_seconds)
        if self._telemetry is not None:
            await in_disk_thread(self._telemetry.stop)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    async def reload(self, wanted: NodeConfig | None = None) -> list[str]:
        """Let parts read their files again and take over another configuration, all of it or nothing.

        Return what kept everything as it is: keys that need a restart, files that cannot be read.  One at a time, and
        none before all parts were started or once they are being stopped.
        """
        async with self._changing:
            return ["it is stopping"] if self._draining else await self._reload(wanted)

    async def _reload(self, wanted: NodeConfig | None) -> list[str]:
        wanted = wanted or self.config
        problems = [f"{key}: needs a restart" for key in needs_restart(self.config, wanted)]
        parts = {name: part for name in self._supervisor.health() if (part := self._supervisor.part(name)) is not None}
        for name, part in parts.items():
            check = getattr(part, "check_reload", None)
            if check is not None:
                problems += [f"{name}: {problem}" for problem in await in_disk_thread(check)]
        if problems:
            return problems
        broker = parts.get("mqtt")
        if isinstance(broker, MqttServer) and wanted.mqtt.enabled:
            problems = [f"mqtt: {one}" for one in await broker.use_attached(wanted.mqtt, wanted.drain_seconds)]
            if problems:
                return problems
        before = {asked.spec.name: asked.options for asked in parts_of(self.config)}
        after = {asked.spec.name: asked.options for asked in parts_of(wanted)}
        renewed = {name for name, options in after.items() if before.get(name) != options}
        self.config = wanted
        for name, part in parts.items():
            reload = getattr(part, "reload", None)
            if reload is not None:
                problems += [f"{name}: {problem}" for problem in reload()]
            if isinstance(part, MqttServer):
                part.use_limits(wanted.mqtt)
            elif isinstance(part, IngestPart):
                part.use(wanted)
        await self._supervisor.change(self._specs(wanted), renewed, wanted.drain_seconds)
        return problems

    @property
    def failures(self) -> dict[str, str]:
        """Parts that do not serve, and why."""
        return self._supervisor.failures

    @property
    def addresses(self) -> dict[str, str]:
        """Where it listens, by name."""
        found: dict[str, str] = {}
        for name in self._supervisor.health():
            found.update(getattr(self._supervisor.part(name), "addresses", {}))
        return found

    # --- What it says

    async def readiness(self) -> str:
        """Return why it is not ready; empty when all parts serve and a byte was written and synced just now."""
        if self._draining:
            return "it is stopping"
        for name, health in self._supervisor.health().items():
            if not health.state.serves:
                return f"part {name} is {health.state}: {health.reason}"
        if self._probed is None or self._clock.monotonic() - self._probed[0] > PROBE_SECONDS:
            if self._probing is None:
                self._probing = asyncio.ensure_future(in_disk_thread(self._probe))
            probing = self._probing
            await asyncio.wait([probing], timeout=PROBE_WAIT_SECONDS)
            if not probing.done():
                return f"{self.config.data}: has not been written and synced within {PROBE_WAIT_SECONDS:g} s"
            if probing is self._probing:
                self._probing, self._probed = None, (self._clock.monotonic(), probing.result())
        assert self._probed is not None
        return self._probed[1]

    def describe(self) -> dict[str, Any]:
        """Return all parts with what they say."""
        parts: dict[str, Any] = hide_secrets(self._supervisor.describe())
        return {"data": self.config.data, "listeners": self.addresses, "parts": parts}

    def health(self) -> dict[str, Health]:
        """Return how each part is."""
        return self._supervisor.health()

    def part(self, name: str) -> Part | None:
        """Return a part that runs."""
        return self._supervisor.part(name)

    def disk_report(self) -> dict[str, Any]:
        """Return what is used of the disk budget, and how long it will last."""
        part = self._supervisor.part("disk")
        return part.describe() if part is not None else {}

    # --- How

    def _take(self) -> Lock:
        return take_data(self.config.data)

    def _probe(self) -> str:
        disk, path = disk_for(self.config.data), os.path.join(self.config.data, PROBE)
        try:
            with disk.modify(path) if disk.stat(path) is not None else disk.create(path) as file:
                file.write_at(0, b"\0")
                file.sync()
        except (OSError, PenstockError) as exc:
            return f"{self.config.data}: {getattr(exc, 'strerror', None) or exc}"
        return ""

    def _taps(self) -> dict[str, Tap]:
        """Return the taps that run, by their names."""
        broker = self._supervisor.part("mqtt")
        attached = broker.attached if isinstance(broker, MqttServer) else None
        return {} if attached is None else {part.name: part for part in attached.parts if isinstance(part, Tap)}

    def _deliveries(self) -> Figures | None:
        """Return what the broker has counted, with what waits in its queues now."""
        broker = self._supervisor.part("mqtt")
        kept = broker.kept if isinstance(broker, MqttServer) else None
        if kept is None:
            return None
        totals, turns = kept.journal.deliveries.totals, kept.journal.turns
        known = self._delivered  # nothing was written and nothing counted since: so nothing has come or gone
        if known is None or known[:3] != (kept, turns, totals):
            known = self._delivered = kept, turns, totals, measure(kept.broker.sessions.values())
        return Figures(totals.came, totals.went, known[3], totals.lost)

    def _part(self, name: str) -> Part | None:
        return self._supervisor.part(name)

    def _specs(self, config: NodeConfig) -> list[Spec]:
        specs = [asked.spec for asked in parts_of(config, self._part, self._telemetry, self._ports)]
        if specs:
            specs.append(Spec("disk", lambda: BudgetPart(lambda: self.config, self._supervisor.part)))
        if specs and config.ledger.enabled:
            specs.append(Spec("ledger", lambda: LedgerPart(lambda: self.config, self._taps, self._deliveries)))
        if config.http.enabled:
            specs.append(Spec("http", lambda: HttpServer(config.http, node_routes(self), self._ports)))
        if not specs:
            raise OptionsError("no part is enabled: there is nothing to serve")
        return specs


def take_data(data: str) -> Lock:
    """Take a data directory, made if it is not there; LockedError while a node serves it."""
    disk = disk_for(data)
    refuse_foreign(disk, data, "data directory of a node")
    make_folders(data)
    check_version(data, note=False)
    try:
        lock = disk.lock(os.path.join(data, LOCK), of=data)
    except LockedError:
        raise LockedError(f"{data}: another node serves this data directory") from None
    try:
        check_version(data)
    except BaseException:
        lock.release()
        raise
    return lock


@contextlib.contextmanager
def hold_data(data: str) -> Iterator[None]:
    """Keep nodes off a data directory for a while."""
    lock = take_data(data)
    try:
        yield
    finally:
        lock.release()
