"""Promise: without a compiler an embedded bucket and a fold of its log work all the same, only slower."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import asyncio, sys
sys.modules["penstock.kernel.foldindex"] = None  # as if it had not been built
from penstock import kernel
assert not kernel.native, "the compiled kernel was used"
from penstock.fold import follow
from penstock.kv import EmbeddedConnection, EmbeddedOptions, StoreConfig
from penstock.log import open_log
from penstock.store import AppendLogStore

async def main(folder):
    options = EmbeddedOptions(sync="none", checkpoint_bytes=2000)
    for start in (0, 200):
        async with EmbeddedConnection(folder, options) as connection:
            store = await connection.store_with_config(StoreConfig(name="b", max_bytes=-1))
            await store.writer.put_many((f"k{n % 30}", b"%d" % n) for n in range(start, start + 200))
            await store.writer.delete("k7")
            live = {entry.key: (entry.value, entry.version) for entry in await store.reader.entries()}
            assert len(live) == 29
    with open_log(folder + "/b/log") as log, AppendLogStore.open(folder + "/fold.snap") as fold:
        await follow(log, fold, once=True)
        assert {entry.key: (entry.value, entry.version) for entry in fold.range()} == live

asyncio.run(main(sys.argv[1]))
"""


def test_the_twins_keep_a_bucket_and_fold_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CODE, str(tmp_path / "buckets")]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
