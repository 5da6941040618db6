"""The bytes of ``metadata.bin``: postcard 1.x, as narwhal 0.7.0 writes it.

    metadata := handler:string  owner:option(string)  config  acl  members  type:varint
    config   := max_clients:option(u32)  max_payload_size:option(u32)  max_persist_messages:option(u32)
                persist:option(bool)  message_flush_interval:option(u32)
    acl      := join:map  publish:map  read:map
    map      := count:varint (domain:string  count:varint username:string*)*
    members  := count:varint nid:string*                    in NID order
    option   := 00 | 01 value       bool := 00 | 01
    string   := length:varint utf-8
    varint   := 7 bits a byte, lowest first, high bit = more; at most 5 bytes for u32, 10 for a length

There is no header, no version and no checksum.  Field 6, the type, exists since 0.7.0: bytes that end right
after field 5 are of 0.6 and mean a pub/sub channel.  Bytes behind field 6 are ignored.  A decoder must accept
overlong varints, repeated domains (the last one wins), names of any kind in an ACL, and members in any order;
``decode`` keeps their order and leaves sorting to whoever uses them.

Worked example and reasons: docs/formats/channel-metadata.md
"""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar, Final

from penstock.channels.ids import Nid
from penstock.channels.model import Allow, ChannelAcl, ChannelType, PersistedChannel, StoredConfig
from penstock.errors import CorruptionError, OptionsError

__all__ = ["encode", "decode", "decode_any", "MAX_METADATA_BYTES"]

MAX_METADATA_BYTES: Final = 64 << 20
"""Larger files are refused unread: nothing that big was ever written on purpose."""

SMALL_RULES: Final = 256
"""Settings and lists of fewer bytes are remembered for the next channel."""

U32: Final = (5, 0x0F)  # bytes a varint may have, and what may stand in the last one
U64: Final = (10, 0x01)


def encode(channel: PersistedChannel) -> bytes:
    """Return the bytes of a channel; ACL entries sorted, so equal content gives equal bytes.

    >>> encode(PersistedChannel("ch")).hex(" ")
    '02 63 68 00 00 00 00 00 00 00 00 00 00 00'
    """
    parts = [_string(channel.handler)]
    parts.append(b"\0" if channel.owner is None else b"\1" + _member(channel.owner))
    parts.append(_config(channel.config))
    for allow in (channel.acl.join, channel.acl.publish, channel.acl.read):
        parts.append(_varint(len(allow.domains)))
        for domain, names in sorted(allow.domains.items()):
            parts.append(_string(domain))
            parts.append(_varint(len(names)))
            parts.extend(map(_string, sorted(names)))
    parts.append(_varint(len(channel.members)))
    parts.extend(map(_member, channel.members))
    parts.append(_varint(channel.channel_type))
    data = b"".join(parts)
    if len(data) > MAX_METADATA_BYTES:
        raise OptionsError(f"channel {channel.handler!r}: {len(data)} bytes of metadata, at most {MAX_METADATA_BYTES}")
    return data


def decode(data: bytes, file: str = "metadata.bin") -> PersistedChannel:
    r"""Return the channel that ``data`` holds; CorruptionError names ``file`` and the byte.

    >>> decode(bytes.fromhex("02 63 68 00 00 00 00 00 00 00 00 00 00 00")).handler
    'ch'
    >>> decode(b"\x02c")
    Traceback (most recent call last):
    penstock.errors.CorruptionError: metadata.bin at byte 1: a string of 2 bytes, 1 left
    """
    return decode_any(data, file)[0]


def decode_any(data: bytes, file: str = "metadata.bin") -> tuple[PersistedChannel, bool]:
    """Return the channel, and whether its type is missing because 0.6 wrote the file.

    >>> decode_any(encode(PersistedChannel("ch")))[1], decode_any(encode(PersistedChannel("ch"))[:-1])[1]
    (False, True)
    """
    return _Decoder(data, file).channel()


def _varint(number: int) -> bytes:
    if number < 0x80:
        return bytes((number,))
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _string(text: str) -> bytes:
    data = text.encode()
    return _varint(len(data)) + data


@lru_cache(65_536)  # a member list is written again with every change, nearly the same each time
def _member(nid: Nid) -> bytes:
    return _string(str(nid))


@lru_cache(1024)  # channels have few settings among them
def _config(config: StoredConfig) -> bytes:
    parts = [*map(_option, (config.max_clients, config.max_payload_size, config.max_persist_messages))]
    parts.append(b"\0" if config.persist is None else b"\1\1" if config.persist else b"\1\0")
    parts.append(_option(config.message_flush_interval))
    return b"".join(parts)


def _option(number: int | None) -> bytes:
    if number is None:
        return b"\0"
    if not 0 <= number < 1 << 32:
        raise OptionsError(f"{number} does not fit the 32 bits of a setting")
    return b"\1" + _varint(number)


@lru_cache(65_536)  # the same members are in many channels
def _known(data: bytes) -> Nid | None:
    """Return the member these bytes spell; None leaves it to the decoder to say what is wrong with them."""
    try:
        return Nid.parse(data.decode())
    except (UnicodeDecodeError, OptionsError):
        return None


class _Decoder:
    """Walks once over the bytes; every item takes at least a byte, so work and memory are bounded by the input."""

    rules_before: ClassVar[tuple[bytes, StoredConfig, ChannelAcl] | None] = None
    """The settings and lists decoded last, with their bytes."""

    def __init__(self, data: bytes, file: str) -> None:
        self.data, self.file, self.at = data, file, 0

    def channel(self) -> tuple[PersistedChannel, bool]:
        """Return the channel, and whether the type was missing."""
        handler = self.string()
        owner = self.nid() if self.tag("option") else None
        config, acl = self.rules()
        members = self.members()
        old = self.at == len(self.data)
        kind = ChannelType.PUBSUB if old else self.kind()
        return PersistedChannel(handler, owner, config, acl, members, kind), old

    def rules(self) -> tuple[StoredConfig, ChannelAcl]:
        """Return settings and lists, which are often those of the channel before: equal bytes mean equal rules."""
        at, before = self.at, _Decoder.rules_before
        if before is not None and self.data.startswith(before[0], at):
            self.at = at + len(before[0])
            return before[1], before[2]
        clients, payload, messages = self.number(), self.number(), self.number()
        persist = self.tag("bool") if self.tag("option") else None
        config = StoredConfig(clients, payload, messages, persist, self.number())
        acl = ChannelAcl(self.allow(), self.allow(), self.allow())
        if self.at - at < SMALL_RULES:
            _Decoder.rules_before = self.data[at : self.at], config, acl
        return config, acl

    def members(self) -> tuple[Nid, ...]:
        data, size, found = self.data, len(self.data), []
        count = self.count()
        at = self.at
        for _ in range(count):
            length = data[at] if at < size else 0x80
            end = at + 1 + length
            nid = _known(data[at + 1 : end]) if length < 0x80 and end <= size else None
            if nid is None:  # a long name, or a bad one, which nid() says
                self.at = at
                nid, end = self.nid(), self.at
            found.append(nid)
            at = end
        self.at = at
        return tuple(found)

    def fail(self, at: int, reason: str) -> CorruptionError:
        return CorruptionError(self.file, at, reason)

    def varint(self, limit: tuple[int, int], name: str) -> int:
        start, value = self.at, 0
        if start < len(self.data) and (byte := self.data[start]) < 0x80:  # nearly all of them
            self.at = start + 1
            return byte
        most, last = limit
        for index in range(most):
            if self.at >= len(self.data):
                raise self.fail(self.at, f"the bytes end inside {name}")
            byte = self.data[self.at]
            self.at += 1
            if index == most - 1 and byte > last:
                raise self.fail(start, f"{name} that does not fit")
            value |= (byte & 0x7F) << 7 * index
            if byte < 0x80:
                return value
        raise self.fail(start, f"{name} that does not fit")  # pragma: no cover - the last byte decided above

    def tag(self, what: str) -> bool:
        if self.at >= len(self.data):
            raise self.fail(self.at, f"the bytes end where {what} was due")
        byte = self.data[self.at]
        if byte > 1:
            raise self.fail(self.at, f"{what} byte is {byte}, not 0 or 1")
        self.at += 1
        return byte == 1

    def number(self) -> int | None:
        return self.varint(U32, "a u32") if self.tag("option") else None

    def string(self) -> str:
        at = self.at
        # Nearly every length fits one byte: spare those the walk.
        if at < len(self.data) and (length := self.data[at]) < 0x80:
            at += 1
        else:
            length = self.varint(U64, "a length")
            at = self.at
        end = at + length
        if end > len(self.data):
            raise self.fail(at, f"a string of {length} bytes, {len(self.data) - at} left")
        try:
            text = self.data[at:end].decode()
        except UnicodeDecodeError as exc:
            raise self.fail(at + exc.start, "text that is not UTF-8") from None
        self.at = end
        return text

    def nid(self) -> Nid:
        at = self.at
        text = self.string()
        try:
            return Nid.parse(text)
        except OptionsError as exc:
            raise self.fail(at, str(exc)) from None

    def count(self) -> int:
        at = self.at
        count = self.varint(U64, "a count")
        if count > len(self.data) - self.at:
            raise self.fail(at, f"{count} items in {len(self.data) - self.at} bytes")
        return count

    def allow(self) -> Allow:
        domains: dict[str, frozenset[str]] = {}
        for _ in range(self.count()):
            domain = self.string()
            domains[domain] = frozenset([self.string() for _ in range(self.count())])
        return Allow(domains)

    def kind(self) -> ChannelType:
        at = self.at
        number = self.varint(U32, "a type")
        try:
            return ChannelType(number)
        except ValueError:
            raise self.fail(at, f"channel type {number}") from None
