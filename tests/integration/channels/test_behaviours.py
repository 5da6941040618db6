"""Promise: the behaviours that the original tests of itself are ours too, over real sockets.

A script says who sends (``ann: …``), who hears what next (``ann< …``) and whose connection ends (``ann x``).  ``⏎`` is
a line end inside, ``#`` any number.  Recorded conversations (test_conversations.py) hold the rest.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from wire_use import PlainAuthenticator, Raw, options

from penstock.channels import channel_hash
from penstock.channels.wire import ChannelServer
from penstock.disk import PosixDisk
from penstock.testing.faulty import FaultyDisk

C = "channel=!c@localhost"
GREETING = (
    "CONNECT_ACK auth_required=false heartbeat_interval=60000 max_inflight_requests=100 max_message_size=8192 "
    "max_payload_size=65536 max_persist_messages=1000 max_subscriptions=100"
)
MADE = f"""
ann: JOIN id=1 {C}
ann< JOIN_ACK id=1 {C}
"""
BOTH = f"""{MADE}
bob: JOIN id=1 {C}
bob< JOIN_ACK id=1 {C}
ann< EVENT {C} kind=MEMBER_JOINED nid=bob@localhost owner=false
"""
KEPT = f"""{MADE}
ann: SET_CHAN_CONFIG id=90 {C} persist=true
ann< SET_CHAN_CONFIG_ACK id=90
"""
QUEUE = f"""{MADE}
ann: SET_CHAN_CONFIG id=90 {C} persist=true type=fifo
ann< SET_CHAN_CONFIG_ACK id=90
"""
SHARED = f"""{QUEUE}
bob: JOIN id=1 {C}
bob< JOIN_ACK id=1 {C}
ann< EVENT {C} kind=MEMBER_JOINED nid=bob@localhost owner=false
"""


def said(count: int, first: int = 1) -> str:
    """Return so many broadcasts of ann with their numbers."""
    return "".join(
        f"ann: BROADCAST id={n} {C} length=2⏎m{n % 10}\nann< BROADCAST_ACK id={n} seq={n}\n"
        for n in range(first, first + count)
    )


def told(numbers: range, name: str = "ann", history: str = "h") -> str:
    return "".join(
        f"{name}< MESSAGE {C} from=ann@localhost history_id={history} length=2 seq={n} timestamp=#⏎m{n % 10}\n"
        for n in numbers
    )


def paged(what: str, ack: str, field: str, names: list[str], extra: str = "") -> str:
    """Return a list asked for in pages of two: 2, 2, 1, 0."""
    script = ""
    for page in range(1, 5):
        part = names[2 * page - 2 : 2 * page]
        listed = f" {field}:{len(part)}={' '.join(part)}" if part else ""
        asked = f" {C}" if ack != "CHANNELS_ACK" else ""
        tail = " type=read" if what == "GET_CHAN_ACL" else ""
        script += f"ann: {what} id={page}{asked} page={page} page_size=2{extra}\n"
        script += f"ann< {ack} id={page}{asked}{listed} page={page} page_size=2 total_count=5{tail}\n"
    return script


USERS = [f"u{n}@localhost" for n in range(5)]
OPEN: dict[str, tuple[dict[str, Any], str]] = {
    "6.1.1 nothing said": ({"connect_timeout": 0.1}, "raw< ERROR detail=\\\"connection timeout\\\" reason=TIMEOUT\nraw x"),
    "6.1.2 no login": ({"authenticate_timeout": 0.1}, f"raw: CONNECT version=1\nraw< {GREETING}\n"
        "raw< ERROR detail=\\\"authentication timeout\\\" reason=TIMEOUT\nraw x"),
    "6.1.3 a ping is not answered": ({"keep_alive_interval": 0.1, "min_keep_alive_interval": 0.05},
        "ann< PING id=#\nann< ERROR detail=\\\"ping timeout\\\" reason=TIMEOUT\nann x"),
    "6.1.5 one connection too many": ({"max_connections": 1}, "ann: CHANNELS id=1\nann< CHANNELS_ACK id=1\n"
        "raw< ERROR reason=SERVER_OVERLOADED detail=\\\"max connections reached\\\"\nraw x"),
    "6.1.8 a name in use": ({}, f"ann: CHANNELS id=1\nann< CHANNELS_ACK id=1\nraw: CONNECT version=1\nraw< {GREETING}\n"
        "raw: IDENTIFY username=ann\nraw< ERROR reason=USERNAME_IN_USE\n"
        "raw: IDENTIFY username=eve\nraw< IDENTIFY_ACK nid=eve@localhost"),
    "6.1.10 a second member": ({}, BOTH),
    "6.1.13 a member leaves": ({}, BOTH + f"bob: LEAVE id=2 {C}\nbob< LEAVE_ACK id=2\n"
        f"ann< EVENT {C} kind=MEMBER_LEFT nid=bob@localhost owner=false"),
    "6.1.18 members in pages": ({}, MADE + "".join(f"{name}: JOIN id=1 {C}\n{name}< JOIN_ACK id=1 {C}\n"
        f"ann< EVENT {C} kind=MEMBER_JOINED nid={name}@localhost owner=false\n" for name in ("bob", "cat", "dan", "eve"))
        + paged("MEMBERS", "MEMBERS_ACK", "members", [f"{name}@localhost" for name in ("ann", "bob", "cat", "dan", "eve")])),
    "6.1.19 channels sorted": ({}, "ann: JOIN id=1 channel=!d@localhost\nann< JOIN_ACK id=1 channel=!d@localhost\n" + MADE
        + "ann: CHANNELS id=3\nann< CHANNELS_ACK id=3 channels:2=!c@localhost !d@localhost"),
    "6.1.29 lists of names and domains": ({}, BOTH + f"ann: SET_CHAN_ACL id=2 action=add {C} nids:2=bob@localhost example.com type=join\n"
        f"ann< SET_CHAN_ACL_ACK id=2\nann: SET_CHAN_ACL id=3 action=add {C} nids:1=localhost type=read\nann< SET_CHAN_ACL_ACK id=3\n"
        f"bob: SET_CHAN_ACL id=4 action=add {C} nids:1=bob@localhost type=read\nbob< ERROR id=4 reason=FORBIDDEN\n"
        f"ann: GET_CHAN_ACL id=5 {C} type=join\nann< CHAN_ACL id=5 {C} nids:2=example.com bob@localhost type=join\n"
        f"ann: GET_CHAN_ACL id=6 {C} type=read\nann< CHAN_ACL id=6 {C} nids:1=localhost type=read\n"
        f"ann: GET_CHAN_ACL id=7 {C} type=publish\nann< CHAN_ACL id=7 {C} type=publish"),
    "6.1.4 an unknown message": ({}, "raw: UNKNOWN\r\nraw< ERROR detail=\\\"unknown message\\\" reason=BAD_REQUEST\nraw x"),
    "6.1.6 a line that is too long": (
        {"max_message_size": 1024},
        "raw= " + "x" * 1024 + "\nraw< ERROR detail=\\\"max message size exceeded\\\" reason=POLICY_VIOLATION\nraw x",
    ),
    "6.1.7 one channel too many": (
        {"max_channels_per_client": 1},
        MADE + "ann: JOIN id=2 channel=!d@localhost\n"
        "ann< ERROR id=2 detail=\\\"subscription limit reached\\\" reason=POLICY_VIOLATION\nann x",
    ),
    "6.1.9 join on behalf": ({}, MADE + f"bob: CHANNELS id=1\nbob< CHANNELS_ACK id=1\nann: JOIN id=2 {C} on_behalf=bob@localhost\n"
        f"ann< JOIN_ACK id=2 {C}\nbob< EVENT {C} kind=MEMBER_JOINED nid=bob@localhost owner=false"),
    "6.1.11 a full channel": ({}, MADE + f"ann: SET_CHAN_CONFIG id=2 {C} max_clients=1\nann< SET_CHAN_CONFIG_ACK id=2\n"
        f"bob: JOIN id=1 {C}\nbob< ERROR id=1 reason=CHANNEL_IS_FULL"),
    "6.1.12 joined twice": ({}, MADE + f"ann: JOIN id=2 {C}\nann< ERROR id=2 reason=USER_IN_CHANNEL"),
    "6.1.14 removed on behalf": ({}, BOTH + f"ann: LEAVE id=2 {C} on_behalf=bob@localhost\nann< LEAVE_ACK id=2\n"
        f"bob< EVENT {C} kind=MEMBER_LEFT nid=bob@localhost owner=false"),
    "6.1.15 the owner leaves": ({}, BOTH + f"ann: LEAVE id=2 {C}\nann< LEAVE_ACK id=2\n"
        f"bob< EVENT {C} kind=MEMBER_LEFT nid=ann@localhost owner=true\n"
        f"bob< EVENT {C} kind=MEMBER_JOINED nid=bob@localhost owner=true"),
    "6.1.16 a stranger leaves": ({}, MADE + f"bob: LEAVE id=1 {C}\nbob< ERROR id=1 reason=USER_NOT_IN_CHANNEL"),
    "6.1.17 members sorted": ({}, BOTH + f"ann: MEMBERS id=3 {C}\nann< MEMBERS_ACK id=3 {C} members:2=ann@localhost bob@localhost"),
    "6.1.21 channels in pages": ({}, "".join(f"ann: JOIN id={n} channel=!c{n}@localhost\nann< JOIN_ACK id={n} channel=!c{n}@localhost\n"
        for n in range(1, 6)) + paged("CHANNELS", "CHANNELS_ACK", "channels", [f"!c{n}@localhost" for n in range(1, 6)])),
    "6.1.20 owned channels": ({}, BOTH + "bob: JOIN id=2 channel=!d@localhost\nbob< JOIN_ACK id=2 channel=!d@localhost\n"
        "bob: CHANNELS id=3 owner=true\nbob< CHANNELS_ACK id=3 channels:1=!d@localhost"),
    "6.1.22 a missing channel": ({}, f"ann: LEAVE id=1 {C}\nann< ERROR id=1 reason=CHANNEL_NOT_FOUND"),
    "6.1.23 the same settings twice": ({}, MADE + 2 * f"ann: SET_CHAN_CONFIG id=2 {C} max_clients=7\nann< SET_CHAN_CONFIG_ACK id=2\n"),
    "6.1.24 settings by a stranger": ({}, BOTH + f"bob: SET_CHAN_CONFIG id=2 {C} max_clients=7\nbob< ERROR id=2 reason=FORBIDDEN"),
    **{f"6.1.25 {field} over the limit": ({}, MADE + f"ann: SET_CHAN_CONFIG id=2 {C} {field}=4000000\n"
        f"ann< ERROR id=2 detail=\\\"{field} exceeds server established limit\\\" reason=BAD_REQUEST\nann x")
       for field in ("max_clients", "max_payload_size", "max_persist_messages")},
    "6.1.28 persistence needs a login": ({}, MADE + f"ann: SET_CHAN_CONFIG id=2 {C} persist=true\n"
        "ann< ERROR id=2 detail=\\\"persistence requires auth\\\" reason=FORBIDDEN\n"
        f"ann: SET_CHAN_CONFIG id=3 {C} persist=false\nann< SET_CHAN_CONFIG_ACK id=3\nann: GET_CHAN_CONFIG id=4 {C}\n"
        f"ann< CHAN_CONFIG id=4 {C} max_clients=100 max_payload_size=65536 max_persist_messages=1000 "
        "message_flush_interval=0 persist=false type=pubsub"),
    "6.1.30 a list in pages": ({}, MADE + f"ann: SET_CHAN_ACL id=9 action=add {C} nids:5={' '.join(USERS)} type=read\n"
        "ann< SET_CHAN_ACL_ACK id=9\n" + paged("GET_CHAN_ACL", "CHAN_ACL", "nids", USERS, " type=read")
        + f"ann: GET_CHAN_ACL id=8 {C} type=read\nann< CHAN_ACL id=8 {C} nids:5={' '.join(USERS)} type=read"),
    "6.1.31 a list that is too long": ({"max_clients_per_channel": 2}, MADE +
        f"ann: SET_CHAN_ACL id=2 action=add {C} nids:3={' '.join(USERS[:3])} type=read\n"
        "ann< ERROR id=2 detail=\\\"ACL allow list exceeds max entries\\\" reason=POLICY_VIOLATION\nann x"),
    "6.1.32 not on the join list": ({}, MADE + f"ann: SET_CHAN_ACL id=2 action=add {C} nids:1=ann@localhost type=join\n"
        f"ann< SET_CHAN_ACL_ACK id=2\nbob: JOIN id=1 {C}\nbob< ERROR id=1 reason=NOT_ALLOWED"),
    "6.1.33 a broadcast reaches the others": ({}, BOTH + f"ann: BROADCAST id=2 {C} length=12⏎hello, world\nann< BROADCAST_ACK id=2 seq=1\n"
        f"bob< MESSAGE {C} from=ann@localhost length=12 seq=1 timestamp=#⏎hello, world"),
    "6.1.34 a payload longer than announced": ({}, MADE + f"ann: BROADCAST id=2 {C} length=3⏎abcd\n"
        "ann< ERROR id=2 detail=\\\"invalid payload format\\\" reason=BAD_REQUEST\nann x"),
    "6.1.35 not on the publish list": ({}, MADE + f"ann: SET_CHAN_ACL id=2 action=add {C} nids:1=bob@localhost type=publish\n"
        f"ann< SET_CHAN_ACL_ACK id=2\nann: BROADCAST id=3 {C} length=1⏎x\nann< ERROR id=3 reason=NOT_ALLOWED"),
    "6.1.36 not on the read list": ({}, BOTH + f"cat: JOIN id=1 {C}\ncat< JOIN_ACK id=1 {C}\n"
        + "".join(f"{name}< EVENT {C} kind=MEMBER_JOINED nid=cat@localhost owner=false\n" for name in ("ann", "bob"))
        + f"ann: SET_CHAN_ACL id=2 action=add {C} nids:1=bob@localhost type=read\n"
        f"ann< SET_CHAN_ACL_ACK id=2\nann: BROADCAST id=3 {C} length=1⏎x\nann< BROADCAST_ACK id=3 seq=1\n"
        f"bob< MESSAGE {C} from=ann@localhost length=1 seq=1 timestamp=#⏎x\n"
        "cat: CHANNELS id=5 owner=true\ncat< CHANNELS_ACK id=5"),
    "6.1.37 an answer that is too large": ({"max_message_size": 512, "max_clients_per_channel": 1000}, MADE + "".join(
        f"ann: SET_CHAN_ACL id=2 action=add {C} nids:1={'x' * 200}{n}@localhost type=read\nann< SET_CHAN_ACL_ACK id=2\n"
        for n in range(4)) + f"ann: GET_CHAN_ACL id=3 {C} type=read\n"
        "ann< ERROR id=3 detail=\\\"response exceeded maximum message size\\\" reason=RESPONSE_TOO_LARGE\n"
        "ann: CHANNELS id=4\nann< CHANNELS_ACK id=4 channels:1=!c@localhost"),
    "6.1.38 deleted by its owner": ({}, BOTH + f"ann: DELETE id=2 {C}\nann< DELETE_ACK id=2\nbob< EVENT {C} kind=CHANNEL_DELETED\n"
        f"bob: JOIN id=3 {C}\nbob< JOIN_ACK id=3 {C}\nbob: CHANNELS id=4 owner=true\nbob< CHANNELS_ACK id=4 channels:1=!c@localhost"),
    "6.1.39 not deleted by others": ({}, BOTH + f"bob: DELETE id=2 {C}\nbob< ERROR id=2 reason=FORBIDDEN\n"
        f"bob: MEMBERS id=3 {C}\nbob< MEMBERS_ACK id=3 {C} members:2=ann@localhost bob@localhost"),
    "6.1.40 too many channels": ({"max_channels": 1}, MADE + "ann: JOIN id=2 channel=!d@localhost\n"
        "ann< ERROR id=2 detail=\\\"maximum channels reached\\\" reason=RESOURCE_LIMIT_REACHED\n"
        f"ann: LEAVE id=3 {C}\nann< LEAVE_ACK id=3"),
    "white space around a name": ({}, f"raw: CONNECT version=1\nraw< {GREETING}\nraw: IDENTIFY username=\\\"\u00a0 eve\u3000\\\"\n"
        "raw< IDENTIFY_ACK nid=eve@localhost"),
    "what is no white space to the original": ({}, f"raw: CONNECT version=1\nraw< {GREETING}\nraw: IDENTIFY username=\x1ceve\n"
        "raw< ERROR detail=\\\"invalid NID format\\\" reason=BAD_REQUEST\nraw x"),
    # Where the process of the original ends, and where ours answers instead.
    "page 0": ({}, MADE + f"ann: MEMBERS id=2 {C} page=0\nann< MEMBERS_ACK id=2 {C} page=0 page_size=20 total_count=1"),
    "a payload beyond the largest power of two": ({"max_payload_size": 5000}, BOTH +
        f"ann: BROADCAST id=2 {C} length=4500⏎{'y' * 4500}\nann< BROADCAST_ACK id=2 seq=1\n"
        f"bob< MESSAGE {C} from=ann@localhost length=4500 seq=1 timestamp=#⏎{'y' * 4500}"),
    "a run with one payload over the channel's limit": ({}, BOTH + f"ann: SET_CHAN_CONFIG id=2 {C} max_payload_size=3\n"
        f"ann< SET_CHAN_CONFIG_ACK id=2\nbob< EVENT {C} kind=CHANNEL_RECONFIGURED\n"
        f"ann: BROADCAST id=3 {C} length=3⏎abc⏎BROADCAST id=4 {C} length=4⏎abcd⏎BROADCAST id=5 {C} length=1⏎z\n"
        "ann< BROADCAST_ACK id=3 seq=1\n"
        "ann< ERROR id=4 detail=\\\"payload size exceeds channel limit\\\" reason=POLICY_VIOLATION\nann x\n"
        f"bob< MESSAGE {C} from=ann@localhost length=3 seq=1 timestamp=#⏎abc"),
    "a lone payload over the channel's limit has spent its number": ({}, BOTH + f"ann: SET_CHAN_CONFIG id=2 {C} max_payload_size=3\n"
        f"ann< SET_CHAN_CONFIG_ACK id=2\nbob< EVENT {C} kind=CHANNEL_RECONFIGURED\nbob: BROADCAST id=3 {C} length=4⏎abcd\n"
        "bob< ERROR id=3 detail=\\\"payload size exceeds channel limit\\\" reason=POLICY_VIOLATION\nbob x\n"
        f"ann< EVENT {C} kind=MEMBER_LEFT nid=bob@localhost owner=false\n"
        f"ann: BROADCAST id=4 {C} length=3⏎abc\nann< BROADCAST_ACK id=4 seq=2"),
    "a run of a stranger": ({}, MADE + f"bob: BROADCAST id=3 {C} length=1⏎a⏎BROADCAST id=4 {C} length=1⏎b\n"
        "bob< ERROR id=3 reason=FORBIDDEN\nbob< ERROR id=4 reason=FORBIDDEN"),
}  # fmt: skip

LOGGED_IN: dict[str, tuple[dict[str, Any], str]] = {
    "6.2.11 kept": ({}, KEPT),
    "6.2.15 without logins nothing is restored": ({}, KEPT + "restart open\nann: CHANNELS id=1\nann< CHANNELS_ACK id=1"),
    "6.3.2 nothing to keep it in": ({}, MADE + f"ann: SET_CHAN_CONFIG id=2 {C} max_persist_messages=0 persist=true\n"
        "ann< ERROR id=2 detail=\\\"max_persist_messages must be greater than 0 for persistent channels\\\" reason=BAD_REQUEST\nann x"),
    "6.3.5 first and last": ({}, KEPT + said(3) + f"ann: CHAN_SEQ id=4 {C}\nann< CHAN_SEQ_ACK id=4 {C} first_seq=1 last_seq=3"),
    "6.3.15 two logs": ({}, KEPT + f"{KEPT.replace('!c@', '!d@')}" + said(2)
        + "ann: BROADCAST id=7 channel=!d@localhost length=1⏎x\nann< BROADCAST_ACK id=7 seq=1\n"
        f"ann: CHAN_SEQ id=8 {C}\nann< CHAN_SEQ_ACK id=8 {C} first_seq=1 last_seq=2\n"
        "ann: CHAN_SEQ id=9 channel=!d@localhost\nann< CHAN_SEQ_ACK id=9 channel=!d@localhost first_seq=1 last_seq=1"),
    "6.3.18 after a restart": ({}, KEPT + said(7) + f"restart\nann: CHAN_SEQ id=10 {C}\nann< CHAN_SEQ_ACK id=10 {C} first_seq=1 last_seq=7"),
    "6.6.1 a queue that is not kept": ({}, MADE + f"ann: SET_CHAN_CONFIG id=2 {C} type=fifo\n"
        "ann< ERROR id=2 detail=\\\"FIFO requires persist=true and max_persist_messages > 0\\\" reason=BAD_REQUEST\nann x"),
    "6.6.2 a queue without room": ({}, MADE + f"ann: SET_CHAN_CONFIG id=2 {C} max_persist_messages=0 persist=true type=fifo\n"
        "ann< ERROR id=2 detail=\\\"max_persist_messages must be greater than 0 for persistent channels\\\" reason=BAD_REQUEST\nann x"),
    "6.6.4 it is a queue after a restart": ({}, QUEUE + f"restart\nann: GET_CHAN_CONFIG id=4 {C}\n"
        f"ann< CHAN_CONFIG id=4 {C} max_clients=100 max_payload_size=65536 max_persist_messages=1000 "
        "message_flush_interval=0 persist=true type=fifo"),
    "6.6.9 members are told": ({}, BOTH + f"ann: SET_CHAN_CONFIG id=2 {C} persist=true type=fifo\nann< SET_CHAN_CONFIG_ACK id=2\n"
        f"bob< EVENT {C} kind=CHANNEL_RECONFIGURED\nann: SET_CHAN_CONFIG id=3 {C} max_clients=7\nann< SET_CHAN_CONFIG_ACK id=3\n"
        f"bob< EVENT {C} kind=CHANNEL_RECONFIGURED\nann: SET_CHAN_CONFIG id=4 {C} max_clients=7 type=fifo\nann< SET_CHAN_CONFIG_ACK id=4\n"
        f"bob: GET_CHAN_CONFIG id=5 {C}\nbob< CHAN_CONFIG id=5 {C} max_clients=7 max_payload_size=65536 max_persist_messages=1000 "
        "message_flush_interval=0 persist=true type=fifo"),
    "6.6.13 an empty queue": ({}, QUEUE + f"ann: POP id=3 {C}\nann< ERROR id=3 reason=QUEUE_EMPTY"),
    "6.6.18 its length": ({}, QUEUE + f"ann: GET_CHAN_LEN id=3 {C}\nann< CHAN_LEN id=3 {C} count=0\n"
        + "".join(f"ann: PUSH id={n} {C} length=1⏎{n}\nann< PUSH_ACK id={n}\n" for n in (4, 5, 6))
        + f"ann: GET_CHAN_LEN id=7 {C}\nann< CHAN_LEN id=7 {C} count=3\nann: POP id=8 {C}\nann< POP_ACK id=8 length=1 timestamp=#⏎4\n"
        f"ann: GET_CHAN_LEN id=9 {C}\nann< CHAN_LEN id=9 {C} count=2"),
    "6.6.20 two take turns": ({}, SHARED + "".join(f"ann: PUSH id={n} {C} length=1⏎{n}\nann< PUSH_ACK id={n}\n" for n in (4, 5, 6))
        + f"bob: POP id=7 {C}\nbob< POP_ACK id=7 length=1 timestamp=#⏎4\nann: POP id=7 {C}\nann< POP_ACK id=7 length=1 timestamp=#⏎5\n"
        f"bob: POP id=8 {C}\nbob< POP_ACK id=8 length=1 timestamp=#⏎6\nbob: POP id=9 {C}\nbob< ERROR id=9 reason=QUEUE_EMPTY\n"
        f"ann: POP id=9 {C}\nann< ERROR id=9 reason=QUEUE_EMPTY"),
    "6.6.23 pushed before a restart": ({}, QUEUE + f"ann: PUSH id=3 {C} length=1⏎x\nann< PUSH_ACK id=3\nrestart\nann: POP id=4 {C}\n"
        "ann< POP_ACK id=4 length=1 timestamp=#⏎x"),
    "6.6.26 what is no queue": ({}, KEPT + f"ann: CLEAR id=3 {C}\nann< ERROR id=3 reason=WRONG_TYPE\nann: POP id=4 {C}\n"
        f"ann< ERROR id=4 reason=WRONG_TYPE\nann: PUSH id=5 {C} length=1⏎x\nann< ERROR id=5 reason=WRONG_TYPE\n"
        f"ann: GET_CHAN_LEN id=6 {C}\nann< ERROR id=6 reason=WRONG_TYPE"),
    "6.2.9 two connections of one user": ({}, "ann: CHANNELS id=1\nann< CHANNELS_ACK id=1\n"
        f"ann#2: JOIN id=1 {C}\nann#2< JOIN_ACK id=1 {C}\n"
        f"ann< EVENT {C} kind=MEMBER_JOINED nid=ann@localhost owner=true\nann#2 bye\n"
        f"ann: MEMBERS id=2 {C}\nann< MEMBERS_ACK id=2 {C} members:1=ann@localhost"),
    "6.2.12 a transient channel is left": ({}, BOTH + f"ann bye\nbob< EVENT {C} kind=MEMBER_LEFT nid=ann@localhost owner=true\n"
        f"bob< EVENT {C} kind=MEMBER_JOINED nid=bob@localhost owner=true"),
    "6.2.13 a persistent channel is kept": ({}, BOTH + f"ann: SET_CHAN_CONFIG id=2 {C} persist=true\nann< SET_CHAN_CONFIG_ACK id=2\n"
        f"bob< EVENT {C} kind=CHANNEL_RECONFIGURED\nann bye\n"
        f"bob: MEMBERS id=3 {C}\nbob< MEMBERS_ACK id=3 {C} members:2=ann@localhost bob@localhost"),
    "6.3.1 it survives a restart": ({}, KEPT + "restart\nann: CHANNELS id=1\nann< CHANNELS_ACK id=1 channels:1=!c@localhost"),
    "6.3.3 off again, it does not": ({}, KEPT + f"ann: SET_CHAN_CONFIG id=3 {C} persist=false\nann< SET_CHAN_CONFIG_ACK id=3\n"
        "restart\nann: CHANNELS id=1\nann< CHANNELS_ACK id=1"),
    "6.3.4 history": ({}, KEPT + said(5) + f"ann: HISTORY id=9 {C} from_seq=1 history_id=h limit=10\n" + told(range(1, 6))
        + f"ann< HISTORY_ACK id=9 {C} count=5 history_id=h"),
    "6.3.6 a part of it": ({}, KEPT + said(10) + f"ann: HISTORY id=99 {C} from_seq=6 history_id=h limit=3\n" + told(range(6, 9))
        + f"ann< HISTORY_ACK id=99 {C} count=3 history_id=h"),
    "6.3.7 after a restart": ({}, KEPT + said(3) + f"restart\nann: HISTORY id=9 {C} from_seq=1 history_id=h limit=10\n"
        + told(range(1, 4)) + f"ann< HISTORY_ACK id=9 {C} count=3 history_id=h\n"
        f"ann: CHAN_SEQ id=10 {C}\nann< CHAN_SEQ_ACK id=10 {C} first_seq=1 last_seq=3"),
    "6.3.8 an empty one": ({}, KEPT + f"ann: HISTORY id=9 {C} from_seq=1 history_id=h limit=10\n"
        f"ann< HISTORY_ACK id=9 {C} count=0 history_id=h\nann: CHAN_SEQ id=10 {C}\nann< CHAN_SEQ_ACK id=10 {C} first_seq=0 last_seq=0"),
    "6.3.12 another reads it": ({}, KEPT + said(2) + f"bob: JOIN id=1 {C}\nbob< JOIN_ACK id=1 {C}\n"
        f"bob: HISTORY id=2 {C} from_seq=1 history_id=h limit=9\n" + told(range(1, 3), "bob")
        + f"bob< HISTORY_ACK id=2 {C} count=2 history_id=h"),
    "6.3.14 from beyond its end": ({}, KEPT + said(2) + f"ann: HISTORY id=9 {C} from_seq=999 history_id=h limit=10\n"
        f"ann< HISTORY_ACK id=9 {C} count=0 history_id=h"),
    "6.3.16 of a transient channel": ({}, MADE + f"ann: CHAN_SEQ id=2 {C}\nann< ERROR id=2 reason=PERSISTENCE_NOT_ENABLED\n"
        f"ann: HISTORY id=3 {C} from_seq=1 history_id=h limit=9\nann< ERROR id=3 reason=PERSISTENCE_NOT_ENABLED"),
    "6.3.17 off and on again": ({}, KEPT + said(5) + f"ann: SET_CHAN_CONFIG id=91 {C} persist=false\nann< SET_CHAN_CONFIG_ACK id=91\n"
        f"ann: SET_CHAN_CONFIG id=92 {C} persist=true\nann< SET_CHAN_CONFIG_ACK id=92\n" + said(3, 6)
        + f"ann: CHAN_SEQ id=93 {C}\nann< CHAN_SEQ_ACK id=93 {C} first_seq=6 last_seq=8"),
    "6.6.3 a queue stays one": ({}, QUEUE + f"ann: SET_CHAN_CONFIG id=3 {C} type=pubsub\n"
        "ann< ERROR id=3 detail=\\\"FIFO is one-way; cannot revert to pubsub\\\" reason=BAD_REQUEST\nann x"),
    "6.6.5 what a queue does not do": ({}, QUEUE + f"ann: BROADCAST id=3 {C} length=1⏎x\nann< ERROR id=3 reason=WRONG_TYPE\n"
        f"ann: HISTORY id=4 {C} from_seq=1 history_id=h limit=1\nann< ERROR id=4 reason=WRONG_TYPE\n"
        f"ann: CHAN_SEQ id=5 {C}\nann< ERROR id=5 reason=WRONG_TYPE"),
    "6.6.8 its owner leaves": ({}, SHARED + f"ann: LEAVE id=3 {C}\nann< LEAVE_ACK id=3\nbob< EVENT {C} kind=CHANNEL_DELETED\n"
        f"bob: POP id=4 {C}\nbob< ERROR id=4 reason=CHANNEL_NOT_FOUND"),
    "6.6.14 a full queue": ({}, QUEUE + f"ann: SET_CHAN_CONFIG id=3 {C} max_persist_messages=3\nann< SET_CHAN_CONFIG_ACK id=3\n"
        + "".join(f"ann: PUSH id={n} {C} length=1⏎{n}\nann< PUSH_ACK id={n}\n" for n in range(4, 7))
        + f"ann: PUSH id=7 {C} length=1⏎7\nann< ERROR id=7 reason=QUEUE_FULL\nann: POP id=8 {C}\n"
        f"ann< POP_ACK id=8 length=1 timestamp=#⏎4\nann: PUSH id=9 {C} length=1⏎9\nann< PUSH_ACK id=9\n"
        f"ann: PUSH id=10 {C} length=1⏎a\nann< ERROR id=10 reason=QUEUE_FULL"),
    "6.6.15 a member that is no owner": ({}, SHARED + f"bob: PUSH id=3 {C} length=1⏎x\nbob< ERROR id=3 reason=FORBIDDEN\n"
        f"bob: GET_CHAN_LEN id=4 {C}\nbob< ERROR id=4 reason=FORBIDDEN\nbob: CLEAR id=5 {C}\nbob< ERROR id=5 reason=FORBIDDEN\n"
        f"bob: POP id=6 {C}\nbob< ERROR id=6 reason=QUEUE_EMPTY"),
    "6.6.16 a stranger": ({}, QUEUE + f"bob: POP id=3 {C}\nbob< ERROR id=3 reason=USER_NOT_IN_CHANNEL\n"
        f"bob: CLEAR id=4 {C}\nbob< ERROR id=4 reason=USER_NOT_IN_CHANNEL"),
    "6.6.17 not on the read list": ({}, SHARED + f"ann: SET_CHAN_ACL id=3 action=add {C} nids:1=ann@localhost type=read\n"
        f"ann< SET_CHAN_ACL_ACK id=3\nbob: POP id=4 {C}\nbob< ERROR id=4 reason=NOT_ALLOWED"),
    "6.6.21 a restart between pops": ({}, QUEUE + "".join(f"ann: PUSH id={n} {C} length=1⏎{n}\nann< PUSH_ACK id={n}\n" for n in (3, 4, 5))
        + f"ann: POP id=6 {C}\nann< POP_ACK id=6 length=1 timestamp=#⏎3\nrestart\n"
        f"ann: POP id=7 {C}\nann< POP_ACK id=7 length=1 timestamp=#⏎4\nann: POP id=8 {C}\nann< POP_ACK id=8 length=1 timestamp=#⏎5\n"
        f"ann: POP id=9 {C}\nann< ERROR id=9 reason=QUEUE_EMPTY"),
    "6.6.22 a pop does not wait for the timer": ({}, QUEUE + f"ann: SET_CHAN_CONFIG id=3 {C} message_flush_interval=60000\n"
        f"ann< SET_CHAN_CONFIG_ACK id=3\nann: PUSH id=4 {C} length=1⏎x\nann< PUSH_ACK id=4\nann: POP id=5 {C}\n"
        "ann< POP_ACK id=5 length=1 timestamp=#⏎x"),
    "6.6.24 cleared": ({}, QUEUE + f"ann: PUSH id=3 {C} length=1⏎x\nann< PUSH_ACK id=3\nann: CLEAR id=4 {C}\nann< CLEAR_ACK id=4\n"
        f"ann: CLEAR id=5 {C}\nann< CLEAR_ACK id=5\nann: GET_CHAN_LEN id=6 {C}\nann< CHAN_LEN id=6 {C} count=0\n"
        f"ann: PUSH id=7 {C} length=1⏎y\nann< PUSH_ACK id=7\nann: POP id=8 {C}\nann< POP_ACK id=8 length=1 timestamp=#⏎y"),
    "6.6.27 an unusable cursor": ({}, QUEUE + f"break\nann: PUSH id=3 {C} length=1⏎x\nann< ERROR id=3 reason=CURSOR_RECOVERY_REQUIRED\n"
        f"ann: GET_CHAN_LEN id=4 {C}\nann< ERROR id=4 reason=CURSOR_RECOVERY_REQUIRED\nann: CLEAR id=5 {C}\nann< CLEAR_ACK id=5\n"
        f"ann: PUSH id=6 {C} length=1⏎y\nann< PUSH_ACK id=6\nann: POP id=7 {C}\nann< POP_ACK id=7 length=1 timestamp=#⏎y"),
}  # fmt: skip


class Stage:
    """A server, and people who talk to it as a script says."""

    def __init__(self, root: Path, settings: dict[str, Any], *, auth: bool, **more: Any) -> None:
        self.root, self.settings, self.auth, self.more = root, settings, auth, more
        self.raws: dict[str, Raw] = {}

    async def start(self) -> None:
        modulator = PlainAuthenticator() if self.auth else None
        self.server = ChannelServer(self.root, options(wire=self.settings, **self.more), modulator=modulator)
        await self.server.start()

    async def stop(self) -> None:
        for raw in self.raws.values():
            await raw.gone()
        self.raws.clear()
        await self.server.stop()

    async def person(self, name: str) -> Raw:
        if name not in self.raws:
            raw = await Raw.open(self.server)
            self.raws[name] = raw if name == "raw" else await raw.login(name.partition("#")[0], auth=self.auth)
        return self.raws[name]

    async def play(self, line: str) -> None:
        if line.startswith("restart"):
            await self.stop()
            self.auth = self.auth and line != "restart open"
            await self.start()
        elif line == "break":
            await self.stop()
            (self.root / channel_hash("c") / "cursor.bin").write_bytes(b"\xff" * 16)
            await self.start()
        elif line.endswith((" x", " bye")):
            name, _, what = line.rpartition(" ")
            if what == "x":
                assert await (await self.person(name)).ended(), f"{name} is not closed"
            else:
                await self.raws.pop(name).gone()
        elif "< " in line and line.partition("< ")[0].replace("#", "").isalnum():
            name, _, wanted = line.partition("< ")
            frame = (await (await self.person(name)).frame()).decode()
            pattern = re.escape(wanted.replace("⏎", "\n") + "\n").replace(r"=\#", r"=\d+")
            assert re.fullmatch(pattern, frame), f"{name} heard {frame!r} instead of {wanted!r}"
        elif "= " in line[:6]:
            name, _, text = line.partition("= ")
            (await self.person(name)).write(text)
        else:
            name, _, text = line.partition(": ")
            (await self.person(name)).write(text.replace("⏎", "\n") + "\n")


@pytest.mark.parametrize(
    ("settings", "script", "auth"),
    [(*case, False) for case in OPEN.values()] + [(*case, True) for case in LOGGED_IN.values()],
    ids=[*OPEN, *LOGGED_IN],
)
async def test_a_behaviour_of_the_original(settings: dict[str, Any], script: str, auth: bool, tmp_path: Path) -> None:
    stage = Stage(tmp_path / "data", settings, auth=auth)
    await stage.start()
    try:
        for name in dict.fromkeys(re.findall(r"^(ann|bob)(?:[:<]| )", script, re.MULTILINE)):
            await stage.person(name)  # all are there before anyone speaks
        for line in filter(None, script.split("\n")):
            await stage.play(line)
    finally:
        await stage.stop()


async def test_200_broadcasts_with_a_quick_timer_are_all_kept(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "data", {"rate_limit": 0}, auth=True)
    await stage.start()
    try:
        ann = await stage.person("ann")
        await ann.ask(f"JOIN id=1 {C}")
        await ann.ask(f"SET_CHAN_CONFIG id=2 {C} persist=true message_flush_interval=10")
        for start in range(0, 200, 50):
            ann.write("".join(f"BROADCAST id={start + n} {C} length=1\nx\n" for n in range(1, 51)))
            assert [frame.split()[0] for frame in await ann.frames(50)] == ["BROADCAST_ACK"] * 50
        assert await ann.ask(f"CHAN_SEQ id=500 {C}") == f"CHAN_SEQ_ACK id=500 {C} first_seq=1 last_seq=200"
    finally:
        await stage.stop()


async def test_one_request_too_many_under_way_ends_the_connection_in_silence(tmp_path: Path) -> None:
    class Slow:
        def __init__(self) -> None:
            self.go_on = asyncio.Event()

        async def transform(self, nid: Any, channel: Any, payload: bytes) -> bytes:
            await self.go_on.wait()
            return payload

    slow = Slow()
    server = ChannelServer(tmp_path / "data", options(wire={"max_inflight_requests": 3}), modulator=slow)
    await server.start()
    try:
        async with await Raw.open(server) as raw:
            await raw.login("ann")
            await raw.ask(f"JOIN id=1 {C}")
            for n in range(2, 6):  # one more than the limit is tolerated
                raw.write(f"BROADCAST id={n} {C} length=1\nx\n")
                assert (await raw.ask(f"CHANNELS id={n + 100}")).startswith("CHANNELS_ACK") or n == 5
            raw.write(f"BROADCAST id=6 {C} length=1\nx\n")
            assert await raw.ended()
    finally:
        slow.go_on.set()
        await server.stop()


def numbers(frames: list[str]) -> list[int]:
    return [int(found[1]) for frame in frames if (found := re.search(r" seq=(\d+) ", frame))]


async def test_what_retention_left_is_told_and_survives_a_restart(tmp_path: Path) -> None:
    """6.3.10, 6.3.11, 6.3.13: small segments and a cap of five."""
    stage = Stage(tmp_path / "data", {"max_persist_messages": 100}, auth=True, segment_bytes=256)
    await stage.start()
    try:
        ann = await stage.person("ann")
        await ann.ask(f"JOIN id=1 {C}")
        await ann.ask(f"SET_CHAN_CONFIG id=2 {C} max_persist_messages=5 persist=true")
        for n in range(3, 23):
            await ann.ask(f"BROADCAST id={n} {C} length=9\nmessage {n % 10}\n")
        for _ in range(2):
            ann = await stage.person("ann")
            found = re.fullmatch(
                r"CHAN_SEQ_ACK id=30 \S+ first_seq=(\d+) last_seq=20", await ann.ask(f"CHAN_SEQ id=30 {C}")
            )
            assert found is not None
            first = int(found[1])
            assert 1 < first <= 16
            ann.write(f"HISTORY id=31 {C} from_seq=1 history_id=h limit=99\n")
            frames = await ann.frames(21 - first + 1)
            assert numbers(frames) == list(range(first, 21))
            assert frames[-1] == f"HISTORY_ACK id=31 {C} count={21 - first} history_id=h"
            await stage.play("restart")
    finally:
        await stage.stop()


async def test_the_time_of_an_element_is_that_of_its_push(tmp_path: Path) -> None:
    """6.6.12."""
    stage = Stage(tmp_path / "data", {}, auth=True)
    await stage.start()
    try:
        ann = await stage.person("ann")
        await ann.ask(f"JOIN id=1 {C}")
        await ann.ask(f"SET_CHAN_CONFIG id=2 {C} persist=true type=fifo")
        before = stage.server.now_ms()
        await ann.ask(f"PUSH id=3 {C} length=3\njob\n")
        after = stage.server.now_ms()
        head, payload = (await ann.ask(f"POP id=4 {C}")).split("\n")
        assert payload == "job"
        assert before <= int(head.rpartition("timestamp=")[2]) <= after
    finally:
        await stage.stop()


FULL = OSError(28, "No space left on device")
FAILING = {
    "6.4.1 a join": (f"bob: JOIN id=5 {C}", f"ann: MEMBERS id=9 {C}", f"MEMBERS_ACK id=9 {C} members:1=ann@localhost"),
    "6.4.3 a list": (
        f"ann: SET_CHAN_ACL id=5 action=add {C} nids:1=bob@localhost type=read",
        f"ann: GET_CHAN_ACL id=9 {C} type=read",
        f"CHAN_ACL id=9 {C} type=read",
    ),
    "6.4.4 settings": (
        f"ann: SET_CHAN_CONFIG id=5 {C} max_clients=7",
        f"ann: GET_CHAN_CONFIG id=9 {C}",
        f"CHAN_CONFIG id=9 {C} max_clients=100 max_payload_size=65536 max_persist_messages=1000 "
        "message_flush_interval=0 persist=true type=pubsub",
    ),
    "6.4.5 a leave": (
        f"bob: LEAVE id=5 {C}",
        f"ann: MEMBERS id=9 {C}",
        f"MEMBERS_ACK id=9 {C} members:2=ann@localhost bob@localhost",
    ),
}


@pytest.mark.parametrize(("asked", "look", "wanted"), FAILING.values(), ids=FAILING)
async def test_a_change_that_cannot_be_saved_ends_the_connection_and_did_not_happen(
    asked: str, look: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk(PosixDisk())
    monkeypatch.setattr("penstock.channels.manager.disk_for", lambda _: disk)
    stage = Stage(tmp_path / "data", {"max_channels_per_client": 1}, auth=True)
    await stage.start()
    try:
        joined = f"bob: JOIN id=1 {C}\nbob< JOIN_ACK id=1 {C}\nann< EVENT {C} kind=MEMBER_JOINED nid=bob@localhost owner=false"
        for line in filter(None, (KEPT + (joined if "LEAVE" in asked else "")).split("\n")):
            await stage.play(line)
        name, _, request = asked.partition(": ")
        await stage.person(name)
        disk.on_call = no_save
        await stage.play(asked)
        await stage.play(f"{name}< ERROR reason=INTERNAL_SERVER_ERROR")
        await stage.play(f"{name} x")
        await stage.raws.pop(name).gone()
        disk.on_call = None
        if request.startswith("JOIN"):  # its slot is free again
            await stage.play("bob: JOIN id=6 channel=!d@localhost")
            await stage.play("bob< JOIN_ACK id=6 channel=!d@localhost")
        await stage.play(look)
        await stage.play(f"ann< {wanted}")
    finally:
        await stage.stop()


async def test_a_broadcast_that_cannot_be_stored_ends_the_connection_and_nobody_hears_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6.4.2."""
    disk = FaultyDisk(PosixDisk())
    monkeypatch.setattr("penstock.channels.manager.disk_for", lambda _: disk)
    stage = Stage(tmp_path / "data", {}, auth=True)
    await stage.start()
    try:
        for line in filter(None, (KEPT + f"bob: JOIN id=1 {C}\nbob< JOIN_ACK id=1 {C}").split("\n")):
            await stage.play(line)
        disk.on_call = no_room
        await stage.play(f"ann< EVENT {C} kind=MEMBER_JOINED nid=bob@localhost owner=false")
        await stage.play(f"ann: BROADCAST id=5 {C} length=1⏎x")
        await stage.play("ann< ERROR reason=INTERNAL_SERVER_ERROR")
        await stage.play("ann x")
        disk.on_call = None
        await stage.play(f"bob: MEMBERS id=6 {C}")
        await stage.play(f"bob< MEMBERS_ACK id=6 {C} members:2=ann@localhost bob@localhost")
    finally:
        await stage.stop()


def no_room(operation: str, path: str) -> None:
    if operation in ("write_at", "write_many_at", "create") and ".log" in path:
        raise FULL


def no_save(operation: str, path: str) -> None:
    if operation in ("write_at", "create", "rename", "sync") and channel_hash("c") in path:
        raise FULL
