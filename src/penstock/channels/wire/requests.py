"""From messages of a client to commands for a channel, and from answers back to messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

from penstock import kernel
from penstock.channels import commands as c
from penstock.channels.ids import ChannelId, Nid
from penstock.channels.wire.frames import Frame, encode_frame
from penstock.errors import OptionsError

__all__ = ["BadName", "channel_of", "nid_of", "command_of", "encode_answer", "encode_event", "encode_run"]

LONGEST_TAIL: Final = len("4294967295 seq=18446744073709551615 timestamp=18446744073709551615\n")


class BadName(Exception):
    """A name in a message that can be none; the text is the detail of the answer, which has no id.

    >>> channel_of("ops@localhost")
    Traceback (most recent call last):
    penstock.channels.wire.requests.BadName: invalid channel ID format
    """


@lru_cache(16_384)
def channel_of(text: str) -> ChannelId:
    """Return the channel that a message names.

    >>> channel_of("!ops/east@localhost").handler
    'ops/east'
    """
    try:
        return ChannelId.parse(text)
    except OptionsError:
        raise BadName("invalid channel ID format") from None


def nid_of(text: str) -> Nid:
    """Return the member that a message names.

    >>> nid_of("ann@localhost").username
    'ann'
    """
    try:
        return Nid.parse(text)
    except OptionsError:
        raise BadName("invalid NID format") from None


def _join(f: dict[str, Any], nid: Nid, is_connected: Callable[[Nid], bool]) -> c.Command:
    channel, other = channel_of(f["channel"]), f["on_behalf"]
    if other is None:
        return c.Join(channel, nid)
    who = nid_of(other)
    return c.Join(channel, nid, who, is_connected(who), wants_number=True)


def _set_acl(f: dict[str, Any], nid: Nid) -> c.Command:
    channel = channel_of(f["channel"])
    return c.SetAcl(channel, nid, f["type"], f["action"], tuple(map(nid_of, f["nids"])))


def _set_config(f: dict[str, Any], nid: Nid) -> c.Command:
    return c.SetConfig(
        channel_of(f["channel"]), nid, f["max_clients"], f["max_payload_size"], f["max_persist_messages"],
        f["persist"], f["message_flush_interval"], f["type"],
    )  # fmt: skip


def command_of(frame: Frame, nid: Nid, now_ms: int, is_connected: Callable[[Nid], bool]) -> c.Command | None:
    """Return what a message asks of a channel; None when it is no request of that kind.

    >>> command_of(Frame("POP", {"id": 1, "channel": "!q@localhost"}), Nid("ann", "localhost"), 0, bool)
    Pop(channel=ChannelId(handler='q', domain='localhost'), nid=Nid(username='ann', domain='localhost'))
    """
    f = frame.fields
    match frame.name:
        case "PUSH":
            return c.Push(channel_of(f["channel"]), nid, frame.payload or b"", now_ms)
        case "POP":
            return c.Pop(channel_of(f["channel"]), nid)
        case "JOIN":
            return _join(f, nid, is_connected)
        case "LEAVE":
            channel = channel_of(f["channel"])
            return c.Leave(channel, nid, None if f["on_behalf"] is None else nid_of(f["on_behalf"]))
        case "HISTORY":
            return c.History(channel_of(f["channel"]), nid, f["from_seq"], f["limit"])
        case "CHAN_SEQ":
            return c.Range(channel_of(f["channel"]), nid)
        case "MEMBERS":
            return c.Members(channel_of(f["channel"]), nid, f["page"], f["page_size"])
        case "GET_CHAN_CONFIG":
            return c.GetConfig(channel_of(f["channel"]), nid)
        case "SET_CHAN_CONFIG":
            return _set_config(f, nid)
        case "GET_CHAN_ACL":
            return c.GetAcl(channel_of(f["channel"]), nid, f["type"], f["page"], f["page_size"])
        case "SET_CHAN_ACL":
            return _set_acl(f, nid)
        case "GET_CHAN_LEN":
            return c.Length(channel_of(f["channel"]), nid)
        case "CLEAR":
            return c.Clear(channel_of(f["channel"]), nid)
        case "DELETE":
            return c.Delete(channel_of(f["channel"]), nid)
    return None


def encode_answer(frame: Frame, answer: Any) -> list[bytes]:
    r"""Return the messages that answer a request; only a history has more than one.

    >>> encode_answer(Frame("BROADCAST", {"id": 9}), 7)
    [b'BROADCAST_ACK id=9 seq=7\n']
    """
    if frame.name == "HISTORY":
        return _encode_history(frame, answer)
    return [_encode_one(frame, answer)]


def _encode_one(frame: Frame, answer: Any) -> bytes:
    f = frame.fields
    number, channel = f["id"], f.get("channel")
    match frame.name:
        case "BROADCAST":
            return encode_frame("BROADCAST_ACK", {"id": number, "seq": answer})
        case "JOIN":
            return encode_frame("JOIN_ACK", {"id": number, "channel": channel, "last_seq": answer})
        case "POP":
            return encode_frame("POP_ACK", {"id": number, "timestamp": answer.timestamp}, answer.payload)
        case "CHAN_SEQ":
            return encode_frame("CHAN_SEQ_ACK", {**f, "first_seq": answer[0], "last_seq": answer[1]})
        case "MEMBERS":
            return encode_frame("MEMBERS_ACK", {"id": number, "channel": channel, **_page("members", answer)})
        case "CHANNELS":
            return encode_frame("CHANNELS_ACK", {"id": number, **_page("channels", answer)})
        case "GET_CHAN_ACL":
            fields = {"id": number, "channel": channel, "type": f["type"], **_page("nids", answer)}
            return encode_frame("CHAN_ACL", fields)
        case "GET_CHAN_CONFIG":
            config, kind = answer
            fields = {name: getattr(config, name) for name in config.__struct_fields__}
            return encode_frame("CHAN_CONFIG", {"id": number, "channel": channel, "type": kind.word, **fields})
        case "GET_CHAN_LEN":
            return encode_frame("CHAN_LEN", {"id": number, "channel": channel, "count": answer})
    return encode_frame(f"{frame.name}_ACK", {"id": number})


def _page(name: str, page: c.Page) -> dict[str, Any]:
    fields: dict[str, Any] = {name: [str(item) for item in page.items]}
    if page.total is not None:
        fields |= {"page": page.page, "page_size": page.page_size, "total_count": page.total}
    return fields


def _encode_history(frame: Frame, entries: list[c.StoredMessage]) -> list[bytes]:
    f = frame.fields
    parts = [
        encode_frame(
            "MESSAGE",
            {
                "channel": f["channel"],
                "from": entry.sender,
                "history_id": f["history_id"],
                "seq": entry.seq,
                "timestamp": entry.timestamp,
            },
            entry.payload,
        )
        for entry in entries
    ]
    parts.append(encode_frame("HISTORY_ACK", {**f, "count": len(entries)}))
    return parts


def encode_event(event: c.Event, *, numbered: bool = False) -> bytes:
    r"""Return the message that tells a member of an event, with the number of a join if it understands that.

    >>> encode_event(c.Event("CHANNEL_DELETED", ChannelId("a", "x.io"), None, None, ()))
    b'EVENT channel=!a@x.io kind=CHANNEL_DELETED\n'
    """
    nid = None if event.nid is None else str(event.nid)
    fields = {"channel": str(event.channel), "kind": event.kind, "nid": nid, "owner": event.owner}
    return encode_frame("EVENT", fields | {"last_seq": event.last_seq} if numbered else fields)


def encode_run(run: c.Messages) -> tuple[bytes, int]:
    r"""Return the MESSAGEs of a run, and how long their longest line can be; made once, however many hear them.

    >>> run = c.Messages(ChannelId("a", "x.io"), Nid("ann", "x.io"), 7, 1767225600000, (b"hi!",))
    >>> encode_run(run)[0]
    b'MESSAGE channel=!a@x.io from=ann@x.io length=3 seq=7 timestamp=1767225600000\nhi!\n'
    """
    if run.encoded is None:
        head = message_head(run.channel, run.sender)
        data = kernel.channelwire.encode_messages(head, run.first_seq, run.timestamp, run.payloads)
        run.encoded = data, len(head) + LONGEST_TAIL
    found: tuple[bytes, int] = run.encoded
    return found


@lru_cache(16_384)
def message_head(channel: ChannelId, sender: Nid) -> bytes:
    """Return the beginning of every MESSAGE of a sender on a channel.

    >>> message_head(ChannelId("a", "x.io"), Nid("ann", "x.io"))
    b'MESSAGE channel=!a@x.io from=ann@x.io length='
    """
    return f"MESSAGE channel={channel} from={sender} length=".encode()
