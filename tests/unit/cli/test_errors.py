"""Promise: whatever goes wrong is one line on stderr and an exit code: 2 for wrong use, 1 for everything else."""

from __future__ import annotations

import ctypes
import http.server
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from command import PENSTOCK, penstock

from penstock.log.messagelog import MessageLog
from penstock.log.xchannel import Writer

DAC_OVERRIDE, DAC_READ_SEARCH, DROP_FROM_BOUNDING_SET = 1, 2, 24


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one thing of each kind."""
    folder = tmp_path_factory.mktemp("errors")
    with Writer.open(folder / "ticks") as writer:
        writer.append_many([b"tick %d" % number for number in range(50_000)])
    with MessageLog.open(folder / "log") as log:
        log.append(b"hello")
    assert penstock("send", "jobs", "one", cwd=folder).returncode == 0
    assert penstock("kv", "put", "buckets", "routes", "node.a", "here", cwd=folder).returncode == 0
    (folder / "empty").mkdir()
    (folder / "text").write_text("hello\n")
    return folder


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("stat nowhere", 2, "nowhere: there is nothing here"),
        ("verify empty", 2, "empty: not a log of a known format"),
        ("tail text", 2, "text: not a log of a known format"),
        ("cat ticks --from here", 2, "--from here: not earliest, latest, a position, a time"),
        ("cat ticks/below", 1, "ticks: Not a directory"),
        ("send ticks x", 2, "ticks: this is a file, not a queue"),
        ("send log x", 2, "log: this is a log of format messagelog, not a queue"),
        ("send nowhere/jobs x", 2, "nowhere/jobs: the folder does not exist"),
        ("send jobs x --sync never", 2, "sync='never': must be one of none, interval, always"),
        ("recv nowhere", 2, "nowhere: there is no channel here"),
        ("recv jobs --ack", 2, "--ack needs --name or --group: there is nothing else to remember it by"),
        ("gc nowhere", 2, "nowhere: there is nothing here"),
        ("compact log", 2, "log: this is a log of format messagelog, not a queue"),
        ("repair ticks", 2, "ticks: this is a file, not a queue"),
        ("kv get buckets routes node.z", 1, "routes: no key node.z"),
        ("kv ls buckets nothing", 2, "buckets: there is no bucket 'nothing' here"),
        ("kv put ticks b k v", 2, "ticks: this is a file, buckets are in a folder"),
        ("kv put buckets routes k v --create --revision 1", 2, "--create and --revision exclude each other"),
        ("kv ls nats://127.0.0.1:1 b", 1, "nats://127.0.0.1:1"),
        ("fold stat nowhere", 2, "nowhere: there is no store here"),
        ("fold dump text", 1, "text at byte 0: bad magic"),
        ("fold follow ticks fold.snap --once", 2, "ticks: its records are no envelopes"),
        ("fold follow nowhere fold.snap --once", 2, "nowhere: there is nothing here"),
        ("fold follow nats://127.0.0.1:1 fold.snap --once --bucket b", 1, "nats://127.0.0.1:1"),
        ("fold follow nats://127.0.0.1:1 fold.snap", 2, "name one with --bucket"),
        ("channels ls nowhere", 2, "nowhere: there is no such data directory"),
        ("channels show empty ops", 2, "empty: there is no channel 'ops'"),
        ("bench nowhere", 2, "nowhere: not a folder"),
        ("pipeline ingest nowhere lake", 2, "nowhere: there is nothing here"),
        ("pipeline decode ticks typed", 2, "JSON needs --schema"),
        ("pipeline aggregate ticks --every soon", 2, "every='soon': use a number"),
        ("pipeline aggregate ticks windows --watermark soon", 2, "watermark='soon': use a number"),
        ("pipeline report ticks --check", 2, "--table, --check and --title are for a page"),
        ("pipeline run nothing ticks", 2, "nothing: not one of aggregate, audit"),
        ("pipeline run os:getcwd ticks --every 1", 2, "--every is for a stream"),
        ("pipeline run os:getcwd ticks --set limit", 2, "'limit': write it as name=value"),
        ("ledger empty", 2, "empty: this is not the data directory of a node"),
        ("backup empty copy", 2, "empty: this is not the data directory of a node"),
        ("channels show empty p\udcfcmp", 2, "a word of the command is not UTF-8 and has to be"),
        ("mqtt scram ann p\udcfcmp -b", 2, "a word of the command is not UTF-8 and has to be"),
        ("recv jobs --group g --lease 1e10 --limit 1", 2, "lease_seconds=10000000000.0: must be above 0 and below 1e9"),
        ("health --http here", 2, "--http here: must be HOST:PORT"),
        ("health --http 127.0.0.1:70000", 2, "port 70000 does not exist"),
        ("health --http 127.0.0.1:1 --token a\tb", 2, "--token: it has characters that no header can"),
        ("top --once --http a..b:80", 2, "'a..b': this is no name of a host"),
        ("write ticks x --node a..b:80", 2, "'a..b': this is no name of a host"),
        ("mqtt pub -h a..b -t t -m x", 2, "'a..b': this is no name of a host"),
        ("mqtt pub -p 70000 -t t -m x", 2, "port 70000 does not exist"),
        ("channels members ops --user ann --server plain://a..b:1", 2, "'a..b': this is no name of a host"),
        (f"cat ticks --from {'9' * 5000}", 2, "not earliest, latest, a position, a time"),
        (f"cat ticks --to {'9' * 400}d", 2, "not earliest, latest, a position, a time"),
        (f"ledger . --since {'9' * 5000}h", 2, "give 24h, 7d, or a time"),
    ],
)
def test_an_error_is_one_line_and_a_code(place: Path, words: str, code: int, says: str) -> None:
    before = sorted(place.rglob("*"))
    done = penstock(*words.split(" "), cwd=place)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("penstock: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(place.rglob("*")) == before  # nothing is left behind either


@pytest.mark.parametrize("page", [b"<html>", b'{"database":"ok"}', b"[1]", b"[" * 100_000], ids=range(4))
def test_another_server_at_the_address_of_a_node_is_told_from_one(page: bytes) -> None:
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        for words, path in ((["health"], "/api/health"), (["top", "--once"], "/api/parts")):
            done = penstock(*words, "--http", address)
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr == f"penstock: {address} in {path}: this is not what a node answers\n"
        server.shutdown()


@pytest.mark.parametrize("words", ["cat ticks --jsn", "cat", "kv frobnicate", "cat ticks --limit many"])
def test_a_command_that_cannot_be_read_is_wrong_use(place: Path, words: str) -> None:
    done = penstock(*words.split(), cwd=place)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: penstock ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["ingest", "ticks", ""], ["run", "report", ""]])
def test_an_empty_path_is_not_the_root_of_the_disk(place: Path, words: list[str]) -> None:
    done = penstock("pipeline", *words, cwd=place)
    assert (done.returncode, done.stdout) == (2, "")
    assert "it is empty" in done.stderr


def without_privileges() -> Callable[[], object] | None:
    """Return what makes root obey file permissions, as everyone else does anyway."""
    if os.geteuid() != 0:
        return None
    libc = ctypes.CDLL(None)
    return lambda: [libc.prctl(DROP_FROM_BOUNDING_SET, right, 0, 0, 0) for right in (DAC_OVERRIDE, DAC_READ_SEARCH)]


@pytest.mark.parametrize("words", ["cat secret", "send shut x", "kv put shut b k v", "fold stat secret", "bench shut"])
def test_a_missing_permission_is_said(tmp_path: Path, words: str) -> None:
    with Writer.open(tmp_path / "secret"):
        pass
    (tmp_path / "secret").chmod(0)
    (tmp_path / "shut").mkdir(0o500)
    done = penstock(*words.split(), cwd=tmp_path, preexec_fn=without_privileges())
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("penstock: secret" if "secret" in words else "penstock: shut")
    assert done.stderr.endswith(": Permission denied\n")


@pytest.mark.parametrize(
    "words",
    ["ledger secret", "backup secret copy", "erase secret --key a", "channels ls secret/channels", "ledger secret/in"],
)
def test_what_may_not_be_looked_into_is_not_called_absent(tmp_path: Path, words: str) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret").chmod(0)
    done = penstock(*words.split(), cwd=tmp_path, preexec_fn=without_privileges())
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("penstock: secret/")
    assert done.stderr.endswith(": Permission denied\n")
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize("words", ["cat ticks", "cat ticks --json", "tail ticks", "stat ticks", "channels ls empty"])
def test_a_reader_that_leaves_ends_the_command_quietly(place: Path, words: str) -> None:
    process = subprocess.Popen([*PENSTOCK, *words.split()], cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert (process.stderr.read(), process.wait(60)) == (b"", 0)
    process.stderr.close()


def test_what_nobody_got_is_not_acknowledged(tmp_path: Path) -> None:
    penstock("send", "jobs", "one", cwd=tmp_path)
    for redirect, says in ((">/dev/full", "No space left on device"), (">&-", "standard output is closed")):
        command = f"{' '.join(PENSTOCK)} recv jobs --name w --ack --timeout 0 {redirect}"
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (1, f"penstock: {says}\n")
    assert penstock("recv", "jobs", "--name", "w", "--ack", "--timeout", 0, cwd=tmp_path).stdout == "one\n"


@pytest.mark.parametrize("words", ["pipeline ingest ticks lake", "pipeline compact lake", "demo"])
def test_a_missing_extra_is_named(place: Path, tmp_path: Path, words: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Bare(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        bare = name.split('.')[0] in {'pyspark', 'pyarrow', 'deltalake'}\n"
        "        return None if bare else super().find_spec(name, path, target)\n"
        "sys.meta_path[:] = [Bare if finder is PathFinder else finder for finder in sys.meta_path]\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = penstock(*words.split(), cwd=place, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 1
    assert "pip install 'penstock[spark]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_names_are_printed_as_they_are(tmp_path: Path) -> None:
    """Brackets, braces and colons are no markup, no format and no emoji."""
    name = "[bold]{x} :bug:"
    with Writer.open(tmp_path / name) as writer:
        writer.append(b"one")
    assert f"path              {name}\n" in penstock("stat", name, cwd=tmp_path).stdout
    assert penstock("verify", name, cwd=tmp_path).stderr == f"{name}: no problem found\n"
    assert penstock("cat", f"{name}[/]", cwd=tmp_path).stderr == f"penstock: {name}[/]: there is nothing here\n"
