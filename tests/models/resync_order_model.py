"""The barrier of a resync: synthetic deletes before the re-list.

Key k was in the fold and vanished from the bucket while the cursor expired; it may come back at any moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.fold.guards import may_relist


class Resync(NamedTuple):
    phase: str = "expired"
    """expired, listed, fallback."""
    bucket_has: bool = False
    listed: bool = False
    fold_has: bool = True
    deletes_folded: bool = False
    put_folded: bool = False


class ResyncModel:
    def __init__(self, *, barrier: bool = True) -> None:
        self.barrier = barrier

    def steps(self, state: Resync) -> Iterator[tuple[str, Resync]]:
        if state.phase == "expired":
            yield "list live keys", state._replace(phase="listed", listed=state.bucket_has)
        if not state.bucket_has:
            yield "k comes back", state._replace(bucket_has=True)
        if state.phase != "expired" and not state.deletes_folded:
            yield "fold deletes", state._replace(deletes_folded=True, fold_has=state.fold_has and state.listed)
        if state.phase == "listed" and (not self.barrier or may_relist(state.deletes_folded)):
            yield "start full watch", state._replace(phase="fallback")
        if state.phase == "fallback" and state.bucket_has and not state.put_folded:
            yield "deliver put", state._replace(fold_has=True, put_folded=True)
