"""Promise: a channel server runs as a command, is used from the shell, and stops without losing anything."""

from __future__ import annotations

import asyncio
import io
import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from wire_use import plain_token

SUPPORT = str(Path(__file__).parents[2] / "support")
PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([SUPPORT, os.environ.get("PYTHONPATH", "")])}


def modules_of(folder: Path) -> dict[str, str]:
    """Return an environment in which the modules of a folder are found."""
    return {"PYTHONPATH": os.pathsep.join([str(folder), ENVIRONMENT["PYTHONPATH"]])}


class Server:
    def __init__(
        self, folder: Path, *args: str, environment: dict[str, str] | None = None, through: tuple[str, ...] = ()
    ) -> None:
        """``through``: what starts the command."""
        command = [*through, *PENSTOCK, "channels", "serve", "--data", str(folder), "--json", *args]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**ENVIRONMENT, **(environment or {})}
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self.process.communicate()[1]).decode()
        ready = json.loads(line)
        assert ready["event"] == "ready"
        self.listeners: dict[str, str] = ready["listeners"]

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(
        tmp_path / "data", "--port", "0", "--plain-port", "0", "--modulator", "wire_use:PlainAuthenticator"
    )
    yield running
    running.process.kill()
    running.process.communicate()


def use(
    server: Server, *args: str, who: str = "ann:s3cret", given: bytes = b"", code: int = 0, plain: bool = False
) -> list[Any]:
    """Run a command here: starting a process for each takes most of the time."""
    from penstock.cli.main import main

    address = [
        "--server",
        "plain://" + server.listeners["channels-plain"],
        "--token",
        who,
        *([] if plain else ["--json"]),
    ]
    out, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    stdin = io.TextIOWrapper(io.BytesIO(given), encoding="utf-8")
    words = ["penstock", "channels", *args, *address]
    with (
        patch.multiple(sys, argv=words, stdin=stdin, stdout=out, stderr=errors),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    assert (ended.value.code or 0) == code, errors.buffer.getvalue().decode()  # type: ignore[attr-defined]
    lines = out.buffer.getvalue().decode().splitlines()  # type: ignore[attr-defined]
    return lines if plain else [json.loads(line) for line in lines]


def taken(server: Server) -> list[Any]:
    """Take an element of the queue, if there is one."""
    try:
        return use(server, "pop", "ops")
    except AssertionError:
        return []


def test_a_channel_is_used_from_the_shell_and_survives_a_stop(server: Server, tmp_path: Path) -> None:
    use(server, "join", "ops")  # a transient channel ends with its last member
    use(server, "members", "ops", code=1)
    assert use(server, "config", "ops", "--set", "persist=true")[0]["persist"] is True  # and is made by its settings
    use(server, "join", "jobs", "--set", "persist=true", "--set", "type=fifo")
    for wrong in ("nonsense=3", "persist=maybe", "max_clients=many", "max_clients=²", "max_clients=" + "9" * 5000):
        use(server, "config", "ops", "--set", wrong, code=2)
    assert use(server, "broadcast", "ops", "pump 7 is on") == [{"seq": 1}]
    assert use(server, "broadcast", "ops", given=b"two\nthree\n") == [{"seq": 2}, {"seq": 3}]
    found = use(server, "history", "ops", "--from", "2")
    assert [(item["seq"], item["from"], item["payload"]) for item in found] == [
        (2, "ann@localhost", "two"),
        (3, "ann@localhost", "three"),
    ]
    assert use(server, "members", "ops") == [{"members": ["ann@localhost"]}]
    assert use(server, "config", "ops", "--set", "max_clients=7")[0]["max_clients"] == 7
    assert use(server, "acl", "ops", "read", "--add", "bob@localhost", "--add", "ann@localhost") == [
        {"type": "read", "nids": ["ann@localhost", "bob@localhost"]}
    ]
    assert use(server, "push", "jobs", given=b"a\nb\n") == [{"pushed": 2}]
    assert use(server, "pop", "jobs") == [{"payload": "a"}]
    assert use(server, "listen", "ops", "--from", "2", "--limit", "2") == found
    assert [item["seq"] for item in use(server, "listen", "ops", "--from", "1", "--limit", "3", who="bob:s3cret")] == [
        1,
        2,
        3,
    ]
    assert server.stop() == 0
    again = Server(tmp_path / "data", "--port", "-1", "--plain-port", "0", "--modulator", "wire_use:PlainAuthenticator")
    try:
        assert use(again, "pop", "jobs") == [{"payload": "b"}]
        use(again, "pop", "jobs", code=1)  # QUEUE_EMPTY
    finally:
        assert again.stop(signal.SIGINT) == 0


async def test_tls_is_modern_and_its_certificate_is_for_localhost(server: Server, tmp_path: Path) -> None:
    from penstock.channels import Client
    from penstock.errors import PenstockError

    host, _, port = server.listeners["channels"].rpartition(":")
    context = ssl.create_default_context(cafile=str(tmp_path / "data" / "development.pem"))
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context.minimum_version = context.maximum_version = version
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="localhost")
        writer.write(b"CONNECT version=1\n")
        assert (await reader.readline()).startswith(b"CONNECT_ACK ")
        writer.close()
        await writer.wait_closed()
    ca = str(tmp_path / "data" / "development.pem")
    async with await Client.connect(f"localhost:{port}", token=plain_token("ann"), ca=ca) as ann:
        assert ann.nid == "ann@localhost"
    with pytest.raises(PenstockError):  # nobody this machine believes has signed it
        await Client.connect(f"localhost:{port}", token=plain_token("ann"), reconnect=False)


def test_the_configuration_of_the_original_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("""
[telemetry.logging]
level = "info"
format = "text"
[telemetry.metrics]
enabled = true
bind_address = "127.0.0.1"
port = 0
[c2s-server]
connect_timeout = "30s"
keep_alive_interval = "1m"
[c2s-server.listener]
domain = "localhost"
bind_address = "127.0.0.1"
port = 0
[c2s-server.limits]
max_connections = 17
max_message_size = 4096
payload_pool_memory_budget = 268435456
unheard_of = 5
""")
    server = Server(
        tmp_path / "data", "--config", str(tmp_path / "config.toml"), "--plain-port", "0",
        environment={"PENSTOCK__C2S_SERVER__LIMITS__MAX_INFLIGHT_REQUESTS": "33"},
    )  # fmt: skip
    try:
        assert set(server.listeners) == {"channels", "channels-plain", "metrics"}

        async def look() -> tuple[bytes, bytes]:
            reader, writer = await asyncio.open_connection(*server.listeners["channels-plain"].split(":"))
            writer.write(b"CONNECT version=1\n")
            answer = await reader.readline()
            scraped, asking = await asyncio.open_connection(*server.listeners["metrics"].split(":"))
            asking.write(b"GET /metrics HTTP/1.1\r\n\r\n")
            body = await scraped.read()
            for one in (writer, asking):
                one.close()
                await one.wait_closed()
            return answer, body

        answer, body = asyncio.run(look())
        assert b"max_inflight_requests=33 max_message_size=4096 " in answer
        assert b"penstock_channels_c2s_connections_accepted_total 1" in body
        assert b"penstock_channels_c2s_connections_active 1" in body
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--config", "/nowhere.toml"], "No such file"),
        (["--modulator", "nowhere"], "module:Class"),
        (["--modulator", "nowhere:Nobody"], "No module named"),
        (["--sync", "sometimes"], "none, interval or always"),
        (["--config", "level.toml"], "telemetry.logging.level=7"),
        (["--config", "format.toml"], "telemetry.logging.format='xml'"),
        (["--config", "nobody.toml"], "modulator.type='python': give modulator.class"),
        (["--config", "folder.toml"], "c2s-server.storage.data_dir=5"),
    ],
)
def test_a_wrong_start_is_one_line_and_exit_code_2(args: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "level.toml").write_text("[telemetry.logging]\nlevel = 7\n")
    (tmp_path / "format.toml").write_text('[telemetry.logging]\nformat = "xml"\n')
    (tmp_path / "nobody.toml").write_text('[modulator]\ntype = "python"\n')
    (tmp_path / "folder.toml").write_text("[c2s-server.storage]\ndata_dir = 5\n")
    data = [] if "folder.toml" in args else ["--data", str(tmp_path / "data")]
    command = [*PENSTOCK, "channels", "serve", *data, "--port", "0", *args]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr.decode().splitlines()[-1]


@pytest.mark.parametrize("command", ["channels", "node"])
def test_a_modulator_is_found_in_the_folder_where_the_server_is_started(tmp_path: Path, command: str) -> None:
    """With the command as it is installed, which knows nothing of the folder it is called in."""
    (tmp_path / "doors.py").write_text("class Door:\n    def authenticate(self, token):\n        return token\n")
    (tmp_path / "node.toml").write_text('data = "data"\n[channels]\nport = 0\nmodulator = "doors:Door"\n')
    words = {
        "channels": ["channels", "serve", "--data", "data", "--port", "0", "--modulator", "doors:Door", "--json"],
        "node": ["serve", "--config", "node.toml", "--port", "0", "--http-port", "0", "--json"],
    }
    penstock = Path(sys.executable).with_name("penstock")
    process = subprocess.Popen(
        [penstock, *words[command]], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    ready = process.stdout.readline()
    process.terminate()
    said = process.communicate(timeout=60)[1].decode()
    assert ready, said
    assert "channels" in json.loads(ready)["listeners"], said
    assert process.returncode == 0


def test_what_is_printed_can_be_given_back(server: Server) -> None:
    """`persist=True` is no setting, and ['ann@localhost'] no name."""
    use(server, "join", "ops", "--set", "persist=true")
    (settings,) = use(server, "config", "ops", plain=True)
    assert "persist=true" in settings.split()
    use(server, "config", "ops", *(word for pair in settings.split() for word in ("--set", pair)))
    assert use(server, "acl", "ops", "read", plain=True) == ["type=read nids=-"]
    told = use(server, "acl", "ops", "read", "--add", "ann@localhost", "--add", "example.com", plain=True)
    assert told == ["type=read nids=example.com,ann@localhost"]


@pytest.mark.parametrize(
    "words",
    [
        ("history", "ops", "--from", "0"), ("history", "ops", "--limit", "0"), ("listen", "ops", "--from", "-3"),
        ("listen", "ops", "--limit", "0"), ("pop", "ops", "--limit", "-1"), ("acl", "ops", "read", "--add", "bob"),
        ("acl", "ops", "read", "--remove", "b@"), ("members", "ops", "--user", "bob"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_wrong_use(server: Server, words: tuple[str, ...]) -> None:
    use(server, "join", "ops", "--set", "persist=true")
    assert use(server, *words, code=2) == []


def test_numbers_of_what_was_broadcast_are_printed_although_the_rest_was_refused(server: Server) -> None:
    """Whoever sends the rest again has to know where it ended: nothing was printed."""
    use(server, "join", "ops", "--set", "persist=true")
    told = use(server, "broadcast", "ops", given=b"x" * 50 + b"\n" + b"line\n" * 5000, code=1)
    numbers = [line["seq"] for line in told]
    assert numbers == list(range(1, len(numbers) + 1))
    sent = use(server, "history", "ops", "--limit", "10000")
    assert 1000 < len(sent) < 5001  # there is a limit of bytes a second
    assert 0 <= len(sent) - len(numbers) < 100  # so many are under way at a time


def test_a_name_that_is_given_counts_more_than_a_token_of_the_environment(tmp_path: Path) -> None:
    open_server = Server(tmp_path / "data", "--port", "-1", "--plain-port", "0")
    try:
        place = ["--server", "plain://" + open_server.listeners["channels-plain"]]
        words = [*PENSTOCK, "channels", "join", "ops", *place, "--user", "bob", "--json"]
        done = subprocess.run(
            words, capture_output=True, timeout=60, check=False, env={**ENVIRONMENT, "PENSTOCK_TOKEN": "ann:s3cret"}
        )
        assert json.loads(done.stdout) == {"joined": "ops", "nid": "bob@localhost"}, done.stderr
    finally:
        open_server.stop()


@pytest.mark.parametrize("what", ["broadcast", "push"])
def test_lines_are_sent_as_they_come_and_an_interrupt_waits_for_none(server: Server, what: str) -> None:
    """`tail -f app.log | penstock channels broadcast ops` said nothing before tail ended, which it does not."""
    kind = "fifo" if what == "push" else "pubsub"
    use(server, "join", "ops", "--set", "persist=true", "--set", f"type={kind}")
    address = ["--server", "plain://" + server.listeners["channels-plain"], "--token", "ann:s3cret", "--json"]
    process = subprocess.Popen(
        [*PENSTOCK, "channels", what, "ops", *address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT
    )
    assert process.stdin is not None
    assert process.stdout is not None
    for number in (1, 2):
        process.stdin.write(f"line {number}\n\n".encode())
        process.stdin.flush()
        if what == "broadcast":
            assert json.loads(process.stdout.readline()) == {"seq": number}
        else:
            while not (popped := taken(server)):
                time.sleep(0.01)
            assert popped == [{"payload": f"line {number}"}]
    process.send_signal(signal.SIGINT)  # stdin is open, and nothing comes
    assert process.wait(timeout=60) == 130
    rest = process.stdout.read()
    assert rest == (b'{"pushed":2}\n' if what == "push" else b"")
    process.stdin.close()
    process.stdout.close()


def listening(server: Server, who: str = "bob:s3cret") -> subprocess.Popen[bytes]:
    """Start to listen to ops, and return when the server knows of it."""
    place = ["--server", "plain://" + server.listeners["channels-plain"], "--token", who, "--json"]
    process = subprocess.Popen(
        [*PENSTOCK, "channels", "listen", "ops", *place],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=ENVIRONMENT,
    )  # fmt: skip
    while "bob@localhost" not in use(server, "members", "ops")[0]["members"]:
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("how", ["deleted", "put out", "refused"])
def test_who_listens_is_told_when_there_is_nothing_to_hear_any_more(server: Server, how: str, tmp_path: Path) -> None:
    """It stood there for ever, or ended as if all were well."""
    use(server, "join", "ops", "--set", "persist=true")
    process = listening(server)
    place = "plain://" + server.listeners["channels-plain"]

    async def end_it() -> None:
        from penstock.channels import Client

        async with await Client.connect(place, token=plain_token("ann")) as ann:
            await (ann.delete("ops") if how == "deleted" else ann.leave("ops", on_behalf="bob@localhost"))

    others = None
    if how == "refused":
        assert server.stop() == 0
        port = place.rpartition(":")[2]
        (tmp_path / "closed.py").write_text("class Closed:\n    def authenticate(self, token):\n        return None\n")
        others = Server(
            tmp_path / "data", "--port", "-1", "--plain-port", port, "--modulator", "closed:Closed",
            environment=modules_of(tmp_path),
        )  # fmt: skip
    else:
        asyncio.run(end_it())
    said = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 1
    wanted = {"deleted": "was deleted", "put out": "is no member of !ops@localhost any more", "refused": "UNAUTHORIZED"}
    assert wanted[how] in said.splitlines()[-1]
    if others is not None:
        assert others.stop() == 0


def test_a_server_stops_although_its_modulator_hangs(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(
        "import time\nclass Hangs:\n    def authenticate(self, token):\n        time.sleep(3600)\n"
    )
    server = Server(
        tmp_path / "data", "--port", "-1", "--plain-port", "0", "--modulator", "hangs:Hangs",
        environment={**modules_of(tmp_path), "PENSTOCK__MODULATOR__TIMEOUT": "50ms"},
    )  # fmt: skip
    host, _, port = server.listeners["channels-plain"].rpartition(":")
    with socket.create_connection((host, int(port))) as client, client.makefile("rb") as answers:
        client.sendall(b"CONNECT version=1\nAUTH token=x\n")
        assert answers.readline().startswith(b"CONNECT_ACK ")
        assert b"INTERNAL_SERVER_ERROR" in answers.readline()
    assert server.stop() == 0


def test_a_server_opens_as_many_files_as_it_may(tmp_path: Path) -> None:
    """The usual 1,024 are a tenth of the clients it lets in: further ones waited for ever, and nobody said why."""
    few = ("sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh")
    server = Server(tmp_path / "data", "--port", "-1", "--plain-port", "0", through=few)
    try:
        soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        assert soft == min(hard, 1 << 20)
    finally:
        assert server.stop() == 0


def test_a_server_that_cannot_open_enough_files_says_so(tmp_path: Path) -> None:
    few = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh")
    server = Server(tmp_path / "data", "--port", "-1", "--plain-port", "0", through=few)
    server.process.terminate()
    said = server.process.communicate(timeout=60)[1].decode()
    assert "max_connections=10000, but this process may open no more than 256 files" in said


def test_the_log_is_json_where_the_configuration_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[telemetry.logging]\nlevel = "debug"\nformat = "json"\n')
    server = Server(tmp_path / "data", "--port", "0", "--config", str(tmp_path / "config.toml"))
    server.process.terminate()
    lines = server.process.communicate(timeout=60)[1].decode().splitlines()
    assert lines
    assert {"level", "message"} <= json.loads(lines[0]).keys()


async def test_a_modulator_is_loaded_again_on_sighup_and_a_broken_one_is_not(tmp_path: Path) -> None:
    from penstock.channels import Client

    module = tmp_path / "doors.py"
    door = "class Door:\n    def transform(self, nid, channel, payload):\n        return payload.{}()\n"
    module.write_text(door.format("upper"))
    server = await asyncio.to_thread(
        Server, tmp_path / "data", "--port", "-1", "--plain-port", "0", "--modulator", "doors:Door",
        environment=modules_of(tmp_path),
    )  # fmt: skip
    place = "plain://" + server.listeners["channels-plain"]
    try:
        async with (
            await Client.connect(place, username="ann") as ann,
            await Client.connect(place, username="bob") as bob,
        ):
            await ann.join("c")
            await bob.join("c")
            heard = bob.messages()
            changes = [
                ("", b"HI"),
                (door.format("lower"), b"hi"),
                ("class Door:", b"hi"),
                (door.format("title"), b"Hi"),
            ]
            for change, wanted in changes:
                if change:
                    module.write_text(change)
                    server.process.send_signal(signal.SIGHUP)
                async with asyncio.timeout(60):
                    while True:  # a signal takes its time
                        await ann.broadcast("c", b"hI")
                        if (await anext(heard)).payload == wanted:
                            break
    finally:
        assert await asyncio.to_thread(server.stop) == 0
