"""Whatever happens in its life, a channel is one that the original opens and reads.

The rules are those a foreign implementation has to keep: names and their order, headers and where they say a segment
begins, nothing between, behind or around frames, no chunk and no code that the original refuses.
"""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given, settings, strategies as st

from penstock.disk import MemoryDisk
from penstock.log.filechannel import ChannelOptions, FileChannel, repair
from penstock.log.filechannel.compress import Unpacker
from penstock.log.filechannel.format import Header
from penstock.log.filechannel.recover import walk_to_end

NAME = re.compile(r"segment\.(0|[1-9][0-9]*)(\.z)?", re.ASCII)
LARGEST_CHUNK = 65_536

Action = tuple[str, int]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["send", "send", "send_many", "send_many", "rotate", "compact", "gc", "receive", "reopen", "torn", "lost"]
        ),
        st.integers(0, 400),
    ),
    min_size=1,
    max_size=25,
)


def bytes_of(disk: MemoryDisk, name: str) -> bytes:
    with disk.open(f"c/{name}") as file:
        return file.read_at(0, file.stat().size)


def uncompressed_chunks(stream: bytes) -> list[int]:
    """Return the uncompressed length of each data chunk of a snappy stream."""
    at, sizes = 0, []
    while at < len(stream):
        kind, length = stream[at], int.from_bytes(stream[at + 1 : at + 4], "little")
        assert kind in (0x00, 0x01, 0xFF), f"a chunk of type {kind}"
        body = stream[at + 8 : at + 4 + length]
        if kind == 1:
            sizes.append(len(body))
        elif kind == 0:
            size = shift = 0
            for byte in body:
                size |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
            sizes.append(size)
        at += 4 + length
    return sizes


def check_rules(disk: MemoryDisk) -> None:
    """Hold a channel that nobody has open against the rules."""
    names = [name for name in disk.list("c") if not name.startswith("penstock-")]
    assert "lock" in names
    assert bytes_of(disk, "lock") == b""
    names.remove("lock")
    found: dict[int, str] = {}
    for name in names:
        parsed = NAME.fullmatch(name)
        assert parsed, f"{name}: no name of the original"
        assert int(parsed[1]) not in found, f"{name}: both plain and compressed"
        found[int(parsed[1])] = name
    indexes = sorted(found)
    assert indexes == list(range(indexes[0], indexes[-1] + 1)), "a gap in the indexes"
    expected: int | None = None
    for index in indexes:
        name, data = found[index], bytes_of(disk, found[index])
        assert len(data) >= 64, f"{name}: too short for a header"
        header = Header.decode(name, data[:64], packed=name.endswith(".z"))
        assert int.from_bytes(data[:4], "big") == index
        assert expected in (None, header.begin), f"{name}: does not begin where the one before ends"
        with disk.open(f"c/{name}") as file:
            if name.endswith(".z"):
                assert header.method in ("snappy", "gzip")
                assert not any(data[21:64])
                unpacker = Unpacker(file, header)
                size = sum(map(len, iter(lambda: unpacker.read(1 << 20), b"")))  # noqa: B023 - used at once
                unpacker.finish()
                end = header.begin + size
                assert header.end == end
                if header.method == "snappy":
                    assert max(uncompressed_chunks(data[64:]), default=0) <= LARGEST_CHUNK
            else:
                assert not any(data[12:64]), f"{name}: bytes that the original leaves zero"
                end, reason = walk_to_end(file, header.begin, len(data), None)
                assert (end, reason) == (header.begin + len(data) - 64, ""), f"{name}: not frames to its end"
        assert end > header.begin or index in (indexes[0], indexes[-1]), f"{name}: sealed without a message"
        expected = end


class Life:
    """A channel on a disk of its own, and what is done to it."""

    def __init__(self) -> None:
        self.disk = MemoryDisk()
        self.turn = 0
        self.open()

    def open(self) -> None:
        self.turn += 1
        options = ChannelOptions(
            sync="none",
            segment_bytes=600,
            compression=("snappy", "gzip", "none")[self.turn % 3],  # type: ignore[arg-type]
        )
        self.channel = FileChannel.open("c", options, disk=self.disk)

    def do(self, what: str, number: int) -> None:
        channel: Any = self.channel
        if what == "send":
            channel.append(bytes([number % 251]) * number)
        elif what == "send_many":
            channel.append_many([bytes([n]) * (number * n % 90) for n in range(number % 30)])
        elif what in ("rotate", "compact", "gc"):
            getattr(channel, what)()
        elif what == "receive":
            with channel.ack_rx("worker") as rx:
                rx.recv_many(number + 1)
                rx.ack()
        else:
            self.channel.close()
            check_rules(self.disk)
            self.damage(what, number)
            self.open()

    def damage(self, what: str, number: int) -> None:
        """Leave what a crash leaves: half a frame at the end; or lose a byte of any file, and repair."""
        names = [name for name in self.disk.list("c") if name.startswith("segment.")]
        if what == "torn":
            newest = max(names, key=lambda name: int(name.split(".")[1]))
            if not newest.endswith(".z"):
                with self.disk.modify(f"c/{newest}") as file:
                    file.write_at(file.stat().size, b"\0\0\1\0" + bytes(number % 60))
        elif what == "lost":
            with self.disk.modify(f"c/{names[number % len(names)]}") as file:
                file.truncate(max(file.stat().size - 1 - number % 5, 0))
            repair("c", disk=self.disk)


@given(ACTIONS)
@settings(deadline=None, max_examples=60)
def test_every_life_leaves_a_channel_the_original_reads(actions: list[Action]) -> None:
    life = Life()
    for what, number in actions:
        life.do(what, number)
    life.channel.close()
    check_rules(life.disk)
