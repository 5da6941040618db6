"""The commands against a real S3 server: artifacts go up and come down, logs are shipped and read by URL."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from ship_use import FORMATS, fill, open_writer
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.disk import object_store_for
from penstock.errors import NotFoundError, OptionsError, PenstockError, RetryError
from penstock.log.envelope import CONTENT, Envelope, encode_envelope
from penstock.log.messagelog import MessageLog
from penstock.ship import Shipper
from penstock.store import AppendLogStore, LmdbStore, RocksStore
from penstock.testing.s3 import S3Server
from penstock.types import KvUpdate, WatchCursor


def penstock(s3: S3Server, *arguments: object, code: int = 0) -> list[Any]:
    """Run a command in this process, which takes a tenth of the time of another one."""
    done = CliRunner().invoke(app, [*map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        assert code, done.exception
        assert isinstance(done.exception, PenstockError | OSError)
        return []
    assert done.exit_code == code, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def run_process(s3: S3Server, *arguments: object) -> list[Any]:
    command = [sys.executable, "-m", "penstock.cli.main", *map(str, arguments)]
    environment = {**os.environ, **s3.environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(autouse=True)
def _environment(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def place(s3: S3Server) -> str:
    return f"s3://{s3.bucket}/{uuid.uuid4().hex}"


def test_a_fold_is_pushed_pulled_and_pruned(s3: S3Server, place: str, tmp_path: Path) -> None:
    fold, url = tmp_path / "routes.snap", f"{place}/routes"
    for revision in (3, 5):
        with AppendLogStore.open(fold) as store:
            store.apply([KvUpdate.put("a", b"%d" % revision, revision)], WatchCursor.of(revision))
        (pushed,) = penstock(s3, "artifact", "push", fold, url, "--json")
        assert (pushed["result"], pushed["cursor"]) == ("published", revision)
    (inspected,) = penstock(s3, "artifact", "inspect", url, "--json")
    assert (inspected["backend"], inspected["cursor"]) == ("append-log", 5)
    (pulled,) = penstock(s3, "artifact", "pull", url, tmp_path / "copy.snap", "--json")
    assert pulled["cursor"] == 5
    with AppendLogStore.open(tmp_path / "copy.snap", read_only=True) as store:
        found = store.get("a")
        assert found is not None
        assert found.value == b"5"
    (pruned,) = penstock(s3, "artifact", "prune", url, "--grace", 0, "--json")
    assert len(pruned["removed"]) == 1


@pytest.mark.parametrize("format", FORMATS)
def test_a_shipped_log_is_listed_verified_and_printed_by_url(
    format: str, s3: S3Server, place: str, tmp_path: Path
) -> None:
    with open_writer(format, tmp_path / "ticks") as writer:
        wanted = [p.decode() for start in (0, 20) for p in fill(format, writer, start, 20)]
    (shipped,) = penstock(s3, "ship", "run", tmp_path / "ticks", f"{place}/edge-1", "--once", "--node", "e1", "--json")
    assert shipped["backlog_segments"] == 0
    (status,) = penstock(s3, "ship", "status", place, "--json")
    assert (status["path"], status["node"], status["records"]) == (f"{place}/edge-1/ticks", "e1", 40)
    (verified,) = penstock(s3, "ship", "verify", f"{place}/edge-1/ticks", "--json")
    assert verified["ok"] is True
    rows = penstock(s3, "cat", f"{place}/edge-1/ticks", "--json")
    assert [row["payload"] for row in rows] == wanted
    here = penstock(s3, "cat", tmp_path / "ticks", "--json")
    assert [row["position"] for row in rows] == [row["position"] for row in here]
    if format == "messagelog":
        (facts,) = penstock(s3, "stat", f"{place}/edge-1/ticks", "--json")
        assert facts["segments"] == 2
        (found,) = penstock(s3, "verify", f"{place}/edge-1/ticks", "--json")
        assert found["ok"] is True
        (back,) = penstock(s3, "ship", "restore", f"{place}/edge-1/ticks", tmp_path / "back", "--json")
        assert back["first_position"] == 1


@pytest.mark.parametrize("kind", [AppendLogStore, RocksStore, LmdbStore])
def test_every_command_on_a_fold_takes_a_url_of_it(
    kind: type[AppendLogStore | RocksStore | LmdbStore], s3: S3Server, place: str, tmp_path: Path
) -> None:
    fold = tmp_path / "routes"
    with kind.open(fold) as store:
        store.apply([KvUpdate.put("a", b"1", 1), KvUpdate.put("b", b"2", 2)], WatchCursor.of(2))
    copy_up(fold, f"{place}/raw/routes")
    wanted = penstock(s3, "fold", "dump", fold, "--json")
    penstock(s3, "artifact", "export", f"{place}/raw/routes", tmp_path / "artifact", "--json")
    (pushed,) = penstock(s3, "artifact", "push", f"{place}/raw/routes", f"{place}/folds/routes", "--json")
    assert pushed["cursor"] == 2
    copy_up(tmp_path / "artifact", f"{place}/raw/artifact")
    for url in (f"{place}/raw/routes", f"{place}/folds/routes", f"{place}/raw/artifact", tmp_path / "artifact"):
        assert penstock(s3, "fold", "dump", url, "--json") == wanted
        (facts,) = penstock(s3, "fold", "stat", url, "--json")
        assert (facts["backend"], facts["path"], facts["entries"], facts["cursor"]) == (kind.backend, str(url), 2, 2)
        (found,) = penstock(s3, "fold", "verify", url, "--json")
        assert (found["entries"], found["problems"]) == (2, [])
    for number, url in enumerate((f"{place}/folds/routes", f"{place}/raw/artifact")):
        (about,) = penstock(s3, "artifact", "inspect", url, "--json")
        assert (about["backend"], about["cursor"]) == (kind.backend, 2)
        (verified,) = penstock(s3, "artifact", "verify", url, "--json")
        assert verified == {"path": url, "ok": True, "problems": []}
        penstock(s3, "artifact", "import", url, tmp_path / f"back{number}", "--json")
        assert penstock(s3, "fold", "dump", tmp_path / f"back{number}", "--json") == wanted


def test_a_fold_begins_with_an_artifact_and_says_so(s3: S3Server, place: str, tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "log", content=CONTENT) as log:
        log.append_many([encode_envelope(Envelope(b"k%d" % (number % 7), b"%d" % number)) for number in range(40)])
        log.roll()

    def follow(store: str) -> Any:
        arguments = ("fold", "follow", tmp_path / "log", tmp_path / store, "--once", "--json")
        (found,) = penstock(s3, *arguments, "--artifact", f"{place}/fold")
        return found["way"], found["folded"], found["cursor"]

    assert follow("one.snap") == ("relist", 40, 41)
    penstock(s3, "artifact", "push", tmp_path / "one.snap", f"{place}/fold", "--json")
    with MessageLog.open(tmp_path / "log") as log:
        log.append_many([encode_envelope(Envelope(b"late", b"%d" % number)) for number in range(3)])
    assert follow("two.snap") == ("artifact", 3, 44)
    assert follow("two.snap") == ("delta", 0, 44)
    old = AppendLogStore.open(tmp_path / "old.snap")
    old.apply([KvUpdate.put("gone", b"1", 5)], WatchCursor.of(6))
    old.close()
    with MessageLog.open(tmp_path / "log") as log:
        log.drop_before(41)
    assert follow("old.snap") == ("artifact", 3, 44)
    (one,) = penstock(s3, "fold", "stat", tmp_path / "old.snap", "--json")
    (two,) = penstock(s3, "fold", "stat", tmp_path / "two.snap", "--json")
    assert one["digest"] == two["digest"]


def test_a_published_artifact_that_was_changed_is_no_fold(s3: S3Server, place: str, tmp_path: Path) -> None:
    with AppendLogStore.open(tmp_path / "routes") as store:
        store.apply([KvUpdate.put("a", b"1", 1)], WatchCursor.of(1))
    penstock(s3, "artifact", "push", tmp_path / "routes", f"{place}/routes", "--json")
    objects = object_store_for(place)
    (payload,) = [info.key for info in objects.objects("routes.payloads")]
    data, _ = objects.get(payload)
    at = data.index(b"PGSS") + 12
    objects.put(payload, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    (verified,) = penstock(s3, "artifact", "verify", f"{place}/routes", "--json", code=1)
    assert verified["ok"] is False
    assert "BLAKE3" in verified["problems"][0]["reason"]
    for arguments in (("fold", "dump"), ("fold", "stat"), ("artifact", "pull"), ("artifact", "import")):
        more = [tmp_path / "made"] if arguments[0] == "artifact" else []
        assert penstock(s3, *arguments, f"{place}/routes", *more, code=1) == []
    assert not (tmp_path / "made").exists()


def copy_up(path: Path, url: str) -> None:
    """Put a file, or every file of a folder, where a URL says, as any tool would."""
    above, _, name = url.rpartition("/")
    objects = object_store_for(above)
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        below = "" if file == path else f"/{file.relative_to(path)}"
        objects.put(name + below, file.read_bytes())


@pytest.mark.parametrize("format", FORMATS)
def test_once_ships_all_there_is_but_what_a_writer_has_open(
    format: str, s3: S3Server, place: str, tmp_path: Path
) -> None:
    writer = open_writer(format, tmp_path / "ticks")
    fill(format, writer, 0, 20)
    writer.append_many([b"open 1", b"open 2"])
    (shipped,) = run_process(s3, "ship", "run", tmp_path / "ticks", place, "--once", "--json")
    assert shipped["lag_bytes"] > 0
    assert len(penstock(s3, "cat", f"{place}/ticks", "--json")) == 20
    writer.close()
    (shipped,) = penstock(s3, "ship", "run", tmp_path / "ticks", place, "--once", "--json")
    assert (shipped["lag_bytes"], shipped["backlog_segments"]) == (0, 0)
    assert penstock(s3, "cat", f"{place}/ticks", "--json") == penstock(s3, "cat", tmp_path / "ticks", "--json")
    (again,) = penstock(s3, "ship", "run", tmp_path / "ticks", place, "--once", "--json")
    assert (again["shipped_to"], again["shipped_bytes"]) == (shipped["shipped_to"], 0)


def test_the_newest_records_of_a_shipped_log_are_printed_without_fetching_the_rest(
    s3: S3Server, place: str, tmp_path: Path
) -> None:
    with open_writer("messagelog", tmp_path / "ticks") as writer:
        for start in range(0, 50, 10):
            fill("messagelog", writer, start, 10)
    penstock(s3, "ship", "run", tmp_path / "ticks", place, "--once", "--json")
    objects = object_store_for(place)
    oldest = min(info.key for info in objects.objects("ticks.segments") if info.key.endswith(".log"))
    objects.delete([oldest])
    rows = penstock(s3, "tail", "-n", 13, f"{place}/ticks", "--json")
    assert [row["seq"] for row in rows] == list(range(38, 51))
    (verified,) = penstock(s3, "ship", "verify", f"{place}/ticks", "--json", code=1)
    (problem,) = verified["problems"]
    assert problem["file"].endswith(oldest)
    assert "gone" in problem["reason"]


def test_a_bucket_that_is_not_there_ends_the_command(s3: S3Server, tmp_path: Path) -> None:
    with open_writer("messagelog", tmp_path / "ticks") as writer:
        writer.append(b"one")
    assert penstock(s3, "ship", "run", tmp_path / "ticks", "s3://no-such-bucket/x", "--once", code=2) == []


def test_a_quiet_log_is_rolled_and_shipped(s3: S3Server, place: str, tmp_path: Path) -> None:
    with open_writer("messagelog", tmp_path / "quiet") as writer:
        writer.append(b"the only one")
    (shipped,) = penstock(s3, "ship", "run", tmp_path / "quiet", place, "--once", "--roll", 0, "--json")
    assert shipped["shipped_to"] == 2
    (row,) = run_process(s3, "cat", f"{place}/quiet", "--json")
    assert row["payload"] == "the only one"


def test_nothing_at_a_url_is_said_in_one_line(s3: S3Server, place: str) -> None:
    for arguments in (("ship", "status", place), ("cat", f"{place}/none"), ("artifact", "inspect", f"{place}/none")):
        assert penstock(s3, *arguments, code=1) == []


@pytest.mark.parametrize("command", [("inspect",), ("verify",), ("pull", "copy.snap"), ("import", "copy.snap")])
def test_an_artifact_that_is_not_published_is_said_so_by_its_name(
    command: tuple[str, ...], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["artifact", command[0], f"{place}/none", *command[1:]])
    assert isinstance(done.exception, NotFoundError), done.exception
    assert f"{place}/none: no artifact is published here" in str(done.exception)


def test_a_bucket_that_is_not_there_is_said_by_every_command(s3: S3Server, tmp_path: Path) -> None:
    with MessageLog.open(tmp_path / "log") as log:
        log.append(b"1")
    with AppendLogStore.open(tmp_path / "fold.snap") as store:
        store.apply([KvUpdate.put("a", b"1", 1)], WatchCursor.of(1))
    place = "s3://no-such-bucket/x"
    for words in (
        ["cat", place + "/log"], ["stat", place + "/log"], ["verify", place + "/log"], ["tail", place + "/log"],
        ["fold", "dump", place + "/fold"], ["ship", "status", place], ["ship", "verify", place],
        ["ship", "compact", place], ["ship", "run", tmp_path / "log", place, "--once"],
        ["artifact", "verify", place + "/fold"], ["artifact", "inspect", place + "/fold"],
        ["artifact", "push", tmp_path / "fold.snap", place + "/fold"],
    ):  # fmt: skip
        done = CliRunner().invoke(app, [*map(str, words)])
        assert isinstance(done.exception, OptionsError), (words, done.exception)
        assert str(done.exception).startswith("s3://no-such-bucket"), words
        assert "there is no such bucket" in str(done.exception), words


def test_pruning_an_artifact_that_is_not_published_is_an_error(place: str) -> None:
    done = CliRunner().invoke(app, ["artifact", "prune", place + "/none"])
    assert isinstance(done.exception, NotFoundError)


def test_a_bucket_that_goes_away_is_no_idle_shipper(s3: S3Server, tmp_path: Path) -> None:
    bucket = f"gone-{uuid.uuid4().hex}"
    s3.make_bucket(bucket)
    store = object_store_for(f"s3://{bucket}")
    with open_writer("messagelog", tmp_path / "log") as writer, Shipper(tmp_path / "log", store) as shipper:
        store.delete([info.key for info in store.objects()])
        connection = http.client.HTTPConnection("127.0.0.1", s3.port)
        connection.request("DELETE", f"/{bucket}")
        assert connection.getresponse().status == 204
        for count in (1, 3):  # one after the other, and side by side
            for turn in range(count):
                fill("messagelog", writer, turn * 10, 10)
            with pytest.raises(RetryError, match="no such bucket"):
                shipper.step()


@pytest.mark.parametrize("as_json", [True, False])
def test_one_bad_log_of_a_fleet_hides_no_other(s3: S3Server, place: str, tmp_path: Path, *, as_json: bool) -> None:
    for name in ("a", "m", "z"):
        with open_writer("messagelog", tmp_path / name) as writer:
            fill("messagelog", writer, 0, 10)
        with Shipper(tmp_path / name, object_store_for(place)) as shipper:
            shipper.step()
    object_store_for(place).put("m.shipped.json", b"no manifest")
    for command in ("status", "verify"):
        done = CliRunner().invoke(app, ["ship", command, place, *(["--json"] if as_json else [])])
        assert done.exit_code == 1
        assert not isinstance(done.exception, PenstockError)
        if as_json:
            found = [json.loads(line) for line in done.stdout.splitlines()]
            assert [one["path"] for one in found] == [f"{place}/{name}" for name in "amz"]
            assert ["not a manifest" in str(one) for one in found] == [False, True, False]
        else:
            assert "not a manifest" in done.output
            assert f"{place}/z" in done.output


@pytest.mark.parametrize("harm", ["replaced", "missing"])
def test_a_log_that_fails_keeps_no_other_from_being_shipped(harm: str, s3: S3Server, tmp_path: Path) -> None:
    place = tmp_path / "up"
    for name in ("other/a", "a", "b", "c"):
        (tmp_path / "other").mkdir(exist_ok=True)
        with open_writer("messagelog", tmp_path / name) as writer:
            for start in range(0, 300, 10):
                fill("messagelog", writer, start, 10)
    if harm == "replaced":
        penstock(s3, "ship", "run", tmp_path / "other/a", place, "--once", "--json")
    bad = tmp_path / ("a" if harm == "replaced" else "none")
    penstock(s3, "ship", "run", bad, tmp_path / "b", tmp_path / "c", place, "--once", "--json", code=1)
    found = {about["channel"]: about["next_position"] for about in penstock(s3, "ship", "status", place, "--json")}
    assert (found["b"], found["c"]) == (301, 301)


def test_a_shipper_that_waits_for_a_log_is_interrupted_in_peace(tmp_path: Path) -> None:
    with open_writer("messagelog", tmp_path / "log") as writer:
        fill("messagelog", writer, 0, 10)
    command = [sys.executable, "-m", "penstock.cli.main", "ship", "run", "none", "log", "up"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "up" / "log.shipped.json").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "none: nothing was shipped; it waits: none: there is nothing here" in said
    assert "log: shipped to position" in said


def test_compacting_where_nothing_was_shipped_is_said(s3: S3Server, tmp_path: Path) -> None:
    with open_writer("messagelog", tmp_path / "log") as writer:
        fill("messagelog", writer, 0, 10)
    place = tmp_path / "up"
    penstock(s3, "ship", "compact", place, code=2)
    penstock(s3, "ship", "run", tmp_path / "log", place, "--once", "--json")
    penstock(s3, "ship", "compact", place / "log", code=2)
    (made,) = penstock(s3, "ship", "compact", place, "--json")
    assert made["rows"] == 10


def test_an_interrupt_ends_the_wait_for_a_store_that_does_not_answer(s3: S3Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {**os.environ, **s3.environment_for(silent.getsockname()[1])}
        command = [sys.executable, "-m", "penstock.cli.main", "cat", "s3://bucket/log"]
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
            asked, _ = silent.accept()
            with asked:
                assert asked.recv(1)
                process.send_signal(signal.SIGINT)
                try:
                    _, said = process.communicate(timeout=40)
                finally:
                    process.kill()
    assert (process.returncode, said) == (130, "")
