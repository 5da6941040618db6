"""Erasing records of a log that is shipped: its shipper goes on, and what is erased is no other log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ship_use import seal, shipped

from penstock.disk.objectstore import Obstore
from penstock.errors import ReplacedError
from penstock.log.detect import open_log
from penstock.log.envelope import CONTENT, Envelope, decode_envelope, encode_envelope
from penstock.log.fingerprint import check_fingerprint, fingerprint_of
from penstock.log.messagelog import MessageLog
from penstock.node.erase import erase_in_log
from penstock.ship import ShipOptions, Shipper


def open_writer(path: Path) -> MessageLog:
    return MessageLog.open(path, segment_bytes=100_000_000, content=CONTENT)


def fill(writer: Any, start: int, count: int) -> None:
    """Append records of the keys ann and bob, turn about, and seal; bob has the last one."""
    keys = [b"ann", b"bob"]
    writer.append_many([encode_envelope(Envelope(keys[n % 2], b"value %d" % n)) for n in range(start, start + count)])
    seal("messagelog", writer)


def keys_of(log: Any) -> list[bytes]:
    return [decode_envelope(bytes(payload)).key for payload in log.read(log.first_position).to_payloads()]


@pytest.mark.parametrize("key", [b"ann", b"bob"])
def test_a_shipper_goes_on_after_records_that_it_shipped_were_erased(
    key: bytes, store: Obstore, tmp_path: Path
) -> None:
    with open_writer(tmp_path / "log") as writer:
        fill(writer, 0, 10)
        fill(writer, 10, 10)
    with Shipper(tmp_path / "log", store) as shipper:
        assert shipper.step() == 2
    assert erase_in_log(str(tmp_path / "log"), key) == 10
    with open_writer(tmp_path / "log") as writer:
        fill(writer, 20, 4)
        with Shipper(tmp_path / "log", store, options=ShipOptions(delete_local=True)) as shipper:
            while shipper.step():
                pass
            assert shipper.head.next == 25
            assert shipper.head.records == 24
        with open_log(str(tmp_path / "log")) as log:
            assert log.first_position > 1  # erased or not, it is there
    with shipped(store) as remote:
        assert list(remote.verify()) == []
        assert keys_of(remote)[:10] == [b"ann", b"bob"] * 5  # what was shipped is not touched


def test_a_segment_in_which_something_else_changed_is_another_one(store: Obstore, tmp_path: Path) -> None:
    for name, word in (("log", b"one"), ("other", b"two")):
        with open_writer(tmp_path / name) as writer:
            writer.append_many([encode_envelope(Envelope(key, word)) for key in (b"ann", b"bob", b"ann")])
            seal("messagelog", writer)
    with Shipper(tmp_path / "log", store) as shipper:
        shipper.step()
    erase_in_log(str(tmp_path / "other"), b"ann")
    (tmp_path / "other" / "penstock-id").write_bytes((tmp_path / "log" / "penstock-id").read_bytes())
    with open_writer(tmp_path / "other") as writer:
        fill(writer, 0, 2)
        with pytest.raises(ReplacedError, match="not what was shipped"):
            Shipper(tmp_path / "other", store, channel="log")


def test_a_named_cursor_behind_an_erased_record_goes_on(tmp_path: Path) -> None:
    with open_writer(tmp_path / "log") as writer:
        fill(writer, 0, 4)
    with open_log(str(tmp_path / "log")) as log:
        seen = fingerprint_of(log.read(1))
        assert check_fingerprint(log, seen)
    erase_in_log(str(tmp_path / "log"), b"bob")
    with open_log(str(tmp_path / "log")) as log:
        assert not check_fingerprint(log, seen)  # nobody can know
