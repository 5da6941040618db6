"""Promise: every line gets the verdict of the original, in its words, and is written again byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from penstock import kernel
from penstock.channels.wire.cutter import BroadcastRun, Cutter, Fault, Item, cut_client_run
from penstock.channels.wire.frames import BadLine, Frame, decode_line, encode_error, encode_frame
from penstock.errors import OptionsError
from penstock.kernel.twin import channelwire as twin
from penstock.testing.packed import read_cases, unpack

VECTORS = Path(__file__).parents[2] / "vectors" / "narwhal-wire"
LINES: list[dict[str, Any]] = json.loads(unpack(read_cases(VECTORS / "lines.jsonl")[0]["lines"]))
KERNELS = [kernel.channelwire, twin]


@pytest.mark.parametrize("words", KERNELS, ids=["kernel", "twin"])
def test_every_line_gets_the_verdict_of_the_original(words: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "channelwire", words)
    assert len(LINES) > 400
    for case in LINES:
        line = bytes.fromhex(case["line_hex"])
        try:
            frame = decode_line(line)
        except BadLine as exc:
            assert not case["ok"], line
            assert str(exc) == case["error"], line
            continue
        assert case["ok"], line
        assert (frame.name, frame.id, frame.payload_bytes) == (case["name"], case["id"], case["payload_length"])
        if case.get("reencoded_hex"):
            assert encode_frame(frame.name, frame.fields).hex() == case["reencoded_hex"], line
        else:
            with pytest.raises(OptionsError, match=case["reencode_error"]):
                encode_frame(frame.name, frame.fields)


def test_an_event_for_a_modulator_may_be_of_any_kind() -> None:
    """The original looks at the kind only later; an EVENT of an unknown kind is refused at once."""
    assert decode_line(b"S2M_FORWARD_EVENT id=1 kind=NEW_ONE").fields["kind"] == "NEW_ONE"
    with pytest.raises(BadLine, match="unknown event kind"):
        decode_line(b"EVENT kind=NEW_ONE")


pieces = st.sampled_from([
    b"BROADCAST", b"MESSAGE", b"BROADCAST_ACK", b"JOIN", b" ", b" id=", b" channel=!a@localhost", b" length=3",
    b" length=", b" qos=1", b" qos=0", b" seq=7", b" timestamp=5", b" from=ann@localhost", b"\n", b"abc\n", b"=",
    b"\\\"", b"\\", b":2=",
    b"\0", b"\t", b"\xff", b"7", b"0", b"18446744073709551616", b" id=1 channel=!a@localhost length=3\nabc\n",
])  # fmt: skip


@given(st.lists(pieces | st.binary(max_size=6), max_size=14).map(b"".join), st.integers(0, 3))
@example(b"BROADCAST id=1 channel=a length=4294967295\n", 0)
@example(b"BROADCAST_ACK id=1 seq=18446744073709551615\nBROADCAST_ACK id=2 seq=1\n", 0)
def test_both_kernels_agree_on_any_bytes(data: bytes, at: int) -> None:
    assert kernel.channelwire.tokenize(data) == twin.tokenize(data)
    for max_line in (12, 4096):
        assert kernel.channelwire.cut_acks(data, at, max_line) == twin.cut_acks(data, at, max_line)
        for cut in ("cut_broadcasts", "cut_messages"):
            ours, theirs = getattr(kernel.channelwire, cut), getattr(twin, cut)
            assert ours(data, at, max_line, 100) == theirs(data, at, max_line, 100)


@given(
    st.integers(1, 2**32 - 200),
    st.lists(st.binary(min_size=1, max_size=40), max_size=20).map(tuple),
    st.integers(1, 2**64 - 200),
    st.integers(1, 2**63),
)
def test_what_one_side_encodes_the_other_cuts(first_id: int, payloads: tuple[bytes, ...], seq: int, time: int) -> None:
    for words in KERNELS:
        sent = words.encode_broadcasts(first_id, b" channel=!a@localhost length=", b" qos=0\n", payloads)
        heard = words.encode_messages(b"MESSAGE channel=!a@localhost from=ann@localhost length=", seq, time, payloads)
        ids = b"".join((first_id + n).to_bytes(4, "little") for n in range(len(payloads)))
        acks = words.encode_acks(ids, seq)
        if not payloads:
            assert sent == heard == acks == b""
            continue
        for cutting in KERNELS:
            assert cutting.cut_broadcasts(sent, 0, 200, 100)[:4] == (b"!a@localhost", 0, ids, list(payloads))
            assert cutting.cut_messages(heard, 0, 200, 100) == (
                b"!a@localhost", b"ann@localhost", seq, time, list(payloads), len(heard),
            )  # fmt: skip
            assert cutting.cut_acks(acks, 0, 200)[1] == list(range(seq, seq + len(payloads)))


def one_by_one(items: list[Item]) -> list[Any]:
    """Return what came, runs taken apart, so that it does not matter how reads were cut."""
    found: list[Any] = []
    for item in items:
        if isinstance(item, BroadcastRun):
            for number, payload in zip(item.id_list(), item.payloads, strict=True):
                found.append(("BROADCAST", number, item.channel, payload, item.qos))
        elif isinstance(item, Frame) and item.name == "BROADCAST":
            f = item.fields
            found.append(("BROADCAST", f["id"], f["channel"], item.payload, 1 if f["qos"] is None else f["qos"]))
        else:
            found.append(item)
    return found


frames = st.sampled_from([
    b"BROADCAST id=1 channel=!a@localhost length=3\nabc\n",
    b"BROADCAST id=2 channel=!a@localhost length=5 qos=0\nab\ncd\n",
    b"BROADCAST  id=3 channel=!a@localhost length=2\r\n\n\n\n",
    b"BROADCAST id=4 channel=\\\"!a@localhost\\\" length=1\nx\n",
    b"PONG id=4\n", b"PUSH id=6 channel=!q@localhost length=4\nwork\n", b"CHANNELS id=7\n",
])  # fmt: skip


@given(st.lists(frames, max_size=12).map(b"".join), st.lists(st.integers(0, 400), max_size=6))
def test_it_does_not_matter_how_reads_are_cut(data: bytes, cuts: list[int]) -> None:
    whole = one_by_one(Cutter(256, 64).feed(data))
    cutter, items, last = Cutter(256, 64), [], 0
    for cut in [*sorted(cuts), len(data)]:
        items += cutter.feed(data[last:cut])
        last = max(last, cut)
    assert one_by_one(items) == whole
    assert not any(isinstance(item, Fault) for item in whole)


@given(st.lists(frames | st.binary(max_size=30), max_size=8).map(b"".join))
def test_no_bytes_do_more_than_end_in_a_fault(data: bytes) -> None:
    for cut_run in (None, cut_client_run):
        cutter = Cutter(64, 16) if cut_run is None else Cutter(64, 16, cut_run)
        items = cutter.feed(data)
        faults = [item for item in items if isinstance(item, Fault)]
        assert faults in ([], items[-1:])
        if faults:
            assert cutter.feed(b"PONG id=1\n") == []


def test_a_run_ends_where_channel_or_qos_change() -> None:
    data = b"".join(
        b"BROADCAST id=%d channel=%s length=1 qos=%d\nx\n" % case
        for case in [(1, b"!a@localhost", 1), (2, b"!a@localhost", 1), (3, b"!b@localhost", 1), (4, b"!b@localhost", 0)]
    )
    assert [item.id_list() for item in Cutter(256, 64).feed(data) if isinstance(item, BroadcastRun)] == [
        [1, 2],
        [3],
        [4],
    ]


def test_a_line_has_its_limit_and_not_one_byte_more() -> None:
    line = b"AUTH token=" + b"x" * 88 + b"\n"
    assert len(line) == 100
    assert isinstance(Cutter(100, 10).feed(line)[0], Frame)
    assert Cutter(99, 10).feed(line) == [Fault("POLICY_VIOLATION", "max message size exceeded")]
    assert Cutter(100, 10).feed(b"x" * 99) == []
    assert Cutter(100, 10).feed(b"x" * 100) == [Fault("POLICY_VIOLATION", "max message size exceeded")]


@pytest.mark.parametrize("word", ["read\\\\", "read\\\\\\\\", "\"':*", "\\\\", "a\\\\\"':*\\\\"])
def test_an_error_that_repeats_what_a_client_sent_can_be_read(word: str) -> None:
    """A quoted value that ends in a backslash never ends, and one with all four quotes cannot be written."""
    data = encode_error("BAD_REQUEST", f"invalid ACL type: {word}", 7)
    (frame,) = Cutter(1024, 1024).feed(data)
    assert isinstance(frame, Frame)
    assert (frame.name, frame.fields["id"], frame.fields["reason"]) == ("ERROR", 7, "BAD_REQUEST")
    assert frame.fields["detail"].startswith("invalid ACL type: ")


def test_a_broadcast_cut_by_a_read_joins_the_run_behind_it() -> None:
    data = b"".join(b"BROADCAST id=%d channel=!a@localhost length=40\n%s\n" % (n, b"y" * 40) for n in range(1, 7))
    whole = Cutter(256, 64).feed(data)
    for cut in range(1, len(data)):
        cutter = Cutter(256, 64)
        before, after = cutter.feed(data[:cut]), cutter.feed(data[cut:])
        assert len(before) <= 1
        assert len(after) <= 1
        runs = [item for item in before + after if isinstance(item, BroadcastRun)]
        assert len(runs) == len(before) + len(after)
        assert [number for run in runs for number in run.id_list()] == [1, 2, 3, 4, 5, 6]
        assert [size for run in runs for size in run.size_list()] == whole[0].size_list()  # type: ignore[union-attr]
        assert {payload for run in runs for payload in run.payloads} == {b"y" * 40}


def test_a_broadcast_cut_by_reads_and_not_followed_by_its_like_stays_by_itself() -> None:
    cutter = Cutter(256, 64)
    assert cutter.feed(b"BROADCAST id=1 channel=!a@localhost length=4\nab") == []
    items = cutter.feed(b"cd\nBROADCAST id=2 channel=!b@localhost length=1\nx\nPONG id=3\n")
    assert [item.id_list() for item in items[:2]] == [[1], [2]]  # type: ignore[union-attr]
    assert isinstance(items[2], Frame)
    assert cutter.feed(b"BROADCAST id=4 channel=!a@localhost length=4\nab") == []
    (fault,) = cutter.feed(b"cdx")
    assert fault == Fault("BAD_REQUEST", "invalid payload format", 4)
