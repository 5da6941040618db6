"""Law: a decision whose steps fail changes nothing; one that succeeds keeps all tables in step with each other.

The commands come from seeded dice, loaded so that most of them find a channel that can do what they ask.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from penstock.channels import commands as c
from penstock.channels.core import ShardCore
from penstock.channels.decisions import Save
from penstock.channels.ids import ChannelId, Nid
from penstock.channels.model import ChannelType, Limits
from penstock.errors import Refused

NIDS = [Nid(name, "localhost") for name in ("ann", "bob", "cat")]
ANN = NIDS[0]
A, B, ELSEWHERE = ChannelId("a", "localhost"), ChannelId("b", "localhost"), ChannelId("a", "x.io")
LIMITS = Limits(max_channels=3, max_channels_per_client=2, max_clients_per_channel=2, max_payload_size=4)
KINDS: list[type[c.Command]] = [
    c.Join, c.Join, c.Leave, c.Delete, c.Broadcast, c.BroadcastMany, c.SetAcl, c.GetAcl, c.SetConfig, c.SetConfig,
    c.GetConfig, c.Members, c.History, c.Range, c.Push, c.Push, c.Pop, c.Length, c.Clear,
]  # fmt: skip


def command_of(rng: random.Random) -> c.Command:
    """Return any command."""
    kind = rng.choice(KINDS)
    base = rng.choice([A, A, A, A, A, B, B, ELSEWHERE]), rng.choice([ANN, ANN, *NIDS])
    other = rng.choice([None, None, None, *NIDS])

    def payload() -> bytes:
        return rng.choice([b"x", b"xy", b"1234", b"", b"12345"])  # the last is too long

    def number() -> int | None:
        return rng.choice([None, None, None, None, 0, 1, 2, 3])

    match kind:
        case c.Join:
            return c.Join(*base, other, rng.random() < 0.8)
        case c.Leave:
            return c.Leave(*base, other)
        case c.Broadcast | c.Push:
            return kind(*base, payload(), 1)  # type: ignore[call-arg]
        case c.BroadcastMany:
            return c.BroadcastMany(*base, tuple(payload() for _ in range(rng.randrange(4))), 1)
        case c.SetAcl | c.GetAcl:
            which: Any = rng.choice(["join", "publish", "read"])
            if kind is c.GetAcl:
                return c.GetAcl(*base, which, number(), number())
            nids = tuple(rng.choices(NIDS, k=rng.randrange(4)))
            return c.SetAcl(*base, which, rng.choice(["add", "remove"]), nids)  # type: ignore[arg-type]
        case c.SetConfig:
            persist = rng.choice([None, True, True, False])
            wanted = rng.choice([None, None, None, None, "pubsub", "fifo", "lifo"])
            return c.SetConfig(*base, number(), number(), number(), persist, number(), wanted)
        case c.History:
            return c.History(*base, rng.randrange(1, 6), rng.randrange(6))
        case _:
            return kind(*base)


def state(core: ShardCore, *, numbers: bool = True) -> dict[str, Any]:
    return {
        "memberships": {nid: core.memberships.of(nid) for nid in NIDS},
        "count": core.memberships.channels,
        "channels": {
            handler: (
                channel.snapshot(),
                channel.head,
                channel.log_next,
                channel.readers(),
                channel.next_seq if numbers or channel.kind is ChannelType.FIFO else None,
            )
            for handler, channel in core.channels.items()
        },
    }


def begun(*commands: c.Command) -> ShardCore:
    core = ShardCore("localhost", LIMITS)
    for command in commands:
        core.apply(core.decide(command))
    return core


BEGINNINGS: tuple[tuple[c.Command, ...], ...] = (  # what chance alone would seldom come to
    (),
    (c.Join(A, ANN), c.Join(A, NIDS[1])),
    (c.Join(A, ANN), c.SetConfig(A, ANN, persist=True), c.Broadcast(A, ANN, b"x", 1)),
    (c.Join(A, ANN), c.Broadcast(A, ANN, b"x", 1), c.SetConfig(A, ANN, persist=True, type="fifo"),
     c.Push(A, ANN, b"x", 1)),
)  # fmt: skip


def test_a_failed_decision_changes_nothing_and_the_tables_agree() -> None:
    seen: Counter[str] = Counter()
    for seed in range(600):
        rng = random.Random(seed)
        core = begun(*BEGINNINGS[seed % len(BEGINNINGS)])
        check(core)
        for _ in range(30):
            outcome = one(core, command_of(rng), works=rng.random() < 0.6)
            seen[outcome] += 1
            check(core)
    kinds = {kind.__name__ for kind in KINDS}
    missing = {f"{kind} {outcome}" for kind in kinds for outcome in ("refused", "applied", "undone")} - seen.keys()
    assert not missing, "the dice never came to these"


def one(core: ShardCore, command: c.Command, *, works: bool) -> str:
    """Decide one command, apply or undo it, and check what that did; return how it ended."""
    name = type(command).__name__
    before, full = state(core, numbers=False), state(core)
    try:
        decision = core.decide(command)
    except Refused:
        assert state(core, numbers=False) == before
        if not isinstance(command, c.Broadcast):  # which spends its number first
            assert state(core) == full
        return f"{name} refused"
    if not works:
        core.undo(decision)
        assert state(core, numbers=False) == before
        if decision.steps:
            assert state(core) == full
        return f"{name} undone"
    saved = [step.channel for step in decision.steps if isinstance(step, Save)]
    core.apply(decision)
    if saved:  # memory is what was saved, to the last field
        assert core.channels[command.channel.handler].snapshot() == saved[-1]
    return f"{name} applied"


def check(core: ShardCore) -> None:
    assert core.memberships.channels == len(core.channels)
    for handler, channel in core.channels.items():
        assert channel.members == tuple(sorted(set(channel.members)))
        assert channel.members, "a channel without members has ended"
        assert channel.owner in channel.members
        for nid in channel.members:
            assert handler in core.memberships.of(nid)
        if channel.kind is ChannelType.FIFO:
            assert channel.config.persist
            assert channel.head is not None
            assert 1 <= channel.head <= channel.next_seq
            assert channel.log_next == channel.next_seq  # a queue spends no number on what is not stored
    for nid in NIDS:
        for handler in core.memberships.of(nid):
            assert core.channels[handler].has(nid)
        assert core.memberships.count(nid) <= LIMITS.max_channels_per_client
