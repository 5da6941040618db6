"""Export, publish, prune and bootstrap: several nodes share one pointer to the newest artifact.

The pointer-swap protocol writes each payload under a name of its own and moves one pointer by compare-and-swap;
the legacy protocol has two registers that are simply overwritten.  An artifact is (node, cursor, whether the one
key that can be deleted is in it); its bytes are its identity.  No lease: it only removes interleavings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from penstock.fold.guards import payload_prunable, pointer_publish_allowed, resume_window_ok

Artifact = tuple[int, int, bool]
Phase = tuple[Any, ...]

IDLE: Phase = ("idle",)
START: Phase = ("start",)

Resync = Literal["none", "degrade", "fail stop"]
Mutation = Literal["", "last write wins", "prune by age", "silent clamp"]


class Fleet(NamedTuple):
    head: int
    deleted: int
    """The revision of the delete, 0 while the key is there."""
    floor: int
    applied: tuple[int, ...]
    nodes: tuple[Phase, ...]
    register: Artifact | None
    pointer: Artifact | None
    uploaded: frozenset[Artifact]
    regressed: bool
    refused: bool
    importer: Phase


class PublishModel:
    def __init__(
        self, nodes: int, revisions: int, *, legacy: bool = False, resync: Resync = "fail stop", mutation: Mutation = ""
    ) -> None:
        self.nodes, self.revisions, self.legacy, self.resync, self.mutation = nodes, revisions, legacy, resync, mutation

    def initial(self) -> Fleet:
        zeros, idle = (0,) * self.nodes, (IDLE,) * self.nodes
        return Fleet(0, 0, 0, zeros, idle, None, None, frozenset(), False, False, START)

    def steps(self, state: Fleet) -> Iterator[tuple[str, Fleet]]:
        head = state.head
        if head < self.revisions:
            yield "churn", state._replace(head=head + 1)
            if not state.deleted:
                yield "delete", state._replace(head=head + 1, deleted=head + 1)
        if state.floor < head:
            yield "compact", state._replace(floor=state.floor + 1)
        for node in range(self.nodes):
            yield from self._node(state, node)
        if not self.legacy:
            yield from self._prune(state)
        yield from self._importer(state)

    def _node(self, state: Fleet, node: int) -> Iterator[tuple[str, Fleet]]:
        applied, phase = state.applied[node], state.nodes[node]
        if applied < state.head:
            yield f"apply {node}", state._replace(applied=_set(state.applied, node, applied + 1))

        def at(after: Phase, **changes: Any) -> Fleet:
            return state._replace(nodes=_set(state.nodes, node, after), **changes)

        if phase[0] == "idle":
            if applied >= 1:
                has_key = not state.deleted or applied < state.deleted
                yield f"export {node}", at(("exported", (node, applied, has_key)))
        elif phase[0] == "exported":
            if self.legacy:
                yield f"upload {node}", at(("uploaded", phase[1]), register=phase[1])
            else:
                yield f"upload {node}", at(("uploaded", phase[1]), uploaded=state.uploaded | {phase[1]})
        elif phase[0] == "uploaded":
            yield f"publish {node}", self._publish(state, at(("done", phase[1][1])), phase[1])
        elif applied > phase[1]:
            yield f"next round {node}", at(IDLE)
        if phase[0] in ("exported", "uploaded"):
            yield f"crash {node}", at(IDLE)

    def _publish(self, state: Fleet, after: Fleet, artifact: Artifact) -> Fleet:
        rank = None if state.pointer is None else state.pointer[1]
        free = self.legacy or self.mutation == "last write wins"
        if not free and not pointer_publish_allowed(state.pointer is not None, rank, artifact[1]):
            return after._replace(refused=True)
        regressed = state.regressed or (rank is not None and rank > artifact[1])
        return after._replace(pointer=artifact, regressed=regressed)

    def _prune(self, state: Fleet) -> Iterator[tuple[str, Fleet]]:
        pointer = state.pointer
        if pointer is None or not any(payload[1] < pointer[1] for payload in state.uploaded):
            return
        kept = frozenset(
            payload
            for payload in state.uploaded
            if not (
                payload != pointer
                if self.mutation == "prune by age"
                else payload_prunable(payload[1], pointer[1], is_target=payload == pointer, aged_out=True)
            )
        )
        yield "prune", state._replace(uploaded=kept)

    def _importer(self, state: Fleet) -> Iterator[tuple[str, Fleet]]:
        phase = state.importer
        match phase[0]:
            case "start":
                if state.pointer is not None:
                    yield "read pointer", state._replace(importer=("pointer", state.pointer))
            case "pointer":
                found = state.register == phase[1] if self.legacy else phase[1] in state.uploaded
                missed = ("cross check failed",) if self.legacy else ("missed",)
                yield "read payload", state._replace(importer=("imported", phase[1]) if found else missed)
            case "imported":
                _, cursor, has_key = phase[1]
                whole = resume_window_ok(cursor, state.floor + 1)
                stale = bool(has_key and state.deleted and state.deleted <= state.floor)
                relist = "stale" if stale else "synced"
                blind = self.mutation == "silent clamp" or self.resync == "none"
                yield (
                    "resume",
                    state._replace(importer=("resumed", phase[1], relist if not whole and blind else "synced")),
                )
                if self.resync == "degrade" and not whole:
                    yield "resume degraded", state._replace(importer=("resumed", phase[1], relist))
            case "cross check failed" | "missed":
                yield "retry", state._replace(importer=START)


def _set(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])
