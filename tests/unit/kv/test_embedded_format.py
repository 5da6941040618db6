"""Promise: the files of a bucket are the ones drawn in docs/formats/bucket.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.disk import PosixDisk
from penstock.errors import CorruptionError
from penstock.kv import EmbeddedOptions, StoreConfig
from penstock.kv.embedded.bucket import Bucket
from penstock.kv.embedded.format import Lease, decode_config, encode_config, encode_record, lease_of
from penstock.kv.embedded.plan import Change
from penstock.kv.embedded.reckon import Reckoner
from penstock.log.envelope import decode_envelope
from penstock.testing.clock import FakeClock
from penstock.types import Op

RECORD = """
01 00 01 00  00 00 fa ed 51 72 86 18  05 00 00 00  38 00 00 00
6c 65 61 73 65
0a 00  65 78 70 69 72 65 73 2d 6e 73  08 00 00 00  00 ac 1d ea 58 72 86 18
0a 00  77 72 69 74 74 65 6e 2d 61 74  10 00 00 00  07 00 00 00 00 00 00 00  00 f2 05 2a 01 00 00 00
6d 65
"""


def test_a_record_is_the_one_drawn() -> None:
    lease = Lease(1_767_225_600_000_000_000, 1_767_225_630_000_000_000, boot=7, monotonic_ns=5_000_000_000)
    record = encode_record(Op.PUT, "lease", b"me", lease.written_ns, lease)
    assert record == bytes.fromhex(RECORD)
    found = decode_envelope(record)
    assert (found.key, found.payload, found.flags) == (b"lease", b"me", 1)
    assert int.from_bytes(found.headers["expires-ns"], "little") == 1_767_225_630_000_000_000
    assert lease_of(found.headers, lease.written_ns) == lease
    assert encode_record(Op.DELETE, "k", b"", 0).hex() == "01010000" + "00" * 8 + "0100000000000000" + "6b"


def test_the_folder_of_a_bucket_has_the_files_drawn(tmp_path: Path) -> None:
    folder = tmp_path / "routes"
    options = EmbeddedOptions(checkpoint_bytes=1)
    config, clock = StoreConfig(name="routes", max_age_seconds=9), FakeClock(1_999_999_970_000_000_000)
    bucket = Bucket.open(str(folder), config, options, disk=PosixDisk(), clock=clock)
    bucket.commit([Change("put", "lease", b"me", ttl_ns=30_000_000_000)])
    bucket.compact(1)
    bucket.close()
    assert {path.name for path in folder.iterdir()} == {
        "ages.json",
        "bucket.json",
        "log",
        "state.snap",
        "expiry.json",
        "head",
    }
    sidecars = {path.name for path in (folder / "log").iterdir() if path.name.startswith("penstock-")}
    assert sidecars == {"penstock-id", "penstock-lock", "penstock-queue", "penstock-mark", "penstock-first"}
    boot = Reckoner(clock, PosixDisk()).boot
    expiry = b'{"keys":{"lease":[1,2000000000000000000,30000000000,30000000000,%d]},"version":2,' % boot
    assert (folder / "expiry.json").read_bytes().startswith(expiry)
    assert (folder / "head").read_bytes() == (1).to_bytes(8, "little") + PosixDisk().boot_id()
    assert (folder / "state.snap").read_bytes().startswith(b"PGSS\x02\x00")


def test_a_description_of_another_version_is_refused() -> None:
    data = encode_config(StoreConfig(name="b")).replace(b'"version":1', b'"version":2')
    with pytest.raises(CorruptionError, match="version 2"):
        decode_config("bucket.json", data)
