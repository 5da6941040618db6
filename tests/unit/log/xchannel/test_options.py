"""Promise: a contradiction fails when the options are made, and the largest message is what really fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import OptionsError
from penstock.log.xchannel import Reader, Writer, WriterOptions


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"region_bytes": 0}, "region_bytes=0"),
        ({"region_bytes": -4096}, "region_bytes=-4096"),
        ({"region_bytes": 5000}, "multiple of the page size"),
        ({"region_bytes": 1 << 32}, "below 4 GiB"),
        ({"roll_bytes": -1}, "roll_bytes=-1"),
        ({"roll_bytes": 111}, "no record fits"),
        ({"roll_bytes": (1 << 40) + 1}, "at most 1 TiB"),
        ({"roll_bytes": (1 << 64) - 1}, "at most 1 TiB"),  # 45, 46
        ({"max_message_bytes": -1}, "max_message_bytes=-1"),
        ({"keep_files": -1}, "keep_files=-1"),
        ({"keep_files": 2}, "keep_files=2: a channel without roll_bytes"),
        ({"sync": "often"}, "sync='often'"),
        ({"sync_seconds": 0}, "sync_seconds=0"),
    ],
)
def test_a_contradiction_is_refused_by_name(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(OptionsError, match=reason):
        WriterOptions(**options)


def test_a_refused_option_leaves_no_file(tmp_path: Path) -> None:  # 45
    with pytest.raises(OptionsError):
        Writer.open(tmp_path / "chan", roll_bytes=1 << 63)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_never_rolled_still_ends_where_positions_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.log.xchannel.tip.MAX_FILE_BYTES", 8192)
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=4096) as writer:
        positions = [writer.append(bytes(3000)) for _ in range(5)]
    assert [position >> 40 for position in positions] == [0, 0, 1, 1, 2]
    assert path.stat().st_size == 8192
    with Reader.open(path) as reader:
        assert [record.position for record in reader.records(timeout=0)] == positions


@pytest.mark.parametrize("region", [4096, 8192, 16384])
@pytest.mark.parametrize("roll", [0, 112, 1000, 4096, 4208, 8191, 8192, 10_000, 20_000, 40_000])
def test_the_largest_message_is_written_and_one_byte_more_is_refused(region: int, roll: int, tmp_path: Path) -> None:
    # facts 1A.4: 2.0.0 adds regions or files for ever; here the size is judged before anything is written.
    path = tmp_path / "chan"
    with Writer.open(path, region_bytes=region, roll_bytes=roll) as writer:
        largest = writer.largest_message
        writer.append(b"")
        writer.append(b"y" * largest)
        before = sorted((f.name, f.stat().st_size) for f in tmp_path.iterdir())
        for refuse in (
            lambda: writer.append(b"z" * (largest + 1)),
            lambda: writer.append_many([b"z" * (largest + 1)]),
            lambda: writer.reserve(largest + 1),
            lambda: writer.append(bytearray(1 << 20)),
            lambda: writer.reserve(1 << 40),
        ):
            with pytest.raises(OptionsError, match="too large"):
                refuse()
        assert sorted((f.name, f.stat().st_size) for f in tmp_path.iterdir()) == before
        writer.append(b"")
    with Reader.open(path) as reader:
        found = [len(record.payload) for record in reader.records(timeout=0)]
    assert found == [0, largest, 0]


def test_the_rule_of_the_original_decides_what_fits() -> None:
    # a record can be written iff 80 + need <= roll (len <= region - 112) or region + need <= roll
    for region in (4096, 8192):
        for roll in (112, 200, 4096, 4200, 6000, 8192, 9000, 16_384, 30_000):
            need = lambda n: (16 + n + 7) // 8 * 8 + 16  # noqa: E731
            fits = [
                n
                for n in range(region)
                if (n <= region - 112 and 80 + need(n) <= roll) or (n <= region - 32 and region + need(n) <= roll)
            ]
            assert WriterOptions(roll_bytes=roll).largest_message(region) == max(fits)


def test_max_message_bytes_is_enforced_as_given(tmp_path: Path) -> None:
    with Writer.open(tmp_path / "chan", region_bytes=4096, max_message_bytes=100) as writer:
        writer.append(bytes(100))
        with pytest.raises(OptionsError, match="max_message_bytes is 100"):
            writer.append(bytes(101))
        writer.append(bytes(100))
