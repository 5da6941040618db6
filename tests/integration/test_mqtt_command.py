"""Promise: ``penstock mqtt serve`` keeps the contract of servers, and a running broker answers questions."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest
from command import penstock
from mqtt_server import Served, serve

from penstock.mqtt import packets as p
from penstock.mqtt.codec import decode, encode
from penstock.mqtt.packets import Properties
from penstock.net import hash_password


class Plain:
    """A client on a plain socket."""

    def __init__(self, served: Served, connect: p.Connect | None = None) -> None:
        self.socket = socket.create_connection(("127.0.0.1", served.port()), timeout=60)
        self.data = b""
        self.version = 5
        self.connack = self.ask(connect or p.Connect("dev", 5))

    def __del__(self) -> None:
        self.socket.close()

    def ask(self, packet: p.Packet) -> p.Packet:
        self.socket.sendall(encode(packet, self.version))
        return self.read()

    def read(self) -> p.Packet:
        while True:
            try:
                packet, end = decode(self.data, self.version)
            except p.BadPacket:
                more = self.socket.recv(65536)
                if not more:
                    raise EOFError from None
                self.data += more
                continue
            self.data = self.data[end:]
            return packet


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_says_goodbye_and_ends_with_0(tmp_path: Path, number: int) -> None:
    with serve("--data", tmp_path / "data") as served:
        client = Plain(served)
        assert isinstance(client.connack, p.Connack)
        assert served.stop(number) == 0
        goodbye = client.read()
        assert isinstance(goodbye, p.Disconnect)
        assert goodbye.reason == 0x8B


def test_a_running_broker_lists_shows_explains_and_kicks(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serve("--data", data) as served:
        client = Plain(served, p.Connect("pump-7", 5, properties=Properties(session_expiry=100)))
        client.ask(p.Subscribe(1, (p.Filter("plant/+", 1),)))
        (line,) = penstock("mqtt", "sessions", "ls", "--data", data, "--json").stdout.splitlines()
        assert json.loads(line)["client"] == "pump-7"
        shown = json.loads(penstock("mqtt", "sessions", "show", "pump-7", "--data", data, "--json").stdout)
        assert shown["subscriptions"] == [{"filter": "plant/+", "qos": 1, "no_local": False, "identifier": None}]
        found = json.loads(penstock("mqtt", "explain", "plant/7", "--data", data, "--json").stdout)
        assert found["sessions"][0]["now"] == "delivered"
        assert "pump-7: filtered" in penstock("mqtt", "explain", "Plant/7", "--client", "pump-7", "--data", data).stdout
        assert penstock("mqtt", "sessions", "kick", "pump-7", "--data", data).returncode == 0
        goodbye = client.read()
        assert isinstance(goodbye, p.Disconnect)
        assert goodbye.reason == 0x98
        assert "pump-7" in penstock("mqtt", "sessions", "ls", "--data", data).stdout
        missing = penstock("mqtt", "sessions", "show", "nobody", "--data", data)
        assert missing.returncode == 2
        assert "there is no session 'nobody'" in missing.stderr
    gone = penstock("mqtt", "sessions", "ls", "--data", data)
    assert gone.returncode == 1
    assert "no broker serves this data directory" in gone.stderr


def test_passwords_and_rules_from_files_are_read_again_on_a_hangup(tmp_path: Path) -> None:
    passwords, rules = tmp_path / "passwords", tmp_path / "acl"
    passwords.write_text(f"ann:{hash_password('secret')}\n")
    rules.write_text("user ann\ntopic readwrite open/#\n")
    with serve("--passwords", passwords, "--acl", rules, "--data", tmp_path / "data") as served:
        refused = Plain(served, p.Connect("x", 5, username="ann", password=b"wrong")).connack
        assert refused == p.Connack(False, 0x86)
        assert Plain(served).connack == p.Connack(False, 0x87)
        client = Plain(served, p.Connect("x", 5, username="ann", password=b"secret"))
        assert isinstance(client.connack, p.Connack)
        assert client.connack.reason == 0
        assert client.ask(p.Publish("closed/x", b"", 1, packet_id=1)).reason == 0x87  # type: ignore[union-attr]
        assert client.ask(p.Publish("open/x", b"", 1, packet_id=2)).reason == 0x10  # type: ignore[union-attr]
        rules.write_text("user ann\ntopic readwrite closed/#\n")
        served.process.send_signal(signal.SIGHUP)
        for _ in range(1000):  # the signal is heard between two turns of the loop
            if client.ask(p.Publish("closed/x", b"", 1, packet_id=1)).reason == 0x10:  # type: ignore[union-attr]
                break
        else:
            pytest.fail("the new rules do not count")
        rules.write_text("nonsense\n")
        served.process.send_signal(signal.SIGHUP)
        assert served.process.stderr is not None
        while "nonsense" not in served.process.stderr.readline():
            pass
        assert client.ask(p.Publish("closed/x", b"", 1, packet_id=1)).reason == 0x10  # type: ignore[union-attr]


def test_a_configuration_file_is_taken_and_nonsense_in_it_is_named(tmp_path: Path) -> None:
    config = tmp_path / "broker.toml"
    config.write_text("[broker]\nreceive_maximum = 7\nmax_keep_alive = 60\n")
    with serve("--config", config) as served:
        connack = Plain(served, p.Connect("dev", 5, keep_alive=100)).connack
        assert isinstance(connack, p.Connack)
        assert (connack.properties.receive_maximum, connack.properties.server_keep_alive) == (7, 60)
    config.write_text("[broker]\nrecieve_maximum = 7\n")
    wrong = penstock("mqtt", "serve", "--port", "0", "--config", config)
    assert wrong.returncode == 2
    assert "recieve_maximum" in wrong.stderr


def test_sys_topics_have_the_names_of_mosquitto(tmp_path: Path) -> None:
    with serve() as served:
        client = Plain(served)
        client.socket.sendall(encode(p.Subscribe(1, (p.Filter("$SYS/#"),)), 5))
        names = set()
        while "$SYS/broker/load/bytes/sent/15min" not in names:
            packet = client.read()
            if isinstance(packet, p.Publish):
                names.add(packet.topic)
        client.socket.close()
    assert {f"$SYS/broker/{name}" for name in ("version", "uptime", "clients/connected", "messages/received")} <= names


def test_a_tap_writes_and_a_feed_publishes_through_the_command_line(tmp_path: Path) -> None:
    words = ("--tap", f"plant/#={tmp_path}/readings", "--tap", f"more/#={tmp_path}/readings")
    with serve("--data", tmp_path / "state", *words) as served:
        here = ("-h", "127.0.0.1", "-p", served.port())
        assert penstock("mqtt", "pub", *here, "-t", "plant/7", "-m", "12", "-q", "1", "-i", "pump").returncode == 0
        assert penstock("mqtt", "pub", *here, "-t", "more/7", "-m", "13", "-q", "2", "-i", "pump").returncode == 0
        rows = [json.loads(line) for line in penstock("cat", tmp_path / "readings", "--json").stdout.splitlines()]
        assert [(row["key"], row["payload"]) for row in rows] == [("plant/7", "12"), ("more/7", "13")]
        told = json.loads(penstock("mqtt", "explain", "plant/7", "--data", tmp_path / "state", "--json").stdout)
        assert told["taps"] == [f"tap:{tmp_path}/readings"]
        feed = ("mqtt", "feed", tmp_path / "readings", "--to", f"mqtt://127.0.0.1:{served.port()}", "--once", "--json")
        done = penstock(*feed, "--topic", "copy/{client}/{key}", "--retain")
        assert (done.returncode, json.loads(done.stdout)["published"]) == (0, 2), done.stderr
        assert json.loads(penstock(*feed).stdout)["published"] == 0  # the cursor stands behind them
        heard = penstock("mqtt", "sub", *here, "-t", "copy/#", "-C", "2", "-v", "-W", "60").stdout.splitlines()
        assert sorted(heard) == ["copy/pump/more/7 13", "copy/pump/plant/7 12"]
    for bad in ("plant/#", "a#=x", f"a={tmp_path}/{{x}}"):
        done = penstock("mqtt", "serve", "--port", "0", "--tap", bad)
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1


def test_a_development_certificate_is_made_on_request_and_certificates_may_be_required(tmp_path: Path) -> None:
    refused = penstock("mqtt", "serve", "--port", "0", "--tls-port", "0")
    assert refused.returncode == 2
    assert "needs cert and key" in refused.stderr
    config = tmp_path / "broker.toml"
    data = tmp_path / "data"
    with serve("--data", data, "--tls-port", "0", "--dev-cert") as served:
        port = served.port("mqtts")
        words = ["mqtt", "pub", "-h", "localhost", "-p", str(port), "-t", "a", "-m", "x", "-q", "1"]
        assert penstock(*words, "--cafile", str(data / "development.pem")).returncode == 0
    config.write_text(f'client_ca = "{data / "development.pem"}"\nrequire_client_certificate = true\n')
    with serve("--data", data, "--tls-port", "0", "--dev-cert", "--config", config) as served:
        words[5] = str(served.port("mqtts"))
        assert penstock(*words, "--cafile", str(data / "development.pem")).returncode == 1
        own = ["--cert", str(data / "development.pem"), "--key", str(data / "development.key")]
        assert penstock(*words, "--cafile", str(data / "development.pem"), *own).returncode == 0


def test_a_password_file_may_begin_anew(tmp_path: Path) -> None:
    users = tmp_path / "users"
    assert penstock("mqtt", "passwd", "-b", str(users), "ann", "one").returncode == 0
    assert penstock("mqtt", "passwd", "-c", "-b", str(users), "bob", "two").returncode == 0
    assert [line.partition(":")[0] for line in users.read_text().splitlines()] == ["bob"]
    assert penstock("mqtt", "passwd", "-c", "-D", str(users), "bob").returncode == 2
