"""The suite every key-value backend passes: what the roles of penstock.kv promise, tried on a real backend.

A backend's test module subclasses KvConformance and says how to connect and how to lose history:

    class TestMyBuckets(KvConformance):
        def new_connection(self): ...
        async def compact(self, store, revision): ...

The methods are pytest tests (asyncio, auto mode); each is named after the promise it holds.
"""

from __future__ import annotations

from penstock.testing.kv_backend import collect, quiet, short
from penstock.testing.kv_entries_conformance import KvEntriesConformance
from penstock.testing.kv_watches_conformance import KvWatchesConformance

__all__ = ["KvConformance", "collect", "quiet", "short"]


class KvConformance(KvEntriesConformance, KvWatchesConformance):
    """Subclass it for a backend; see the head of this module."""
