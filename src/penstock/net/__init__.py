"""Floor 6: what every server stands on.  Listeners, connections, TLS, WebSocket, PROXY headers, credentials, limits.

listen(endpoints, make_core)          a socket read is one batch for the core, a turn of the loop one write
"""

from penstock.net.certificates import make_development_certificate
from penstock.net.connection import Connection, ConnectionOptions, Core, Peer
from penstock.net.credentials import (
    Credentials,
    CredentialsFile,
    change_credentials,
    hash_password,
    hash_token,
    new_token,
)
from penstock.net.dial import Target, dial
from penstock.net.limits import Admission, ConnectionLimits, TokenBucket
from penstock.net.listen import Endpoint, Listeners, listen
from penstock.net.loop import run
from penstock.net.tls import Tls, TlsFiles
from penstock.net.websocket import WebSocketOptions

__all__ = [
    "listen",
    "Endpoint",
    "Listeners",
    "Core",
    "Connection",
    "ConnectionOptions",
    "Peer",
    "dial",
    "Target",
    "Tls",
    "TlsFiles",
    "make_development_certificate",
    "WebSocketOptions",
    "Credentials",
    "CredentialsFile",
    "change_credentials",
    "hash_password",
    "hash_token",
    "new_token",
    "Admission",
    "ConnectionLimits",
    "TokenBucket",
    "run",
]
