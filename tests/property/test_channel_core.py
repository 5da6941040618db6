"""Law: a decision whose steps fail changes nothing; one that succeeds keeps all tables in step with each other."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.channels import commands as c
from penstock.channels.core import Core
from penstock.channels.decisions import Save
from penstock.channels.ids import ChannelId, Nid
from penstock.channels.model import ChannelType, Limits
from penstock.errors import Refused

NIDS = [Nid(name, "localhost") for name in ("ann", "bob", "cat")]
LIMITS = Limits(max_channels=3, max_channels_per_client=2, max_clients_per_channel=2, max_payload_size=4)
channels = st.sampled_from([ChannelId("a", "localhost"), ChannelId("b", "localhost"), ChannelId("a", "x.io")])
nids = st.sampled_from(NIDS)
maybe = st.none() | nids
payloads = st.binary(max_size=5)
numbers = st.none() | st.integers(0, 3)
commands = st.one_of(
    st.builds(c.Join, channels, nids, maybe, st.booleans()),
    st.builds(c.Join, channels, nids),
    st.builds(c.Leave, channels, nids, maybe),
    st.builds(c.Delete, channels, nids),
    st.builds(c.Broadcast, channels, nids, payloads, st.just(1)),
    st.builds(c.BroadcastMany, channels, nids, st.lists(payloads, max_size=3).map(tuple), st.just(1)),
    st.builds(c.SetAcl, channels, nids, st.sampled_from(["join", "publish", "read"]),
              st.sampled_from(["add", "remove"]), st.lists(nids, max_size=3).map(tuple)),
    st.builds(c.SetConfig, channels, nids, numbers, numbers, numbers, st.none() | st.booleans(), numbers,
              st.sampled_from([None, "pubsub", "fifo", "lifo"])),
    st.builds(c.SetConfig, channels, nids, persist=st.just(True), type=st.sampled_from([None, "fifo"])),
    st.builds(c.GetConfig, channels, nids),
    st.builds(c.Members, channels, nids),
    st.builds(c.History, channels, nids, st.integers(1, 5), st.integers(1, 5)),
    st.builds(c.Range, channels, nids),
    st.builds(c.Push, channels, nids, payloads, st.just(1)),
    st.builds(c.Pop, channels, nids),
    st.builds(c.Length, channels, nids),
    st.builds(c.Clear, channels, nids),
)  # fmt: skip


A, ANN = ChannelId("a", "localhost"), NIDS[0]
QUEUE = [(c.Join(A, ANN), True), (c.SetConfig(A, ANN, persist=True, type="fifo"), True)]


def state(core: Core, *, numbers: bool = True) -> dict[str, Any]:
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


@given(st.sampled_from([[], QUEUE]), st.lists(st.tuples(commands, st.booleans()), max_size=60))
@settings(max_examples=300)
def test_a_failed_decision_changes_nothing_and_the_tables_agree(
    begun: list[tuple[c.Command, bool]], asked: list[tuple[c.Command, bool]]
) -> None:
    core = Core("localhost", LIMITS)
    for command, works in [*begun, *asked]:
        before, full = state(core, numbers=False), state(core)
        try:
            decision = core.decide(command)
        except Refused:
            assert state(core, numbers=False) == before
            if not isinstance(command, c.Broadcast):  # which spends its number first
                assert state(core) == full
            continue
        if works:
            saved = [step.channel for step in decision.steps if isinstance(step, Save)]
            core.apply(decision)
            if saved:  # memory is what was saved, to the last field
                assert core.channels[command.channel.handler].snapshot() == saved[-1]
        else:
            core.undo(decision)
            assert state(core, numbers=False) == before
        check(core)


def check(core: Core) -> None:
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
            assert 1 <= channel.head <= channel.log_next <= channel.next_seq
    for nid in NIDS:
        for handler in core.memberships.of(nid):
            assert core.channels[handler].has(nid)
        assert core.memberships.count(nid) <= LIMITS.max_channels_per_client
