"""``penstock serve`` as a user runs it: one process, real sockets, signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from command import PENSTOCK, penstock
from node_use import PORTS, ask, node

from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.messagelog import MessageLog


def test_a_node_without_a_configuration_serves_and_says_so(tmp_path: Path) -> None:
    with node(tmp_path) as (process, ready):
        assert ready["event"] == "ready"
        assert ready["failures"] == {}
        assert {"mqtt", "channels", "http"} <= set(ready["listeners"])
        address = ready["listeners"]["http"]
        assert ask(address, "/livez") == (200, b"alive\n")
        assert ask(address, "/readyz") == (200, b"ready\n")
        status, metrics = ask(address, "/metrics")
        assert status == 200
        assert b'penstock_node_part_up{part="mqtt"} 1.0' in metrics
        assert b"penstock_build_info" in metrics
        parts = json.loads(ask(address, "/api/parts")[1])["parts"]
        assert parts["mqtt"]["state"] == "ready"
        assert ask(address, "/elsewhere")[0] == 404
        assert penstock("health", "--http", address).returncode == 0
        host, _, port = ready["listeners"]["mqtt"].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            client.sendall(b"\x10\x0e\x00\x04MQTT\x04\x02\x00\x3c\x00\x02me")
            assert client.recv(4) == b"\x20\x02\x00\x00"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert penstock("health", "--http", address).returncode == 1


def test_a_second_node_on_the_data_directory_is_refused(tmp_path: Path) -> None:
    with node(tmp_path):
        done = penstock("serve", "--data", tmp_path / "data", *PORTS)
    assert (done.returncode, "another node serves this data directory" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    "words", [["serve", *PORTS], ["mqtt", "serve", "--port", "0"], ["channels", "serve", "--port", "0"]],
    ids=["node", "mqtt", "channels"],
)  # fmt: skip
def test_a_hangup_ends_no_server_that_is_still_being_loaded(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Hangup:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'penstock.net':\n"
        "            os.kill(os.getpid(), signal.SIGHUP)\n"
        "sys.meta_path.insert(0, Hangup)\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = [*PENSTOCK, *words, "--data", str(tmp_path / "data"), "--json"]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert json.loads(process.stdout.readline())["event"] == "ready"
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_part_that_cannot_start_says_so_and_the_rest_serves_or_nothing_does(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with node(tmp_path, "--port", port) as (_, ready):
            assert list(ready["failures"]) == ["mqtt"]
            status, body = ask(ready["listeners"]["http"], "/readyz")
            assert (status, b"part mqtt is failed" in body) == (503, True)
        config = tmp_path / "stop.toml"
        config.write_text(f'on_failure = "stop"\ndata = "{tmp_path}/other"\n[http]\nport = 0\n[channels]\nport = 0\n')
        done = penstock("serve", "--config", config, "--port", port)
    assert done.returncode == 1
    assert "mqtt" in done.stderr


def test_a_fold_of_the_configuration_follows_its_log(tmp_path: Path) -> None:
    log, store = tmp_path / "readings", tmp_path / "latest.snap"
    with MessageLog.open(log, content=CONTENT) as writer:
        writer.append_many([encode_envelope(Envelope(b"pump.%d" % n, b"on")) for n in range(100)])
    config = tmp_path / "penstock.toml"
    config.write_text(f'[http]\ntoken = "t"\n[[fold]]\nname = "latest"\nlog = "{log}"\nstore = "{store}"\n')
    with node(tmp_path, "--config", str(config)) as (process, ready):
        address = ready["listeners"]["http"]
        assert ask(address, "/api/parts")[0] == 401
        while True:
            part = json.loads(ask(address, "/api/parts", Authorization="Bearer t")[1])["parts"]["fold:latest"]
            if part.get("records") == 100:
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    done = penstock("fold", "stat", store, "--json")
    assert json.loads(done.stdout)["entries"] == 100


def test_check_init_and_config(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    assert penstock("init", path).returncode == 0
    assert penstock("init", path).returncode == 2
    assert penstock("check", path).returncode == 0
    other = tmp_path / "other.toml"
    other.write_text("[mqtt]\nport = 1884\n")
    done = penstock("check", other, "--against", path, "--json")
    assert json.loads(done.stdout)["changes"] == ["mqtt.port: 1883 → 1884  (needs a restart)"]
    other.write_text("[mqtt]\nprot = 1884\n")
    done = penstock("check", other)
    assert (done.returncode, done.stdout) == (
        1,
        f"{other}: line 2: mqtt.prot: there is no such key; did you mean port?\n",
    )
    assert penstock("config", "--config", path).stdout == ""
    assert "port = 1883" in penstock("config", "--config", path, "--effective").stdout


def test_a_data_directory_with_a_long_name_that_is_not_there_yet_is_served(tmp_path: Path) -> None:
    data = "not/there/yet/" + "a-name-too-long-for-the-address-of-a-socket" * 3
    with node(tmp_path, data=data) as (process, ready):
        assert ready["failures"] == {}
        done = penstock("write", "readings", "one", "--node", tmp_path / data)
        assert done.returncode == 0, done.stderr
        modes = {path.stat().st_mode & 0o077 for path in (tmp_path / data).rglob("*")}
        assert modes == {0}
        process.terminate()
        assert process.wait(60) == 0
