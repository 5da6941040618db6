"""Where an artifact is on an object store, byte for byte as the reference puts it.

    <prefix>/<key>.manifest.json                             the pointer: the manifest of the newest artifact
    <prefix>/<key>.payloads/<rank:16>-<hash:16>.tar          payloads, each written once

The reference turns a prefix into a path of objects and then the whole once more, so a character that has to be
encoded is encoded twice in a prefix and once in a key.
"""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["ArtifactNames", "encode_path", "rank_in_name"]

ENCODED: Final = frozenset('\\{}[]^%`"<>~#|*?')


class ArtifactNames(msgspec.Struct, frozen=True):
    """The names of one artifact.

    >>> ArtifactNames("folds~", "edge/a~").pointer
    'folds%257E/edge/a%7E.manifest.json'
    """

    prefix: str
    key: str

    @property
    def pointer(self) -> str:
        """The pointer."""
        return self._path(f"{self.key}.manifest.json")

    @property
    def payloads(self) -> str:
        """The folder of the payloads."""
        return self._path(f"{self.key}.payloads")

    def payload(self, name: str) -> str:
        """One payload."""
        return self._path(f"{self.key}.payloads/{name}")

    def _path(self, below: str) -> str:
        return encode_path(f"{encode_path(self.prefix)}/{below}")


def encode_path(text: str) -> str:
    """Return a text as a path of objects.

    >>> encode_path("/a//b c/~/../é")
    'a/b c/%7E/%2E%2E/%C3%A9'
    """
    return "/".join(_segment(part) for part in text.split("/") if part)


def _segment(part: str) -> str:
    if part in (".", ".."):
        return "%2E" * len(part)
    return "".join(
        char if 32 <= ord(char) < 127 and char not in ENCODED else "".join(f"%{byte:02X}" for byte in char.encode())
        for char in part
    )


def rank_in_name(key: str) -> int | None:
    """Return the rank in the name of a payload, None where it has none: such an object is never pruned.

    >>> rank_in_name("p/k.payloads/000000000000000a-00.tar"), rank_in_name("p/k.payloads/zz-x.tar")
    (10, None)
    """
    digits = key.rpartition("/")[2].partition("-")[0].removeprefix("+")
    if not digits or any(char not in "0123456789abcdefABCDEF" for char in digits):
        return None
    rank = int(digits, 16)
    return rank if rank < 1 << 64 else None
