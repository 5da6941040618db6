"""Where a host is: what cannot be one is refused before anybody is asked."""

from __future__ import annotations

from penstock.errors import OptionsError

__all__ = ["check_address"]


def check_address(host: str, port: int) -> None:
    """Refuse a port that does not exist, and a host that nobody can look up.

    >>> check_address("127.0.0.1", 1883)
    >>> check_address("broker..example", 1883)
    Traceback (most recent call last):
    penstock.errors.OptionsError: 'broker..example': this is no name of a host
    """
    if not 0 <= port <= 65_535:
        raise OptionsError(f"port {port} does not exist")
    try:
        host.encode("idna")  # as the resolver does it
    except UnicodeError:
        raise OptionsError(f"{host!r}: this is no name of a host") from None
    if not host or "\0" in host:
        raise OptionsError(f"{host!r}: this is no name of a host")
