"""Promise: asked the same, the manager answers the same as a server of narwhal 0.7.0, and tells the same members.

The frames of recorded conversations are taken apart here by just enough of the line protocol, asked of a manager,
and what it answers is compared frame by frame, for each connection and channel in order.  Timestamps aside.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.channels import (
    ChannelId,
    ChannelManager,
    ChannelMessage,
    ChannelSession,
    Event,
    FileChannelStore,
    Limits,
    ManagerOptions,
    Nid,
    PersistedChannel,
    commands as c,
)
from penstock.channels.rules import RECOVERABLE
from penstock.errors import Refused
from penstock.testing.packed import read_cases, unpack

VECTORS = Path(__file__).parents[2] / "vectors" / "narwhal-metadata"
Frame = tuple[str, dict[str, Any], bytes]
HANDSHAKE = {"CONNECT", "AUTH", "IDENTIFY"}
HANDSHAKE_ACKS = {"CONNECT_ACK", "AUTH_ACK", "IDENTIFY_ACK"}
NO_COMMAND = {"NOPE"}
PARAMETER = re.compile(r' (\w+)(?::(\d+))?=(?:\\"(.*?)\\"|([^ ]*))')


def parse(data: bytes) -> Frame:
    head, _, rest = data.partition(b"\n")
    text = head.decode()
    name = text.split(" ", 1)[0]
    fields: dict[str, Any] = {}
    at = len(name)
    while found := PARAMETER.match(text, at):
        at = found.end()
        value: Any = found[4] if found[3] is None else found[3]
        if found[2]:
            more = text[at:].split(" ")[1 : int(found[2])]
            at += sum(len(word) + 1 for word in more)
            value = [value, *more]
        fields[found[1]] = value
    return name, fields, rest[:-1]


def number(fields: dict[str, Any], name: str) -> int | None:
    return int(fields[name]) if name in fields else None


def flag(fields: dict[str, Any], name: str) -> bool | None:
    return fields[name] == "true" if name in fields else None


def command_of(name: str, f: dict[str, Any], payload: bytes, nid: Nid, manager: ChannelManager) -> c.Command:
    channel = ChannelId.parse(f["channel"])
    other = Nid.parse(f["on_behalf"]) if "on_behalf" in f else None
    pages = number(f, "page"), number(f, "page_size")
    made: c.Command
    match name:
        case "JOIN":
            made = c.Join(channel, nid, other, other is None or manager.is_connected(other))
        case "LEAVE":
            made = c.Leave(channel, nid, other)
        case "DELETE":
            made = c.Delete(channel, nid)
        case "BROADCAST":
            made = c.Broadcast(channel, nid, payload, 1)
        case "PUSH":
            made = c.Push(channel, nid, payload, 1)
        case "POP":
            made = c.Pop(channel, nid)
        case "GET_CHAN_LEN":
            made = c.Length(channel, nid)
        case "CLEAR":
            made = c.Clear(channel, nid)
        case "MEMBERS":
            made = c.Members(channel, nid, *pages)
        case "GET_CHAN_ACL":
            made = c.GetAcl(channel, nid, f["type"], *pages)
        case "SET_CHAN_ACL":
            nids = f.get("nids", [])
            nids = [nids] if isinstance(nids, str) else nids
            made = c.SetAcl(channel, nid, f["type"], f["action"], tuple(map(Nid.parse, nids)))
        case "GET_CHAN_CONFIG":
            made = c.GetConfig(channel, nid)
        case "SET_CHAN_CONFIG":
            numbers = [number(f, field) for field in ("max_clients", "max_payload_size", "max_persist_messages")]
            interval = number(f, "message_flush_interval")
            made = c.SetConfig(channel, nid, *numbers, flag(f, "persist"), interval, f.get("type"))
        case "CHAN_SEQ":
            made = c.Range(channel, nid)
        case "HISTORY":
            made = c.History(channel, nid, int(f["from_seq"]), int(f["limit"]))
        case _:
            raise AssertionError(name)
    return made


def paged(page: c.Page, name: str) -> dict[str, Any]:
    fields: dict[str, Any] = {name: [str(item) for item in page.items]} if page.items else {}
    if page.total is not None:
        fields |= {"page": str(page.page), "page_size": str(page.page_size), "total_count": str(page.total)}
    return fields


def answer_frames(name: str, f: dict[str, Any], answer: Any) -> list[Frame]:
    """Return the frames a server would make of an answer."""
    base, channel = {"id": f["id"]}, {"id": f["id"], "channel": f.get("channel")}
    match name:
        case "JOIN":
            return [("JOIN_ACK", channel, b"")]
        case "BROADCAST":
            return [("BROADCAST_ACK", base | {"seq": str(answer)}, b"")]
        case "POP":
            return [("POP_ACK", base | {"length": str(len(answer.payload))}, answer.payload)]
        case "GET_CHAN_LEN":
            return [("CHAN_LEN", channel | {"count": str(answer)}, b"")]
        case "MEMBERS":
            return [("MEMBERS_ACK", channel | paged(answer, "members"), b"")]
        case "GET_CHAN_ACL":
            return [("CHAN_ACL", channel | paged(answer, "nids") | {"type": f["type"]}, b"")]
        case "GET_CHAN_CONFIG":
            config, kind = answer
            values = {field: str(getattr(config, field)).lower() for field in config.__struct_fields__}
            return [("CHAN_CONFIG", channel | values | {"type": kind.word}, b"")]
        case "CHAN_SEQ":
            return [("CHAN_SEQ_ACK", channel | {"first_seq": str(answer[0]), "last_seq": str(answer[1])}, b"")]
        case "HISTORY":
            history = {"history_id": f["history_id"]}
            frames: list[Frame] = []
            for entry in answer:
                size, seq = str(len(entry.payload)), str(entry.seq)
                told = {"channel": f["channel"], "from": entry.sender, **history, "length": size, "seq": seq}
                frames.append(("MESSAGE", told, entry.payload))
            return [*frames, ("HISTORY_ACK", channel | history | {"count": str(len(answer))}, b"")]
    return [(name + "_ACK", base, b"")]


def event_frame(event: Event | ChannelMessage) -> Frame:
    if isinstance(event, ChannelMessage):
        fields = {"channel": str(event.channel), "from": str(event.sender), "length": str(len(event.payload))}
        return "MESSAGE", fields | {"seq": str(event.seq)}, event.payload
    fields = {"channel": str(event.channel), "kind": event.kind}
    if event.nid is not None:
        fields |= {"nid": str(event.nid), "owner": str(event.owner).lower()}
    return "EVENT", fields, b""


def one_by_one(event: c.Delivery) -> list[Event | ChannelMessage]:
    return list(event) if isinstance(event, c.Messages) else [event]


def user_of(fields: dict[str, Any]) -> str:
    if "username" in fields:
        return str(fields["username"])
    return base64.b64decode(fields["token"]).split(b"\0")[1].decode()


class Replay:
    """One recorded conversation, asked again."""

    def __init__(self, manager: ChannelManager) -> None:
        self.manager = manager
        self.sessions: dict[str, ChannelSession] = {}
        self.said: dict[str, list[Frame]] = {}

    async def ask(self, conn: str, data: bytes) -> bool:
        """Ask what a client sent; return False where a server would close the connection."""
        name, fields, payload = parse(data)
        if name in HANDSHAKE:
            if name != "CONNECT":
                nid = Nid(user_of(fields), "localhost")
                heard = self.said.setdefault(conn, [])
                session = self.manager.connect(
                    nid, sink=lambda event: heard.extend(map(event_frame, one_by_one(event)))
                )
                self.sessions[conn] = session
            return True
        nid = self.sessions[conn].nid
        try:
            if name in NO_COMMAND:
                raise Refused("BAD_REQUEST", "unknown message")
            if name == "CHANNELS":
                owner = flag(fields, "owner") or False
                page = self.manager.channels(nid, owner=owner, page=number(fields, "page"),
                                             page_size=number(fields, "page_size"))  # fmt: skip
                self.said[conn].append(("CHANNELS_ACK", {"id": fields["id"]} | paged(page, "channels"), b""))
                return True
            command = command_of(name, fields, payload, nid, self.manager)
            answer = await self.manager.submit(command, self.sessions[conn])
        except Refused as exc:
            detail = {"detail": exc.detail} if exc.detail else {}
            known = {} if name in NO_COMMAND else {"id": fields["id"]}
            self.said[conn].append(("ERROR", known | detail | {"reason": exc.reason}, b""))
            return exc.reason in RECOVERABLE
        self.said[conn].extend(answer_frames(name, fields, answer))
        return True


def expected_frame(data: bytes) -> Frame:
    name, fields, payload = parse(data)
    fields.pop("timestamp", None)
    for lists in ("members", "nids", "channels"):
        if isinstance(fields.get(lists), str):
            fields[lists] = [fields[lists]]
    return name, fields, payload


@pytest.mark.parametrize("case", read_cases(VECTORS / "sessions.jsonl"), ids=lambda case: str(case["name"]))
async def test_a_recorded_conversation_goes_the_same_way(case: dict[str, Any], tmp_path: Path) -> None:
    limits = Limits(**{name: value for name, value in case["limits"].items() if name != "rate_limit"})
    options = ManagerOptions(limits=limits, authenticated=case["auth"])
    frames = [(way, conn, bytes.fromhex(data)) for way, conn, data in json.loads(unpack(case["frames"]))]
    async with await ChannelManager.open(tmp_path / "data", options) as manager:
        replay = Replay(manager)
        for index, (way, conn, data) in enumerate(frames):
            if way == "c>s" and not data:
                if conn in replay.sessions:
                    await replay.sessions.pop(conn).close()
            elif way == "c>s":
                if not await replay.ask(conn, data):
                    await replay.sessions.pop(conn).close()
            elif data and b"SHUTTING_DOWN" not in data and parse(data)[0] not in HANDSHAKE_ACKS:
                wanted = expected_frame(data)
                # A client that goes leaves its channels in any order: the original takes that of a hash table.
                said = [frame for frame in replay.said[conn] if frame[1].get("channel") == wanted[1].get("channel")]
                assert said[:1] == [wanted], f"frame {index} to {conn}"
                replay.said[conn].remove(said[0])
        if case["name"].startswith("session"):  # the others were not read to their end
            left = {conn: said for conn, said in replay.said.items() if said and conn in replay.sessions}
            assert left == {}
    for server in read_cases(VECTORS / "server.jsonl"):
        if server["name"] == case["name"] == "session_00_auth":  # and what it left on disk says the same
            assert [channel.to_json() for channel in kept(tmp_path)] == [f["metadata"] for f in server["channels"]]


def kept(tmp_path: Path) -> list[PersistedChannel]:
    store = FileChannelStore(str(tmp_path / "data"))
    return [store.load(digest) for digest in store.hashes()]
