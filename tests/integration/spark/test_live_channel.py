"""Promise: Spark reads the history of a channel while the channel server runs and writes it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from penstock.channels import ChannelManager, channel_hash


def test_spark_reads_the_history_of_a_channel_that_is_being_served(spark: Any, tmp_path: Path) -> None:
    async def serve_and_read() -> tuple[int, int]:
        async with await ChannelManager.open(tmp_path / "data") as manager:
            ops = manager.channel("ops")
            await ops.join("ann@localhost")
            await ops.configure("ann@localhost", persist=True)
            await ops.broadcast_many("ann@localhost", [b"%d" % n for n in range(500)])

            def read() -> int:
                frame = spark.read.format("penstock").load(str(tmp_path / "data" / channel_hash("ops")))
                return int(frame.where("cast(payload as string) like '%7'").count())

            first = await asyncio.to_thread(read)
            await ops.broadcast_many("ann@localhost", [b"7"] * 10)
            return first, await asyncio.to_thread(read)

    assert asyncio.run(serve_and_read()) == (50, 60)
