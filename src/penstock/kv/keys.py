"""Which keys and prefixes a bucket can have: the same everywhere, so that what works in a folder works on NATS."""

from __future__ import annotations

import re
from typing import Final

from penstock.errors import OptionsError

__all__ = ["check_key", "check_prefix", "check_ttl"]

_KEY: Final = re.compile(r"\A[-/_=.a-zA-Z0-9]+\Z")


def check_key(key: str) -> str:
    """Return the key, or raise OptionsError for one no subject can carry.

    >>> check_key("node.a")
    'node.a'
    >>> check_key("node.*")
    Traceback (most recent call last):
    penstock.errors.OptionsError: key 'node.*': letters, digits and -/_=. only, no dot at an end, no two in a row
    """
    if not _KEY.match(key) or key.startswith(".") or key.endswith(".") or ".." in key:
        raise OptionsError(f"key {key!r}: letters, digits and -/_=. only, no dot at an end, no two in a row")
    return key


def check_prefix(prefix: str) -> str:
    """Return the prefix: empty, or a key and a dot.

    >>> check_prefix("node")
    Traceback (most recent call last):
    penstock.errors.OptionsError: prefix 'node': must be empty or end in a dot
    """
    if prefix:
        if not prefix.endswith("."):
            raise OptionsError(f"prefix {prefix!r}: must be empty or end in a dot")
        check_key(prefix[:-1])
    return prefix


def check_ttl(ttl_seconds: float) -> float:
    """Return a time to live that can be; OptionsError for another.

    >>> check_ttl(0)
    Traceback (most recent call last):
    penstock.errors.OptionsError: ttl_seconds=0: must be above 0 and below 1e9
    """
    if not 0 < ttl_seconds < 1e9:
        raise OptionsError(f"ttl_seconds={ttl_seconds}: must be above 0 and below 1e9")
    return ttl_seconds
