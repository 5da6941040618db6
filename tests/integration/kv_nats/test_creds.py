"""Credentials of a real server in operator mode: in base 64, from a file, and which of them wins."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nkeys
import pytest

from penstock.errors import NotConnected
from penstock.kv import NatsConnection, NatsOptions
from penstock.testing.nats import NatsServer

LIMITS = "subs data payload imports exports conn leaf mem_storage disk_storage streams consumer"
NO_LIMITS = dict.fromkeys(LIMITS.split(), -1)


def new_key(prefix: int) -> nkeys.KeyPair:
    return nkeys.from_seed(nkeys.encode_seed(os.urandom(32), prefix))


def jwt(issuer: nkeys.KeyPair, subject: nkeys.KeyPair, name: str, claims: dict[str, Any]) -> str:
    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    body = {
        "jti": name, "iat": int(time.time()), "iss": issuer.public_key.decode(), "name": name,
        "sub": subject.public_key.decode(), "nats": {**claims, "version": 2},
    }  # fmt: skip
    text = f"{part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{part(body)}"
    return f"{text}.{base64.urlsafe_b64encode(issuer.sign(text.encode())).decode().rstrip('=')}"


def creds_text(user_jwt: str, user: nkeys.KeyPair) -> str:
    return (
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NatsServer, str, str]]:
    """Yield (server, credentials it takes, credentials of a stranger)."""
    folder = tmp_path_factory.mktemp("nats")
    operator, system, account = (
        new_key(nkeys.PREFIX_BYTE_OPERATOR),
        new_key(nkeys.PREFIX_BYTE_ACCOUNT),
        new_key(nkeys.PREFIX_BYTE_ACCOUNT),
    )
    user, stranger = new_key(nkeys.PREFIX_BYTE_USER), new_key(nkeys.PREFIX_BYTE_USER)
    grant = {"type": "account", "limits": {**NO_LIMITS, "wildcards": True}}
    resolved = {
        account.public_key.decode(): jwt(operator, account, "app", grant),
        system.public_key.decode(): jwt(operator, system, "sys", {"type": "account", "limits": {"conn": -1}}),
    }
    config = folder / "server.conf"
    config.write_text(
        f"operator: {jwt(operator, operator, 'op', {'type': 'operator'})}\n"
        f"system_account: {system.public_key.decode()}\nresolver: MEMORY\nresolver_preload: {{\n"
        + "\n".join(f"  {key}: {text}" for key, text in resolved.items())
        + "\n}\n"
    )
    unlimited = {"type": "user", "subs": -1, "data": -1, "payload": -1}
    allowed = creds_text(jwt(account, user, "user", unlimited), user)
    refused = creds_text(jwt(stranger, stranger, "stranger", unlimited), stranger)
    with NatsServer(str(folder), "--config", str(config)) as server:
        yield server, allowed, refused


async def test_credentials_open_the_door_and_the_first_ones_are_used(
    secured: tuple[NatsServer, str, str], tmp_path: Path
) -> None:
    server, allowed, refused = secured
    good, bad = tmp_path / "good.creds", tmp_path / "bad.creds"
    good.write_text(allowed)
    bad.write_text(refused)
    encoded = base64.b64encode(allowed.encode()).decode()
    for options in (
        NatsOptions(url=server.url, creds=encoded),
        NatsOptions(url=server.url, creds_file=str(good)),
        NatsOptions(url=server.url.replace("//", "//me:wrong@"), creds=encoded, creds_file=str(bad)),
    ):
        async with NatsConnection(options) as connection:
            store = await connection.store("creds")
            await store.writer.put("a", b"1")
    with pytest.raises(NotConnected):
        await NatsConnection(NatsOptions(url=server.url, creds_file=str(bad))).connect()
    with pytest.raises(NotConnected):
        await NatsConnection(NatsOptions(url=server.url)).connect()
