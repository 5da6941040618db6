"""What callers give a client, looked at before anything is sent: most of what a server takes for a mistake ends the
connection, and with it what others ask over it.
"""  # noqa: D205

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, Final

from penstock.channels.ids import Nid
from penstock.errors import OptionsError

__all__ = ["as_bytes", "as_member", "check_settings", "tls_context"]

SETTINGS: Final[dict[str, type]] = {
    "persist": bool, "type": str, "max_clients": int, "max_payload_size": int, "max_persist_messages": int,
    "message_flush_interval": int,
}  # fmt: skip
KINDS: Final = {bool: "true or false", int: "a whole number", str: "a word"}


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings of a channel that there are none of, and values that cannot be theirs.

    >>> check_settings({"persist": "yes"})
    Traceback (most recent call last):
    penstock.errors.OptionsError: persist='yes': true or false is wanted
    """
    for name, value in settings.items():
        kind = SETTINGS.get(name)
        if kind is None:
            raise OptionsError(f"{name}: no such setting, only {', '.join(sorted(SETTINGS))}")
        if type(value) is not kind and value is not None:
            raise OptionsError(f"{name}={value!r}: {KINDS[kind]} is wanted")


def as_member(name: str | None) -> str | None:
    """Return the name of a member, or of a domain, if it is one.

    >>> as_member("ann@localhost"), as_member("example.com"), as_member(None)
    ('ann@localhost', 'example.com', None)
    """
    return None if name is None else str(Nid.parse(name))


def as_bytes(payload: bytes) -> bytes:
    """Return what a caller gave as bytes: any buffer will do.

    >>> as_bytes(bytearray(b"hi!"))
    b'hi!'
    """
    return payload if type(payload) is bytes else bytes(memoryview(payload))


def tls_context(ca: str | None, *, verify: bool) -> ssl.SSLContext:
    """Return what a server's certificate is checked with.

    >>> tls_context("nowhere.pem", verify=True)
    Traceback (most recent call last):
    penstock.errors.OptionsError: nowhere.pem: No such file or directory
    """
    try:
        context = ssl.create_default_context(cafile=ca)
    except ssl.SSLError as exc:
        raise OptionsError(f"{ca}: no certificate can be read from it") from exc
    except OSError as exc:
        raise OptionsError(f"{ca}: {exc.strerror}") from exc
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
