"""NATS as bytes and JSON: the recorded answers of the reference are ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import OptionsError
from penstock.kernel import natswire
from penstock.kernel.twin import natswire as twin
from penstock.kv.nats.wire import (
    ack_sequence,
    bucket_body,
    classify_create,
    decode_messages,
    encode_message,
    filters_of,
    parse_headers,
    says_expired,
)
from penstock.kv.roles import StoreConfig
from penstock.types import Op

VECTORS = Path(__file__).parents[2] / "vectors" / "slipstream_kv"
PARSING = json.loads((VECTORS / "nats_parsing.json").read_text())
REAL = json.loads((VECTORS / "ack_real.json").read_text())
OUTCOMES = {"Created": "created", "AlreadyExists": "exists", "StreamLimit": "limit", "Failed": "failed"}


@pytest.mark.parametrize("case", PARSING["ack_subjects"], ids=lambda case: case["note"])
def test_the_sequence_in_an_ack_subject_is_the_one_the_reference_reads(case: dict[str, Any]) -> None:
    assert ack_sequence(case["subject"]) == case["sequence"]
    known, sequence, _, _ = twin.ack_fields(case["subject"].encode())
    assert (sequence if known else None) == case["sequence"]


@pytest.mark.parametrize("message", [m for capture in REAL["captures"] for m in capture["messages"]])
def test_the_ack_subjects_of_a_real_server_are_read(message: dict[str, Any]) -> None:
    headers = message["headers"] or None
    found = decode_messages(encode_message(message["subject"], message["reply"], headers, b"v"), b"$KV.ackt.")
    assert found.sequences.tolist() == [message["sequence"]]
    update = found.updates(np.array([True]))[0]
    assert update.key == message["subject"].removeprefix("$KV.ackt.")
    assert update.op is (Op.DELETE if headers else Op.PUT)


@pytest.mark.parametrize("case", PARSING["expiry_error_texts"], ids=lambda case: case["error"])
def test_an_error_that_means_expired_is_recognised(case: dict[str, Any]) -> None:
    assert says_expired(case["error"]) is case["cursor_expired"]


@pytest.mark.parametrize("case", PARSING["raw_create_responses"], ids=lambda case: case["response"])
def test_answers_to_a_creation_are_sorted_as_the_reference_sorts_them(case: dict[str, Any]) -> None:
    outcome, code, description = classify_create(case["response"].encode())
    name, _, rest = case["outcome"].partition(" ")
    assert outcome == OUTCOMES[name]
    if rest:
        assert rest == f'{{ code: {code}, description: "{description}" }}'


def test_the_plain_creation_has_the_fields_of_the_reference() -> None:
    config = StoreConfig(name="b", history=3, max_age_seconds=1e30, discard="old", replicas=3, storage="memory")
    assert bucket_body(config, deny_delete=False) == {
        "name": "KV_b", "subjects": ["$KV.b.>"], "max_msgs_per_subject": 3, "max_bytes": 10485760,
        "max_age": (1 << 63) - 1, "storage": "memory", "allow_rollup_hdrs": True, "deny_delete": False,
        "deny_purge": False, "allow_direct": True, "discard": "old", "num_replicas": 3, "retention": "limits",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("headers", "op"),
    [
        (None, Op.PUT),
        ({"KV-Operation": "DEL"}, Op.DELETE),
        ({"KV-Operation": "PURGE", "Nats-Rollup": "sub"}, Op.PURGE),
        ({"Nats-Marker-Reason": "MaxAge"}, Op.PURGE),
        ({"Nats-Marker-Reason": "Purge"}, Op.PURGE),
        ({"Nats-Marker-Reason": "Remove"}, Op.DELETE),
        ({"KV-Operation": "NEW-IN-2030"}, Op.PUT),
        ({"Trace": "x"}, Op.PUT),
    ],
)
def test_headers_say_what_an_update_does(headers: dict[str, str] | None, op: Op) -> None:
    raw = encode_message("$KV.b.k", "$JS.ACK.KV_b.c.1.7.1.0.3", headers, b"v")
    found = decode_messages(raw, b"$KV.b.")
    update = found.updates(np.array([True]))[0]
    assert (update.op, update.key, update.version.as_int()) == (op, "k", 7)
    assert update.value == (b"v" if op is Op.PUT else b"")
    assert found.pending.tolist() == [3]


def test_a_foreign_key_is_marked_and_a_missing_reply_is_an_unknown_version() -> None:
    raw = encode_message("$KV.other.k", "", None, b"v") + encode_message("$KV.b.k", "", None, b"v")
    found = decode_messages(raw, b"$KV.b.")
    assert found.ops.tolist() == [5, 0]
    assert found.updates(found.ops == 0)[0].version.known is False


def test_status_messages_stand_apart_with_their_place() -> None:
    data = encode_message("$KV.b.k", "$JS.ACK.KV_b.c.1.7.1.0.0", None, b"v")
    beat = encode_message("_I", "", {"Status": "100", "Description": "Idle Heartbeat", "Nats-Last-Consumer": "1"}, b"")
    flow = encode_message("_I", "$JS.FC.x", {"Status": "100", "Description": "FlowControl Request"}, b"")
    found = decode_messages(beat + data + flow + data, b"$KV.b.")
    assert len(found) == 2
    assert [(row, reply) for row, reply, _ in found.controls] == [(0, ""), (1, "$JS.FC.x")]
    assert found.controls[0][2]["Nats-Last-Consumer"] == "1"


def test_a_value_left_out_still_has_its_length() -> None:
    raw = encode_message("$KV.b.k", "$JS.ACK.KV_b.c.1.7.1.0.0", {"Nats-Msg-Size": "12"}, b"")
    assert decode_messages(raw, b"$KV.b.").sizes.tolist() == [12]


def test_headers_are_read_whatever_is_in_them() -> None:
    assert parse_headers(b"NATS/1.0\r\nA: b:c\r\nbroken\r\n\xff: \xfe\r\n\r\n")["A"] == "b:c"
    assert parse_headers(b"") == {}


def test_prefixes_become_filters_without_overlap() -> None:
    assert filters_of("b", ["svc.", "node.", "node.a."]) == ["$KV.b.svc.>", "$KV.b.node.>"]
    assert filters_of("b", ["", "node."]) == ["$KV.b.>"]
    with pytest.raises(OptionsError):
        filters_of("b", ["node.*."])


def test_cutting_finds_runs_of_one_subscription() -> None:
    one, two = b"MSG a 1 2\r\nhi\r\n", b"MSG a 2 0\r\n\r\n"
    data = one + one + b"PING\r\n" + two
    assert natswire.cut_run(data, 0) == (2 * len(one), 1, 2)
    assert natswire.cut_run(data, 2 * len(one)) == (2 * len(one) + 6, 0, 1)
    assert natswire.cut_run(data, 2 * len(one) + 6) == (len(data), 2, 1)
