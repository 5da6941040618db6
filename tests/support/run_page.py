"""Run the examples of a page, Python and shell, top to bottom in the present folder: run_page.py PAGE [NATS_ADDRESS].

Blocks of Python share their names; one that begins with the name of a file is written to it.  Commands that go on until
they are interrupted are interrupted.  ``rm -rf`` and ``test -e … ||`` are understood, so that a page can be run again.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from command import PENSTOCK

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w/]+\.py)\n")
ADDRESS = "nats://localhost:4222"

# What a page leaves to its reader: calling the functions it defines, and waiting for what never ends.
AFTER = {
    "buckets.md": """
async def bounded(work):
    try:
        await asyncio.wait_for(work, 0.5)
    except TimeoutError:
        pass

async def after():
    from penstock.types import WatchCursor
    async with EmbeddedConnection("buckets") as connection:
        store = await connection.store("routes")
        leading = asyncio.create_task(lead(store, b"me"))
        while (leader := await store.reader.get("leader")) is None:
            await asyncio.sleep(0.01)
        assert leader.value == b"me"
        leading.cancel()
        await bounded(follow(store, WatchCursor.of(1)))

asyncio.run(after())
""",
    "channels.md": """
async def after():
    async with await ChannelManager.open("chat") as manager:
        await rules(manager.channel("ops/east"))
        assert (await work(manager)).payload == b"mend pump 7"

asyncio.run(after())
""",
    "fold.md": """
import asyncio

async def after():
    async with EmbeddedConnection("fold-buckets") as connection:
        await (await connection.store("routes")).writer.put("eu.a", b"10.0.0.1")
    stop = asyncio.Event()
    running = asyncio.create_task(main(stop))
    while not routes and not running.done():
        await asyncio.sleep(0.01)
    stop.set()
    await running

asyncio.run(after())
assert routes == {"eu.a": b"10.0.0.1"}
routes.clear()  # a restart
asyncio.run(after())
assert routes == {"eu.a": b"10.0.0.1"}
""",
    "follow.md": """
async def after():
    stop = asyncio.Event()
    with open_log("sales") as log, AppendLogStore.open("kinds.snap") as store:
        running = asyncio.create_task(run(log, store, stop))
        while not store.count() and not running.done():
            await asyncio.sleep(0.01)
        stop.set()
        await running
        assert store.count() == 1

asyncio.run(after())
""",
    "nats.md": """
async def after():
    async with await nats_connect("nats://localhost:4222") as connection:
        try:
            await asyncio.wait_for(follow(await connection.store("routes")), 0.5)
        except TimeoutError:
            pass

asyncio.run(after())
""",
    "node.md": """
import subprocess, sys
ports = ["--port", "0", "--channels-port", "0", "--http-port", "0"]
node = subprocess.Popen([sys.executable, "-m", "penstock.cli.main", "serve", *ports], stderr=subprocess.DEVNULL)
try:
    produce()
finally:
    node.terminate()
    assert node.wait(60) == 0
""",
    "spark.md": """
for started in spark.streams.active:
    started.awaitTermination(60)
assert good.count() == 1007 and bad.count() == 0
assert latest.count() == 7
assert live.count() == 7 and summary.entries == 7
assert spark.read.format("penstock").load("data/copy").count() == 1007
spark.stop()
""",
}


def commands(block: str) -> Iterator[list[str]]:
    for line in block.splitlines():
        if line.startswith("rm -rf "):
            yield shlex.split(line, comments=True)
            continue
        if unless := re.match(r"test -e (\S+) \|\| ", line):
            if os.path.exists(unless[1]):
                continue
            line = line[unless.end() :]
        words = shlex.split(line.removeprefix("$ "), comments=True) if "penstock " in line else []
        if words and words[0] == "penstock":
            yield words[1:]


def begin_anew(patterns: list[str]) -> None:
    """Remove what a page made before: names in the present folder, and nothing elsewhere."""
    for pattern in patterns:
        assert "/" not in pattern
        for path in Path().glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def run_command(words: list[str]) -> None:
    if words[0] == "rm":
        begin_anew(words[2:])
        return
    if words[0] == "serve":
        words = [
            *words,
            "--port",
            "0",
            "--channels-port",
            "0",
            "--http-port",
            "0",
        ]  # others may listen where a node does by default
    target = None
    if ">" in words:
        words, target = words[:-2], words[-1]
    command = [*PENSTOCK, *words]
    goes_on = words[0] == "serve" or (words[1:2] and words[1] in {"follow", "watch", "serve", "feed"})
    if "-f" in words or (goes_on and "--once" not in words):
        interrupt(command)
        return
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, f"penstock {' '.join(words)}\n{done.stderr}"
    if target is not None:
        Path(target).write_text(done.stdout)


def interrupt(command: list[str]) -> None:
    """Run a command that goes on, on a terminal, and interrupt it when it has said something."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        try:
            os.close(theirs)
            select.select([ours], [], [], 60)  # an end is also something
            ended = process.poll()
            process.send_signal(signal.SIGINT)
            said = b""
            try:
                while more := os.read(ours, 1 << 16):
                    said += more
            except OSError:  # everyone who had the terminal has left
                pass
            code = process.wait(60)
        finally:
            process.kill()
            os.close(ours)
    assert ended is None, f"{command} did not go on:\n{said.decode()}"
    assert said, f"{command} said nothing"
    assert code in {0, 130}, f"{command} ended with {code}:\n{said.decode()}"
    assert b"Traceback" not in said, said.decode()


def run_page(page: Path, address: str = ADDRESS) -> int:
    """Return how many examples there were."""
    names: dict[str, object] = {"__name__": page.stem}
    count = 0
    for language, block in [*BLOCK.findall(page.read_text()), ("python", AFTER.get(page.name, ""))]:
        if language == "python" and (named := FILE.match(block)):
            path = Path(named[1])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block)
        elif language == "python":
            exec(compile(block.replace(ADDRESS, address), page.name, "exec"), names)
            count += 1
        else:
            for words in commands(block.replace(ADDRESS, address)):
                run_command(words)
                count += 1
    return count


if __name__ == "__main__":
    print(run_page(Path(sys.argv[1]), *sys.argv[2:]))
