"""How a channel server behaves: what it serves, where, and with which limits."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.channels.ids import is_domain, is_handler
from penstock.channels.model import Limits
from penstock.channels.wire.settings import WireSettings
from penstock.errors import OptionsError

__all__ = ["ChannelServerOptions", "ModulatorLink"]

DEFAULT_PORT = 22_622


class ModulatorLink(msgspec.Struct, frozen=True, kw_only=True):
    """Where a modulator of its own process is reached, and where it reaches the server.

    >>> ModulatorLink(address="127.0.0.1:22623").timeout
    5.0
    """

    address: str = ""
    """``host:port``, or empty."""
    socket_path: str = ""
    shared_secret: str = ""
    heartbeat_interval: float = 60.0
    connect_timeout: float = 5.0
    timeout: float = 5.0
    backoff_initial_delay: float = 0.1
    backoff_max_delay: float = 30.0
    backoff_max_retries: int = 5

    m2s_address: str = ""
    """Where the server listens for payloads of the modulator; empty: nowhere."""
    m2s_socket_path: str = ""
    m2s_secret: str = ""
    m2s: WireSettings = WireSettings(
        max_connections=250, max_payload_size=262_144, rate_limit=524_288, connect_timeout=5.0,
        keep_alive_interval=30.0, request_timeout=10.0, payload_read_timeout=5.0,
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.m2s_address and not self.m2s_secret:
            raise OptionsError("modulator: a TCP listener for modulators needs a shared_secret")


class ChannelServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a channel server serves and where.

    >>> ChannelServerOptions(port=0).bind_address
    '127.0.0.1'
    >>> ChannelServerOptions(domain="example.com")
    Traceback (most recent call last):
    penstock.errors.OptionsError: domain='example.com': give cert_file and key_file, or plain_port alone
    """

    domain: str = "localhost"
    """What stands behind the @ of names and channels; other than ``localhost`` needs a certificate."""
    bind_address: str = "127.0.0.1"
    """The address that TCP listeners bind."""
    port: int | None = DEFAULT_PORT
    """TLS; 0 picks a free one, None does not listen."""
    plain_port: int | None = None
    """Without TLS; 0 picks a free one."""
    socket_path: str | None = None
    """A unix socket, without TLS."""
    cert_file: str = ""
    """Path of the certificate; read again by a reload."""
    key_file: str = ""
    """Both empty: a certificate for localhost is made and kept in the data directory."""
    limits: Limits = Limits()
    """What no channel and no client may exceed."""
    wire: WireSettings = WireSettings()
    """What one connection may do, and how long it may take."""
    segment_bytes: int = 128 << 20
    """Size of a segment of a channel's history."""
    sync: Literal["always", "interval", "none"] = "always"
    """As for ManagerOptions: ``always`` goes by the flush interval of each channel."""
    modulator_timeout: float = 5.0
    """Seconds a modulator in this process may take for one answer."""
    modulator: ModulatorLink | None = None
    """Where a modulator in a process of its own is; None: there is none."""
    tap: dict[str, str] = {}
    """Copies what channels say into logs: handler, or ``*`` for all, → path of a message log."""
    metrics_address: str = ""
    """``host:port`` of the metrics endpoint; empty: none."""

    def __post_init__(self) -> None:
        if not is_domain(self.domain):
            raise OptionsError(f"domain={self.domain!r}: not a domain")
        if bool(self.cert_file) != bool(self.key_file):
            raise OptionsError("cert_file and key_file go together")
        if self.domain != "localhost" and not self.cert_file and self.port is not None:
            raise OptionsError(f"domain={self.domain!r}: give cert_file and key_file, or plain_port alone")
        for handler, path in self.tap.items():
            if handler != "*" and not is_handler(handler):
                raise OptionsError(f"tap {handler!r}: no channel has this name; write ops/east, or * for all")
            if not isinstance(path, str) or not path:
                raise OptionsError(f"tap {handler!r}: {path!r} is no path of a log")
        if self.port is None and self.plain_port is None and self.socket_path is None:
            raise OptionsError("a server listens somewhere: give port, plain_port or socket_path")
