"""A link so slow that no part of many at once is there in its time: they go up one by one, and all of it arrives."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import uuid
from pathlib import Path

from ship_use import open_writer, seal

from penstock.disk import ObjectOptions, object_store_for
from penstock.lifecycle import State
from penstock.ship import ShipPart
from penstock.ship.remote import ShippedLog
from penstock.testing.s3 import S3Server

LINK_BYTES = 4_000_000
"""A second, for all connections together."""


class SlowLink:
    """A relay to a server that all connections share, slow on the way up."""

    def __init__(self, port: int) -> None:
        self._server, self._turn = ("127.0.0.1", port), threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            for source, target, slow in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._carry, args=(source, target, slow), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, slow: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if slow:
                    with self._turn:
                        time.sleep(len(data) / LINK_BYTES)
                target.sendall(data)
        except OSError:
            pass
        for side in (source, target):
            side.close()

    def close(self) -> None:
        self._listener.close()


async def test_a_link_that_is_too_slow_for_parts_side_by_side_is_used_part_by_part(
    s3: S3Server, tmp_path: Path
) -> None:
    url, link = f"s3://{s3.bucket}/{uuid.uuid4().hex}", SlowLink(s3.port)
    objects = ObjectOptions(config=s3.options(link.port), retry_seconds=0.5, timeout_seconds=2.5)
    with open_writer("messagelog", tmp_path / "log") as writer:
        writer.append_many([bytes([number % 256]) * 60_000 for number in range(350)])  # 5 s on this link
        seal("messagelog", writer)
        part = ShipPart(tmp_path / "log", url, objects=objects, look_seconds=0.05)
        await part.start()
        try:
            async with asyncio.timeout(240):
                while part.health().state is not State.DEGRADED:
                    await asyncio.sleep(0.05)
                while part.describe().get("shipped_to") != 351:
                    assert part.health().state is not State.FAILED, part.health()
                    await asyncio.sleep(0.05)
        finally:
            await part.stop()
            link.close()
    with ShippedLog(f"{url}/log", object_store_for(url, ObjectOptions(config=s3.options()))) as log:
        assert list(log.verify()) == []
