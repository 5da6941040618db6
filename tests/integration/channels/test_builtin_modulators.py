"""Promise: the modulators that come with the server let in whom they should, and refuse what does not fit."""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import json
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from wire_use import address, moderated, plain_token

from penstock.channels.ids import ChannelId, Nid
from penstock.channels.wire import Client
from penstock.channels.wire.builtin import JsonSchema, JsonWebTokens, PasswordFile
from penstock.errors import OptionsError, Refused
from penstock.net import hash_password
from penstock.net.credentials import change_credentials, hash_token

OPS, ANN = ChannelId("ops", "localhost"), Nid("ann", "localhost")


async def test_a_password_file_lets_in_who_is_in_it(tmp_path: Path) -> None:
    passwords = str(tmp_path / "passwords")
    change_credentials(passwords, "ann", hash_password("s3cret"))
    change_credentials(passwords, "probe", hash_token("a-long-token"))
    server = await moderated(tmp_path, PasswordFile(passwords))
    try:
        async with await Client.connect(address(server), token=plain_token("ann")) as ann:
            assert ann.nid == "ann@localhost"
            await ann.join("c")
            await ann.configure("c", persist=True)
        for wrong in (plain_token("ann", "guess"), plain_token("eve"), base64.b64encode(b"x").decode(), "x"):
            with pytest.raises(Refused, match="UNAUTHORIZED"):
                await Client.connect(address(server), token=wrong)
    finally:
        await server.stop()


async def test_a_modulator_with_a_name_reads_its_files_again_at_a_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node says of a SIGHUP that passwords are read again; who was taken out of the file came in until it ended."""
    passwords = str(tmp_path / "passwords")
    monkeypatch.setenv("PENSTOCK_PASSWORDS", passwords)
    for name in ("ann", "eve"):
        change_credentials(passwords, name, hash_token(f"{name}-has-a-long-token"))
    server = await moderated(tmp_path, "penstock.channels.wire.builtin:PasswordFile")
    try:
        async with await Client.connect(address(server), token="eve-has-a-long-token") as eve:
            change_credentials(passwords, "eve", None)
            assert server.check_reload() == []
            assert server.reload() == []
            await eve.join("c")  # who is in stays in
        with pytest.raises(Refused, match="UNAUTHORIZED"):
            await Client.connect(address(server), token="eve-has-a-long-token")
        Path(passwords).write_text("ann:no hash\n")
        for problems in (server.check_reload(), server.reload()):
            assert len(problems) == 1
            assert "line 1: 'ann' has a password that is not hashed" in problems[0]
        async with await Client.connect(address(server), token="ann-has-a-long-token") as ann:
            assert ann.nid == "ann@localhost"
    finally:
        await server.stop()


async def test_a_json_web_token_lets_in_its_subject_and_nothing_else_does(tmp_path: Path) -> None:
    secret = b"k" * 32
    (tmp_path / "key").write_bytes(secret)
    now = dt.datetime.now(dt.UTC)
    good = {"sub": "ann", "aud": "channels", "exp": now + dt.timedelta(minutes=5)}
    modulator = JsonWebTokens(str(tmp_path / "key"), audience="channels")
    assert modulator.authenticate(jwt.encode(good, secret, "HS256")) == "ann"
    wrong = [
        jwt.encode(good, b"x" * 32, "HS256"),
        jwt.encode({**good, "exp": now - dt.timedelta(minutes=5)}, secret, "HS256"),
        jwt.encode({**good, "aud": "other"}, secret, "HS256"),
        jwt.encode({name: good[name] for name in ("sub", "aud")}, secret, "HS256"),
        jwt.encode({**good, "sub": "bob"}, "", "none"),
        "not.a.token",
    ]
    assert [modulator.authenticate(token) for token in wrong] == [None] * len(wrong)
    server = await moderated(tmp_path, modulator)
    try:
        async with await Client.connect(address(server), token=jwt.encode(good, secret, "HS256")) as ann:
            assert ann.nid == "ann@localhost"
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("claim", "seconds", "good"),
    [
        ("iat", 20, True), ("nbf", 20, True), ("exp", -20, True),
        ("iat", 300, False), ("nbf", 300, False), ("exp", -300, False),
    ],
)  # fmt: skip
def test_the_clock_of_whoever_signs_tokens_may_be_a_little_off(
    claim: str, seconds: int, good: bool, tmp_path: Path
) -> None:
    """A token that was made just now is not from the future: a client that is refused does not come back."""
    secret = b"k" * 32
    (tmp_path / "key").write_bytes(secret)
    now = dt.datetime.now(dt.UTC)
    claims = {"sub": "ann", "exp": now + dt.timedelta(minutes=5), claim: now + dt.timedelta(seconds=seconds)}
    token = jwt.encode(claims, secret, "HS256")
    assert JsonWebTokens(str(tmp_path / "key")).authenticate(token) == ("ann" if good else None)


@pytest.mark.parametrize(
    "text", ["-----BEGIN PUBLIC KEY-----\nnonsense\n-----END PUBLIC KEY-----\n", "-----BEGIN nothing"]
)
def test_a_key_that_is_none_is_refused_at_once(text: str, tmp_path: Path) -> None:
    """Every login would find that out anew."""
    (tmp_path / "key").write_text(text)
    with pytest.raises(OptionsError, match="key: no public key"):
        JsonWebTokens(str(tmp_path / "key"))


@pytest.mark.parametrize("secret", [b"", b"\n", b"sesame", b"k" * 31])
def test_a_secret_that_can_be_guessed_is_refused(secret: bytes, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(secret)
    with pytest.raises(OptionsError, match="32 are wanted"):
        JsonWebTokens(str(tmp_path / "key"))


@pytest.mark.parametrize("place", ["#/nope", "other.json", "file:///etc/passwd", "http://127.0.0.1:9/x.json"])
def test_a_schema_that_refers_to_what_is_not_there_is_refused(place: str) -> None:
    """Nothing is fetched, and nothing is found missing only when a message comes."""
    with pytest.raises(OptionsError, match=f"the schema of ops: .*{place}"):
        JsonSchema({"ops": {"type": "array", "items": {"$ref": place}}})
    JsonSchema(
        {"ops": {"const": {"$ref": place}, "$defs": {"a": {"$id": "a/b", "$defs": {"c": {}}, "$ref": "b#/$defs/c"}}}}
    )


@pytest.mark.parametrize(
    ("payload", "fits"),
    [
        ([{"a": n} for n in range(6000)], True), ([{"a": n % 5999} for n in range(6000)], False),
        ([1, True, "1", None, [1], {"1": 1}, 0, False, []], True), ([1, 1.0], False), ([[0], [False]], True),
        ([{"a": 1, "b": 2}, {"b": 2, "a": 1}], False),
    ],
)  # fmt: skip
def test_many_items_are_compared_in_no_time(payload: list[Any], fits: bool) -> None:
    """Each with each takes minutes: one message would keep a thread, and with it the modulator."""
    checks = JsonSchema({"ops": {"uniqueItems": True}})
    data = json.dumps(payload).encode()
    assert checks.transform(ANN, OPS, data) == (data if fits else None)


@pytest.mark.parametrize("payload", [b"1e400", b"-Infinity", b"1" * 4000])
def test_a_number_beyond_all_bounds_is_refused(payload: bytes) -> None:
    assert JsonSchema({"ops": {"multipleOf": 0.1}}).transform(ANN, OPS, payload) is None


async def test_a_schema_refuses_payloads_that_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "schemas").mkdir()
    (tmp_path / "schemas" / "ops.east.json").write_text('{"type": "object", "required": ["value"]}')
    server = await moderated(tmp_path, JsonSchema({"ops/east": {"type": "object", "required": ["value"]}}))
    try:
        async with await Client.connect(address(server), username="ann", reconnect=False) as ann:
            await ann.join("ops/east")
            assert await ann.broadcast("ops/east", b'{"value": 1}') == 1
            with pytest.raises(Refused, match="BAD_REQUEST"):
                await ann.broadcast("ops/east", b"{}")
    finally:
        await server.stop()


async def test_keys_of_tokens_come_from_a_url(tmp_path: Path) -> None:
    """A key set is fetched over HTTP and kept; a server of keys that is away is a failure and lets nobody in."""
    private = ec.generate_private_key(ec.SECP256R1())
    other = ec.generate_private_key(ec.SECP256R1())
    public = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(private.public_key()))
    asked: list[str] = []

    async def keys(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).decode().split()[1])
        body = json.dumps({"keys": [{**public, "kid": "one", "use": "sig", "alg": "ES256"}]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()
        await writer.wait_closed()

    claims = {"sub": "ann", "exp": dt.datetime.now(dt.UTC) + dt.timedelta(minutes=5)}
    good = jwt.encode(claims, private, "ES256", headers={"kid": "one"})
    forged = jwt.encode(claims, other, "ES256", headers={"kid": "one"})
    unknown = jwt.encode(claims, private, "ES256", headers={"kid": "two"})
    async with await asyncio.start_server(keys, "127.0.0.1", 0) as http:
        url = f"http://127.0.0.1:{http.sockets[0].getsockname()[1]}/keys.json"
        server = await moderated(tmp_path, JsonWebTokens(url=url))
        try:
            for _ in range(3):
                async with await Client.connect(address(server), token=good) as ann:
                    assert ann.nid == "ann@localhost"
            assert asked == ["/keys.json"]
            for token in (forged, unknown):
                with pytest.raises(Refused, match="UNAUTHORIZED"):
                    await Client.connect(address(server), token=token, reconnect=False)
            http.close()
            await http.wait_closed()
            away = JsonWebTokens(url=url)
            with pytest.raises(jwt.PyJWKClientConnectionError):
                await asyncio.to_thread(away.authenticate, good)
        finally:
            await server.stop()


async def test_a_key_that_was_taken_out_of_its_set_lets_nobody_in() -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    public = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(private.public_key()))
    names = ["one"]

    async def keys(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps({"keys": [{**public, "kid": name, "use": "sig", "alg": "ES256"} for name in names]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()
        await writer.wait_closed()

    claims = {"sub": "ann", "exp": dt.datetime.now(dt.UTC) + dt.timedelta(minutes=5)}
    token = jwt.encode(claims, private, "ES256", headers={"kid": "one"})
    async with await asyncio.start_server(keys, "127.0.0.1", 0) as http:
        url = f"http://127.0.0.1:{http.sockets[0].getsockname()[1]}/keys.json"
        tokens = JsonWebTokens(url=url, keep_seconds=1e-6)
        assert await asyncio.to_thread(tokens.authenticate, token) == "ann"
        names[:] = ["two"]
        assert await asyncio.to_thread(tokens.authenticate, token) is None
