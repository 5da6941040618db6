"""Every message of the channel protocol: its parameters, their types, which must be given, which is the payload.

    type      u8 u16 u32 u64 · bool · str · list (of strings)
    mark      *  must not be zero or empty when it arrives     ?  may be absent, and is then left out

Parameters stand here in the order in which they are written: ``id`` first, the others by name.  What arrives may have
any order.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

__all__ = ["CATALOGUE", "Field", "Layout", "REASONS", "KINDS"]

LIMITS: Final = {"u8": (1 << 8) - 1, "u16": (1 << 16) - 1, "u32": (1 << 32) - 1, "u64": (1 << 64) - 1}
DEFAULTS: Final[dict[str, Any]] = {"u8": 0, "u16": 0, "u32": 0, "u64": 0, "bool": False, "str": "", "list": ()}


class Field(msgspec.Struct, frozen=True):
    """One parameter of a message."""

    name: str
    kind: str
    required: bool = False
    optional: bool = False

    @property
    def default(self) -> Any:
        """What it is when it was not given."""
        return None if self.optional else DEFAULTS[self.kind]

    @property
    def label(self) -> str:
        """What the original calls it when it complains."""
        return {"version": "protocol_version", "type": "r#type"}.get(self.name, self.name)


class Layout(msgspec.Struct, frozen=True):
    """One message: its fields as written, those that must be given in the order in which they are checked."""

    name: str
    fields: dict[str, Field]
    required: tuple[Field, ...]
    defaults: dict[str, Any]
    """What each field is when it was not given."""
    has_payload: bool = False


TABLE: Final = """
CONNECT               heartbeat_interval:u32 resume:bool? version:u16*
CONNECT_ACK           application_protocol:str? auth_required:bool heartbeat_interval:u32 max_inflight_requests:u32 max_message_size:u32 max_payload_size:u32 max_persist_messages:u32? max_subscriptions:u32 resume:bool?
IDENTIFY              username:str*
IDENTIFY_ACK          nid:str*
AUTH                  token:str*
AUTH_ACK              challenge:str? nid:str? succeeded:bool?
JOIN                  id:u32* channel:str* on_behalf:str?
JOIN_ACK              id:u32* channel:str last_seq:u64?
LEAVE                 id:u32* channel:str* on_behalf:str?
LEAVE_ACK             id:u32*
DELETE                id:u32* channel:str*
DELETE_ACK            id:u32*
BROADCAST             id:u32* channel:str* length:u32* qos:u8?
BROADCAST_ACK         id:u32* seq:u64*
MESSAGE               channel:str* from:str* history_id:str? length:u32* seq:u64* timestamp:u64*
PUSH                  id:u32* channel:str* length:u32*
PUSH_ACK              id:u32*
POP                   id:u32* channel:str*
POP_ACK               id:u32* length:u32* timestamp:u64*
GET_CHAN_LEN          id:u32* channel:str*
CHAN_LEN              id:u32* channel:str* count:u32
CLEAR                 id:u32* channel:str*
CLEAR_ACK             id:u32*
CHANNELS              id:u32* owner:bool page:u32? page_size:u32?
CHANNELS_ACK          id:u32* channels:list page:u32? page_size:u32? total_count:u32?
MEMBERS               id:u32* channel:str* page:u32? page_size:u32?
MEMBERS_ACK           id:u32* channel:str* members:list page:u32? page_size:u32? total_count:u32?
GET_CHAN_ACL          id:u32* channel:str* page:u32? page_size:u32? type:str*
CHAN_ACL              id:u32* channel:str* nids:list page:u32? page_size:u32? total_count:u32? type:str*
SET_CHAN_ACL          id:u32* action:str* channel:str* nids:list type:str*
SET_CHAN_ACL_ACK      id:u32*
GET_CHAN_CONFIG       id:u32* channel:str*
CHAN_CONFIG           id:u32* channel:str* max_clients:u32 max_payload_size:u32 max_persist_messages:u32 message_flush_interval:u32 persist:bool type:str*
SET_CHAN_CONFIG       id:u32* channel:str* max_clients:u32? max_payload_size:u32? max_persist_messages:u32? message_flush_interval:u32? persist:bool? type:str?
SET_CHAN_CONFIG_ACK   id:u32*
CHAN_SEQ              id:u32* channel:str*
CHAN_SEQ_ACK          id:u32* channel:str* first_seq:u64 last_seq:u64
HISTORY               id:u32* channel:str* from_seq:u64* history_id:str* limit:u32*
HISTORY_ACK           id:u32* channel:str* count:u32 history_id:str*
EVENT                 channel:str? kind:str* last_seq:u64? nid:str? owner:bool?
MOD_DIRECT            id:u32? from:str* length:u32*
MOD_DIRECT_ACK        id:u32*
PING                  id:u32*
PONG                  id:u32*
ERROR                 id:u32? detail:str? reason:str*
S2M_CONNECT           heartbeat_interval:u32 secret:str? version:u16*
S2M_CONNECT_ACK       application_protocol:str* heartbeat_interval:u32* max_inflight_requests:u32* max_message_size:u32* max_payload_size:u32* operation_mask:u64*
S2M_AUTH              id:u32* token:str*
S2M_AUTH_ACK          id:u32* challenge:str? succeeded:bool username:str?
S2M_FORWARD_EVENT     id:u32* channel:str? kind:str* nid:str? owner:bool?
S2M_FORWARD_EVENT_ACK id:u32*
S2M_FORWARD_BROADCAST_PAYLOAD id:u32* channel:str* from:str* length:u32*
S2M_FORWARD_BROADCAST_PAYLOAD_ACK id:u32* altered_payload:bool altered_payload_length:u32 valid:bool
S2M_MOD_DIRECT        id:u32* from:str* length:u32*
S2M_MOD_DIRECT_ACK    id:u32* valid:bool
M2S_CONNECT           heartbeat_interval:u32 secret:str? version:u16*
M2S_CONNECT_ACK       heartbeat_interval:u32* max_inflight_requests:u32* max_message_size:u32* max_payload_size:u32*
M2S_MOD_DIRECT        id:u32* length:u32* targets:list*
M2S_MOD_DIRECT_ACK    id:u32*
RESUME                id:u32* channel:str* from_seq:u64
RESUME_ACK            id:u32* channel:str* first_seq:u64 last_seq:u64 recovered:bool
"""  # noqa: E501
"""RESUME, RESUME_ACK, ``resume`` and the ``last_seq`` of JOIN_ACK and EVENT are ours (docs/formats/channel-wire.md):
the original never meets them."""

CHECKED_OTHERWISE: Final = {
    "HISTORY": "id history_id channel from_seq limit",
    "HISTORY_ACK": "id history_id channel",
    "MESSAGE": "from channel length seq timestamp",
    "SET_CHAN_ACL": "id channel type action",
    "M2S_MOD_DIRECT": "id targets length",
    "S2M_FORWARD_BROADCAST_PAYLOAD": "id from channel length",
    "S2M_CONNECT_ACK": "application_protocol operation_mask heartbeat_interval max_inflight_requests max_message_size"
    " max_payload_size",
}
"""Messages whose parameters are not checked in the order in which they are written."""

REASONS: Final = frozenset({
    "BAD_REQUEST", "CHANNEL_IS_FULL", "CHANNEL_NOT_FOUND", "CURSOR_RECOVERY_REQUIRED", "FORBIDDEN",
    "INTERNAL_SERVER_ERROR", "NONE", "NOT_ALLOWED", "NOT_IMPLEMENTED", "OUTBOUND_QUEUE_FULL",
    "PERSISTENCE_NOT_ENABLED", "POLICY_VIOLATION", "QUEUE_EMPTY", "QUEUE_FULL", "RESOURCE_LIMIT_REACHED",
    "RESPONSE_TOO_LARGE", "SEND_CHANNEL_FULL", "SERVER_OVERLOADED", "SERVER_SHUTTING_DOWN", "TIMEOUT", "UNAUTHORIZED",
    "UNEXPECTED_MESSAGE", "UNSUPPORTED_PROTOCOL_VERSION", "USERNAME_IN_USE", "USER_IN_CHANNEL", "USER_NOT_IN_CHANNEL",
    "USER_NOT_REGISTERED", "WRONG_TYPE",
})  # fmt: skip
KINDS: Final = frozenset({"MEMBER_JOINED", "MEMBER_LEFT", "CHANNEL_DELETED", "CHANNEL_RECONFIGURED"})


def _layouts() -> dict[str, Layout]:
    layouts = {}
    for line in TABLE.strip().splitlines():
        name, *words = line.split()
        fields = {}
        for word in words:
            label, kind = word.rstrip("*?").split(":")
            fields[label] = Field(label, kind, word.endswith("*"), word.endswith("?"))
        order = CHECKED_OTHERWISE.get(name, "").split() or fields
        required = tuple(fields[label] for label in order if fields[label].required)
        defaults = {label: field.default for label, field in fields.items()}
        layouts[name] = Layout(name, fields, required, defaults, "length" in fields)
    return layouts


CATALOGUE: Final = _layouts()
