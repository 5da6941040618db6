"""Who may come in: a file of names with hashed passwords and tokens.

    line := name ":" hash            "#" begins a comment; a name has no colon
    hash := $argon2id$…              argon2, what we write
          | $7$rounds$salt$hash      mosquitto 2: PBKDF2 with SHA-512, base64
          | $6$salt$hash             mosquitto 1: SHA-512 of password and salt, base64
          | $token$sha256            a long random secret that was made here: one SHA-256, hex

mosquitto's password file is read as it is.  Passwords are checked by threads of their own: a check costs argon2 64 MiB
and some 50 ms on purpose, so it must not stop the loop, and two at a time bound the memory.  A password that was right
is known again for a while by a keyed hash, so that a fleet that reconnects does not wait for itself.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import os
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from penstock.disk import Threads
from penstock.disk.plain import read_small
from penstock.errors import Backpressure, OptionsError
from penstock.net.private import replace_private

__all__ = ["Credentials", "CredentialsFile", "change_credentials", "hash_password", "hash_token", "new_token"]

_log = logging.getLogger(__name__)

THREADS: Final = 2
WAITING: Final = 10_000
"""Checks that may wait for a thread; a flood beyond it is refused instead of remembered."""
KNOWN: Final = 65_536
"""Right passwords that are known again."""
MOST_BYTES: Final = 256 << 20
"""A file of passwords is no longer: more than a million names."""

_KINDS: Final = ("$argon2", "$7$", "$6$", "$token$")


def hash_password(password: str | bytes) -> str:
    """Return the line's right half for a password.

    >>> hash_password("s3cret").startswith("$argon2id$")
    True
    """
    import argon2

    return argon2.PasswordHasher().hash(password)


def new_token() -> str:
    """Return a secret that nobody can guess: 256 bits.

    >>> len(new_token()), new_token() == new_token()
    (43, False)
    """
    return secrets.token_urlsafe(32)


def hash_token(token: str | bytes) -> str:
    """Return the line's right half for a token.

    >>> hash_token("a")
    '$token$ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb'
    """
    return "$token$" + hashlib.sha256(token.encode() if isinstance(token, str) else token).hexdigest()


class Credentials:
    """Names and hashes.  Pure and unchanging; ``verify`` takes its time.

    >>> users = Credentials({"ann": hash_password("s3cret"), "pump": hash_token("t0ken")})
    >>> users.verify("ann", b"s3cret"), users.verify("ann", b"guess"), users.verify("bob", b"s3cret")
    (True, False, False)
    >>> users.name_of_token(b"t0ken"), users.name_of_token(b"s3cret")
    ('pump', None)
    """

    def __init__(self, hashes: Mapping[str, str]) -> None:
        self._hashes = dict(hashes)
        self._of_token = {stored: name for name, stored in self._hashes.items() if stored.startswith("$token$")}

    @classmethod
    def parse(cls, text: str, source: str = "credentials") -> Credentials:
        """Read the lines of a file; a line that means nothing is refused with its number.

        >>> Credentials.parse("ann:secret")
        Traceback (most recent call last):
        penstock.errors.OptionsError: credentials line 1: 'ann' has a password that is not hashed
        """
        hashes: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            line = line.rstrip()
            if not line or line.startswith("#"):
                continue
            name, colon, stored = line.partition(":")
            where = f"{source} line {number}"
            if not colon or not name:
                raise OptionsError(f"{where}: not of the form name:hash")
            if not stored.startswith(_KINDS):
                raise OptionsError(f"{where}: {name!r} has a password that is not hashed")
            if name in hashes:
                raise OptionsError(f"{where}: {name!r} is there twice")
            _check_form(stored, where)
            hashes[name] = stored
        return cls(hashes)

    def __contains__(self, name: object) -> bool:
        return name in self._hashes

    def __len__(self) -> int:
        return len(self._hashes)

    def stored(self, name: str) -> str | None:
        """Return what is kept about a name."""
        return self._hashes.get(name)

    def verify(self, name: str, password: bytes) -> bool:
        """Return whether it is the password or token of that name.  An unknown name takes as long as a known one."""
        stored = self._hashes.get(name)
        if stored is None:
            _verify(_unknown_hash(), password)
            return False
        return _verify(stored, password)

    def name_of_token(self, token: bytes) -> str | None:
        """Return whose token it is: for protocols where a token comes without a name."""
        return self._of_token.get(hash_token(token))

    def is_cheap(self, name: str) -> bool:
        """Whether a check may be made on the loop: it takes microseconds."""
        stored = self._hashes.get(name)
        return stored is not None and stored.startswith(("$token$", "$6$"))


_unknown: list[str] = []


def _unknown_hash() -> str:
    if not _unknown:
        _unknown.append(hash_password(secrets.token_bytes(16)))
    return _unknown[0]


def _verify(stored: str, password: bytes) -> bool:
    if stored.startswith("$token$"):
        return hmac.compare_digest(stored, hash_token(password))
    if stored.startswith("$argon2"):
        import argon2

        try:
            return argon2.PasswordHasher().verify(stored, password)
        except (argon2.exceptions.VerificationError, argon2.exceptions.InvalidHashError):
            return False
    parts = stored.split("$")[1:]
    if parts[0] == "6":
        salt, digest = map(base64.b64decode, parts[1:3])
        return hmac.compare_digest(hashlib.sha512(password + salt).digest(), digest)
    salt, digest = map(base64.b64decode, parts[2:4])
    return hmac.compare_digest(hashlib.pbkdf2_hmac("sha512", password, salt, int(parts[1]), len(digest)), digest)


def _check_form(stored: str, where: str) -> None:
    parts = stored.split("$")[1:]
    try:
        if stored.startswith("$argon2"):
            import argon2

            argon2.extract_parameters(stored)  # its error is a ValueError
            return
        if parts[0] == "6":
            _, salt, digest = parts
            base64.b64decode(salt, validate=True)
            good = len(base64.b64decode(digest, validate=True)) == 64
        elif parts[0] == "7":
            _, rounds, salt, digest = parts
            good = int(rounds) > 0 and len(base64.b64decode(digest, validate=True)) > 0
            base64.b64decode(salt, validate=True)
        else:
            good = len(bytes.fromhex(parts[1])) == 32
    except (ValueError, IndexError) as exc:
        raise OptionsError(f"{where}: the hash is damaged: {exc}") from exc
    if not good:
        raise OptionsError(f"{where}: the hash is too short")


class CredentialsFile:
    """A file of credentials that is read again on request, and checked off the loop.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "passwords")
    ...     _ = change_credentials(path, "ann", hash_password("s3cret"))
    ...     users = CredentialsFile(path)
    ...     asyncio.run(users.check("ann", b"s3cret"))
    True
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.problem: str | None = None
        """Why the last reload kept the old credentials."""
        self.current = self._load()
        self._pool: Threads | None = None
        self._waiting = 0
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._key = secrets.token_bytes(32)

    def _load(self) -> Credentials:
        try:
            return Credentials.parse(read_small(self.path, MOST_BYTES).decode(), self.path)
        except (OSError, UnicodeDecodeError) as exc:
            raise OptionsError(f"{self.path}: {getattr(exc, 'strerror', None) or exc}") from exc

    def reload(self) -> str | None:
        """Read the file again; return None when it counts from now on, else why the old one still does."""
        try:
            self.current = self._load()
            self.problem = None
        except OptionsError as exc:
            self.problem = str(exc)
            _log.error("the credentials were NOT replaced, the old ones still count: %s", exc)
        return self.problem

    async def check(self, name: str, password: bytes) -> bool:
        """Return whether it is the password of that name; raises Backpressure where too many wait already."""
        current = self.current
        if current.is_cheap(name):
            return current.verify(name, password)
        seal = hashlib.blake2b(name.encode() + b"\0" + password, key=self._key).digest()
        if name in current and self._known.get(seal) == current.stored(name):
            self._known.move_to_end(seal)
            return True
        if self._waiting >= WAITING:
            raise Backpressure(f"{self.path}: {self._waiting} passwords wait to be checked")
        if self._pool is None:
            self._pool = Threads(THREADS, "penstock-passwords")
        self._waiting += 1
        try:
            right = await asyncio.get_running_loop().run_in_executor(self._pool, current.verify, name, password)
        finally:
            self._waiting -= 1
        stored = current.stored(name)
        if right and stored is not None:
            self._known[seal] = stored
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        return right

    def close(self) -> None:
        """Let the threads go."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def change_credentials(path: str, name: str, stored: str | None, *, fresh: bool = False) -> bool:
    """Write a name's hash into the file, or take the name out with None; everything else stays as it is.

    The file is replaced as a whole or not at all and stays readable by whom it was; with ``fresh`` no other name stays
    in it.  Returns whether the name was there.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "passwords")
    ...     change_credentials(path, "pump", hash_token("t0ken")), change_credentials(path, "pump", None)
    (False, True)
    """
    if not name or ":" in name or "\n" in name or name.startswith("#"):
        raise OptionsError(f"{name!r} cannot be a name: no colon, no line break, no # in front")
    lines: list[str] = []
    mode = 0o600
    if os.path.exists(path):
        lines = read_small(path, MOST_BYTES).decode().splitlines()
        mode = os.stat(path).st_mode & 0o777
    kept = [line for line in lines if line.startswith("#") or line.partition(":")[0] != name]
    was_there = len(kept) < len(lines)
    if fresh:
        kept = []
    if stored is not None:
        kept.append(f"{name}:{stored}")
    replace_private(path, "".join(f"{line}\n" for line in kept).encode(), mode)
    return was_there
