"""Promise: a broker under load with taps needs no more memory and descriptors after a long time than after a short one.

Short form: some seconds.  Long form (``--long``): 30 minutes; PENSTOCK_SOAK_SECONDS sets another time.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from command import PENSTOCK

from penstock.mqtt import Client, ClientOptions


def resources(pid: int) -> tuple[int, int]:
    """Return resident bytes that are its own, and open descriptors."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024, len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
async def test_memory_and_descriptors_are_flat_under_load_with_taps(tmp_path: Path, long_run: bool) -> None:
    seconds = float(os.environ.get("PENSTOCK_SOAK_SECONDS", "1800" if long_run else "6"))
    config = tmp_path / "taps.toml"
    config.write_text(
        f'[[taps]]\nfilter = "#"\npath = "{tmp_path}/all"\n[taps.options]\nroll_bytes = 8388608\nkeep_files = 4\n\n'
        f'[[taps]]\nfilter = "plant/#"\npath = "{tmp_path}/by/{{client}}"\nmax_open = 4\n'
        f"[taps.options]\nroll_bytes = 2097152\nkeep_files = 2\nregion_bytes = 65536\n"
    )
    words = ["mqtt", "serve", "--json", "--port", "0", "--data", str(tmp_path / "state"), "--config", str(config)]
    process = subprocess.Popen([*PENSTOCK, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        address = json.loads(process.stdout.readline())["listeners"]["mqtt"]
        ending = time.monotonic() + seconds
        sent = [0]

        async def publish(number: int) -> None:
            """Publish, and come again under the same name now and then."""
            while time.monotonic() < ending:
                options = ClientOptions(client_id=f"dev-{number}", clean=number % 2 == 0, session_expiry=60)
                async with Client(address, options) as client:
                    for step in range(200):
                        if time.monotonic() > ending:
                            return
                        payloads = [b"%d" % step] * (1 + step % 40)
                        topic = f"plant/{number}/{step % 50}"
                        await client.publish_many(topic, payloads, qos=(number + step) % 3, retain=step % 20 == 0)
                        sent[0] += len(payloads)

        loads = [asyncio.create_task(publish(number)) for number in range(8)]
        await asyncio.sleep(seconds / 3)  # caches fill
        before = resources(process.pid)
        await asyncio.gather(*loads)
        after = resources(process.pid)
        print(f"\n{sent[0]:,} messages in {seconds:.0f} s; own memory {before[0] >> 10} → {after[0] >> 10} KiB, "
              f"descriptors {before[1]} → {after[1]}")  # fmt: skip
        assert sent[0] > 1000
        assert after[1] <= before[1] + 16
        assert after[0] <= before[0] * 1.25 + (16 << 20)
    finally:
        process.terminate()
        assert process.wait(60) == 0
        process.stdout.close()
