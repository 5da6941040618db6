"""The original channel server in a process of its own, where ``PENSTOCK_NARWHAL`` says that it was built."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from wire_use import PlainAuthenticator

from penstock.channels.wire.remote import ModulatorServer

BUILT = os.environ.get("PENSTOCK_NARWHAL", "")
SECONDS = 120.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@asynccontextmanager
async def original(folder: Path, *, auth: bool, limits: str = "") -> AsyncIterator[str]:
    """Run the original server; with logins, our own modulator server is its modulator."""
    port, path = free_port(), str(folder / "s2m")
    extra = f'[modulator]\ntype = "s2m"\n[modulator.s2m-client]\nnetwork = "unix"\nsocket_path = "{path}"\n'
    config = folder / "config.toml"
    config.write_text(
        f"[telemetry.metrics]\nenabled = false\n[c2s-server.listener]\nbind_address = '127.0.0.1'\nport = {port}\n"
        f"[c2s-server.storage]\ndata_dir = '{folder}/data'\n{limits}{extra if auth else ''}"
    )
    modulator = ModulatorServer(PlainAuthenticator(), socket_path=path)
    if auth:
        await modulator.start()
    with (folder / "errors").open("ab") as errors:
        process = subprocess.Popen(
            [os.path.join(BUILT, "narwhal"), "-c", str(config)],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "NARWHAL_NUM_WORKERS": "1"},  # with more, events of one channel may overtake each other
        )
    try:
        async with asyncio.timeout(SECONDS):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    await writer.wait_closed()
                    break
                except OSError:
                    assert process.poll() is None, (folder / "errors").read_text()
                    await asyncio.sleep(0.05)
        yield f"localhost:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, 30)
        if auth:
            await modulator.stop()
