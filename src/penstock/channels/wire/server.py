"""The channel server: narwhal's protocol on our channels.  A Part: start, ready, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine
from typing import Any, Self

import msgspec

from penstock.channels.ids import Nid
from penstock.channels.manager import ChannelManager
from penstock.channels.options import ManagerOptions
from penstock.channels.wire import counts
from penstock.channels.wire.client_shell import ClientShell
from penstock.channels.wire.metrics import serve_metrics
from penstock.channels.wire.modulator import Moderation, load_modulator, reload_modulator
from penstock.channels.wire.options import ChannelServerOptions, ModulatorLink
from penstock.channels.wire.peer import PeerShell, Service
from penstock.channels.wire.remote import RemoteModulator, direct_service, endpoint_of
from penstock.channels.wire.tap import ChannelTap
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import ClosedError, OptionsError, PenstockError
from penstock.lifecycle import Health, State
from penstock.net import Endpoint, Listeners, Tls, TlsFiles, listen, make_development_certificate
from penstock.options import options_from, shows_options

__all__ = ["ChannelServer"]

_log = logging.getLogger(__name__)

DRAIN_SECONDS = 5.0


class ChannelServer:
    r"""Serves the channels of a data directory to clients of the channel protocol.

    >>> import tempfile
    >>> async def demo(folder):
    ...     async with ChannelServer(folder, port=None, plain_port=0) as server:
    ...         host, port = server.addresses["channels-plain"].split(":")
    ...         reader, writer = await asyncio.open_connection(host, int(port))
    ...         writer.write(b"CONNECT version=1\n")
    ...         answer = await reader.readline()
    ...         writer.close(); await writer.wait_closed()
    ...         return answer.split()[0]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(demo(folder))
    b'CONNECT_ACK'
    """

    name = "channels"

    @shows_options(ChannelServerOptions)
    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        options: ChannelServerOptions | None = None,
        *,
        modulator: object | str | None = None,
        clock: Clock = SYSTEM_CLOCK,
        ports: dict[str, int] | None = None,
        **given: Any,
    ) -> None:
        """Options as keywords or as one object; ChannelServerOptions says what each means.

        ``modulator`` is an object as in modulator.py, or ``module:Class``, which a reload loads again.  ``ports`` are
        those of ``net.listen``.
        """
        self.data_dir, self.clock, self._ports = os.fspath(data_dir), clock, ports
        self.options = options_from(ChannelServerOptions, options, given)
        self.manager: ChannelManager
        self._modulator_name = modulator if isinstance(modulator, str) else ""
        self._next: Moderation | None = None
        if isinstance(modulator, str):
            modulator = load_modulator(modulator)
        self.moderation = None if modulator is None else Moderation(modulator, self.options.modulator_timeout)
        self.clients: set[ClientShell] = set()
        self._listeners: Listeners | None = None
        self._metrics: Listeners | None = None
        self._m2s: Listeners | None = None
        self._m2s_service: Service | None = None
        self._remote: RemoteModulator | None = None
        self._taps: list[ChannelTap] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._state, self._reason = State.NEW, ""
        self._stopped = asyncio.Event()
        self._draining = False

    # --- The life of a Part

    async def start(self) -> None:
        """Restore the channels and listen."""
        self._state = State.STARTING
        try:
            if self.options.modulator is not None and self.moderation is None:
                await self._reach_modulator(self.options.modulator)
            limits = self.options.limits
            if self.options.wire.max_payload_size != limits.max_payload_size:
                raise OptionsError("max_payload_size of the wire and of the channels must be the same")
            manager_options = ManagerOptions(
                domain=self.options.domain,
                limits=limits,
                authenticated=self.authenticates,
                segment_bytes=self.options.segment_bytes,
                sync=self.options.sync,
            )
            self.manager = await ChannelManager.open(self.data_dir, manager_options)
            try:
                if self.moderation is not None and self.moderation.has("on_event"):
                    self.manager.event_gate = self.moderation.tell
                for handler, path in self.options.tap.items():
                    tap = ChannelTap(handler, path, limits.max_payload_size)
                    await tap.open()
                    self._taps.append(tap)
                    self.manager.listen(tap)
                if self.options.metrics_address:
                    self._metrics = await serve_metrics(self.options.metrics_address)
                await self._listen_to_modulators()
                self._listeners = await listen(self._endpoints(), lambda: ClientShell(self), ports=self._ports)
            except BaseException:
                await self._let_go()
                raise
        except BaseException as exc:
            if self._remote is not None:
                await self._remote.close()
            self._state, self._reason = State.FAILED, str(exc)
            raise
        self._state = State.READY

    async def _reach_modulator(self, link: ModulatorLink) -> None:
        """Use the modulator that the configuration names; both sides' limits count."""
        self._remote = RemoteModulator(link)
        await self._remote.start()
        self.moderation = Moderation(self._remote, link.timeout)
        sizes = {name: min(getattr(self.options.wire, name), most) for name, most in self._remote.limits.items()}
        limits = msgspec.structs.replace(self.options.limits, max_payload_size=sizes["max_payload_size"])
        wire = msgspec.structs.replace(self.options.wire, **sizes)
        self.options = msgspec.structs.replace(self.options, wire=wire, limits=limits)

    async def ready(self) -> None:
        """Return: a server that has started is ready."""
        if not self._state.serves:
            raise ClosedError(f"the channel server is {self._state}: {self._reason}")

    async def drain(self, seconds: float = DRAIN_SECONDS) -> None:
        """Let nobody in, answer what was asked, say goodbye to every client."""
        if self._listeners is None or self._draining:
            return
        self._state, self._draining = State.DRAINING, True
        self._listeners.stop_accepting()
        try:
            async with asyncio.timeout(seconds):
                while any(client.busy for client in self.clients):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            _log.warning("some requests were not answered within %g s", seconds)
        for client in list(self.clients):
            client.shut_down()
        await self._listeners.close("the server stops", seconds)

    async def stop(self) -> None:
        """End everything; what was acknowledged is kept."""
        if self._state is State.STOPPED:
            return
        if self._listeners is not None:
            await self.drain()
            while self._tasks:
                await asyncio.wait(set(self._tasks))
            await self._let_go()
        if self.moderation is not None:
            self.moderation.close()
        self._state = State.STOPPED
        self._stopped.set()

    async def _listen_to_modulators(self) -> None:
        link = self.options.modulator
        if link is not None and (link.m2s_address or link.m2s_socket_path):
            self._m2s_service = service = direct_service(link, self.send_direct)
            endpoint = endpoint_of("m2s", link.m2s_address, link.m2s_socket_path)
            self._m2s = await listen([endpoint], lambda: PeerShell(service, self.clock))

    async def _let_go(self) -> None:
        if self._m2s is not None and self._m2s_service is not None:
            for peer in list(self._m2s_service.peers):
                peer.shut_down()
            await self._m2s.close()
        if self._remote is not None:
            await self._remote.close()
        if self._metrics is not None:
            await self._metrics.close()
        for tap in self._taps:
            await tap.close()
        await self.manager.close()

    async def wait(self) -> None:
        """Return when the server has stopped."""
        await self._stopped.wait()

    def health(self) -> Health:
        """Return how it is."""
        if self._state is State.READY and self.manager.broken:
            return Health(State.DEGRADED, f"{len(self.manager.broken)} channels are broken or damaged")
        return Health(self._state, self._reason)

    def describe(self) -> dict[str, Any]:
        """Return where it is reached and what it serves."""
        if self._listeners is None:
            return {"addresses": {}}
        return {
            "addresses": self.addresses,
            "clients": len(self.clients),
            "channels": len(self.manager.handlers()),
            "broken": dict(self.manager.broken),
        }

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # --- For its clients

    @property
    def authenticates(self) -> bool:
        """Whether clients log in by token: then channels may be persistent, and are restored."""
        return self.moderation is not None and self.moderation.has("authenticate")

    @property
    def addresses(self) -> dict[str, str]:
        """Where the server is reached, by the name of the listener."""
        if self._listeners is None:
            return {}
        others = [found.addresses for found in (self._metrics, self._m2s) if found is not None]
        return {name: place for found in (self._listeners.addresses, *others) for name, place in found.items()}

    def now_ms(self) -> int:
        """Return the time of a message."""
        return self.clock.now_ns() // 1_000_000

    def entered(self, client: ClientShell) -> bool:
        """Count a client in; False when there are too many."""
        if len(self.clients) >= self.options.wire.max_connections or self._draining:
            return False
        self.clients.add(client)
        return True

    def left(self, client: ClientShell) -> None:
        """Count a client out."""
        self.clients.discard(client)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something on behalf of a client; what it raises is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a request ended in a fault", exc_info=task.exception())

    def send_direct(self, usernames: list[str], payload: bytes) -> int:
        """Hand a payload to every connection of these users; return how many took it."""
        wanted = {Nid(name, self.options.domain) for name in usernames}
        taking = [client for client in self.clients if client.link.nid in wanted]
        for client in taking:
            client.hearing.direct(payload)
        return len(taking)

    def set_modulator(self, modulator: object) -> None:
        """Put another modulator in the place of the one in use; clients that are connected stay so."""
        self._use(self._successor(modulator))

    def _successor(self, modulator: object) -> Moderation:
        new = Moderation(modulator, self.options.modulator_timeout)
        if new.has("authenticate") != self.authenticates:
            raise OptionsError(
                "a modulator that authenticates can only be replaced by one that does, and the other way"
            )
        return new

    def _use(self, new: Moderation) -> None:
        self.moderation = new  # the old one ends with the last call that is still under way there
        self.manager.event_gate = new.tell if new.has("on_event") else None
        for client in self.clients:
            client.remoderate(new)

    def check_reload(self) -> list[str]:
        """Return what would keep an old certificate or modulator in use; nothing changes."""
        problems = []
        try:
            self._endpoints()
        except (PenstockError, OSError) as exc:
            problems.append(str(exc))
        return problems + self._load_modulator_again()

    def reload(self) -> list[str]:
        """Load the certificates, and a modulator that has a name, again; return what kept an old one in use."""
        if self._listeners is None:
            return []
        problems = self._listeners.reload_certificates()
        if self._next is None:  # nobody looked before whether it can be done
            problems += self._load_modulator_again()
        if self._next is not None:
            self._use(self._next)
            self._next = None
        return problems

    def _load_modulator_again(self) -> list[str]:
        self._next = None
        if not self._modulator_name:
            return []
        try:
            self._next = self._successor(reload_modulator(self._modulator_name))
        except Exception as exc:  # noqa: BLE001 - it is anyone's code, and half written perhaps
            prefix, said = (
                f"modulator {self._modulator_name}: ",
                str(exc) if isinstance(exc, PenstockError) else repr(exc),
            )
            return [f"{prefix}{said.removeprefix(prefix)}; the one in use stays"]
        return []

    def _endpoints(self) -> list[Endpoint]:
        options, endpoints = self.options, []
        if options.port is not None:
            if options.cert_file:
                files = TlsFiles(certificate=options.cert_file, key=options.key_file)
            else:
                files = make_development_certificate(self.data_dir)
            endpoints.append(
                Endpoint(
                    name="channels",
                    host=options.bind_address,
                    port=options.port,
                    tls=Tls(files, self.clock),
                    handshakes=counts.HANDSHAKES,
                )
            )
        if options.plain_port is not None:
            endpoints.append(Endpoint(name="channels-plain", host=options.bind_address, port=options.plain_port))
        if options.socket_path is not None:
            endpoints.append(Endpoint(name="channels-unix", path=options.socket_path))
        return endpoints
