"""Promise: ``penstock mqtt pub``, ``sub`` and ``passwd`` do what scripts written for mosquitto's commands expect."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import PENSTOCK, penstock
from mqtt_server import Served, serve

from penstock.net import make_development_certificate


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("broker")
    files = make_development_certificate(str(folder))
    passwords = folder / "passwords"
    assert penstock("mqtt", "passwd", passwords, "ann", "s3cret", "-b").returncode == 0
    config = folder / "mqtt.toml"
    config.write_text("anonymous = true\n")
    words = ("--tls-port", "0", "--ws-port", "0", "--cert", files.certificate, "--key", files.key)
    with serve(*words, "--passwords", passwords, "--config", config) as served:
        served.certificate = files.certificate  # type: ignore[attr-defined]
        yield served


def pub(broker: Served, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return penstock("mqtt", "pub", "-p", broker.port(), *words, **options)


def sub(broker: Served, *words: str) -> subprocess.Popen[str]:
    command = [*PENSTOCK, "mqtt", "sub", "-p", str(broker.port()), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def printed(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def test_lines_go_in_and_come_out_in_every_form(broker: Served) -> None:
    for topic, text in (("form/a", "one"), ("form/b", "two %p")):
        assert pub(broker, "-t", topic, "-m", text, "-q", "1", "-r").returncode == 0
    forms = {
        (): "one\ntwo %p\n",
        ("-F", "%t|%p|%q|%r|%l|%x%%\\t"): "form/a|one|0|1|3|6f6e65%\t\nform/b|two %p|0|1|6|74776f202570%\t\n",
        ("-v", "-N"): "form/a oneform/b two %p",
    }
    for words, expected in forms.items():
        assert printed(sub(broker, "-t", "form/#", "-C", "2", *words)) == expected
    rows = [
        json.loads(line) for line in printed(sub(broker, "-t", "form/#", "-C", "2", "--json", "-q", "1")).splitlines()
    ]
    assert rows[0] == {"topic": "form/a", "qos": 1, "retain": True, "payload": "one"}


def test_a_session_is_kept_and_stdin_lines_arrive_once_and_in_order(broker: Served) -> None:
    keep = ("-i", "keeper", "-c", "-q", "1", "-t", "lines")
    first = sub(broker, *keep, "-W", "0.5")
    first.communicate(timeout=120)
    text = "".join(f"line {number}\n" for number in range(1000))
    done = pub(broker, "-t", "lines", "-l", "-q", "2", "--json", input=text)
    assert json.loads(done.stdout) == {"published": 1000}, done.stderr
    half = printed(sub(broker, *keep, "-C", "400"))
    rest = printed(sub(broker, *keep, "-C", "600"))
    assert half + rest == text


def test_who_sends_lines_and_is_interrupted_waits_for_no_further_line(broker: Served) -> None:
    words = [*PENSTOCK, "mqtt", "pub", "-h", "127.0.0.1", "-p", str(broker.port()), "-t", "waits", "-l", "-r"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stdin is not None
    process.stdin.write(b"one\n")
    process.stdin.flush()
    assert printed(sub(broker, "-t", "waits", "-C", "1")) == "one\n"
    process.send_signal(signal.SIGINT)  # stdin is open, and nothing comes
    assert process.wait(timeout=60) == 130
    process.stdin.close()


def test_a_line_of_stdin_ends_with_a_newline_and_with_nothing_else(broker: Served) -> None:
    lines = [f"at {number}\r50 %\rdone\x0b" for number in range(5)]
    done = pub(broker, "-t", "carriage", "-l", "-q", "1", "-r", "--json", input="".join(f"{line}\n" for line in lines))
    assert json.loads(done.stdout) == {"published": len(lines)}, done.stderr
    kept = json.loads(printed(sub(broker, "-t", "carriage", "-C", "1", "--json")))
    assert kept["payload"] == lines[-1]


def test_versions_tls_and_websocket(broker: Served) -> None:
    ca = broker.certificate  # type: ignore[attr-defined]
    ways = [
        ("-h", "localhost", "-p", broker.port("mqtts"), "--cafile", ca),
        ("-h", f"ws://localhost:{broker.port('ws')}/mqtt"),
        ("-h", f"mqtt://127.0.0.1:{broker.port()}"),
    ]
    for version, way in zip(("mqttv5", "mqttv311", "mqttv31"), ways, strict=True):
        topic = f"way/{version}"
        done = penstock("mqtt", "pub", *way, "-V", version, "-t", topic, "-m", "x", "-q", "1", "-r")
        assert done.returncode == 0, done.stderr
        assert penstock("mqtt", "sub", *way, "-V", version, "-t", topic, "-C", "1").stdout == "x\n"


def test_files_stdin_and_repeats_are_messages(broker: Served, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\x00\xff")
    assert pub(broker, "-t", "what/file", "-f", str(tmp_path / "file"), "-r").returncode == 0
    assert pub(broker, "-t", "what/stdin", "-s", "-r", input="a\nb").returncode == 0
    rows = [json.loads(line) for line in printed(sub(broker, "-t", "what/#", "-C", "2", "--json")).splitlines()]
    assert rows[0]["payload_base64"] == "AP8="
    assert rows[1]["payload"] == "a\nb"
    assert pub(broker, "-t", "what/file", "-n", "-r").returncode == 0
    assert printed(sub(broker, "-t", "what/#", "-C", "1")) == "a\nb\n"


def test_who_is_refused_or_uses_it_wrongly_is_told_in_one_line(broker: Served) -> None:
    problems = {
        ("-u", "ann", "-P", "guess", "-t", "a", "-m", "b"): (1, "BAD_USER_NAME_OR_PASSWORD"),
        ("-t", "a"): (2, "one of -m, -l, -f, -s and -n"),
        ("-t", "a/#", "-m", "b"): (2, "no topic"),
    }
    for words, (code, said) in problems.items():
        done = pub(broker, *words)
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert pub(broker, "-u", "ann", "-P", "s3cret", "-t", "a", "-m", "b", "-q", "2").returncode == 0
    late = penstock("mqtt", "sub", "-p", broker.port(), "-t", "silence", "-C", "1", "-W", "0.2")
    assert (late.returncode, "did not come" in late.stderr) == (1, True)
    nobody = penstock("mqtt", "pub", "-p", 1, "-t", "a", "-m", "b")
    assert (nobody.returncode, len(nobody.stderr.splitlines())) == (1, 1)


def test_passwords_are_set_replaced_made_and_deleted(tmp_path: Path) -> None:
    from penstock.net import Credentials

    path = tmp_path / "users"
    assert penstock("mqtt", "passwd", path, "ann", "one", "-b").returncode == 0
    assert penstock("mqtt", "passwd", path, "ann", "two", "-b").returncode == 0
    token = penstock("mqtt", "passwd", path, "pump", "--token").stdout.strip()
    users = Credentials.parse(path.read_text())
    assert users.verify("ann", b"two")
    assert not users.verify("ann", b"one")
    assert users.verify("pump", token.encode())
    assert penstock("mqtt", "passwd", path, "ann", "-D").returncode == 0
    assert "ann" not in Credentials.parse(path.read_text())
    again = penstock("mqtt", "passwd", path, "ann", "-D")
    assert (again.returncode, "no user ann" in again.stderr) == (2, True)


def test_scram_prints_a_line_that_the_configuration_takes() -> None:
    import tomllib

    from penstock.mqtt.scram import Verifier, make_verifier

    line = penstock("mqtt", "scram", "ann of works", "pencil", "-b").stdout
    verifier = Verifier.parse(tomllib.loads(f"[scram]\n{line}")["scram"]["ann of works"])
    assert verifier == make_verifier("pencil", verifier.salt)
