"""The guards answer as the truth tables of the reference do."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.fold import BatchConfig, guards
from penstock.kv import NatsOptions, StoreConfig
from penstock.kv.nats import bucket as nats_bucket, watch as nats_watch
from penstock.store import AppendLogOptions

TABLES = json.loads((Path(__file__).parents[2] / "vectors" / "slipstream_kv" / "guards.json").read_text())


def test_the_numbers_are_those_of_the_reference() -> None:
    assert guards.MAX_STORE_FAILURES == 16
    assert BatchConfig().window_seconds == 0.01
    assert nats_watch.IDLE_PROBE_SECONDS == 30.0
    assert nats_watch.HEARTBEAT_SECONDS == 5.0
    assert nats_bucket.SCAN_INACTIVE_SECONDS == 300
    assert NatsOptions().operation_seconds == 30.0
    bucket = StoreConfig(name="b")
    assert (bucket.history, bucket.max_bytes, bucket.replicas, bucket.max_age_seconds) == (1, 10_485_760, 1, 0)
    assert bucket.discard == "new"
    assert AppendLogOptions().compact_threshold_bytes == 10_485_760


def test_publishing_answers_as_the_reference_does() -> None:
    for row in TABLES["pointer_publish_allowed"]:
        present = row["current"] == "present"
        assert guards.pointer_publish_allowed(present, row.get("current_rank"), row["candidate_rank"]) is row["allowed"]


def test_pruning_answers_as_the_reference_does() -> None:
    for row in TABLES["payload_prunable"]:
        answer = guards.payload_prunable(
            row["payload_rank"], row["pointer_rank"], is_target=row["is_pointer_target"], aged_out=row["aged_out"]
        )
        assert answer is row["prunable"]


def test_the_resume_window_answers_as_the_reference_does() -> None:
    for row in TABLES["resume_window_ok"]:
        assert guards.resume_window_ok(row["revision"], row["first_sequence"]) is row["ok"]
    for row in TABLES["resume_start_sequence"]:
        assert guards.resume_start(row["revision"]) == row["start_sequence"]
