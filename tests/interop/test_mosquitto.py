"""mosquitto's own commands against our broker, and ours against mosquitto; `make interop` runs it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import penstock
from mqtt_server import Served, serve

from penstock.mqtt import Client, ClientOptions
from penstock.net import make_development_certificate

SECONDS = 60
VERSIONS = ["mqttv5", "mqttv311", "mqttv31"]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("broker")
    files = make_development_certificate(str(folder))
    passwords, acl = folder / "passwords", folder / "acl"
    subprocess.run(["mosquitto_passwd", "-c", "-b", passwords, "ann", "s3cret"], check=True, capture_output=True)
    subprocess.run(["mosquitto_passwd", "-b", passwords, "bob", "w0rd"], check=True, capture_output=True)
    rules = ["topic readwrite open/#", "user ann", "topic readwrite ann/#", "topic read open/#", "topic read $SYS/#"]
    acl.write_text("\n".join([*rules, "pattern write out/%u", ""]))
    config = folder / "mqtt.toml"
    config.write_text("anonymous = true\n")
    words = ("--tls-port", "0", "--ws-port", "0", "--cert", files.certificate, "--key", files.key)
    with serve(*words, "--passwords", passwords, "--acl", acl, "--config", config) as served:
        served.certificate = files.certificate  # type: ignore[attr-defined]
        yield served


@contextlib.contextmanager
def subscribed(*words: object, count: int) -> Iterator[subprocess.Popen[str]]:
    """A mosquitto_sub that has said that it is subscribed."""
    command = ["mosquitto_sub", *map(str, words), "-C", str(count), "-W", str(SECONDS), "-d"]
    with subprocess.Popen(
        ["stdbuf", "-oL", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("Subscribed"):
                break
        else:
            pytest.fail("".join(said))
        yield process


def payloads(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    lines = process.stdout.read().splitlines()  # not communicate(): what was read ahead is in this file's own buffer
    return [line for line in lines if not line.startswith(("Client", "Subscribed"))]


def pub(*words: object, **options: object) -> None:
    done = subprocess.run(
        ["mosquitto_pub", *map(str, words)], capture_output=True, timeout=SECONDS, check=False, **options
    )  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_its_commands_talk_through_our_broker(broker: Served, version: str, qos: int) -> None:
    where = ("-p", broker.port(), "-V", version, "-q", qos, "-t", f"open/{version}/{qos}")
    with subscribed(*where, count=1000) as process:
        pub(*where, "-l", input="".join(f"{number}\n" for number in range(1000)).encode())
        assert payloads(process) == [str(number) for number in range(1000)]


def test_its_commands_speak_tls(broker: Served) -> None:
    ca = broker.certificate  # type: ignore[attr-defined]
    where = ("-h", "localhost", "-p", broker.port("mqtts"), "--cafile", ca, "-q", 1, "-t", "open/tls")
    with subscribed(*where, count=1) as process:
        pub(*where, "-m", "over TLS")
        assert payloads(process) == ["over TLS"]


def test_its_password_and_acl_files_mean_what_they_mean_there(broker: Served) -> None:
    ann = ("-p", broker.port(), "-u", "ann", "-P", "s3cret", "-q", 1)
    with subscribed(*ann, "-t", "ann/#", count=1) as process:
        pub("-p", broker.port(), "-u", "bob", "-P", "w0rd", "-q", 1, "-t", "ann/x", "-m", "from bob")
        pub(*ann, "-t", "ann/x", "-m", "from ann")
        assert payloads(process) == ["from ann"]
    wrong = subprocess.run(
        ["mosquitto_pub", "-p", str(broker.port()), "-u", "ann", "-P", "guess", "-t", "ann/x", "-m", "x"],
        capture_output=True,
        check=False,
        timeout=SECONDS,
    )
    assert wrong.returncode != 0


def test_retained_messages_wills_and_sessions(broker: Served) -> None:
    where = ("-p", broker.port(), "-q", 1)
    pub(*where, "-t", "open/kept", "-m", "kept", "-r")
    with subscribed(*where, "-t", "open/kept", count=1) as process:
        assert payloads(process) == ["kept"]
    keeper = (*where, "-i", "keeper", "-c", "-t", "open/queue")
    with subscribed(*keeper, "-V", "mqttv311", count=1) as process:
        pub(*where, "-t", "open/queue", "-m", "first")
        assert payloads(process) == ["first"]
    for number in range(5):
        pub(*where, "-t", "open/queue", "-m", number)
    done = subprocess.run(
        ["mosquitto_sub", *map(str, keeper), "-V", "mqttv311", "-C", "5", "-W", str(SECONDS)],
        capture_output=True, check=False, text=True, timeout=2 * SECONDS,
    )  # fmt: skip
    assert done.stdout.split() == ["0", "1", "2", "3", "4"]


def test_sys_topics_are_where_its_exporters_look(broker: Served) -> None:
    names = ["clients/connected", "messages/received", "bytes/sent", "load/messages/received/1min", "uptime"]
    wanted = [word for name in names for word in ("-t", f"$SYS/broker/{name}")]
    done = subprocess.run(
        ["mosquitto_sub", "-p", str(broker.port()), "-u", "ann", "-P", "s3cret", *wanted, "-v", "-C", "5", "-W", "60"],
        capture_output=True, check=False, text=True, timeout=2 * SECONDS,
    )  # fmt: skip
    assert {line.partition(" ")[0] for line in done.stdout.splitlines()} == {f"$SYS/broker/{name}" for name in names}


@pytest.fixture(scope="module")
def mosquitto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("mosquitto")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "conf").write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nmax_queued_messages 0\n")
    with subprocess.Popen(["mosquitto", "-c", folder / "conf"], stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.05)
            yield port
        finally:
            process.terminate()


@pytest.mark.parametrize("version", [3, 4, 5])
async def test_our_client_talks_through_its_broker(mosquitto: int, version: int) -> None:
    options = ClientOptions(version=version, client_id=f"c{version}")
    async with asyncio.timeout(SECONDS), Client(f"mqtt://127.0.0.1:{mosquitto}", options) as client:
        await client.subscribe("t/#", qos=2)
        sent = [b"%d" % number for number in range(500)]
        for qos in (0, 1, 2):
            await client.publish_many(f"t/{qos}", sent, qos=qos)
        got: dict[str, list[bytes]] = {}
        async for message in client.messages():
            got.setdefault(message.topic, []).append(message.payload)
            if sum(map(len, got.values())) == 1500:
                break
        assert got == {f"t/{qos}": sent for qos in (0, 1, 2)}


def test_our_commands_talk_through_its_broker(mosquitto: int, tmp_path: Path) -> None:
    assert penstock("mqtt", "pub", "-p", mosquitto, "-t", "kept", "-m", "hello", "-q", "2", "-r").returncode == 0
    done = penstock("mqtt", "sub", "-p", mosquitto, "-t", "kept", "-C", "1", "--json")
    assert json.loads(done.stdout)["payload"] == "hello"
    uptime = penstock("mqtt", "sub", "-p", mosquitto, "-t", "$SYS/broker/uptime", "-C", "1")
    assert "seconds" in uptime.stdout


def test_our_password_file_lines_stay_beside_its_own(tmp_path: Path) -> None:
    path = tmp_path / "users"
    subprocess.run(["mosquitto_passwd", "-c", "-b", path, "ann", "s3cret"], check=True, capture_output=True)
    before = path.read_text()
    assert penstock("mqtt", "passwd", path, "bob", "word", "-b").returncode == 0
    assert path.read_text().startswith(before)
