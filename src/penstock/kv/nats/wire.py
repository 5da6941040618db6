r"""NATS as bytes and JSON: subjects, requests and answers, without a socket.

    message := "MSG "  subject sid [reply] total            CRLF payload         CRLF
             | "HMSG " subject sid [reply] headers total    CRLF headers payload CRLF
    headers := "NATS/1.0" [" " status " " text] CRLF (name ": " value CRLF)* CRLF

    bucket b            stream KV_b, subjects $KV.b.>
    key k of bucket b   subject $KV.b.k
    revision            sequence number of the stream, found in the reply subject:

    $JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>.<consumer seq>.<time>.<pending>                 9 tokens
    $JS.ACK.<domain>.<account>.<stream>.<consumer>.<deliveries>.<stream seq>.<consumer seq>.<time>.<pending>[.<x>]

The last token looks like a sequence number and is not one, so it is counted from the front.  Messages are
decoded many at a time by the kernel (kernel/natswire.pyx), straight into the columns of an UpdateBatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.batch import Spans, UpdateBatch
from penstock.kernel import natswire
from penstock.kv.keys import check_prefix
from penstock.kv.roles import StoreConfig

__all__ = [
    "Decoded",
    "decode_messages",
    "encode_message",
    "parse_headers",
    "ack_sequence",
    "filters_of",
    "bucket_body",
    "classify_create",
    "CreateOutcome",
    "says_expired",
]

PUT, DELETE, PURGE, OTHER, CONTROL, FOREIGN = range(6)

INT64_MAX: Final = (1 << 63) - 1
NS_PER_S: Final = 1_000_000_000
MARKER_SECONDS: Final = 365 * 24 * 3600
"""How long the marker of a key that ran out stays: a watch that was away for less hears of it."""

_EXPIRED_TEXTS = ("start sequence", "first sequence", "sequence not found", "too old")


# --- Messages


@dataclass(slots=True)
class Decoded:
    """A run of messages in columns; ``controls`` are the status messages among them.

    >>> run = encode_message("$KV.b.k", "$JS.ACK.KV_b.c.1.7.1.0.0", None, b"v")
    >>> decode_messages(run, b"$KV.b.").sequences.tolist()
    [7]
    """

    buffer: Any
    ops: NDArray[np.uint8]
    spans: NDArray[np.int64]
    sequences: NDArray[np.uint64]
    consumer_sequences: NDArray[np.uint64]
    pending: NDArray[np.int64]
    sizes: NDArray[np.int64]
    known: NDArray[np.bool_]
    controls: list[tuple[int, str, dict[str, str]]]
    """(row before which it came, reply subject, headers) of each status message."""

    def __len__(self) -> int:
        return len(self.ops)

    def updates(self, keep: NDArray[np.bool_]) -> UpdateBatch:
        """Return the kept rows as updates; an unknown operation counts as a put."""
        ops = self.ops[keep]
        ops[ops == OTHER] = PUT
        spans, known = self.spans[keep], self.known[keep]
        tokens = self.sequences[keep].astype(">u8").tobytes()
        start = len(self.buffer)
        lengths = np.where(known, 8, 0)
        return UpdateBatch(
            b"".join((self.buffer, tokens)),
            ops,
            Spans(spans[:, 0], spans[:, 1]),
            Spans(spans[:, 2], np.where(ops == PUT, spans[:, 3], 0)),
            Spans(start + 8 * np.arange(len(ops), dtype=np.int64), lengths),
        )


def decode_messages(data: bytes | bytearray, prefix: bytes) -> Decoded:
    """Decode a run of whole messages of one subscription; keys are what follows ``prefix``."""
    count, _ = natswire.count_frames(data, len(data))
    ops = np.empty(count, np.uint8)
    spans, sequences = np.empty((count, 4), np.int64), np.empty((count, 2), np.uint64)
    counts = np.empty((count, 3), np.int64)
    rows = natswire.decode(data, prefix, ops, spans, sequences, counts)
    controls: list[tuple[int, str, dict[str, str]]] = []
    if rows and (ops[:rows] == CONTROL).any():
        before = np.cumsum(ops[:rows] != CONTROL)
        for row in np.flatnonzero(ops[:rows] == CONTROL).tolist():
            reply_at, reply_len, headers_at, headers_len = spans[row].tolist()
            reply = data[reply_at : reply_at + reply_len].decode("utf-8", "replace")
            controls.append((int(before[row]), reply, parse_headers(data[headers_at : headers_at + headers_len])))
    part = ops[:rows] != CONTROL
    return Decoded(
        data,
        ops[:rows][part],
        spans[:rows][part],
        sequences[:rows, 0][part],
        sequences[:rows, 1][part],
        counts[:rows, 0][part],
        counts[:rows, 1][part],
        counts[:rows, 2][part].astype(np.bool_),
        controls,
    )


def encode_message(subject: str, reply: str, headers: dict[str, str] | None, payload: bytes) -> bytes:
    r"""Return a message as a server sends it, for subscription 1.

    >>> encode_message("a", "", None, b"hi")
    b'MSG a 1 2\r\nhi\r\n'
    """
    words = f"{subject} 1 {reply} " if reply else f"{subject} 1 "
    if headers is None:
        return f"MSG {words}{len(payload)}\r\n".encode() + payload + b"\r\n"
    named = dict(headers)
    status = " ".join(filter(None, ("NATS/1.0", named.pop("Status", ""), named.pop("Description", ""))))
    block = "".join([status, "\r\n", *(f"{name}: {value}\r\n" for name, value in named.items()), "\r\n"]).encode()
    return f"HMSG {words}{len(block)} {len(block) + len(payload)}\r\n".encode() + block + payload + b"\r\n"


def parse_headers(block: bytes | bytearray) -> dict[str, str]:
    r"""Return headers by name, the status line as ``Status`` and ``Description``.

    >>> parse_headers(b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 9\r\n\r\n")
    {'Status': '100', 'Description': 'Idle Heartbeat', 'Nats-Last-Consumer': '9'}
    """
    first, *lines = bytes(block).decode("utf-8", "replace").split("\r\n")
    found: dict[str, str] = {}
    _, _, status = first.partition(" ")
    if status:
        found["Status"], _, found["Description"] = status.partition(" ")
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            found[name.strip()] = value.strip()
    return found


def ack_sequence(subject: str) -> int | None:
    """Return the stream sequence in one ACK subject, or None.

    >>> ack_sequence("$JS.ACK.KV_b.c.1.42.7.1700000000000000000.0")
    42
    """
    raw = subject.encode()
    sequence, known = np.zeros(1, np.uint64), np.zeros(1, np.uint8)
    natswire.parse_acks(raw, np.zeros(1, np.int64), np.array([len(raw)], np.int64), sequence, known)
    return int(sequence[0]) if known[0] else None


# --- Keys and filters


def filters_of(bucket: str, prefixes: Sequence[str]) -> list[str]:
    """Return the subjects of these prefixes; one that another covers is left out.

    >>> filters_of("b", ["node.", "node.a.", ""])
    ['$KV.b.>']
    >>> filters_of("b", ["node"])
    Traceback (most recent call last):
    penstock.errors.OptionsError: prefix 'node': must be empty or end in a dot
    """
    for prefix in prefixes:
        check_prefix(prefix)
    wide = [one for one in prefixes if not any(one != other and one.startswith(other) for other in prefixes)]
    return [f"$KV.{bucket}.{prefix}>" for prefix in dict.fromkeys(wide)]


# --- Making a bucket

CreateOutcome = tuple[Literal["created", "exists", "limit", "failed"], int, str]


def bucket_body(config: StoreConfig, *, deny_delete: bool, ttl: bool = False) -> dict[str, Any]:
    """Return the stream of a bucket as the server wants it described.

    With ``ttl`` single messages may have a time to live, and the server (2.11 and later) leaves a marker where a key
    ran out or went by age, so that watches hear of it.

    >>> bucket_body(StoreConfig(name="b"), deny_delete=False)["subjects"]
    ['$KV.b.>']
    """
    times = {"allow_msg_ttl": True, "subject_delete_marker_ttl": MARKER_SECONDS * NS_PER_S} if ttl else {}
    return {
        "name": f"KV_{config.name}",
        "subjects": [f"$KV.{config.name}.>"],
        "max_msgs_per_subject": config.history,
        "max_bytes": config.max_bytes,
        "max_age": min(int(config.max_age_seconds * NS_PER_S), INT64_MAX),
        "storage": config.storage,
        "allow_rollup_hdrs": True,
        "deny_delete": deny_delete,
        "deny_purge": False,
        "allow_direct": True,
        "discard": config.discard,
        "num_replicas": config.replicas,
        "retention": "limits",
        **times,
    }


def classify_create(response: bytes) -> CreateOutcome:
    """Return what an answer to a bucket creation means: outcome, code, description.

    An answer nobody can read counts as created: looking the bucket up afterwards is the real check.

    >>> classify_create(b'{"error":{"code":400,"err_code":10058,"description":"in use"}}')
    ('exists', 400, 'in use')
    """
    try:
        body = msgspec.json.decode(response)
    except msgspec.DecodeError:
        return "created", 0, ""
    if not isinstance(body, dict) or "error" not in body:
        return "created", 0, ""
    error = body["error"] if isinstance(body["error"], dict) else {}
    code = _count(error.get("code"))
    description = error.get("description")
    if not isinstance(description, str):
        description = "unknown error"
    if 10058 in (code, _count(error.get("err_code"))):
        return "exists", code, description
    if code == 400 and "maximum number of streams" in description:
        return "limit", code, description
    return "failed", code, description


def says_expired(text: str) -> bool:
    """Whether the text of an error means that a start sequence is gone.

    >>> says_expired("optional START SEQUENCE too low"), says_expired("timed out")
    (True, False)
    """
    return any(words in text.lower() for words in _EXPIRED_TEXTS)


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
