"""Promise: what is wrong is told in the order of the protocol, so a refusal gives away nothing it should not.

Each case begins with everything wrong at once and mends one thing at a time, in the order of the checks: the reason
must change with each, and at the end nothing is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.channels import commands as c
from penstock.channels.core import ShardCore
from penstock.channels.ids import ChannelId, Nid
from penstock.channels.live import LiveChannel
from penstock.channels.model import Allow, ChannelType, Config, Limits
from penstock.errors import Refused

ANN, BOB, EVE = (Nid(name, "localhost") for name in ("ann", "bob", "eve"))
HERE, THERE, NOWHERE = ChannelId("ops", "localhost"), ChannelId("ops", "x.io"), ChannelId("none", "localhost")
NOBODY = Allow({"nobody.org": frozenset()})


class World:
    """A core with one channel owned by ann, and bob in it."""

    def __init__(self, *, fifo: bool = False, persist: bool = False) -> None:
        self.limits = Limits(max_channels=1, max_channels_per_client=1)
        self.core = ShardCore("localhost", self.limits)
        self.channel = LiveChannel("ops", Config(2, 4, 2, persist=persist or fifo))
        self.channel.kind = ChannelType.FIFO if fifo else ChannelType.PUBSUB
        self.channel.owner = ANN
        self.channel.set_members((ANN, BOB))
        self.core._insert(self.channel)
        for nid in (ANN, BOB):
            self.core.memberships.take(nid, "ops")

    def acl(self, kind: Any, allow: Allow) -> None:
        self.channel.set_acl(self.channel.acl.replace(kind, allow))

    def configured(self, **changes: Any) -> None:
        import msgspec

        self.channel.config = msgspec.structs.replace(self.channel.config, **changes)


class Asked:
    """A command whose parts are mended one by one."""

    def __init__(self, kind: Any, /, **parts: Any) -> None:
        self.kind, self.parts = kind, parts

    def mended(self, **parts: Any) -> None:
        self.parts.update(parts)

    def command(self) -> c.Command:
        found: c.Command = self.kind(**self.parts)
        return found


def walk(world: World, asked: Asked, *steps: tuple[str, Callable[[], Any]]) -> None:
    for reason, mend in steps:
        with pytest.raises(Refused) as refusal:
            world.core.decide(asked.command())
        assert str(refusal.value).startswith(reason), f"expected {reason}, not {refusal.value}"
        mend()
    world.core.decide(asked.command())


def test_join() -> None:
    world = World()
    world.acl("join", NOBODY)
    world.core.memberships.take(EVE, "elsewhere")
    asked = Asked(c.Join, channel=THERE, nid=BOB, on_behalf=EVE, registered=False)
    walk(
        world, asked,
        ("NOT_IMPLEMENTED", lambda: asked.mended(channel=NOWHERE)),
        ("RESOURCE_LIMIT_REACHED: maximum channels reached", lambda: asked.mended(channel=HERE)),
        ("FORBIDDEN", lambda: asked.mended(nid=ANN)),
        ("USER_NOT_REGISTERED", lambda: asked.mended(registered=True)),
        ("NOT_ALLOWED", lambda: (world.acl("join", Allow()), asked.mended(on_behalf=BOB))),
        ("USER_IN_CHANNEL", lambda: asked.mended(on_behalf=EVE)),
        ("CHANNEL_IS_FULL", lambda: world.configured(max_clients=3)),
        ("POLICY_VIOLATION: subscription limit reached", lambda: world.core.memberships.release(EVE, "elsewhere")),
    )  # fmt: skip


def test_leave_and_delete() -> None:
    world = World()
    asked = Asked(c.Leave, channel=THERE, nid=BOB, on_behalf=EVE)
    walk(
        world, asked,
        ("NOT_IMPLEMENTED", lambda: asked.mended(channel=NOWHERE)),
        ("CHANNEL_NOT_FOUND", lambda: asked.mended(channel=HERE)),
        ("FORBIDDEN", lambda: asked.mended(nid=ANN)),
        ("USER_NOT_IN_CHANNEL", lambda: asked.mended(on_behalf=BOB)),
    )  # fmt: skip
    asked = Asked(c.Delete, channel=THERE, nid=BOB)
    walk(
        world, asked,
        ("NOT_IMPLEMENTED", lambda: asked.mended(channel=NOWHERE)),
        ("CHANNEL_NOT_FOUND", lambda: asked.mended(channel=HERE)),
        ("FORBIDDEN", lambda: asked.mended(nid=ANN)),
    )  # fmt: skip


def test_broadcast() -> None:
    world = World(fifo=True)
    world.acl("publish", NOBODY)
    asked = Asked(c.Broadcast, channel=THERE, nid=EVE, payload=b"12345", timestamp=1)
    walk(
        world, asked,
        ("NOT_IMPLEMENTED", lambda: asked.mended(channel=NOWHERE)),
        ("CHANNEL_NOT_FOUND", lambda: asked.mended(channel=HERE)),
        ("WRONG_TYPE", lambda: setattr(world.channel, "kind", ChannelType.PUBSUB)),
        ("FORBIDDEN", lambda: asked.mended(nid=BOB)),
        ("NOT_ALLOWED", lambda: world.acl("publish", Allow())),
        ("POLICY_VIOLATION: payload size exceeds channel limit", lambda: asked.mended(payload=b"1234")),
    )  # fmt: skip
    assert world.channel.next_seq == 3  # only the last two passed the lists, and each took a number


def test_lists() -> None:
    world = World()
    for kind, parts in ((c.GetAcl, {}), (c.SetAcl, {"action": "add", "nids": (ANN, BOB, EVE)})):
        asked = Asked(kind, channel=THERE, nid=BOB, kind="read", **parts)
        steps = [
            ("NOT_ALLOWED", lambda asked=asked: asked.mended(channel=NOWHERE)),
            ("CHANNEL_NOT_FOUND", lambda asked=asked: asked.mended(channel=HERE)),
            ("FORBIDDEN", lambda asked=asked: asked.mended(nid=ANN)),
        ]
        if kind is c.SetAcl:
            mend = ("POLICY_VIOLATION: ACL allow list exceeds max entries", lambda a=asked: a.mended(nids=(ANN,)))
            steps.append(mend)  # type: ignore[arg-type]
        walk(world, asked, *steps)


def test_settings() -> None:
    world = World(fifo=True)
    world.core.authenticated = False
    asked = Asked(
        c.SetConfig, channel=THERE, nid=BOB, type="lifo", persist=True, max_clients=101, max_payload_size=65_537,
        max_persist_messages=1001, message_flush_interval=60_001,
    )  # fmt: skip
    walk(
        world, asked,
        ("BAD_REQUEST: unknown channel type: lifo", lambda: asked.mended(type="pubsub")),
        ("FORBIDDEN: persistence requires auth", lambda: setattr(world.core, "authenticated", True)),
        ("NOT_ALLOWED", lambda: asked.mended(channel=NOWHERE)),
        ("BAD_REQUEST: max_clients exceeds server established limit", lambda: asked.mended(max_clients=3)),
        ("BAD_REQUEST: max_payload_size exceeds", lambda: asked.mended(max_payload_size=3)),
        ("BAD_REQUEST: max_persist_messages exceeds", lambda: asked.mended(max_persist_messages=0)),
        ("BAD_REQUEST: message_flush_interval exceeds", lambda: asked.mended(message_flush_interval=5)),
        ("CHANNEL_NOT_FOUND", lambda: asked.mended(channel=HERE)),
        ("FORBIDDEN", lambda: asked.mended(nid=ANN)),
        ("BAD_REQUEST: FIFO is one-way; cannot revert to pubsub", lambda: asked.mended(type="fifo")),
        ("BAD_REQUEST: max_persist_messages must be greater than 0", lambda: asked.mended(persist=False)),
        ("BAD_REQUEST: FIFO requires persist=true", lambda: asked.mended(persist=True, max_persist_messages=5)),
    )  # fmt: skip
    asked = Asked(c.GetConfig, channel=NOWHERE, nid=EVE)
    walk(
        world, asked,
        ("CHANNEL_NOT_FOUND", lambda: asked.mended(channel=THERE)),  # no domain is checked
        ("FORBIDDEN", lambda: asked.mended(nid=BOB)),
    )  # fmt: skip


def test_members() -> None:
    world, asked = World(), Asked(c.Members, channel=THERE, nid=EVE)
    walk(
        world, asked,
        ("NOT_IMPLEMENTED", lambda: asked.mended(channel=NOWHERE)),
        ("CHANNEL_NOT_FOUND", lambda: asked.mended(channel=HERE)),
        ("USER_NOT_IN_CHANNEL", lambda: asked.mended(nid=BOB)),
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "parts"), [(c.History, {"from_seq": 1, "limit": 1}), (c.Range, {})])
def test_history_and_range(kind: Any, parts: dict[str, Any]) -> None:
    world = World(fifo=True)
    world.acl("read", NOBODY)
    world.configured(persist=False)
    asked = Asked(kind, channel=THERE, nid=EVE, **parts)
    walk(
        world, asked,
        ("NOT_IMPLEMENTED", lambda: asked.mended(channel=NOWHERE)),
        ("CHANNEL_NOT_FOUND", lambda: asked.mended(channel=HERE)),
        ("WRONG_TYPE", lambda: setattr(world.channel, "kind", ChannelType.PUBSUB)),
        ("USER_NOT_IN_CHANNEL", lambda: asked.mended(nid=BOB)),
        ("NOT_ALLOWED", lambda: world.acl("read", Allow())),
        ("PERSISTENCE_NOT_ENABLED", lambda: world.configured(persist=True)),
    )  # fmt: skip


def queue_steps(world: World, asked: Asked) -> list[tuple[str, Callable[[], Any]]]:
    return [
        ("NOT_IMPLEMENTED", lambda: asked.mended(channel=NOWHERE)),
        ("CHANNEL_NOT_FOUND", lambda: asked.mended(channel=HERE)),
        ("WRONG_TYPE", lambda: setattr(world.channel, "kind", ChannelType.FIFO)),
    ]


def broken_queue() -> World:
    world = World(fifo=True)
    world.channel.kind, world.channel.head = ChannelType.PUBSUB, None
    return world


def test_push() -> None:
    world = broken_queue()
    world.channel.next_seq = 3
    asked = Asked(c.Push, channel=THERE, nid=EVE, payload=b"12345", timestamp=1)
    walk(
        world, asked, *queue_steps(world, asked),
        ("CURSOR_RECOVERY_REQUIRED", lambda: setattr(world.channel, "head", 1)),
        ("USER_NOT_IN_CHANNEL", lambda: asked.mended(nid=BOB)),
        ("FORBIDDEN", lambda: asked.mended(nid=ANN)),
        ("POLICY_VIOLATION: payload size exceeds channel limit", lambda: asked.mended(payload=b"1234")),
        ("QUEUE_FULL", lambda: setattr(world.channel, "head", 2)),
    )  # fmt: skip


def test_pop_and_length() -> None:
    world = broken_queue()
    world.acl("read", NOBODY)
    asked = Asked(c.Pop, channel=THERE, nid=EVE)
    walk(
        world, asked, *queue_steps(world, asked),
        ("CURSOR_RECOVERY_REQUIRED", lambda: setattr(world.channel, "head", 1)),
        ("USER_NOT_IN_CHANNEL", lambda: asked.mended(nid=ANN)),
        ("NOT_ALLOWED", lambda: world.acl("read", Allow())),
        ("QUEUE_EMPTY", lambda: setattr(world.channel, "next_seq", 2)),
    )  # fmt: skip
    world = broken_queue()
    asked = Asked(c.Length, channel=THERE, nid=EVE)
    walk(
        world, asked, *queue_steps(world, asked),
        ("CURSOR_RECOVERY_REQUIRED", lambda: setattr(world.channel, "head", 1)),
        ("USER_NOT_IN_CHANNEL", lambda: asked.mended(nid=BOB)),
        ("FORBIDDEN", lambda: asked.mended(nid=ANN)),
    )  # fmt: skip


def test_clear_is_not_stopped_by_an_unusable_cursor() -> None:
    world = broken_queue()
    asked = Asked(c.Clear, channel=THERE, nid=EVE)
    walk(
        world, asked, *queue_steps(world, asked),
        ("USER_NOT_IN_CHANNEL", lambda: asked.mended(nid=BOB)),
        ("FORBIDDEN", lambda: asked.mended(nid=ANN)),
    )  # fmt: skip
