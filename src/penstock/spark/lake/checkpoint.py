"""What a checkpoint tells of its query: where it lies, and the id that Spark has given the query.

A sink is told neither.  Without them two queries of one name, or a query whose checkpoint was removed, would take each
other's batches for their own: the numbers are the same.
"""

from __future__ import annotations

import hashlib
import os

import msgspec

from penstock.disk.plain import read_small
from penstock.errors import OptionsError
from penstock.spark.source.options import is_remote, local_path, path_here

__all__ = ["check_checkpoint", "checkpoint_here", "digest_of_place", "query_of"]


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


def check_checkpoint(checkpoint: str) -> str:
    """Return a checkpoint that Spark can write; it knows no object store.

    >>> check_checkpoint("s3://bucket/raw/_mine")
    Traceback (most recent call last):
    penstock.errors.OptionsError: s3://bucket/raw/_mine: Spark keeps its checkpoint on a file system: name one there
    """
    if is_remote(checkpoint):
        raise OptionsError(f"{checkpoint}: Spark keeps its checkpoint on a file system: name one there")
    return checkpoint


def checkpoint_here(spark: object, checkpoint: str) -> str:
    """Return a checkpoint as this process means it, whatever folder Java began in; one on another file system as it is.

    >>> checkpoint_here(object(), "lake/raw/_checkpoint"), checkpoint_here(object(), "hdfs://host/checkpoint")
    ('lake/raw/_checkpoint', 'hdfs://host/checkpoint')
    """
    try:
        return path_here(spark, checkpoint)
    except OptionsError:
        return checkpoint


def query_of(checkpoint: str) -> str:
    """Return the id of the query with this checkpoint, or nothing where it cannot be read.

    >>> query_of("/nowhere/at/all")
    ''
    """
    try:
        return msgspec.json.decode(read_small(f"{local_path(checkpoint)}/metadata"), type=Metadata).id
    except (OSError, OptionsError, msgspec.DecodeError):
        return ""
