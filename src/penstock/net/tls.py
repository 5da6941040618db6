"""TLS from files: contexts that can be exchanged while connections live, and the filter that runs OpenSSL on bytes.

A connection keeps the context it began with; `Tls.reload` puts a new one in place only after it has been loaded and
looked at in full.  The filter is sans-IO (`ssl.MemoryBIO`): it works the same behind a PROXY header and below
WebSocket, what a turn of the loop produced becomes one run of TLS records, and a connection that waits holds no
buffers of its own.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import ssl
from typing import Any, Final

import msgspec

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.disk.plain import read_small
from penstock.errors import OptionsError, ProtocolError

__all__ = ["TlsFiles", "Tls", "TlsFilter", "certificate_name"]

_log = logging.getLogger(__name__)

_PIECE: Final = 64 << 10
"""Bytes given to OpenSSL's memory at once: it never gives back what it has grown to."""

_READ: Final = 16 << 10
"""What one record holds at the most: OpenSSL hands out one at a time, and making room for more takes time each time."""


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server's certificate is, and whose certificates it believes.

    >>> TlsFiles(certificate="server.pem", key="server.key").require_client_certificate
    False
    """

    certificate: str
    """PEM: the certificate, then the chain above it."""
    key: str
    """PEM: its key."""
    client_ca: str | None = None
    """PEM: who may sign the certificates of clients; with it the name in a certificate becomes the peer's identity."""
    require_client_certificate: bool = False
    """Refuse who brings none; needs `client_ca`."""
    minimum_version: str = "1.2"
    """"1.2" or "1.3"."""

    def __post_init__(self) -> None:
        if self.minimum_version not in ("1.2", "1.3"):
            raise OptionsError(f"minimum_version={self.minimum_version!r}: must be 1.2 or 1.3")
        if self.require_client_certificate and self.client_ca is None:
            raise OptionsError("require_client_certificate needs client_ca: nobody could be believed")


class Tls:
    """The context new connections begin with.

    >>> import tempfile
    >>> from penstock.net.certificates import make_development_certificate
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tls = Tls(make_development_certificate(folder))
    ...     before = tls.context
    ...     tls.reload(), tls.context is before
    (None, False)
    """

    def __init__(self, files: TlsFiles, clock: Clock = SYSTEM_CLOCK) -> None:
        self.files = files
        self._clock = clock
        self.problem: str | None = None
        """Why the last reload kept the old certificate, None where it did not."""
        self._marks = self._look()
        self.context = load_context(files, clock.now_ns())

    def reload(self) -> str | None:
        """Load the files again; return None when new connections use them, else why the old ones are kept."""
        marks = self._look()
        try:
            self.context = load_context(self.files, self._clock.now_ns())
        except OptionsError as exc:
            self.problem = str(exc)
            _log.error("the TLS certificate was NOT replaced, the old one stays in use: %s", exc)
        else:
            self.problem = None
            _log.info("new connections use the certificate in %s", self.files.certificate)
        self._marks = marks
        return self.problem

    def reload_if_changed(self) -> bool:
        """Reload where one of the files is not the one that was loaded last; return whether it was tried."""
        if self._look() == self._marks:
            return False
        self.reload()
        return True

    def _look(self) -> list[tuple[int, int, int] | None]:
        found: list[tuple[int, int, int] | None] = []
        for path in (self.files.certificate, self.files.key, self.files.client_ca):
            try:
                stat = os.stat(path) if path is not None else None
            except OSError:
                stat = None
            found.append(None if stat is None else (stat.st_mtime_ns, stat.st_ino, stat.st_size))
        return found


def load_context(files: TlsFiles, now_ns: int) -> ssl.SSLContext:
    """Return a server's context, or raise OptionsError that names the file: unreadable, not a pair, or out of date."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3 if files.minimum_version == "1.3" else ssl.TLSVersion.TLSv1_2
    try:
        # A key with a passphrase would ask on the terminal: it is refused instead.
        context.load_cert_chain(files.certificate, files.key, password=lambda: b"")
    except (OSError, ValueError) as exc:
        raise OptionsError(f"{files.certificate} with {files.key}: {_words(exc)}") from exc
    _check_dates(files.certificate, now_ns)
    if files.client_ca is not None:
        try:
            context.load_verify_locations(files.client_ca)
        except (OSError, ValueError) as exc:
            raise OptionsError(f"{files.client_ca}: {_words(exc)}") from exc
        context.verify_mode = ssl.CERT_REQUIRED if files.require_client_certificate else ssl.CERT_OPTIONAL
    return context


def _check_dates(path: str, now_ns: int) -> None:
    from cryptography import x509

    own = x509.load_pem_x509_certificates(read_small(path))[0]
    now = dt.datetime.fromtimestamp(now_ns / 1e9, dt.UTC)
    if now > own.not_valid_after_utc:
        raise OptionsError(f"{path}: expired on {own.not_valid_after_utc:%Y-%m-%d}")
    if now < own.not_valid_before_utc:
        raise OptionsError(f"{path}: not valid before {own.not_valid_before_utc:%Y-%m-%d}")


def _words(exc: Exception) -> str:
    if isinstance(exc, ssl.SSLError):
        return (exc.reason or str(exc)).replace("_", " ").lower()
    return exc.strerror or str(exc) if isinstance(exc, OSError) else str(exc)


def certificate_name(certificate: Any) -> str | None:
    """Return who a peer's certificate (as `ssl` tells it) names: its common name, else its first alternative name.

    >>> certificate_name({"subject": ((("organizationName", "Works"),), (("commonName", "pump-7"),))})
    'pump-7'
    >>> certificate_name({"subjectAltName": (("DNS", "pump-8"),)}), certificate_name(None)
    ('pump-8', None)
    """
    if not certificate:
        return None
    for part in certificate.get("subject", ()):
        for key, value in part:
            if key == "commonName":
                return str(value)
    return next((str(value) for _, value in certificate.get("subjectAltName", ())), None)


class TlsFilter:
    """OpenSSL between the socket's bytes and the next filter's; either side of a connection."""

    __slots__ = ("_incoming", "_outgoing", "_peer", "_ssl", "ended", "established")

    def __init__(
        self, context: ssl.SSLContext, peer: str, *, server_side: bool = True, server_hostname: str | None = None
    ) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=server_hostname
        )
        self._peer = peer
        self.established = False
        self.ended = False

    @property
    def identity(self) -> str | None:
        """The name in the peer's verified certificate."""
        return certificate_name(self._ssl.getpeercert())

    def begin(self) -> None:
        """Say the first word, as a client does; `answers` has it."""
        self._shake_hands()

    def receive(self, data: bytes) -> list[bytes]:
        """Return what ``data`` decrypts to; raises ProtocolError where it is no TLS."""
        if len(data) <= _PIECE:
            self._incoming.write(data)
            return self._decrypt()
        found: list[bytes] = []
        view = memoryview(data)
        for at in range(0, len(view), _PIECE):
            self._incoming.write(view[at : at + _PIECE])
            found += self._decrypt()
        return found

    def _decrypt(self) -> list[bytes]:
        found: list[bytes] = []
        if self.ended or (not self.established and not self._shake_hands()):
            return found
        read, append = self._ssl.read, found.append
        try:
            while True:
                piece = read(_READ)
                if not piece:
                    self.ended = True
                    break
                append(piece)
        except (ssl.SSLWantReadError, ssl.SSLSyscallError):
            pass
        except ssl.SSLZeroReturnError:
            self.ended = True
        except ssl.SSLError as exc:
            raise ProtocolError(self._peer, "TLS record", _words(exc)) from exc
        return found

    def _shake_hands(self) -> bool:
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLCertVerificationError as exc:
            raise ProtocolError(self._peer, "TLS handshake", f"its certificate: {exc.verify_message}") from exc
        except (ssl.SSLError, OSError) as exc:
            raise ProtocolError(self._peer, "TLS handshake", _words(exc)) from exc
        self.established = True
        return True

    def send(self, data: bytes) -> bytes:
        """Return the records that carry ``data``."""
        try:
            if len(data) <= _PIECE:
                self._ssl.write(data)
                return self._outgoing.read()
            view, records = memoryview(data), []
            for at in range(0, len(view), _PIECE):
                self._ssl.write(view[at : at + _PIECE])
                records.append(self._outgoing.read())
        except ssl.SSLError as exc:
            raise ProtocolError(self._peer, "TLS record", _words(exc)) from exc
        return b"".join(records)

    def answers(self) -> bytes:
        """Return what OpenSSL itself has to say: the handshake, alerts, new tickets."""
        return self._outgoing.read()

    def goodbye(self) -> bytes:
        """Return the alert that ends the connection."""
        try:
            self._ssl.unwrap()
        except (ssl.SSLError, OSError, ValueError):
            pass  # the peer's own alert is not waited for
        return self._outgoing.read()
