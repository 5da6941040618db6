"""One node with everything in it, as a user runs it: tap, feed, ingest, fold, ship, reload, ledger, backup.

The tests share one process and run in the order they stand in.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command import PENSTOCK, penstock
from node_use import PORTS, ask

from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.mqtt import Client
from penstock.node import IngestWriter

CONFIG = """
[ledger]
look_seconds = 0.2
[disk]
look_seconds = 0.2
[mqtt]
passwords = "{folder}/passwords"
anonymous = true
[[mqtt.taps]]
filter = "plant/#"
path = "{folder}/d/logs/plant"
[[mqtt.feeds]]
log = "{folder}/d/logs/alerts"
topic = "alerts/{{key}}"
retain = true
[[channel]]
name = "alerts"
content = "envelope/1"
[[channel]]
name = "readings"
segment_bytes = 2000
[[fold]]
name = "latest"
log = "{folder}/d/logs/plant"
store = "{folder}/d/latest.snap"
[[ship]]
log = "{folder}/d/logs/readings"
url = "file://{folder}/up"
"""


class Served:
    """The node of this module."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data, self.config = folder, folder / "d", folder / "penstock.toml"
        self.config.write_text(CONFIG.format(folder=folder))
        (folder / "passwords").write_text("")
        self.errors = (folder / "stderr").open("w+")
        self.start()

    def start(self) -> None:
        command = [*PENSTOCK, "serve", "--data", str(self.data), "--config", str(self.config), *PORTS, "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.errors, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self.folder / "stderr").read_text()
        self.ready = json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def http(self) -> str:
        return str(self.ready["listeners"]["http"])

    def parts(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(ask(self.http, "/api/parts")[1])["parts"]
        return found

    def seams(self) -> dict[str, Any]:
        return {seam["seam"]: seam for seam in json.loads(ask(self.http, "/api/ledger")[1])}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("n"))
    try:
        yield served
    finally:
        served.kill()
        served.errors.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def publish(served: Served, count: int) -> None:
    async def run() -> None:
        async with Client(f"mqtt://{served.ready['listeners']['mqtt']}") as client:
            for n in range(count):
                await client.publish(f"plant/{n % 5}", b"%d" % n, qos=1)

    asyncio.run(run())


def test_records_come_in_on_every_side_and_the_ledger_accounts_for_them(served: Served) -> None:
    assert served.ready["failures"] == {}
    publish(served, 60)
    done = penstock("write", "readings", "one", "two", "--node", served.data, "--json")
    assert json.loads(done.stdout) == {"written": 2, "first_position": 1, "last_position": 2}
    done = penstock("write", "readings", "x", "--key", "k", "--node", served.data)
    assert (done.returncode, "its content is raw" in done.stderr) == (2, True)
    with IngestWriter(served.data, "readings") as writer:
        writer.append_many([b"x" * 100] * 100)
    with IngestWriter(served.data, "alerts", content=CONTENT) as writer:
        writer.append_many([encode_envelope(Envelope(b"%d" % n, b"hot")) for n in range(3)])
    until(lambda: served.seams().get("feed:" + f"{served.data}/logs/alerts", {}).get("went") == 3)
    until(lambda: served.seams()["fold:latest"]["went"] == 60)
    until(lambda: served.seams()["ship:readings"]["went"] > 50)
    done = penstock("ledger", served.data, "--json")
    assert done.returncode == 0, done.stdout
    seams = {seam["seam"]: seam for seam in map(json.loads, done.stdout.splitlines())}
    assert {name: seam["came"] for name, seam in seams.items()} == {
        "ingest:readings": 102, "ingest:alerts": 3, "mqtt:deliveries": 0, f"tap:{served.data}/logs/plant": 60,
        "fold:latest": 60, f"feed:{served.data}/logs/alerts": 3, "ship:readings": 102,
    }  # fmt: skip
    for seam in seams.values():
        assert seam["ok"]
        assert seam["came"] == seam["went"] + seam["waiting"] + sum(seam["lost"].values())
    since = json.loads(penstock("ledger", served.data, "--since", "1h", "--json").stdout.splitlines()[0])
    assert since["ok"]


def test_metrics_api_and_top_say_the_same(served: Served) -> None:
    metrics = ask(served.http, "/metrics")[1].decode()
    assert 'penstock_ledger_ok{seam="ship:readings"} 1.0' in metrics
    assert "penstock_disk_used_bytes" in metrics
    assert "penstock_mqtt_sessions" in metrics
    assert set(json.loads(ask(served.http, "/api")[1])) >= {"/api/ledger", "/api/disk", "/api/parts"}
    top = json.loads(penstock("top", "--http", served.http, "--once", "--json").stdout)
    assert top["disk"]["level"] == "ok"
    assert {part["state"] for part in top["parts"].values()} == {"ready"}
    assert "ship:readings" in penstock("top", "--http", served.http, "--once").stdout


def test_a_running_node_is_backed_up_and_restored(served: Served, tmp_path: Path) -> None:
    done = penstock("backup", served.data, tmp_path / "copy", "--json")
    assert done.returncode == 0, done.stderr
    logs = {log["path"]: log["records"] for log in json.loads(done.stdout)["logs"]}
    assert (logs["logs/readings"], logs["logs/plant"]) == (102, 60)
    done = penstock("restore", tmp_path / "copy", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    found = json.loads(penstock("fold", "stat", tmp_path / "again" / "latest.snap", "--json").stdout)
    assert found["entries"] == 5
    done = penstock("erase", served.data, "--key", "plant/1")
    assert (done.returncode, "another node serves" in done.stderr) == (1, True)


def test_sighup_changes_everything_or_nothing(served: Served) -> None:
    text = served.config.read_text()

    def hang_up() -> None:
        served.process.send_signal(signal.SIGHUP)

    def said(words: str) -> Callable[[], bool]:
        return lambda: words in (served.folder / "stderr").read_text()

    more = f'[[fold]]\nname = "more"\nlog = "{served.data}/logs/plant"\nstore = "{served.data}/more.snap"\n'
    served.config.write_text(text + more + "[http2]\n")
    hang_up()
    until(said("there is no such key; did you mean http?"))
    served.config.write_text(text.replace("[mqtt]", '[mqtt]\nbind = "127.0.0.2"') + more)
    hang_up()
    until(said("mqtt.bind: needs a restart"))
    served.config.write_text(text + more)
    (served.folder / "passwords").write_text("no password here\n")
    hang_up()
    until(said("passwords"))
    assert "fold:more" not in served.parts()
    (served.folder / "passwords").write_text("")
    before = served.parts()["fold:latest"]["records"]
    hang_up()
    until(lambda: served.parts().get("fold:more", {}).get("records") == 60)
    assert served.parts()["fold:latest"]["records"] == before
    served.config.write_text(text)
    hang_up()
    until(lambda: "fold:more" not in served.parts())


def test_a_log_of_json_has_nothing_else_in_it(tmp_path: Path) -> None:
    config, log = tmp_path / "penstock.toml", tmp_path / "stderr"
    text = f'data = "{tmp_path}/d"\nlog_format = "json"\n'
    config.write_text(text)
    command = [*PENSTOCK, "serve", "--config", str(config), *PORTS]
    with log.open("w") as stderr, subprocess.Popen(command, stderr=stderr, cwd=tmp_path) as process:
        try:
            until(lambda: "part http serves" in log.read_text())
            config.write_text(text + "".join(f"[table{number}]\n" for number in range(30)))
            process.send_signal(signal.SIGHUP)
            until(lambda: "nothing was changed" in log.read_text())
        finally:
            process.terminate()
            assert process.wait(120) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    told = {line["message"].split(" listens on ")[0] for line in lines if " listens on " in line["message"]}
    assert told >= {"mqtt", "channels", "ingest", "http"}  # with a free port nothing else says where
    (said,) = (line["message"] for line in lines if "nothing was changed" in line["message"])
    assert all(f"table{number}: there is no such key" in said for number in range(30))  # none of them was held back


def test_sighup_brings_and_takes_taps_and_feeds(served: Served) -> None:
    text = served.config.read_text()

    def attached() -> dict[str, Any]:
        found: dict[str, Any] = served.parts()["mqtt"]["attached"]
        return found

    before = attached()
    tap = f'[[mqtt.taps]]\nname = "more"\nfilter = "plant/1"\npath = "{served.data}/logs/more"\n'
    served.config.write_text(text.replace("[[mqtt.feeds]]", f"{tap}[[mqtt.feeds]]", 1))
    served.process.send_signal(signal.SIGHUP)
    until(lambda: "tap:more" in attached())
    assert attached().keys() - {"tap:more"} == before.keys()
    publish(served, 10)
    until(lambda: served.seams().get("tap:more", {}).get("went") == 2)
    taken = tap.replace('"more"', '"worse"').replace(f"{served.data}/logs/more", f"{served.data}/logs/readings")
    served.config.write_text(text.replace("[[mqtt.feeds]]", f"{taken}[[mqtt.feeds]]", 1))
    served.process.send_signal(signal.SIGHUP)
    until(lambda: "tap:worse" in (served.folder / "stderr").read_text())
    assert "tap:more" in attached()
    served.config.write_text(text)
    served.process.send_signal(signal.SIGHUP)
    until(lambda: "tap:more" not in attached())
    assert attached().keys() == before.keys()
    publish(served, 5)
    until(lambda: served.seams()["fold:latest"]["went"] == 75)


def test_the_ledger_is_exact_after_a_kill_and_the_node_goes_on(served: Served) -> None:
    served.kill()
    assert penstock("ledger", served.data).returncode == 0
    served.start()
    publish(served, 40)
    until(lambda: served.seams()["fold:latest"]["went"] == 115)
    assert all(seam["ok"] for seam in served.seams().values())
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(120) == 0
    assert penstock("ledger", served.data).returncode == 0
    done = penstock("erase", served.data, "--key", "plant/1", "--json")
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one["kind"], one["count"]) for one in said if "count" in one] == [("fold", 1), ("retained", 0)]
    assert {one["kind"] for one in said if "left" in one} == {"log", "backup", "shipped"}
