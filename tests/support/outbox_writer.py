"""Publishes numbers into an outbox and tells each one that was kept: ``outbox_writer.py PATH PORT FIRST``."""

from __future__ import annotations

import sys

from penstock.mqtt import Outbox, RemoteSpec

path, port, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
with Outbox(path, RemoteSpec(url=f"mqtt://127.0.0.1:{port}", reconnect_seconds=(0.01, 0.1))) as outbox:
    while True:
        outbox.publish("plant/out", b"%d" % number)
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
        number += 1
