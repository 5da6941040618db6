"""Azure's object store, as Azurite has it: shipped, read by URL, published.

`make interop` installs Azurite by its name (360 MB); the account and its key are those that the emulator publishes.
"""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import http.client
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ship_use import FORMATS, fill, open_writer, read_all

from penstock.artifact import export_store, transport_for
from penstock.disk import object_store_for
from penstock.disk.objectstore import check_conditions
from penstock.ship import Shipper, find_shipped, open_shipped
from penstock.store import AppendLogStore
from penstock.types import KvUpdate, WatchCursor

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.fail("missing: npm install azurite, with azurite-blob on PATH", pytrace=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--blobPort", str(port), "--blobHost", "127.0.0.1", "--location", str(tmp_path / "azurite")]
    process = subprocess.Popen([program, *words, "--silent", "--skipApiVersionCheck", "--disableTelemetry"])
    try:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:{port}/{ACCOUNT}")
        _make_container(port, "fleet")
        yield "az://fleet"
    finally:
        process.kill()
        process.wait()


def _make_container(port: int, name: str) -> None:
    date = email.utils.formatdate(usegmt=True)
    headers = {"x-ms-date": date, "x-ms-version": "2021-12-02"}
    signed = "PUT" + "\n" * 12 + "".join(f"{key}:{value}\n" for key, value in headers.items())
    signed += f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signature = base64.b64encode(hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()).decode()
    headers |= {"Authorization": f"SharedKey {ACCOUNT}:{signature}", "Content-Length": "0"}
    deadline = time.monotonic() + 60
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("PUT", f"/{ACCOUNT}/{name}?restype=container", headers=headers)
            assert connection.getresponse().status == 201
            connection.close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def test_azure_keeps_conditions_segments_and_artifacts(container: str, tmp_path: Path) -> None:
    check_conditions(object_store_for(container), "probe")
    for kind in FORMATS:
        with open_writer(kind, tmp_path / kind) as writer:
            wanted = [payload for start in (0, 20) for payload in fill(kind, writer, start, 20)]
        with Shipper(tmp_path / kind, object_store_for(f"{container}/edge-1"), node="edge-1") as shipper:
            while shipper.step():
                pass
        with open_shipped(f"{container}/edge-1/{kind}") as log:
            assert read_all(log) == wanted
            assert list(log.verify()) == []
    assert len(find_shipped(container)) == 3
    transport = transport_for(f"{container}/folds")
    for revision in (7, 3):
        with AppendLogStore.open(tmp_path / f"{revision}.snap") as store:
            store.apply([KvUpdate.put("a", b"1", 1)], WatchCursor.of(revision))
            export_store(store, tmp_path / f"artifact{revision}")
    assert transport.upload(tmp_path / "artifact7", "k").result == "published"
    assert transport.upload(tmp_path / "artifact3", "k").result == "superseded"
    assert transport.download("k", tmp_path / "copy").rank == 7
