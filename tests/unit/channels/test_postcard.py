"""Promise: metadata.bin has the bytes of narwhal 0.7.0, and damaged bytes get its verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.channels.ids import Nid
from penstock.channels.model import Allow, ChannelAcl, ChannelType, PersistedChannel, StoredConfig
from penstock.channels.postcard import MAX_METADATA_BYTES, decode, decode_any, encode
from penstock.errors import CorruptionError, OptionsError
from penstock.testing.packed import read_cases, unpack

VECTORS = Path(__file__).parents[2] / "vectors" / "narwhal-metadata"
SAVED = read_cases(VECTORS / "metadata.jsonl")
ODD = read_cases(VECTORS / "metadata_odd.jsonl")
OLD_LAYOUT = "v06_no_type_byte"


def named(case: dict[str, Any]) -> str:
    return str(case["name"])


def test_metadata_on_disk_is_the_one_drawn_in_the_format_page() -> None:
    channel = PersistedChannel(
        "ops/east",
        Nid("zoe", "localhost"),
        StoredConfig(100, 65_536, 1000, True, 250),
        ChannelAcl(join=Allow({"localhost": frozenset({"zoe", "ann"})}), read=Allow({"example.com": frozenset()})),
        (Nid("ann", "localhost"), Nid("zoe", "localhost")),
    )
    golden = (
        "08 6f 70 73 2f 65 61 73 74  01 0d 7a 6f 65 40 6c 6f 63 61 6c 68 6f 73 74"
        "01 64  01 80 80 04  01 e8 07  01 01  01 fa 01"
        "01 09 6c 6f 63 61 6c 68 6f 73 74 02 03 61 6e 6e 03 7a 6f 65  00"
        "01 0b 65 78 61 6d 70 6c 65 2e 63 6f 6d 00"
        "02 0d 61 6e 6e 40 6c 6f 63 61 6c 68 6f 73 74 0d 7a 6f 65 40 6c 6f 63 61 6c 68 6f 73 74  00"
    )
    assert encode(channel) == bytes.fromhex(golden)
    assert decode(bytes.fromhex(golden)) == channel


@pytest.mark.parametrize("case", SAVED, ids=named)
def test_what_the_original_saved_is_read_and_written_again(case: dict[str, Any]) -> None:
    data = unpack(case["data"])
    channel = decode(data)
    assert channel.to_json() == case["channel"]
    again = encode(channel)
    if case["byte_stable"]:
        assert again == data
    else:  # the original writes ACL entries in any order
        assert len(again) == len(data)
        assert decode(again) == channel


@pytest.mark.parametrize("case", ODD, ids=named)
def test_hand_made_bytes_get_the_verdict_of_the_original(case: dict[str, Any]) -> None:
    data = bytes.fromhex(case["hex"])
    if case["loads"]:
        assert decode(data).to_json() == case["channel"]
    elif case["name"] == OLD_LAYOUT:  # docs/decisions/081: read as what 0.6 meant
        assert decode_any(data)[0].channel_type is ChannelType.PUBSUB
        assert decode_any(data)[1]
    else:
        with pytest.raises(CorruptionError, match=r"metadata\.bin at byte"):
            decode(data)


def test_no_shorter_prefix_loads_but_the_one_of_the_old_layout() -> None:
    (case,) = [case for case in ODD if case["name"] == "valid_base"]
    data = bytes.fromhex(case["hex"])
    assert case["prefixes_that_load"] == []
    for length in range(len(data) - 1):
        with pytest.raises(CorruptionError):
            decode(data[:length])
    assert decode_any(data[:-1]) == (decode(data), True)


def test_a_number_that_does_not_fit_is_refused_before_it_is_written() -> None:
    with pytest.raises(OptionsError, match="32 bits"):
        encode(PersistedChannel("a", config=StoredConfig(max_clients=1 << 32)))


def test_metadata_that_could_not_be_loaded_is_not_written() -> None:
    names = frozenset({"x" * (MAX_METADATA_BYTES // 2), "y" * (MAX_METADATA_BYTES // 2)})
    with pytest.raises(OptionsError, match="at most"):
        encode(PersistedChannel("a", acl=ChannelAcl(join=Allow({"d": names}))))


def test_a_length_of_ten_bytes_is_read_and_of_eleven_is_not() -> None:
    rest = encode(PersistedChannel(""))[1:]
    assert decode(b"\x80" * 9 + b"\x00" + rest).handler == ""
    with pytest.raises(CorruptionError, match="a length that does not fit"):
        decode(b"\x80" * 9 + b"\x02" + rest)
    with pytest.raises(CorruptionError, match="a length that does not fit"):
        decode(b"\x80" * 10 + b"\x00" + rest)
