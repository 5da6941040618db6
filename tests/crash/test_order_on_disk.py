"""Promise: what channels do to a real disk is in the promised order, below Python too: bytes, sync, name, sync of the
folder, and only then the answer.

The saves of many channels are C code, which no disk of ours can watch.  So a small library (tests/support/interpose.c)
is compiled and loaded into a child process, where it notes every call to the C library that changes a file, whoever
makes it.  A C compiler is something the project needs anyway.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.channels import FileChannelStore, channel_hash

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD and renameat2 are Linux's")

SOURCE = Path(__file__).parents[1] / "support" / "interpose.c"
CHANNELS = 100
GENERATIONS = 4
NAMES = ("rename", "exchange", "remove", "link")

SAVES = """
import os, sys
from penstock import kernel
from penstock.channels import FileChannelStore, PersistedChannel
from penstock.channels.model import StoredConfig

assert kernel.native, kernel.reason
root, channels, generations = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = FileChannelStore(root)
store.make_root()
said = os.open(root + "/said", os.O_WRONLY | os.O_CREAT)
for generation in range(generations):
    config = StoredConfig(max_clients=10 ** (generations - generation))  # each file is shorter than the one before
    saved = [PersistedChannel(f"ops/{number}", config=config) for number in range(channels)]
    if channels > 1:
        results = store.save_many(saved)
        assert all(isinstance(result, str) for result in results), results
    else:
        store.save(saved[0])
    os.write(said, b"saved")
"""

MESSAGES = """
import asyncio, os, sys
from penstock.channels import ChannelManager, ManagerOptions

root, seconds, ann = sys.argv[1], float(sys.argv[2]), "ann@localhost"

async def main():
    options = ManagerOptions(sync_on_loop_seconds=seconds)
    async with await ChannelManager.open(root, options) as manager:
        said = os.open(root + "/said", os.O_WRONLY | os.O_CREAT)
        ops, jobs = manager.channel("ops"), manager.channel("jobs")
        for channel, kind in ((ops, "pubsub"), (jobs, "fifo")):
            await channel.join(ann)
            await channel.configure(ann, persist=True, type=kind)
        for _ in range(3):
            await ops.broadcast(ann, b"alone")
            os.write(said, b"broadcast")
        await asyncio.gather(*(ops.broadcast(ann, b"together") for _ in range(10)))
        os.write(said, b"broadcasts")
        await jobs.push(ann, b"element")
        os.write(said, b"push")
        await jobs.pop(ann)
        os.write(said, b"pop")

asyncio.run(main())
"""


class Step(NamedTuple):
    """One call: what was done to which file, and the error number it ended with."""

    call: str
    path: str
    other: str
    size: int
    failed: int


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library; there must be a compiler."""
    wanted = [name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name]
    compiler = next((name for name in wanted if shutil.which(name)), None)
    if compiler is None:
        pytest.fail(f"this test compiles a small library and found no C compiler: {', '.join(wanted)}")
    target = tmp_path_factory.mktemp("interpose") / "interpose.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", str(target), str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def traced(library: Path, place: Path, code: str, *arguments: object) -> tuple[str, list[list[Step]]]:
    """Run code that answers by writing to ``said``; return its folder, and what it did before each answer."""
    root, trace = str(place / "data"), place / "trace"
    command = [sys.executable, "-c", code, root, *map(str, arguments)]
    preload = {"LD_PRELOAD": str(library), "TRACE_FILE": str(trace), "TRACE_ROOT": str(place)}
    done = subprocess.run(
        command, env={**os.environ, **preload}, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answers: list[list[Step]] = [[]]
    for line in trace.read_text().splitlines():
        call, path, other, size, failed = line.split("\t")
        if path == f"{root}/said":
            answers.append([])
        else:
            answers[-1].append(Step(call, path, other, int(size), int(failed)))
    return root, answers


def check_save(steps: list[Step], folder: str, name: str) -> None:
    """Check one replacement of ``name``: all its bytes, a sync of them, the name, a sync of the folder."""
    steps = [step for step in steps if step.path == folder or step.path.startswith(f"{folder}/")]
    shown = "\n".join(map(str, steps))
    worked = [step for step in steps if not step.failed]
    named = [
        at for at, step in enumerate(worked) if step.call in ("rename", "exchange") and step.other == f"{folder}/{name}"
    ]
    assert len(named) == 1, f"the file must get its name once\n{shown}"
    (at,) = named
    written = worked[at].path
    changes = [step for step in worked if step.call in ("write", "truncate")]
    assert changes, f"nothing was written\n{shown}"
    assert {step.path for step in changes} == {written}, f"other bytes were written too\n{shown}"
    last = max(at for at, step in enumerate(worked) if step in changes)
    assert last < at, f"bytes were written after the file had its name\n{shown}"
    synced = [step.path for step in worked[last + 1 : at] if step.call == "sync"]
    assert written in synced, f"the bytes were not synced before the file had its name\n{shown}"
    renamed = max(at for at, step in enumerate(worked) if step.call in NAMES)
    synced = [step.path for step in worked[renamed + 1 :] if step.call == "sync"]
    assert folder in synced, f"the folder was not synced after the file had its name\n{shown}"


@pytest.mark.parametrize("channels", [CHANNELS, 1], ids=["side by side", "one"])
def test_a_save_is_bytes_sync_name_sync_of_the_folder(library: Path, tmp_path: Path, channels: int) -> None:
    root, answers = traced(library, tmp_path, SAVES, channels, GENERATIONS)
    assert len(answers) == GENERATIONS + 1
    digests = [channel_hash(f"ops/{number}") for number in range(channels)]
    for generation in answers[:-1]:
        for digest in digests:
            check_save(generation, f"{root}/{digest}", "metadata.bin")
    for digest in digests:  # all bytes of the last generation, and none of a longer one
        assert FileChannelStore(root).load(digest).config.max_clients == 10
    if any(step.call == "exchange" and not step.failed for step in answers[2]):
        spares = {step.path for step in answers[3] if step.call == "write"}
        assert spares == {f"{root}/{digest}/penstock-spare" for digest in digests}, "no spare was written again"


def test_the_folder_of_a_channel_is_durable_before_its_first_save(library: Path, tmp_path: Path) -> None:
    root, (first, *_) = traced(library, tmp_path, SAVES, CHANNELS, 1)
    for number in range(CHANNELS):
        folder = f"{root}/{channel_hash(f'ops/{number}')}"
        made = first.index(Step("make", folder, "", 0, 0))
        begun = next(at for at, step in enumerate(first) if step.path.startswith(f"{folder}/"))
        assert Step("sync", root, "", 0, 0) in first[made:begun]


@pytest.mark.parametrize("seconds", [0, 60], ids=["in threads", "on the loop"])
def test_a_message_is_synced_once_and_before_it_is_acknowledged(library: Path, tmp_path: Path, seconds: int) -> None:
    root, answers = traced(library, tmp_path, MESSAGES, seconds)
    assert len(answers) == 7
    ops, jobs = f"{root}/{channel_hash('ops')}", f"{root}/{channel_hash('jobs')}"
    log = f"{ops}/00000000000000000001.log"
    first = [step[:2] for step in answers[0]]
    assert first.index(("write", log)) < first.index(("sync", log)) < len(first)
    assert ("sync", ops) in first[first.index(("write", log)) :], "the name of the segment was not synced"
    for steps in answers[1:4]:  # alone, alone, ten together: one write, one sync, the mark, the answer
        calls = [step[:2] for step in steps]
        assert calls == [("write", log), ("sync", log), ("write", f"{ops}/penstock-mark")]
    pushed = [step[:2] for step in answers[4]]
    assert pushed.index(("write", f"{jobs}/00000000000000000001.log")) < pushed.index(
        ("sync", f"{jobs}/00000000000000000001.log")
    )
    check_save(answers[5], jobs, "cursor.bin")
