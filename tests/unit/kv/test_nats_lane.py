"""The fast lane sorts bytes: runs of a watch to its inbox, everything else to the client's own parser."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from penstock.kv.nats.lane import Inbox, Lane, lane_of


class Client:
    """What nats-py's parser calls, and nothing else."""

    is_closed = False

    def __init__(self) -> None:
        self.stats = {"in_msgs": 0, "in_bytes": 0}
        self.slow: list[tuple[int, bytes]] = []
        self.pings = 0
        self._ps: Any = Parser(self)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self.slow.append((sid, data))

    async def _process_ping(self) -> None:
        self.pings += 1


def message(sid: int, payload: bytes) -> bytes:
    return b"MSG a.b %d reply %d\r\n%s\r\n" % (sid, len(payload), payload)


async def feed(client: Client, data: bytes, sizes: list[int]) -> None:
    at = 0
    while at < len(data):
        size = sizes[at % len(sizes)] if sizes else len(data)
        await client._ps.parse(data[at : at + size])
        at += size


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([1, 7, 7, 8]), st.binary(max_size=40)), max_size=12),
    st.lists(st.integers(1, 60), max_size=5),
)
async def test_however_the_bytes_are_cut_each_message_arrives_once(
    messages: list[tuple[int, bytes]], sizes: list[int]
) -> None:
    client = Client()
    lane = lane_of(client)
    assert lane is not None
    inboxes = {sid: Inbox(None, str(sid)) for sid in (7, 8)}
    lane.inboxes.update(inboxes)
    data = b"".join(message(sid, payload) + b"PING\r\n" for sid, payload in messages)
    await feed(client, data, sizes)
    assert client.slow == [(sid, payload) for sid, payload in messages if sid == 1]
    assert client.pings == len(messages)
    for sid, inbox in inboxes.items():
        expected = b"".join(message(one, payload) for one, payload in messages if one == sid)
        assert b"".join(inbox._parts) == expected
    assert client.stats["in_msgs"] == sum(sid != 1 for sid, _ in messages)


@pytest.mark.parametrize("cut", range(1, len(message(1, b"hello")) + 1))
async def test_a_lane_put_in_anywhere_loses_nothing(cut: int) -> None:
    client = Client()
    data = message(1, b"hello") + message(1, b"again") + message(7, b"fast")
    await client._ps.parse(data[:cut])
    lane = lane_of(client)
    assert lane is not None
    assert lane_of(client) is lane
    lane.inboxes[7] = inbox = Inbox(None, "7")
    await client._ps.parse(data[cut:])
    assert client.slow == [(1, b"hello"), (1, b"again")]
    assert b"".join(inbox._parts) == message(7, b"fast")


async def test_bytes_that_are_not_the_protocol_drop_the_connection() -> None:
    client = Client()
    assert isinstance(lane_of(client), Lane)
    with pytest.raises(ProtocolError):
        await client._ps.parse(b"MSG a 1 x\r\n")
    client._ps.reset()
    await client._ps.parse(message(1, b"new"))
    assert client.slow == [(1, b"new")]


def test_a_client_without_a_place_for_it_gets_none() -> None:
    assert lane_of(object()) is None
