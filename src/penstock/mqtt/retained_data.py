r"""The value of a retained message: byte for byte the ``RetainedData`` that mqlite keeps.

    qos:u8  payload_len:u64 payload  tag:u8 [properties_len:u64 properties]  stored_at:u64  tag:u8 [expiry:u32]

little-endian (bincode 1.3).  ``properties`` are the raw properties of MQTT 5 without their length, as they travel on:
neither topic alias nor expiry.  ``stored_at`` is in seconds since 1970.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from penstock.errors import CorruptionError

__all__ = ["RetainedData", "decode_retained", "encode_retained"]

LENGTH: Final = struct.Struct("<Q")
EXPIRY: Final = struct.Struct("<I")


class RetainedData(msgspec.Struct, frozen=True):
    """A retained message as it is stored; ``expiry`` is -1 where there is none."""

    qos: int
    payload: bytes
    properties: bytes | None = None
    stored_at: int = 0
    expiry: int = -1


def encode_retained(data: RetainedData) -> bytes:
    r"""Return the bytes of a value.

    >>> encode_retained(RetainedData(1, b"on", None, 7, 60)).hex(" ")
    '01 02 00 00 00 00 00 00 00 6f 6e 00 07 00 00 00 00 00 00 00 01 3c 00 00 00'
    """
    parts = [bytes((data.qos,)), LENGTH.pack(len(data.payload)), data.payload]
    if data.properties is None:
        parts.append(b"\0")
    else:
        parts += (b"\1", LENGTH.pack(len(data.properties)), data.properties)
    parts.append(LENGTH.pack(data.stored_at))
    parts.append(b"\0" if data.expiry < 0 else b"\1" + EXPIRY.pack(data.expiry))
    return b"".join(parts)


def decode_retained(path: str, key: str, value: bytes) -> RetainedData:
    r"""Return the message of a value; CorruptionError for what is none.

    >>> decode_retained("state", "retained/a", encode_retained(RetainedData(2, b"x", b"\x01\x01", 9)))
    RetainedData(qos=2, payload=b'x', properties=b'\x01\x01', stored_at=9, expiry=-1)
    """
    try:
        (size,) = LENGTH.unpack_from(value, 1)
        at = 9 + size
        payload = value[9:at]
        properties = None
        tag = value[at]
        at += 1
        if tag == 1:
            (size,) = LENGTH.unpack_from(value, at)
            at += 8 + size
            properties = value[at - size : at]
        (stored_at,) = LENGTH.unpack_from(value, at)
        expiring = value[at + 8]
        at += 9
        expiry = -1
        if expiring == 1:
            (expiry,) = EXPIRY.unpack_from(value, at)
            at += 4
        if at != len(value) or tag > 1 or expiring > 1:
            raise ValueError(f"{len(value)} bytes, of which {at} are understood")
    except (struct.error, IndexError, ValueError) as exc:
        raise CorruptionError(path, 0, f"the value of {key!r} is no retained message: {exc}") from None
    return RetainedData(min(value[0], 2), payload, properties, stored_at, expiry)
