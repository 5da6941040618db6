"""Promise: what a receiver pays does not depend on how many segments, receivers and groups a queue has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.disk import PosixDisk
from penstock.errors import CorruptionError, ExpiredError
from penstock.log.filechannel import ChannelOptions, FileChannel, ack, segments
from penstock.log.filechannel.segments import Folder, Walk

MESSAGE = b"x" * 190
SMALL = ChannelOptions(sync="none", segment_bytes=180, compression="none", keep_bytes=1 << 40)


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    found: list[str] = []
    real = PosixDisk.list

    def counted(self: PosixDisk, folder: str) -> list[str]:
        found.append(folder)
        return real(self, folder)

    monkeypatch.setattr(PosixDisk, "list", counted)
    return found


def test_acknowledging_lists_nothing(tmp_path: Path, listed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ack, "SEEN_SECONDS", 0.0)  # each acknowledgement takes a fingerprint
    monkeypatch.setattr(segments, "LISTING_SHARE", 0)  # what is listed late would be counted below
    path = str(tmp_path / "jobs")
    with FileChannel.open(path, SMALL) as queue:
        queue.append_many([MESSAGE] * 20)
    larger = ChannelOptions(sync="none", segment_bytes=1 << 20, compression="none", keep_bytes=1 << 40)
    with FileChannel.open(path, larger) as queue, queue.ack_rx("first") as first, queue.group("g") as group:
        queue.ack_rx("away").close()  # nothing is collected: that looks at who holds what
        newest = queue.ack_rx("newest", start="latest")

        def use() -> None:
            queue.append(b"one")
            assert newest.recv() == b"one"
            newest.ack()
            assert first.recv() == MESSAGE
            first.ack()
            group.ack(group.take_many(1))

        use()  # what it finds out is kept
        os.utime(path)  # a segment of a receiver or of a compression came or went
        use()
        listed.clear()
        for _ in range(5):
            use()
        newest.close()
        assert len(listed) <= 1  # a file came or went; fifteen fingerprints were taken


@pytest.mark.parametrize("kind", ["receivers", "groups"])
def test_another_name_lists_nothing(tmp_path: Path, listed: list[str], kind: str) -> None:
    with FileChannel.open(str(tmp_path / "jobs"), SMALL) as queue:
        queue.append_many([MESSAGE] * 3)
        queue.ack_rx("away").close()

        def use(name: str) -> None:
            here: Any = queue.ack_rx(name) if kind == "receivers" else queue.group(name)
            if kind == "groups":
                here.ack(here.take_many(1))
            here.close()

        use("first")
        listed.clear()
        for number in range(5):
            use(f"n{number}")
        assert listed == []


@pytest.mark.parametrize("kind", ["receivers", "groups"])
def test_another_name_at_the_newest_segment_lists_nothing_while_the_last_listing_will_do(
    tmp_path: Path, listed: list[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with FileChannel.open(str(tmp_path / "jobs"), SMALL) as queue:
        queue.append(MESSAGE)

        def use(name: str) -> None:
            here: Any = queue.ack_rx(name) if kind == "receivers" else queue.group(name)
            assert here.take_many(1) if kind == "groups" else here.recv()
            here.close()

        monkeypatch.setattr(segments, "LISTING_SHARE", 1e9)
        monkeypatch.setattr(segments, "LISTING_SECONDS", 1e9)
        use("first")
        listed.clear()
        for number in range(20):
            use(f"n{number}")
        assert listed == []
        position = queue.append(MESSAGE)  # a segment of its own, which nobody has listed
        assert Walk(queue.folder).read(position, 1).positions.tolist() == [position]


@pytest.mark.parametrize("ends", ["end", "each its own"])
def test_opening_a_queue_with_many_groups_after_a_restart_of_the_machine_lists_no_more_than_with_few(
    tmp_path: Path, listed: list[str], monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    found = []
    for count in (3, 30):
        path = str(tmp_path / f"jobs{count}")
        with FileChannel.open(path, SMALL) as queue:
            queue.append_many([MESSAGE] * 40)
            for number in range(count):
                with queue.group(f"g{number}") as group:
                    group.ack(group.take_many(40 if ends == "end" else 5 + number))
        with monkeypatch.context() as patch:
            patch.setattr(PosixDisk, "boot_id", lambda self: b"another boot id!")
            listed.clear()
            with FileChannel.open(path, SMALL):
                found.append(len(listed))
    assert found[0] == found[1]


def test_what_was_collected_or_came_since_it_was_listed_is_noticed(tmp_path: Path) -> None:
    path = str(tmp_path / "jobs")
    with FileChannel.open(path, SMALL) as queue:
        positions = queue.append_many([MESSAGE] * 6).tolist()
        folder = Folder(PosixDisk(), path)
        walk = Walk(folder)
        assert walk.read(positions[1], 1).positions.tolist() == [positions[1]]
        assert folder.first_position() == positions[0]
        later = queue.append_many([MESSAGE] * 3).tolist()
        assert walk.read(later[-1], 1).positions.tolist() == [later[-1]]
        for number in range(3):
            os.unlink(f"{path}/segment.{number}")
        walk.close()
        with pytest.raises(ExpiredError):
            walk.read(positions[0], 1)
        assert folder.first_position() == positions[3]
        assert walk.read(positions[4], 1).positions.tolist() == [positions[4]]
        os.unlink(f"{path}/segment.5")
        walk.close()
        with pytest.raises(CorruptionError, match=r"segment\.5"):
            walk.read(positions[5], 1)
