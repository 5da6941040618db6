"""Promise: data directories of narwhal 0.7.0 are served as they are, and ours have the same bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from penstock.channels import ChannelId, ChannelManager, Limits, ManagerOptions, Nid, channel_hash, commands as c
from penstock.channels.postcard import decode
from penstock.errors import CorruptionError
from penstock.log.messagelog import MessageLogReader
from penstock.log.messagelog.fifo_cursor import load_cursor
from penstock.testing.packed import lay_out, read_cases

VECTORS = Path(__file__).parents[2] / "vectors" / "narwhal-metadata"
SERVERS = read_cases(VECTORS / "server.jsonl")
OPTIONS = ManagerOptions(limits=Limits(max_history_limit=1 << 20, max_persist_messages=1 << 20))


def named(case: dict[str, Any]) -> str:
    return str(case["name"])


def listing(root: Path) -> dict[str, bytes]:
    """Return the files of the original's making; ours beside them are named penstock-*."""
    files = (path for path in sorted(root.rglob("*")) if path.is_file() and not path.name.startswith("penstock-"))
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


@pytest.mark.parametrize("case", SERVERS, ids=named)
async def test_a_directory_of_the_original_is_served_and_left_as_it_is(case: dict[str, Any], tmp_path: Path) -> None:
    root = tmp_path / "data"
    lay_out(case["files"], root)
    before = listing(root)
    async with await ChannelManager.open(root, OPTIONS) as manager:
        assert manager.handlers() == sorted(channel["metadata"]["handler"] for channel in case["channels"])
        assert manager.broken == {}
        for expected in case["channels"]:
            await check_channel(manager, expected)
    assert listing(root) == before


async def check_channel(manager: ChannelManager, expected: dict[str, Any]) -> None:
    saved = expected["metadata"]
    channel, owner = manager.channel(saved["handler"]), saved["owner"]
    assert [str(nid) for nid in await channel.members(owner)] == saved["members"]
    config, _ = await channel.config(owner)
    assert {name: getattr(config, name) for name in saved["config"]} == saved["config"]
    if saved["channel_type"] == "Fifo":
        assert await channel.length(owner) == expected["cursor"]["waiting"]
        return
    first, last = await channel.range(owner)
    assert (first, last) == (expected["log"]["first_seq"], expected["log"]["last_seq"])
    reader = next((nid for nid in map(Nid.parse, saved["members"]) if may_read(saved, nid)), None)
    if reader is not None:
        found = await channel.history(reader, 1, 1 << 20)
        assert [entry.seq for entry in found] == expected["read_all"]
        digests = [hashlib.sha256(entry.payload).hexdigest() for entry in found]
        assert digests == [entry["sha256"] for entry in expected["entries"]]
        assert [entry.sender for entry in found] == [entry["sender"] for entry in expected["entries"]]


def may_read(saved: dict[str, Any], nid: Nid) -> bool:
    allowed = saved["acl"]["read"]
    return not allowed or (nid.domain in allowed and (not allowed[nid.domain] or nid.username in allowed[nid.domain]))


@pytest.mark.parametrize("case", SERVERS, ids=named)
async def test_the_same_history_gives_the_same_bytes(case: dict[str, Any], tmp_path: Path) -> None:
    """What the original was asked, asked here with the same clock: metadata, segments and cursors are the same."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    lay_out(case["files"], theirs)
    async with await ChannelManager.open(ours, OPTIONS) as manager:
        for expected in case["channels"]:
            await replay(manager, theirs / expected["folder"], expected)
    for expected in case["channels"]:
        folder = expected["folder"]
        assert folder == channel_hash(expected["metadata"]["handler"])
        mine, other = listing(ours / folder), listing(theirs / folder)
        assert mine.keys() == other.keys()
        metadata = mine.pop("metadata.bin"), other.pop("metadata.bin")
        assert decode(metadata[0]) == decode(metadata[1])
        assert len(metadata[0]) == len(metadata[1])  # ACL entries may stand in another order
        if all(len(domains) <= 1 and all(len(users) <= 1 for users in domains.values())
               for domains in expected["metadata"]["acl"].values()):  # fmt: skip
            assert metadata[0] == metadata[1]
        assert mine == other


async def replay(manager: ChannelManager, folder: Path, expected: dict[str, Any]) -> None:
    saved = expected["metadata"]
    name, owner = ChannelId(saved["handler"], "localhost"), Nid.parse(saved["owner"])
    fifo = saved["channel_type"] == "Fifo"
    await manager.submit(c.Join(name, owner))
    for member in map(Nid.parse, saved["members"]):
        if member != owner:
            await manager.submit(c.Join(name, member))
    entries = list(MessageLogReader(str(folder)).entries()) if expected["entries"] else []
    core = manager._core(name.handler)
    # A queue that was a channel before has entries below its cursor that nobody popped: they were broadcast.
    was_channel = fifo and bool(entries) and case_was_converted(saved["handler"])
    settings = {field: value for field, value in saved["config"].items() if field != "message_flush_interval"}
    await manager.submit(
        c.SetConfig(
            name, owner, **settings, message_flush_interval=0, type="fifo" if fifo and not was_channel else None
        )
    )
    converted_at = expected["cursor"]["next_seq"] if was_channel else 0
    for entry in entries:
        if was_channel and entry.seq == converted_at:
            await manager.submit(c.SetConfig(name, owner, type="fifo"))
        core.channels[name.handler].next_seq = entry.seq  # numbers that were spent on refused messages
        sender = Nid.parse(entry.sender.decode())
        kind = c.Push if fifo and not (was_channel and entry.seq < converted_at) else c.Broadcast
        await manager.submit(kind(name, sender, entry.payload, entry.timestamp_ms))
    if was_channel and (not entries or entries[-1].seq < converted_at):
        await manager.submit(c.SetConfig(name, owner, type="fifo"))
    if fifo:
        while core.channels[name.handler].head != expected["cursor"]["next_seq"]:
            await manager.submit(c.Pop(name, owner))
    if saved["config"]["message_flush_interval"]:
        interval = saved["config"]["message_flush_interval"]
        await manager.submit(c.SetConfig(name, owner, message_flush_interval=interval))
    for kind_of_list, domains in saved["acl"].items():
        nids = tuple(Nid(user, domain) for domain, users in domains.items() for user in users or [""])
        if nids:
            await manager.submit(c.SetAcl(name, owner, kind_of_list, "add", nids))


def case_was_converted(handler: str) -> bool:
    return handler.startswith("conv")


@pytest.mark.parametrize("case", read_cases(VECTORS / "cursor.jsonl"), ids=named)
def test_a_cursor_gets_the_verdict_of_the_original(case: dict[str, Any], tmp_path: Path) -> None:
    from penstock.disk import PosixDisk

    if case["hex"] is not None:
        (tmp_path / "cursor.bin").write_bytes(bytes.fromhex(case["hex"]))
    bounds = case["log_first_seq"], case["log_last_seq"]
    if "next_seq" in case:
        assert load_cursor(PosixDisk(), str(tmp_path), *bounds) == case["next_seq"]
    else:
        with pytest.raises(CorruptionError, match=r"cursor\.bin"):
            load_cursor(PosixDisk(), str(tmp_path), *bounds)
