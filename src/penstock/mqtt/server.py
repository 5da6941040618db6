"""The shell of the broker: listeners, timers, credentials.  It decides nothing about MQTT."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, Final

import msgspec

from penstock.disk.plain import make_folders, read_small
from penstock.errors import Backpressure, OptionsError, PenstockError
from penstock.kernel.mqtt import Run
from penstock.lifecycle import Health, State
from penstock.mqtt.access import Access, Method, Verdict
from penstock.mqtt.acl_files import AclFile
from penstock.mqtt.attached import Attached, needs_gate
from penstock.mqtt.bridge import BridgeSpec
from penstock.mqtt.broker import Broker
from penstock.mqtt.control import SOCKET, Control, Question
from penstock.mqtt.feed import FeedSpec
from penstock.mqtt.gate import TurnGate
from penstock.mqtt.link import Link
from penstock.mqtt.metered import MeteredLink
from penstock.mqtt.mirror import MirrorSpec
from penstock.mqtt.options import BrokerOptions
from penstock.mqtt.packets import Connect
from penstock.mqtt.reasons import Reason
from penstock.mqtt.scram import SCRAM, ScramSha256, Verifier
from penstock.mqtt.state_backup import back_up
from penstock.mqtt.state_open import KeptBroker
from penstock.mqtt.state_options import PersistenceOptions
from penstock.mqtt.sys import SysTopics
from penstock.mqtt.tapspec import TapSpec
from penstock.net.certificates import make_development_certificate
from penstock.net.connection import ConnectionOptions, Core
from penstock.net.credentials import CredentialsFile
from penstock.net.limits import Admission, ConnectionLimits
from penstock.net.listen import Endpoint, Listeners, listen
from penstock.net.tls import Tls, TlsFiles
from penstock.net.websocket import WebSocketOptions
from penstock.options import options_from, shows_options

__all__ = ["ATTACHED", "MqttServer", "ServerOptions", "RELOADED_LIMITS"]

_log = logging.getLogger(__name__)

QUEUE_SECONDS: Final = 30.0
"""How often queues are looked through for what has waited for too long."""

AGAIN_SECONDS: Final = 1.0
"""How long deadlines are left alone after a fault."""

METRIC_SECONDS: Final = 1.0
"""How often metrics are brought up to date."""

RELOADED_LIMITS: Final = (
    "max_queued_messages", "max_queued_bytes", "max_total_queued_bytes", "max_subscriptions", "max_session_expiry",
)  # fmt: skip
"""Limits of the broker that a running one can take over."""

ATTACHED: Final = ("taps", "feeds", "bridges", "mirrors")
"""What hangs on a broker and can come and go while it runs."""


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a broker listens and whom it lets in; the tables of its configuration file.

    >>> ServerOptions(tls_port=8883)
    Traceback (most recent call last):
    penstock.errors.OptionsError: tls_port=8883: needs cert and key
    """

    bind: str = "127.0.0.1"
    """The address that all TCP listeners bind."""
    port: int | None = 1883
    """MQTT over TCP; 0 picks a free one, None does not listen."""
    ws_port: int | None = None
    """MQTT over WebSocket; 0 picks a free one."""
    tls_port: int | None = None
    """MQTT over TLS; 0 picks a free one.  It needs ``cert`` and ``key``."""
    wss_port: int | None = None
    """MQTT over WebSocket and TLS; 0 picks a free one.  It needs ``cert`` and ``key``."""
    cert: str | None = None
    """Path of the certificate, with the chain to it; read again by a reload."""
    key: str | None = None
    """Path of the key of ``cert``."""
    development_certificate: bool = False
    """Make a certificate for this machine in the data directory, where cert and key are not given."""
    client_ca: str | None = None
    """Path of the certificates that vouch for clients: one of theirs is a client's name, and needs no password."""
    require_client_certificate: bool = False
    """Refuse who brings none; needs client_ca."""
    unix: str | None = None
    """Path of a unix socket to listen on."""
    proxy: bool = False
    """Every TCP and TLS connection begins with a PROXY header."""
    passwords: str | None = None
    """Path of a file of users and hashes, as ``penstock mqtt passwd`` or ``mosquitto_passwd`` write it."""
    acl: str | None = None
    """Rules: mosquitto's form, or roles in a file that ends in ``.toml``."""
    scram: dict[str, str] = {}
    """User → SCRAM-SHA-256 verifier, for clients of MQTT 5 that ask for that method."""
    anonymous: bool | None = None
    """Whether clients without credentials come in; unless said, only on loopback and without a password file."""
    limits: ConnectionLimits = ConnectionLimits()
    """How many connections there may be, in all and from one address, and how fast they may come."""
    broker: BrokerOptions = BrokerOptions()
    """What the broker lets clients do, and what a slow or absent one may cost."""
    persistence: PersistenceOptions = PersistenceOptions()
    """Where and how what must not be forgotten is kept."""
    taps: tuple[TapSpec, ...] = ()
    """What is copied into logs."""
    feeds: tuple[FeedSpec, ...] = ()
    """Logs that are published."""
    bridges: tuple[BridgeSpec, ...] = ()
    """Other brokers; they need a data directory."""
    mirrors: tuple[MirrorSpec, ...] = ()
    """Buckets that hold what is retained; they need a data directory."""

    def __post_init__(self) -> None:
        for name in ("tls_port", "wss_port"):
            if getattr(self, name) is not None and (self.cert is None or self.key is None):
                if self.development_certificate and self.cert is self.key is None:
                    continue
                raise OptionsError(f"{name}={getattr(self, name)}: needs cert and key")

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return self.bind in ("127.0.0.1", "::1", "localhost")


class FileAuthenticator:
    """An Authenticator on a file of credentials; hashes are computed off the loop."""

    def __init__(self, path: str, *, anonymous: bool) -> None:
        self.file = CredentialsFile(path)
        self._anonymous = anonymous
        self._tasks: set[asyncio.Task[None]] = set()

    def check(
        self,
        connect: Connect,
        address: str,  # noqa: ARG002  (part of the seam)
        identity: str | None,
        answer: Callable[[Verdict], None],
    ) -> None:
        """Answer when the hash is known; a verified certificate needs no password."""
        if identity is not None:
            answer(Verdict(username=identity))
        elif connect.username is None:
            answer(Verdict() if self._anonymous else Verdict(Reason.NOT_AUTHORIZED))
        else:
            task = asyncio.get_running_loop().create_task(
                self._check(connect.username, connect.password or b"", answer)
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _check(self, username: str, password: bytes, answer: Callable[[Verdict], None]) -> None:
        try:
            good = await self.file.check(username, password)
        except Backpressure:
            answer(Verdict(Reason.SERVER_BUSY))
            return
        except Exception:  # noqa: BLE001 - whatever it is, who waits for an answer gets one
            _log.exception("the password of a client could not be checked")
            answer(Verdict(Reason.SERVER_UNAVAILABLE))
            return
        answer(Verdict(username=username) if good else Verdict(Reason.BAD_USER_NAME_OR_PASSWORD))

    def close(self) -> None:
        """Let the threads go."""
        for task in self._tasks:
            task.cancel()
        self.file.close()


class MqttServer:
    """A broker with listeners; a part (penstock.lifecycle).

    >>> async def demo():
    ...     server = MqttServer(port=0)
    ...     await server.start(); await server.ready()
    ...     print(sorted(server.addresses)); await server.stop()
    >>> asyncio.run(demo())
    ['mqtt']
    """

    name = "mqtt"

    @shows_options(ServerOptions)
    def __init__(
        self,
        options: ServerOptions | None = None,
        *,
        data: str | None = None,
        access: Access | None = None,
        methods: dict[str, Method] | None = None,
        holds: bool = False,
        on_tapped: Callable[[str, str, Run, int], None] | None = None,
        ports: dict[str, int] | None = None,
        **given: Any,
    ) -> None:
        """Options as keywords or as one object; ServerOptions says what each means.

        ``holds``: acknowledgements may wait for what others hang on the broker.  ``on_tapped`` is told of runs with a
        ``traceparent`` that taps have written.  ``ports`` are those of ``net.listen``.
        """
        self._on_tapped, self._ports = on_tapped, ports
        self._holds = holds
        self.options = options_from(ServerOptions, options, given)
        persistence = self.options.persistence
        self.data = data or persistence.path or ("./data" if persistence.enabled else None)
        self.kept: KeptBroker | None = None
        self._state = State.NEW
        self._reason = ""
        self._listeners: Listeners | None = None
        self._control: Listeners | None = None
        self._due: asyncio.TimerHandle | None = None
        self._sys: asyncio.Task[None] | None = None
        self._late: asyncio.Task[None] | None = None
        self._questions: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()
        self._passwords: FileAuthenticator | None = None
        self._methods = dict(methods or {})
        self._access = access
        self._acl: AclFile | None = None
        self.attached: Attached | None = None
        """Its taps, feeds, bridges and mirrors."""
        self.broker: Broker

    @property
    def addresses(self) -> dict[str, str]:
        """Where it listens, by name."""
        return dict(self._listeners.addresses) if self._listeners is not None else {}

    async def start(self) -> None:
        """Open all listeners or none."""
        self._state = State.STARTING
        try:
            await self._start()
        except BaseException as exc:
            self._state, self._reason = State.FAILED, str(exc)
            await self._close()
            raise
        self._state = State.READY

    async def _start(self) -> None:
        options = self.options
        anonymous = options.anonymous
        if anonymous is None:
            anonymous = options.on_loopback and options.passwords is None
        if options.passwords is not None:
            self._passwords = FileAuthenticator(options.passwords, anonymous=anonymous)
        if options.acl is not None:
            self._access = self._acl = AclFile(options.acl)
        if options.scram:
            users = {name: Verifier.parse(text) for name, text in options.scram.items()}
            self._methods.setdefault(SCRAM, ScramSha256(users))
        self._open_broker(msgspec.structs.replace(options.broker, anonymous=anonymous))
        self.broker.on_due = self._set_timer
        self.broker.on_tapped = self._on_tapped
        self._set_timer()
        if not anonymous and self._passwords is None:
            _log.warning("nobody can come in by a password: no password file, and anonymous clients only on loopback")
        if anonymous and self._acl is not None and self._passwords is None:
            _log.warning("rules without a password file: every client is who it says it is")
        self.attached = Attached(options, self.broker, self.data)
        await self.attached.start()
        self._listeners = await listen(
            self._endpoints(), self._link, admission=Admission(options.limits), ports=self._ports
        )
        if isinstance(self.broker.gate, TurnGate):
            self.broker.gate.before_writing = self._listeners.flush
        if self.data is not None:
            make_folders(self.data)
            control = Endpoint(name="control", path=os.path.join(self.data, SOCKET), mode=0o600)
            self._control = await listen([control], lambda: Control(self.broker, self._later))
        self._late = asyncio.get_running_loop().create_task(self._drop_late())
        topics = SysTopics(self.broker, _version(), memory=_memory)
        self._sys = asyncio.get_running_loop().create_task(self._say(topics))
        if self.kept is not None:  # nobody should learn of a full disk ten seconds later
            self.kept.gate.on_trouble = topics.publish if options.broker.sys_seconds else topics.meter

    @property
    def keeps(self) -> bool:
        """Whether state outlives the process."""
        return self.data is not None and self.options.persistence.enabled is not False

    def _open_broker(self, options: BrokerOptions) -> None:
        parts: dict[str, Any] = {
            "authenticator": self._passwords,
            "access": self._access,
            "methods": self._methods,
        }
        loop = asyncio.get_running_loop()
        if not self.keeps:
            gate = TurnGate(loop) if self._holds or needs_gate(self.options) else None
            self.broker = Broker(options, gate=gate, **parts)
            return
        assert self.data is not None
        make_folders(self.data)
        self.kept = KeptBroker(self.data, options, self.options.persistence, loop=loop, **parts)
        self.broker = self.kept.broker

    def _link(self) -> Core:
        options = self.broker.options
        metered = options.messages_per_second is not None or options.bytes_per_second is not None
        return MeteredLink(self.broker) if metered else Link(self.broker)

    def _certificate(self) -> TlsFiles:
        o = self.options
        cert, key = o.cert, o.key
        if cert is None or key is None:
            if self.data is None:
                raise OptionsError("development_certificate: needs a data directory to keep it in")
            made = make_development_certificate(self.data)
            cert, key = made.certificate, made.key
            _log.warning("TLS with a certificate for development; clients need %s to believe it", cert)
        return TlsFiles(
            certificate=cert, key=key, client_ca=o.client_ca, require_client_certificate=o.require_client_certificate
        )

    def _endpoints(self) -> list[Endpoint]:
        o = self.options
        tls = None
        if o.tls_port is not None or o.wss_port is not None:
            tls = Tls(self._certificate())
        websocket = WebSocketOptions()
        places = []
        if o.port is not None:
            places.append(Endpoint(name="mqtt", host=o.bind, port=o.port, proxy=o.proxy))
        if o.tls_port is not None:
            places.append(Endpoint(name="mqtts", host=o.bind, port=o.tls_port, tls=tls, proxy=o.proxy))
        if o.ws_port is not None:
            places.append(Endpoint(name="ws", host=o.bind, port=o.ws_port, websocket=websocket))
        if o.wss_port is not None:
            places.append(Endpoint(name="wss", host=o.bind, port=o.wss_port, tls=tls, websocket=websocket))
        if o.unix is not None:
            places.append(Endpoint(name="unix", path=o.unix))
        if not places:
            raise OptionsError("no listener: port, tls_port, ws_port, wss_port and unix are all empty")
        unsent = self.broker.options.max_unsent_bytes
        water = ConnectionOptions(high_water_bytes=unsent, low_water_bytes=unsent // 4)
        return [msgspec.structs.replace(each, options=water) for each in places]

    async def ready(self) -> None:
        """Return at once: ``start`` has opened everything."""

    async def drain(self, seconds: float) -> None:
        """Let nobody in any more and disconnect everyone with 0x8B, as ``shut_down`` of the broker does."""
        if not self._state.serves:
            return
        self._state = State.DRAINING
        if self._listeners is not None:
            self._listeners.stop_accepting()
            self.broker.shut_down()
            if self.kept is not None:
                await self.kept.settle(seconds)
            await self._listeners.close("the broker stops", seconds)
        if self.attached is not None:
            await self.attached.drain(seconds)

    async def stop(self) -> None:
        """End everything."""
        if self._state in (State.READY, State.DEGRADED):
            await self.drain(5.0)
        await self._close()
        self._state = State.STOPPED
        self._stopped.set()

    async def _close(self) -> None:
        for task in (self._sys, self._late):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self._sys = self._late = None
        if self._due is not None:
            self._due.cancel()
            self._due = None
        for listeners in (self._listeners, self._control):
            if listeners is not None:
                await listeners.close("the broker stops", 1.0)
        self._control = None
        if self.attached is not None:
            await self.attached.stop()
        kept, self.kept = self.kept, None
        if kept is not None:
            kept.close()
        if self._passwords is not None:
            self._passwords.close()

    async def wait(self) -> None:
        """Return when it has stopped."""
        await self._stopped.wait()

    def health(self) -> Health:
        """Return how it is: degraded while one of its taps, feeds, bridges or mirrors is, or the disk fails it."""
        if self._state is State.READY and self.attached is not None and (reason := self.attached.trouble):
            return Health(State.DEGRADED, reason)
        if self._state is State.READY and self.kept is not None and self.broker.journal.full:
            return Health(State.DEGRADED, self.broker.journal.full)
        if self._state is State.READY and self.kept is not None and (reason := self.kept.checkpoints.trouble):
            return Health(State.DEGRADED, f"the store cannot be written, so the journal grows: {reason}")
        return Health(self._state, self._reason)

    def describe(self) -> dict[str, Any]:
        """Return addresses and counts."""
        broker = self.broker
        return {
            "listeners": self.addresses,
            "clients": broker.connected,
            "sessions": len(broker.sessions),
            "subscriptions": broker.subscription_count,
            "retained": len(broker.retained),
            "persistence": None if self.kept is None else self.kept.describe(),
            "attached": {} if self.attached is None else self.attached.describe(),
        }

    def check_reload(self) -> list[str]:
        """Return what would keep old passwords, rules or certificates in use; nothing changes."""
        options, problems = self.options, []
        try:
            self._endpoints()
        except (PenstockError, OSError) as exc:
            problems.append(str(exc))
        readers: tuple[tuple[str | None, Callable[[str], object]], ...] = (
            (options.passwords, CredentialsFile),
            (options.acl, AclFile),
        )
        for path, read in readers:
            try:
                if path is not None:
                    read(path)
            except (PenstockError, OSError) as exc:
                problems.append(str(exc))
        return problems

    def use_limits(self, options: ServerOptions) -> None:
        """Take over the limits of other options: of connections, and what the broker lets wait for its sessions."""
        changed = {name: getattr(options.broker, name) for name in RELOADED_LIMITS}
        broker, kept = self.broker, msgspec.structs.replace(self.options.broker, **changed)
        self.options = msgspec.structs.replace(self.options, limits=options.limits, broker=kept)
        if self._listeners is not None:
            self._listeners.admission.use(options.limits)
        broker.options = msgspec.structs.replace(broker.options, **changed)
        broker.budget.limit = options.broker.max_total_queued_bytes
        for session in broker.sessions.values():
            session.options = broker.options

    async def use_attached(self, options: ServerOptions, seconds: float) -> list[str]:
        """Have the taps, feeds, bridges and mirrors of other options, all of them or none; return what prevents it."""
        if self.attached is None or all(getattr(options, name) == getattr(self.options, name) for name in ATTACHED):
            return []
        if options.bridges and not isinstance(self.broker.gate, TurnGate):
            return ["bridges: need a restart of a broker that keeps nothing"]
        problem = await self.attached.change(options, seconds)
        if not problem:
            changed = {name: getattr(options, name) for name in ATTACHED}
            self.options = msgspec.structs.replace(self.options, **changed)
        return [problem] if problem else []

    def reload(self) -> list[str]:
        """Read passwords, rules and certificates again; return what kept the old ones in use."""
        problems = self._listeners.reload_certificates() if self._listeners is not None else []
        if self._passwords is not None:
            problem = self._passwords.file.reload()
            problems += [problem] if problem is not None else []
        if self._acl is not None:
            problem = self._acl.reload()
            problems += [problem] if problem is not None else []
            self.broker.rules_changed(self._acl)
        return problems

    # --- Time

    def _set_timer(self) -> None:
        due = self.broker.next_due
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if due is not None:
            delay = max(0.0, due - self.broker.clock.monotonic())
            self._due = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._due = None
        try:
            self.broker.tick()
        except Exception:  # noqa: BLE001 - whatever it is, the next deadline counts as well
            _log.exception("what was due now was not done")
            self._due = asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._tick)
            return
        self._set_timer()

    def _later(self, question: Question, say: Callable[[Any], None]) -> bool:
        """Take a question that needs time."""
        kept = self.kept
        if question.do != "backup" or question.path is None or kept is None:
            return False
        path = question.path

        async def answer() -> None:
            try:
                say({"ok": msgspec.to_builtins(await back_up(kept, path))})
            except Exception as exc:  # noqa: BLE001 - whatever it is, who asked is told
                say({"error": str(exc) or type(exc).__name__})

        task = asyncio.get_running_loop().create_task(answer())
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)
        return True

    async def _drop_late(self) -> None:
        """Drop what has waited for too long for clients that are away, now and then."""
        while True:
            await asyncio.sleep(min(QUEUE_SECONDS, self.broker.options.max_queued_seconds))
            with said_when_it_fails("what has waited for too long"):
                self.broker.drop_late()

    async def _say(self, topics: SysTopics) -> None:
        """Bring metrics up to date every second, and $SYS as often as it is wanted."""
        seconds, left = self.options.broker.sys_seconds, 0.0
        while True:
            with said_when_it_fails("$SYS and metrics"):
                if seconds and left <= 0:
                    left = seconds
                    topics.publish()
                else:
                    topics.meter()
            pause = min(METRIC_SECONDS, left) if seconds else METRIC_SECONDS
            await asyncio.sleep(pause)
            left -= pause


@contextlib.contextmanager
def said_when_it_fails(what: str) -> Iterator[None]:
    """Log what was raised and go on: a side line of the broker neither ends it nor ends unheard."""
    try:
        yield
    except Exception:  # noqa: BLE001 - whatever it is, the clients are served
        _log.exception("%s", what)


def _memory() -> tuple[int, int]:
    """Return the resident bytes of this process, now and at the most."""
    try:
        now = int(read_small("/proc/self/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        now = 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return now or most, max(now, most)  # the system brings the latter up to date now and then


def _version() -> str:
    try:
        return metadata.version("penstock")
    except metadata.PackageNotFoundError:
        return "unknown"
