"""SCRAM-SHA-256 as a method of enhanced authentication (RFC 5802, RFC 7677): the server's side, sans-IO.

    client-first  n,,n=USER,r=NONCE      →
                                         ←  r=NONCE+OURS,s=SALT,i=ITERATIONS      server-first
    client-final  c=biws,r=…,p=PROOF     →
                                         ←  v=SIGNATURE                           server-final

The password is never sent and not kept: a verifier holds what proves it.  An unknown user is led the same way.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from penstock.errors import OptionsError, Refused

__all__ = ["Verifier", "ScramSha256", "make_verifier", "SCRAM"]

SCRAM: Final = "SCRAM-SHA-256"
ITERATIONS: Final = 4096


class Verifier(msgspec.Struct, frozen=True):
    """What a server keeps of a password.

    >>> Verifier.parse(str(make_verifier("pencil", b"salt"))) == make_verifier("pencil", b"salt")
    True
    """

    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes

    def __str__(self) -> str:
        keys = ":".join(base64.b64encode(key).decode() for key in (self.stored_key, self.server_key))
        return f"{SCRAM}${self.iterations}:{base64.b64encode(self.salt).decode()}${keys}"

    @classmethod
    def parse(cls, text: str) -> Verifier:
        """Read the form that PostgreSQL uses as well: ``SCRAM-SHA-256$4096:salt$stored:server``."""
        try:
            name, middle, keys = text.split("$")
            count, _, salt = middle.partition(":")
            stored, _, server = keys.partition(":")
            parts = [base64.b64decode(part, validate=True) for part in (salt, stored, server)]
            if name != SCRAM or len(parts[1]) != 32 or len(parts[2]) != 32 or int(count) < 1:
                raise ValueError(text)
            return cls(parts[0], int(count), parts[1], parts[2])
        except ValueError:
            raise OptionsError(f"no {SCRAM} verifier: {text[:40]!r}") from None


def make_verifier(password: str, salt: bytes | None = None, iterations: int = ITERATIONS) -> Verifier:
    """Return what is kept of a password."""
    salt = secrets.token_bytes(16) if salt is None else salt
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    server_key = hmac.digest(salted, b"Server Key", "sha256")
    return Verifier(salt, iterations, hashlib.sha256(client_key).digest(), server_key)


class ScramSha256:
    """The method: users and their verifiers.

    >>> method = ScramSha256({"ann": make_verifier("pencil")})
    >>> conversation = method.begin()
    >>> done, answer = conversation.step(b"n,,n=ann,r=abc"); done, answer.startswith(b"r=abc")
    (False, True)
    """

    def __init__(
        self, users: Mapping[str, Verifier], *, nonce: Callable[[], str] = lambda: secrets.token_urlsafe(18)
    ) -> None:
        self.users, self._nonce = users, nonce
        self._secret = secrets.token_bytes(32)

    def begin(self) -> _Conversation:
        """Start a conversation."""
        return _Conversation(self.users, self._nonce(), self._secret)


class _Conversation:
    def __init__(self, users: Mapping[str, Verifier], nonce: str, secret: bytes) -> None:
        self.username: str | None = None
        self._users, self._nonce, self._secret = users, nonce, secret
        self._verifier: Verifier | None = None
        self._first = self._answer = ""

    def step(self, data: bytes | None) -> tuple[bool, bytes | None]:
        """Take the client's next message."""
        try:
            text = (data or b"").decode()
        except UnicodeDecodeError:
            raise Refused("NOT_AUTHORIZED", "not SCRAM") from None
        if data is None or not text:
            if self._answer:
                raise Refused("NOT_AUTHORIZED", "not SCRAM")
            return False, None  # the client waits to be asked
        return self._take_final(text) if self._answer else self._take_first(text)

    def _take_first(self, text: str) -> tuple[bool, bytes]:
        header, _, rest = text.partition(",")
        authzid, _, bare = rest.partition(",")
        fields = dict(part.partition("=")[::2] for part in bare.split(","))
        name, nonce = fields.get("n"), fields.get("r")
        if header not in ("n", "y") or authzid or not name or not nonce or bare.startswith("m="):
            raise Refused("NOT_AUTHORIZED", "not SCRAM")
        name = name.replace("=2C", ",").replace("=3D", "=")
        self.username, self._verifier = name, self._users.get(name)
        # An unknown name gets a salt too, the same one each time, so that asking does not tell who exists.
        salt = hmac.digest(self._secret, name.encode(), "sha256")[:16]
        count = ITERATIONS
        if self._verifier is not None:
            salt, count = self._verifier.salt, self._verifier.iterations
        self._first = bare
        self._channel = base64.b64encode(f"{header},,".encode()).decode()
        self._answer = f"r={nonce}{self._nonce},s={base64.b64encode(salt).decode()},i={count}"
        return False, self._answer.encode()

    def _take_final(self, text: str) -> tuple[bool, bytes]:
        without, _, proof = text.rpartition(",p=")
        fields = dict(part.partition("=")[::2] for part in without.split(","))
        nonce = self._answer.partition(",")[0][2:]
        try:
            given = base64.b64decode(proof, validate=True)
        except ValueError:
            given = b""
        verifier = self._verifier
        if verifier is None or len(given) != 32 or fields.get("r") != nonce or fields.get("c") != self._channel:
            raise Refused("NOT_AUTHORIZED", "authentication failed")
        message = f"{self._first},{self._answer},{without}".encode()
        signature = hmac.digest(verifier.stored_key, message, "sha256")
        key = bytes(a ^ b for a, b in zip(given, signature, strict=True))
        if not hmac.compare_digest(hashlib.sha256(key).digest(), verifier.stored_key):
            raise Refused("NOT_AUTHORIZED", "authentication failed")
        answer = base64.b64encode(hmac.digest(verifier.server_key, message, "sha256"))
        return True, b"v=" + answer
