"""Promises of credentials: the right password and nobody else's, off the loop, and a bad file changes nothing."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from penstock.errors import Backpressure, OptionsError
from penstock.net import credentials
from penstock.net.credentials import (
    Credentials,
    CredentialsFile,
    change_credentials,
    hash_password,
    hash_token,
    new_token,
)

# Written by mosquitto_passwd 2.0.11 (the first with -H sha512).
MOSQUITTO = """\
ann:$6$fydWakKiDZBTFQwQ$xasl2AamX3uBoEnk5MnlZyYynNxAiSDTMLgLa3n28ll/169ynwHT/i3imNpKZY4kjVz19l9/zGPzD0zQryV4jQ==
bob:$7$101$hAxIHLvnqLL6yDKS$LVClAJ5tcooAeNcKI8rwdh5+PY/vZXG8TyUKClOgnDma0ikB6izLIHIv3XIrAAKbAisP6Pf+vgzd0wTNZSuGtA==
"""


def test_the_password_file_of_mosquitto_is_read_as_it_is() -> None:
    users = Credentials.parse(MOSQUITTO)
    assert users.verify("ann", b"s3cret")
    assert users.verify("bob", "päss wörd".encode())
    assert not users.verify("ann", b"s3cre")
    assert not users.verify("bob", b"s3cret")
    assert not users.verify("carl", b"s3cret")


def test_passwords_and_tokens_are_told_apart_from_wrong_ones() -> None:
    token = new_token()
    users = Credentials({"ann": hash_password("s3cret"), "pump": hash_token(token)})
    assert users.verify("ann", b"s3cret")
    assert not users.verify("ann", b"")
    assert users.verify("pump", token.encode())
    assert not users.verify("pump", b"s3cret")
    assert users.name_of_token(token.encode()) == "pump"
    assert users.name_of_token(b"") is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ann", "name:hash"),
        (":$6$a$b", "name:hash"),
        ("ann:plain", "not hashed"),
        ("ann:$6$AAAA$AAAA", "too short"),
        ("ann:$6$AAAA", "damaged"),
        ("ann:$7$x$AAAA$AAAA", "damaged"),
        ("ann:$7$101$AAAA$!!", "damaged"),
        ("ann:$token$zz", "damaged"),
        ("ann:$argon2id$v=19$nonsense", "damaged"),
    ],
)
def test_a_line_that_means_nothing_is_refused_with_its_number(line: str, words: str) -> None:
    with pytest.raises(OptionsError, match=f"users line 2: .*{words}"):
        Credentials.parse(f"# comment\n{line}\n", "users")


def test_a_name_that_is_there_twice_is_refused() -> None:
    line = f"ann:{hash_token('a')}"
    with pytest.raises(OptionsError, match="twice"):
        Credentials.parse(f"{line}\n{line}\n")


async def test_a_check_runs_off_the_loop_and_is_known_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "users")
    change_credentials(path, "ann", hash_password("s3cret"))
    users = CredentialsFile(path)
    threads: list[str] = []
    verify = Credentials.verify

    def watched(self: Credentials, name: str, password: bytes) -> bool:
        threads.append(threading.current_thread().name)
        return verify(self, name, password)

    monkeypatch.setattr(Credentials, "verify", watched)
    assert await users.check("ann", b"s3cret")
    assert await users.check("ann", b"s3cret")
    assert len(threads) == 1
    assert threads[0].startswith("penstock-passwords")
    assert not await users.check("ann", b"guess")
    assert not await users.check("ann", b"guess")  # a wrong one is paid for each time
    assert len(threads) == 3
    users.close()


async def test_a_password_that_was_changed_is_not_known_any_more(tmp_path: Path) -> None:
    path = str(tmp_path / "users")
    change_credentials(path, "ann", hash_password("old"))
    users = CredentialsFile(path)
    assert await users.check("ann", b"old")
    assert change_credentials(path, "ann", hash_password("new"))
    assert await users.check("ann", b"old")  # not reloaded yet
    assert users.reload() is None
    assert not await users.check("ann", b"old")
    assert await users.check("ann", b"new")
    change_credentials(path, "ann", None)
    assert users.reload() is None
    assert not await users.check("ann", b"new")
    users.close()


async def test_a_bad_file_keeps_the_old_credentials_loudly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "users"
    path.write_text(MOSQUITTO)
    users = CredentialsFile(str(path))
    path.write_text("ann:plain\n")
    assert "line 1" in str(users.reload())
    assert "NOT replaced" in caplog.text
    assert await users.check("ann", b"s3cret")
    path.unlink()
    assert "No such file" in str(users.reload())
    assert await users.check("ann", b"s3cret")
    path.write_text(MOSQUITTO)
    assert users.reload() is None
    users.close()


async def test_a_flood_of_passwords_is_refused_instead_of_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "WAITING", 2)
    path = str(tmp_path / "users")
    change_credentials(path, "ann", hash_password("s3cret"))
    users = CredentialsFile(path)
    answers = await asyncio.gather(
        *(users.check("ann", b"guess %d" % number) for number in range(4)), return_exceptions=True
    )
    assert sum(isinstance(answer, Backpressure) for answer in answers) == 2
    users.close()


def test_a_change_keeps_the_other_lines_and_who_may_read_them(tmp_path: Path) -> None:
    path = tmp_path / "users"
    path.write_text("# the works\n" + MOSQUITTO)
    path.chmod(0o640)
    assert not change_credentials(str(path), "carl", hash_token("x"))
    assert change_credentials(str(path), "ann", None)
    lines = path.read_text().splitlines()
    assert lines[0] == "# the works"
    assert [line.partition(":")[0] for line in lines[1:]] == ["bob", "carl"]
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["users"]
    with pytest.raises(OptionsError, match="cannot be a name"):
        change_credentials(str(path), "a:b", None)


def test_a_new_file_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "users"
    change_credentials(str(path), "ann", hash_token("x"))
    assert path.stat().st_mode & 0o777 == 0o600
