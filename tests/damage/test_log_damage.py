"""Whatever happens to a file of a log: what is handed out was written, what is missing is reported, nothing is deleted.

The short form tries one damage in some dozens, ``make damage`` every byte and every length of every file.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from damage import ANSWERS, Answer, Thing, damages, files_below
from penstock.log.detect import open_log
from penstock.log.ends import lost_at_end
from penstock.log.envelope import CONTENT, encode_envelopes
from penstock.log.filechannel import ChannelOptions, FileChannel
from penstock.log.messagelog import MessageLog, MessageLogOptions
from penstock.log.xchannel import Writer

PAYLOADS = [b"%03d-%s" % (number, b"payload " * (number % 4)) for number in range(24)]
EVERY = 83


def make_messagelog(folder: Path) -> dict[Any, bytes]:
    with MessageLog.open(folder / "log", MessageLogOptions(sync="always", segment_bytes=400)) as log:
        numbers = [log.append(payload, sender=b"ann", timestamp_ns=10**18) for payload in PAYLOADS]
    return dict(zip(numbers, PAYLOADS, strict=True))


def make_queue(folder: Path, **options: Any) -> dict[Any, bytes]:
    settings = ChannelOptions(sync="always", segment_bytes=150, **{"compression": "none"} | options)
    with FileChannel.open(folder / "log", settings) as channel:
        found = {channel.append(payload): payload for payload in PAYLOADS}
        channel.ack_rx("slow").close()
        if settings.compression != "none":
            channel.compact()
    return found


def make_xchannel(folder: Path, sync: str = "always") -> dict[Any, bytes]:
    options = {"region_bytes": 4096, "roll_bytes": 600, "sync": sync}
    with Writer.open(folder / "log", **options) as writer:  # type: ignore[arg-type]
        return {writer.append(payload, timestamp_ns=7): payload for payload in PAYLOADS}


def make_envelopes(folder: Path) -> dict[Any, bytes]:
    records = encode_envelopes([b"k%d" % n for n in range(24)], PAYLOADS, headers={"unit": b"C"})
    with MessageLog.open(folder / "log", MessageLogOptions(sync="always", segment_bytes=900, content=CONTENT)) as log:
        numbers = log.append_many(records, timestamp_ns=10**18).tolist()
    return dict(zip(numbers, records.to_payloads(), strict=True))


def look(folder: Path, kind: str) -> Answer:
    """Read all there is, going on behind damage, and gather all that is said."""
    answer = Answer({}, [])
    try:
        with open_log(str(folder / "log"), format=kind, on_damage="skip") as log:
            position = log.first_position
            for _ in range(200):
                batch = log.read(position, 5)
                if not len(batch):
                    break
                answer.records |= dict(zip(batch.positions.tolist(), batch.to_payloads(), strict=True))
                assert batch.next_position > position
                position = batch.next_position
            else:
                raise AssertionError("reading does not end")
            answer.said += map(str, log.damage)
            answer.said += [str(problem) for problem in (lost_at_end(log),) if problem is not None]
            log.stat()
    except ANSWERS as exc:
        answer.said.append(f"raised: {exc}")
    return answer


def verify(folder: Path, kind: str) -> list[str]:
    try:
        with open_log(str(folder / "log"), format=kind) as log:
            return [str(problem) for problem in log.verify()]
    except ANSWERS as exc:
        return [f"raised: {exc}"]


def own_messagelog(folder: Path) -> list[str]:
    with MessageLog.open(folder / "log", MessageLogOptions(sync="none", segment_bytes=400)) as log:
        return [str(problem) for problem in log.repairs]


def own_queue(folder: Path) -> list[str]:
    options = ChannelOptions(sync="none", segment_bytes=150, compression="none", collect=False)
    with FileChannel.open(folder / "log", options) as channel:
        return [str(problem) for problem in channel.problems]


def own_xchannel(folder: Path) -> list[str]:
    Writer.open(folder / "log", roll_bytes=600).close()
    return []


def thing(name: str, kind: str, make: Any, own: Any, *, checked: bool = True) -> Thing:
    return Thing(name, make, lambda folder: look(folder, kind), own, checked)


THINGS = {
    "messagelog": thing("messagelog", "messagelog", make_messagelog, own_messagelog),
    "envelopes": thing("envelopes", "messagelog", make_envelopes, own_messagelog),
    "queue": thing("queue", "filechannel", make_queue, own_queue),
    "queue-snappy": thing(
        "queue-snappy", "filechannel", lambda folder: make_queue(folder, compression="snappy"), own_queue
    ),
    "queue-gzip": thing("queue-gzip", "filechannel", lambda folder: make_queue(folder, compression="gzip"), own_queue),
    "xchannel": thing("xchannel", "xchannel", make_xchannel, own_xchannel, checked=False),
    "xchannel-unsynced": thing(
        "xchannel-unsynced", "xchannel", lambda folder: make_xchannel(folder, "none"), own_xchannel, checked=False
    ),
}


def used(file: str, data: bytes) -> int:
    """Return how many bytes of a file matter: what lies behind the last byte that is not zero is room."""
    return min(len(data), len(data.rstrip(b"\x00")) + 2)


def test_what_is_whole_is_read_whole(tmp_path: Path) -> None:
    for name, thing in THINGS.items():
        folder = tmp_path / name
        folder.mkdir()
        written = thing.make(folder)
        answer = thing.look(folder)
        assert (answer.records, answer.said) == (written, []), name
        assert (
            verify(folder, "filechannel" if "queue" in name else "xchannel" if "xchannel" in name else "messagelog")
            == []
        )


@pytest.mark.parametrize("name", THINGS)
def test_damage_is_answered(name: str, tmp_path: Path, long_run: bool) -> None:
    thing, sound, copy = THINGS[name], tmp_path / "sound", tmp_path / "copy"
    sound.mkdir()
    written = thing.make(sound)
    kind = "filechannel" if "queue" in name else "xchannel" if "xchannel" in name else "messagelog"
    every = 1 if long_run else EVERY * (5 if "xchannel" in name else 1)
    failures = []
    for damage in damages(sound, used, every=every):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(sound, copy)
        damage.do(copy)
        before = files_below(copy)
        answer = thing.look(copy)
        said = [*answer.said, *verify(copy, kind)]
        wrong = {at: payload for at, payload in answer.records.items() if written.get(at) != payload}
        if "queue" in name:
            wrong = _wrong_in_queue(wrong, damage.how, answer, written)
        if thing.checked and wrong:
            failures.append(f"{damage}: handed out what nobody wrote: {wrong}")
        if (
            answer.records.keys() < written.keys()
            and not answer.said
            and not _like_retention(damage.file, name, damage.how)
        ):
            failures.append(
                f"{damage}: {len(written) - len(answer.records)} are missing in silence; verify says {said}"
            )
        if files_below(copy) != before:
            failures.append(f"{damage}: reading changed a file")
        failures += _opened(thing, copy, f"{damage}", answer, before)
    assert failures == [], f"{len(failures)} failures:\n" + "\n".join(failures[:40])


def _wrong_in_queue(wrong: dict[Any, bytes], how: str, answer: Answer, written: dict[Any, bytes]) -> dict[Any, bytes]:
    """Leave out what the format cannot tell: zeros are empty messages (decision 022), and a begin that was changed in a
    header moves the positions of its messages, which is reported, because the segment before ends elsewhere."""
    if how == "zero":
        wrong = {at: payload for at, payload in wrong.items() if payload}
    if answer.said:
        wrong = {at: payload for at, payload in wrong.items() if payload not in written.values()}
    return wrong


def _like_retention(file: str, name: str, how: str) -> bool:
    """Whether a damage looks exactly like what retention does: the oldest files are gone."""
    if how != "remove":
        return False
    return file.endswith(("00000000000000000001.log", "/segment.0", "/segment.0.z")) or (
        "xchannel" in name and file in ("log", "log.0")
    )


def _opened(thing: Thing, folder: Path, damage: str, answer: Answer, before: dict[str, bytes]) -> list[str]:
    """Open it as its owner does: it opens or says why not, and whatever was readable stays so, or is set aside."""
    try:
        thing.own(folder)
    except ANSWERS:
        pass
    after = files_below(folder)
    failures = []
    kept = b"".join(after.values())
    for file, data in before.items():
        gone = file not in after
        if gone and data.strip(b"\0") and data not in kept and "penstock-" not in file and not file.endswith(".idx"):
            failures.append(f"{damage}: opening deleted {file} of {len(data)} bytes")
    if not thing.checked:
        return failures
    now = thing.look(folder)
    lost = answer.records.keys() - now.records.keys()
    aside = any(file.endswith(".bad") for file in after)
    if lost and not aside and not any("raised" in text for text in now.said):
        failures.append(f"{damage}: opening lost {sorted(lost)}")
    return failures
