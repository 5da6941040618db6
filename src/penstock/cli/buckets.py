"""Which bucket a command means: a folder is embedded, ``nats://`` and ``tls://`` are NATS."""

from __future__ import annotations

import os

from penstock.disk import PosixDisk
from penstock.errors import OptionsError
from penstock.kv import Connection, EmbeddedConnection, NatsConnection, NatsOptions

__all__ = ["connection_of", "is_nats", "bucket_folder"]


def is_nats(place: str) -> bool:
    """Whether a place is a NATS server.

    >>> is_nats("nats://localhost:4222"), is_nats("data/buckets")
    (True, False)
    """
    return place.startswith(("nats://", "tls://"))


def bucket_folder(place: str) -> tuple[str, str] | None:
    """Return (folder, name) when ``place`` is the folder of one embedded bucket, else None.

    >>> bucket_folder("/nowhere/at/all") is None
    True
    """
    if PosixDisk().stat(os.path.join(place, "bucket.json")) is None:
        return None
    folder, name = os.path.split(os.path.abspath(place))
    return folder, name


def connection_of(place: str, bucket: str, *, make: bool) -> Connection:
    """Return the connection to a place; without ``make`` an embedded bucket must be there already."""
    if is_nats(place):
        return NatsConnection(NatsOptions(url=place))
    if not make and bucket_folder(os.path.join(place, bucket)) is None:
        raise OptionsError(f"{place}: there is no bucket {bucket!r} in this folder")
    return EmbeddedConnection(place)
