"""The stream inside a compressed segment: packing it, and unpacking it piece by piece.

Snappy means the framing format: an identifier, then chunks of at most 65536 unpacked bytes, each with its own
CRC-32C.  The chunks are cut here and each is unpacked by itself, so memory stays bounded whatever the bytes
say, and everything before a damaged chunk is still delivered.  Gzip goes through zlib in the same way.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Final

from penstock.disk import ReadFile
from penstock.errors import CorruptionError, UnsupportedError
from penstock.log.filechannel.format import HEADER_BYTES, Header, Method

__all__ = ["Unpacker", "pack", "snappy_codec"]

IDENTIFIER: Final = b"\xff\x06\x00\x00sNaPpY"
IDENTIFIERS: Final = (IDENTIFIER[4:], b"S2sTwO")
PACK_BYTES: Final = 1 << 20
GZIP_STEP: Final = 4096
GZIP: Final = 31  # zlib's name for the gzip wrapper with the largest window
CHUNK_LIMIT: Final = 1 << 17  # a chunk of 65536 bytes never packs to more


def snappy_codec() -> Any:
    """Return the package that does snappy; UnsupportedError names what to install."""
    try:
        import cramjam
    except ImportError:
        raise UnsupportedError("snappy segments need the package cramjam: pip install 'penstock[compress]'") from None
    return cramjam.snappy


def pack(frames: Iterator[bytes | memoryview], method: Method) -> Iterator[bytes]:
    """Yield the stream of those frames; nothing at all for an empty snappy stream, as in the original."""
    if method == "gzip":
        packer = zlib.compressobj(wbits=GZIP)
        for piece in frames:
            yield packer.compress(piece)
        yield packer.flush()
        return
    codec, first = snappy_codec(), True
    for piece in frames:
        if len(piece):
            stream = bytes(codec.compress(piece))
            yield stream if first else stream.removeprefix(IDENTIFIER)
            first = False


class Unpacker:
    """The frames of one compressed segment, from its beginning on.

    ``read`` returns more of them each time and b"" behind the last; CorruptionError where the stream breaks.
    What a stream holds past the end offset of the header is never unpacked.
    """

    def __init__(self, file: ReadFile, header: Header) -> None:
        assert header.end is not None
        self._file, self._left = file, header.end - header.begin
        self._at = HEADER_BYTES
        self._damage: CorruptionError | None = None
        self._pieces = self._gzip() if header.method == "gzip" else self._snappy()

    def read(self, size: int) -> bytes:
        """Return at least ``size`` bytes, fewer only at the end; what came before damage comes first."""
        if self._damage is not None:
            raise self._damage
        parts: list[bytes] = []
        got = 0
        try:
            while got < size and self._left:
                piece = next(self._pieces, b"")
                if not piece:
                    raise CorruptionError(
                        self._file.path, self._at, f"the stream ends {self._left} bytes before its header says"
                    )
                piece = piece[: self._left]
                self._left -= len(piece)
                parts.append(piece)
                got += len(piece)
        except CorruptionError as exc:
            if not got:
                raise
            self._damage = exc  # met by the next read
        return b"".join(parts)

    def finish(self) -> None:
        """Read the rest of the stream: CorruptionError if its end is not in order."""
        while self.read(PACK_BYTES):
            pass
        for piece in self._pieces:
            if piece:
                raise CorruptionError(self._file.path, self._at, "the stream goes on behind the end the header names")

    def _snappy(self) -> Iterator[bytes]:
        codec, size = snappy_codec(), self._file.stat().size
        named = False
        while self._at < size:
            head = self._file.read_at(self._at, 4)
            if len(head) < 4:
                raise CorruptionError(self._file.path, self._at, "the snappy stream ends inside a chunk header")
            kind, length = head[0], int.from_bytes(head[1:], "little")
            if length > size - self._at - 4:
                raise CorruptionError(self._file.path, self._at, "the snappy stream ends inside a chunk")
            if kind == 0xFF:
                if self._file.read_at(self._at + 4, length) not in IDENTIFIERS:
                    raise CorruptionError(self._file.path, self._at, "not a snappy stream: its identifier is wrong")
                named = True
            elif not named:
                raise CorruptionError(self._file.path, self._at, "the snappy stream has no identifier")
            elif kind in (0, 1):
                if not 4 <= length <= CHUNK_LIMIT:
                    raise CorruptionError(self._file.path, self._at, f"a snappy chunk of {length} bytes")
                yield self._chunk(codec, head + self._file.read_at(self._at + 4, length))
            elif kind < 0x80:
                raise CorruptionError(self._file.path, self._at, f"snappy chunk type {kind:#x} is not known")
            self._at += 4 + length

    def _chunk(self, codec: Any, chunk: bytes) -> bytes:
        try:
            return bytes(codec.decompress(IDENTIFIER + chunk))
        except Exception as exc:  # noqa: BLE001 - the codec has its own class for what is wrong
            raise CorruptionError(self._file.path, self._at, f"a snappy chunk does not unpack: {exc}") from None

    def _gzip(self) -> Iterator[bytes]:
        size = self._file.stat().size
        if self._at >= size:
            raise CorruptionError(self._file.path, self._at, "the gzip stream is missing")
        while self._at < size:  # a member each
            start, unpacker = self._at, zlib.decompressobj(wbits=GZIP)
            while not unpacker.eof:
                step = unpacker.unconsumed_tail or self._gzip_step()
                try:
                    piece = unpacker.decompress(step, PACK_BYTES)
                except zlib.error as exc:
                    damage = self._at - len(step)
                    yield self._before_damage(start, damage)
                    raise CorruptionError(self._file.path, damage, f"the gzip stream does not unpack: {exc}") from None
                if piece:
                    yield piece
            self._at -= len(unpacker.unused_data)

    def _gzip_step(self) -> bytes:
        step = self._file.read_at(self._at, GZIP_STEP)
        if not step:
            raise CorruptionError(self._file.path, self._at, "the gzip stream is cut short")
        self._at += len(step)
        return step

    def _before_damage(self, start: int, damage: int) -> bytes:
        """Return what the damaged step still gave: it is fed again, a byte at a time."""
        unpacker = zlib.decompressobj(wbits=GZIP)
        for at in range(start, damage, GZIP_STEP):
            step = self._file.read_at(at, min(GZIP_STEP, damage - at))
            while step:
                unpacker.decompress(step, PACK_BYTES)
                step = unpacker.unconsumed_tail
        found = []
        try:
            for at in range(damage, damage + GZIP_STEP):
                found += [unpacker.decompress(self._file.read_at(at, 1))]
        except zlib.error:
            pass
        return b"".join(found)
