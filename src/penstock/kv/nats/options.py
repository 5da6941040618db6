"""Where a NATS server is and how to get in, and a client that asks for TLS and means it."""

from __future__ import annotations

import base64
import binascii
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from penstock.disk.plain import read_small
from penstock.errors import OptionsError
from penstock.kv.nats.api import OPERATION_SECONDS

__all__ = ["NatsOptions", "new_client", "without_secrets"]

SCHEMES: Final = ("nats", "tls")
ENVIRONMENT: Final = {
    "NATS_USER": "user",
    "NATS_PASSWORD": "password",
    "NATS_PASSWORD_FILE": "password_file",
    "NATS_CREDS": "creds_file",
    "NATS_CA": "ca_file",
    "NATS_CERT": "cert_file",
    "NATS_KEY": "key_file",
}
"""The variables that commands read, and the option each of them sets; most are those of NATS's own command."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class NatsOptions:
    """Where a NATS server is and how to get in.  The first credentials in this order are used:
    ``creds``, ``creds_file``, ``user`` with ``password`` or ``password_file``, those in the URL, none.

    Printing it shows which secrets are set and never what they are.

    >>> NatsOptions(url="nats://me:secret@localhost:4222", creds="AAAA")
    NatsOptions(url='nats://localhost:4222', creds=set, creds_file=None, password=None, url_password=set)
    """  # noqa: D205

    url: str = "nats://localhost:4222"
    """``nats://`` or ``tls://``; several servers of one cluster separated by commas.  One ``tls://`` among them and all
    are reached by TLS or not at all.  A password in a URL is seen by whoever can list processes."""

    creds: str | None = None
    """The text of a .creds file in base 64, for containers that mount no files."""

    creds_file: str | None = None
    """Path of a .creds file."""

    user: str | None = None
    """Name of the user; with a token instead of a user and a password, give the token as the user of the URL."""

    password: str | None = None
    """The password of ``user``."""

    password_file: str | None = None
    """Path of a file whose first line is the password of ``user``; read at each dial."""

    ca_file: str | None = None
    """Path of the certificates that are believed, instead of those of the system."""

    cert_file: str | None = None
    """Path of a certificate that proves who this client is."""

    key_file: str | None = None
    """Path of the key of ``cert_file``."""

    name: str = "penstock"
    """What the server's monitoring shows."""

    operation_seconds: float = OPERATION_SECONDS
    """How long one operation may take before it fails with Timeout."""

    ping_seconds: float = 10.0
    """How often the server is asked whether it is there.  After two questions without an answer the connection
    counts as dead and is dialled again: a link that swallows everything is noticed within three times this."""

    def __post_init__(self) -> None:
        for name in ("operation_seconds", "ping_seconds"):
            if not getattr(self, name) > 0:
                raise OptionsError(f"{name}={getattr(self, name)}: must be positive")
        if self.user is None and (self.password is not None or self.password_file is not None):
            raise OptionsError("password: needs a user")
        if self.key_file is not None and self.cert_file is None:
            raise OptionsError("key_file: needs cert_file")

    @classmethod
    def from_environment(cls, url: str, environ: Mapping[str, str]) -> NatsOptions:
        """Return options for a URL with credentials and certificates from the variables of ENVIRONMENT.

        >>> NatsOptions.from_environment("tls://localhost", {"NATS_USER": "me", "NATS_PASSWORD": "secret"})
        NatsOptions(url='tls://localhost', creds=None, creds_file=None, password=set, url_password=None)
        """
        given: dict[str, Any] = {option: environ[name] for name, option in ENVIRONMENT.items() if environ.get(name)}
        return cls(url=url, **given)

    def __repr__(self) -> str:
        try:
            urls, user, _ = self.servers()
        except OptionsError:
            urls, user = ["?"], None
        shown = (self.creds, self.password or self.password_file, user)
        creds, password, in_url = ("set" if value else "None" for value in shown)
        return (
            f"NatsOptions(url={','.join(urls)!r}, creds={creds}, creds_file={self.creds_file!r}, "
            f"password={password}, url_password={in_url})"
        )

    def servers(self) -> tuple[list[str], str | None, str | None]:
        """Return the addresses without credentials, and the user and password that were in them."""
        urls, user, password = [], None, None
        for url in self.url.split(","):
            # What is wrong is never quoted: in an address that cannot be read, a password may be anywhere.
            try:
                parts = urlsplit(url.strip() if "://" in url else f"nats://{url.strip()}")
                host, port = parts.hostname, parts.port
            except ValueError:
                raise OptionsError("url: a server address must be scheme://[user:password@]host[:port]") from None
            if not host:
                raise OptionsError("url: a server address has no host")
            if parts.scheme not in SCHEMES:
                raise OptionsError("url: a server address begins with nats:// or tls://")
            if parts.path.strip("/") or parts.query or parts.fragment:
                raise OptionsError(
                    "url: there is more behind the host and port of a server; in a password, write / ? # and @ as %XX"
                )
            if parts.username and user is None:
                user, password = unquote(parts.username), None if parts.password is None else unquote(parts.password)
            shown = f"[{host}]" if ":" in host else host
            urls.append(f"{parts.scheme}://{shown}" + (f":{port}" if port is not None else ""))
        return urls, user, password

    @property
    def needs_tls(self) -> bool:
        """Whether TLS was asked for: then there is no connection without it."""
        urls, _, _ = self.servers()
        return any(url.startswith("tls://") for url in urls) or self.ca_file is not None or self.cert_file is not None

    def tls_context(self) -> ssl.SSLContext | None:
        """Return what certificates are checked with, None when TLS was not asked for."""
        if not self.needs_tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as exc:
            place = exc.filename if isinstance(exc, OSError) and exc.filename else self.cert_file or self.ca_file
            raise OptionsError(f"{place}: {exc.strerror or 'no certificate can be read from it'}") from None
        return context

    def credentials(self) -> dict[str, Any]:
        """Return the arguments for nats-py that carry the credentials, by the stated priority."""
        _, user, password = self.servers()
        if self.creds:
            from nats.aio.client import RawCredentials

            try:
                text = base64.b64decode(self.creds, validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                raise OptionsError("creds: must be the text of a .creds file in base 64") from None
            return {"user_credentials": RawCredentials(text)}
        if self.creds_file:
            return {"user_credentials": self.creds_file}
        if self.user:
            return {"user": self.user, "password": self.password or self._password_in_file()}
        if user and password is None:
            return {"token": user}
        return {"user": user, "password": password} if user else {}

    def _password_in_file(self) -> str:
        if self.password_file is None:
            return ""
        try:
            return read_small(self.password_file).decode().partition("\n")[0].rstrip("\r")
        except (OSError, UnicodeDecodeError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else "not a text"
            raise OptionsError(f"{self.password_file}: the password cannot be read: {reason}") from None


def without_secrets(url: str) -> str:
    """Return an address as it may be shown: without what is in front of an @.

    >>> without_secrets("nats://me:secret@localhost:4222"), without_secrets("data/buckets")
    ('nats://localhost:4222', 'data/buckets')
    """
    if "://" not in url:
        return url
    try:
        return ",".join(NatsOptions(url=url).servers()[0])
    except OptionsError:
        return url.partition("://")[0] + "://…"


def new_client(needs_tls: bool) -> Any:
    """Return a nats-py client; one that needs TLS sends nothing to a server that does not offer it.

    nats-py takes ``tls://`` for a wish: where the server does not ask for TLS in its first line it goes on and sends
    the password.  That line is not protected by anything, so whoever is in between could leave the word out.
    """
    from nats import errors
    from nats.aio.client import Client

    if not needs_tls:
        return Client()

    class TlsClient(Client):
        async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
            if initial_connection:
                if not (info.get("tls_required") or info.get("tls_available")):
                    raise errors.Error("the server offers no TLS, and TLS was asked for: nothing was sent")
                info["tls_required"] = True  # it is for us, and nats-py begins TLS by this word
            await super()._process_info(info, initial_connection)

        def _connect_command(self) -> bytes:
            writer = getattr(self._transport, "_io_writer", None)
            if writer is None or writer.get_extra_info("ssl_object") is None:
                raise errors.Error("TLS was asked for and the connection has none: nothing was sent")
            return super()._connect_command()

    return TlsClient()
