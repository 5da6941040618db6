"""The nodes of ``penstock demo``: ``penstock serve`` as processes, and people who count what comes back."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from penstock.cli.demo_readings import SITES
from penstock.errors import NotFoundError, PenstockError

__all__ = ["DemoNode", "DemoStore", "Subscriber", "edge_config", "require_tools", "second_config"]

WAIT_SECONDS: Final = 120.0
STOP_SECONDS: Final = 60.0


def require_tools() -> None:
    """Say at once what is missing."""
    for module, words in (
        ("paho.mqtt.client", "the demo's devices are clients of paho-mqtt: pip install paho-mqtt"),
        ("moto.server", "the demo's object store is moto: pip install 'moto[s3]' flask flask-cors"),
    ):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise NotFoundError(words)


def edge_config(folder: str, url: str) -> str:
    """Return the configuration of the node that is killed: every kind of part is in it."""
    logs = f"{folder}/node/logs"
    taps = "".join(
        f'[[mqtt.taps]]\nname = "{site}"\nfilter = "{site}/#"\npath = "{logs}/{site}"\nformat = "{kind}"\n\n'
        for site, kind in SITES.items()
    )
    ships = "".join(
        f'[[ship]]\nlog = "{logs}/{name}"\nurl = "{url}/edge-1"\nroll_seconds = 4.0\n\n'
        for name in (*SITES, "lab", "mill")
    )
    return f"""\
data = "{folder}/node"
log_format = "json"

[ledger]
look_seconds = 2.0

{taps}\
[[mqtt.feeds]]                      # what Spark found goes out as retained messages
name = "alerts"
log = "{folder}/node/alerts"
topic = "alerts/{{key}}"
retain = true
qos = 1

[[mqtt.mirrors]]                    # and is kept as entries of a bucket
place = "{folder}/node/buckets"
bucket = "alerts"
prefix = "alerts/"
direction = "to_bucket"

[[channel]]                         # producers hand their records to ingest
name = "lab"
content = "envelope/1"

[[fold]]                            # the newest reading of each machine of the lab
name = "lab"
log = "{logs}/lab"
store = "{folder}/node/lab.snap"

[[export]]                          # which another node can begin with
fold = "lab"
url = "{url}/folds"
every_seconds = 2.0

[[fold]]                            # a channel that another program writes, in xchannel's format
name = "mill"
log = "{logs}/mill"
store = "{folder}/node/mill.snap"

{ships}"""


def second_config(folder: str, url: str) -> str:
    """Return the configuration of the second node: its fold comes as an artifact and follows the shipped log."""
    return f"""\
data = "{folder}/second"
log_format = "json"

[channels]
enabled = false

[[fold]]
name = "lab"
log = "{url}/edge-1/lab"
store = "{folder}/second/lab.snap"
bootstrap = "{url}/folds/lab"
"""


class DemoStore:
    """An S3 server on this machine, in a process of its own; its objects are in memory and end with it."""

    BUCKET: Final = "penstock"

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.url = f"s3://{self.BUCKET}"
        self.environment: dict[str, str] = {}

    def start(self) -> None:
        """Return when it listens and has its bucket."""
        command = [sys.executable, "-m", "penstock.testing.s3"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        if not port.isdigit():
            raise PenstockError("the S3 server did not start: pip install 'moto[s3]' flask flask-cors")
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=WAIT_SECONDS)
        connection.request("PUT", f"/{self.BUCKET}")
        connection.getresponse().read()
        connection.close()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "demo",
            "AWS_SECRET_ACCESS_KEY": "demo",
            "AWS_REGION": "us-east-1",
        }

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()


class DemoNode:
    """``penstock serve`` from a configuration; started again it listens where it did."""

    def __init__(self, folder: str, name: str, config: str) -> None:
        self.folder, self.name = folder, name
        self.listeners: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._path = os.path.join(folder, f"{name}.toml")
        Path(self._path).write_text(config)

    def start(self) -> None:
        """Return when everything listens and what was kept is restored."""
        ports = [f"--{option}={self._port(name)}" for name, option in (
            ("mqtt", "port"), ("channels", "channels-port"), ("http", "http-port"))]  # fmt: skip
        with open(os.path.join(self.folder, f"{self.name}.log"), "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.cli.main", "serve", "--config", self._path, "--json", *ports],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PenstockError(f"the node did not start:\n{self.last_words()}")
        said = json.loads(line)
        if said["failures"]:
            raise PenstockError(f"parts of the node did not start: {said['failures']}")
        self.listeners = said["listeners"]

    def _port(self, name: str) -> str:
        return self.listeners.get(name, ":0").rpartition(":")[2]

    @property
    def port(self) -> int:
        """Where MQTT is."""
        return int(self._port("mqtt"))

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """End it at once: it does not get to run another line."""
        if self._process is not None:
            self._process.kill()
            self._gone()

    def stop(self) -> int:
        """Tell it to end, as systemd would; return its exit code."""
        if self._process is None:
            return 0
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = -9
        self._gone()
        return code

    def _gone(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def ask(self, path: str) -> Any:
        """Return what the node's API says."""
        host, _, port = self.listeners["http"].rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_SECONDS)
        try:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def last_words(self) -> str:
        """Return the end of its log."""
        with open(os.path.join(self.folder, f"{self.name}.log"), encoding="utf-8", errors="replace") as file:
            return "".join(file.readlines()[-15:]).strip()


class Subscriber:
    """Somebody who wants to hear of alerts, with a client of paho.

    One with ``keeps`` has a session that waits while it is away; another comes late and gets what is retained.
    """

    def __init__(self, name: str, *, keeps: bool) -> None:
        from paho.mqtt.client import Client
        from paho.mqtt.enums import CallbackAPIVersion

        self.found: dict[str, str] = {}
        self._wanted = 0
        self._subscribed, self._complete, self._answered = threading.Event(), threading.Event(), threading.Event()
        self._client = Client(CallbackAPIVersion.VERSION2, client_id=name, clean_session=not keeps)
        self._client.on_connect = lambda client, *_: client.subscribe("alerts/#", qos=1)
        self._client.on_subscribe = lambda *_: self._subscribed.set()
        self._client.on_unsubscribe = lambda *_: self._answered.set()
        self._client.on_message = self._arrived

    def _arrived(self, _client: Any, _data: Any, message: Any) -> None:
        self.found[message.topic.removeprefix("alerts/")] = message.payload.decode()
        if len(self.found) >= self._wanted:
            self._complete.set()

    def visit(self, port: int, wanted: int) -> dict[str, str]:
        """Connect, stay until so many alerts are here, and leave; return them by device."""
        self._wanted = wanted
        self._subscribed.clear()
        if wanted and len(self.found) < wanted:
            self._complete.clear()
        else:
            self._complete.set()
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        self._subscribed.wait(WAIT_SECONDS)
        self._complete.wait(WAIT_SECONDS)
        self._answered.clear()
        self._client.unsubscribe("nothing")  # the answer is read when what came before it is acknowledged
        self._answered.wait(WAIT_SECONDS)
        self._client.disconnect()
        self._client.loop_stop()
        return self.found


def wait_until(condition: Any, seconds: float = WAIT_SECONDS) -> bool:
    """Look again and again until something is so, or it takes too long; return whether it is.

    >>> wait_until(lambda: True)
    True
    """
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
