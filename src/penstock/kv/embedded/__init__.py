"""Buckets in a folder: a message log and a store, shared by any number of processes."""

from penstock.kv.embedded.connection import EmbeddedConnection, EmbeddedKvStore, EmbeddedOptions, embedded_connect

__all__ = ["EmbeddedConnection", "EmbeddedKvStore", "EmbeddedOptions", "embedded_connect"]
