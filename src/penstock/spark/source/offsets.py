"""The offset of a stream: for each channel its identity and the position up to which it was read.  Pure.

    {"channels": {"site/ticks": {"id": "…", "at": 4096}}}

More fields appear when they are needed.  ``from`` is where the batch that ends with this offset begins when it is not
where the one before ended: the channel is new, or something was lost and that is allowed.  ``lost`` counts the records
that were lost so far, where they can be counted, and ``lost_bytes`` how many bytes of the log at most where they
cannot.  ``seen`` is the fingerprint of the last record before the position, so that a backup that was put back is
noticed.

Spark keeps two offsets a batch.  Those of many channels are packed: names, positions, fingerprints and five bytes of
each identity in columns, compressed; about 25 bytes a channel instead of 110.  Both forms are read, whatever is
written.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np

from penstock.errors import OptionsError
from penstock.log.fingerprint import Fingerprint

__all__ = ["Offset", "Place", "pack_offset", "same_identity", "short_identity", "unpack_offset"]

READABLE: Final = 100
"""So many channels are written as they are."""
ID_BYTES: Final = 5
SHORT: Final = "~"
"""How an identity begins that was shortened."""

Place = dict[str, Any]
Offset = dict[str, Any]


def pack_offset(places: Mapping[str, Place]) -> Offset:
    """Return the offset that holds these places.

    >>> pack_offset({"ticks": {"id": "x", "at": 80}})
    {'channels': {'ticks': {'id': 'x', 'at': 80}}}
    >>> many = {f"c{n:05}": {"id": f"{n:032x}", "at": 80 + 24 * n} for n in range(10_000)}
    >>> len(str(pack_offset(many))) < 15 * 10_000
    True
    """
    if len(places) <= READABLE:
        return {"channels": dict(places)}
    names = sorted(places)
    ids = b"".join(_raw(str(places[name]["id"])) for name in names)
    at = np.array([places[name]["at"] for name in names], "<u8").view(np.uint8).reshape(-1, 8).T.tobytes()
    more: dict[str, Place] = {}
    seen = bytearray()
    for index, name in enumerate(names):
        place = places[name]
        mark = Fingerprint.parse(place["seen"]) if "seen" in place else None
        seen += (
            bytes(16)
            if mark is None
            else (place["at"] - mark.position).to_bytes(8, "little", signed=True) + mark.digest
        )
        if len(place) > 2 + (mark is not None):
            more[str(index)] = {key: value for key, value in place.items() if key not in ("id", "at", "seen")}
    marks = np.frombuffer(seen, np.uint8).reshape(-1, 16).T.tobytes()
    told = msgspec.json.encode([names, more])
    columns = len(told).to_bytes(4, "little") + told + at + ids + marks
    return {"count": len(names), "packed": base64.b85encode(zlib.compress(columns, 6)).decode()}


def unpack_offset(offset: Mapping[str, Any] | None) -> dict[str, Place]:
    """Return the places of an offset, in whichever form it is.

    >>> unpack_offset({"channels": {"ticks": {"id": "x", "at": 80}}})
    {'ticks': {'id': 'x', 'at': 80}}
    """
    if not offset:
        return {}
    if "packed" not in offset:
        return {name: dict(place) for name, place in offset.get("channels", {}).items()}
    try:
        columns = zlib.decompress(base64.b85decode(offset["packed"]))
        length = int.from_bytes(columns[:4], "little")
        names, more = msgspec.json.decode(columns[4 : 4 + length], type=tuple[list[str], dict[str, Place]])
        count, begin = len(names), 4 + length
        at = np.frombuffer(columns, np.uint8, 8 * count, begin).reshape(8, count).T.copy().view("<u8")[:, 0].tolist()
        ids = columns[begin + 8 * count : begin + (8 + ID_BYTES) * count]
        marks = np.frombuffer(columns, np.uint8, -1, begin + (8 + ID_BYTES) * count).reshape(16, count).T.tobytes()
        places: dict[str, Place] = {
            name: {"id": SHORT + ids[n * ID_BYTES : (n + 1) * ID_BYTES].hex(), "at": at[n]}
            for n, name in enumerate(names)
        }
        for n, name in enumerate(names):
            mark = marks[16 * n : 16 * n + 16]
            if mark.strip(b"\0"):
                places[name]["seen"] = str(
                    Fingerprint(at[n] - int.from_bytes(mark[:8], "little", signed=True), mark[8:])
                )
        for index, fields in more.items():
            places[names[int(index)]].update(fields)
    except (ValueError, KeyError, IndexError, zlib.error, msgspec.MsgspecError) as exc:
        raise OptionsError(f"the offset in the checkpoint is not one of a stream of channels: {exc}") from None
    return places


def same_identity(known: str, identity: str) -> bool:
    """Whether an offset's identity is that of a log, shortened or not.

    >>> same_identity(short_identity("abc"), "abc"), same_identity("abc", "abc"), same_identity("abc", "")
    (True, True, False)
    """
    return known == identity or (known.startswith(SHORT) and known == short_identity(identity))


def short_identity(identity: str) -> str:
    """Return an identity as packed offsets have it.

    >>> short_identity("")
    '~0000000000'
    """
    return SHORT + _raw(identity).hex()


def _raw(identity: str) -> bytes:
    if identity.startswith(SHORT):
        return bytes.fromhex(identity[1:])
    return hashlib.sha256(identity.encode()).digest()[:ID_BYTES] if identity else bytes(ID_BYTES)
