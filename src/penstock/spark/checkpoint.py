"""What a checkpoint tells of its query: where it lies, and the id that Spark has given the query.

A sink is told neither.  Without them two queries of one name, or a query whose checkpoint was removed, would take each
other's batches for their own: the numbers are the same.
"""

from __future__ import annotations

import hashlib
import os

import msgspec

from penstock.errors import OptionsError
from penstock.spark.options import local_path

__all__ = ["digest_of_place", "query_of"]


class Metadata(msgspec.Struct):
    """The file ``metadata`` of a checkpoint, which is there before the first batch."""

    id: str


def digest_of_place(checkpoint: str) -> str:
    """Return sixteen digits for a checkpoint, the same however its path is written.

    >>> digest_of_place("lake/raw/_checkpoint") == digest_of_place("file:" + os.path.abspath("lake/raw/_checkpoint/"))
    True
    """
    try:
        place = os.path.abspath(local_path(checkpoint))
    except OptionsError:  # on another file system
        place = checkpoint.rstrip("/")
    return hashlib.sha256(place.encode()).hexdigest()[:16]


def query_of(checkpoint: str) -> str:
    """Return the id of the query with this checkpoint, or nothing where it cannot be read.

    >>> query_of("/nowhere/at/all")
    ''
    """
    try:
        with open(os.path.join(local_path(checkpoint), "metadata"), "rb") as file:
            return msgspec.json.decode(file.read(), type=Metadata).id
    except (OSError, OptionsError, msgspec.DecodeError):
        return ""
