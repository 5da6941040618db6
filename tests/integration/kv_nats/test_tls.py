"""TLS asked for is TLS or no connection: a password is never sent in clear."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import NotConnected, OptionsError
from penstock.kv import NatsConnection, NatsOptions
from penstock.testing.nats import NatsServer


def certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate of 127.0.0.1 that signs itself; return its file and that of its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "penstock tests")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(made.public_bytes(pem))
    form, secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(pem, form, secret))
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NatsServer, Path]]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = certificate(folder)
    arguments = ("--tls", "--tlscert", str(cert), "--tlskey", str(key), "--user", "me", "--pass", "s@crt")
    with NatsServer(str(folder), *arguments) as server:
        yield server, cert


class Listener:
    """A server that says a first line of the test's choice and keeps everything it is sent."""

    def __init__(self, info: dict[str, object]) -> None:
        self.info, self.heard, self.calls = info, b"", 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.calls += 1
        said = {"server_id": "x", "version": "2.11.0", "max_payload": 1048576, "headers": True, **self.info}
        writer.write(b"INFO " + json.dumps(said).encode() + b"\r\n")
        try:
            while line := await reader.readline():
                self.heard += line
                if line.startswith(b"PING"):
                    writer.write(b"PONG\r\n")
        except ConnectionError:
            pass
        writer.close()


@pytest.mark.parametrize("info", [{}, {"tls_required": False}, {"auth_required": True}])
async def test_nothing_is_sent_to_a_server_that_offers_no_tls(info: dict[str, object]) -> None:
    listener = Listener(info)
    server = await asyncio.start_server(listener.serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for url in (f"tls://me:hidden@{address}", f"nats://me:hidden@{address},tls://me:hidden@{address}"):
        with pytest.raises(NotConnected, match="no TLS") as caught:
            await NatsConnection(NatsOptions(url=url, operation_seconds=5)).connect()
        assert "hidden" not in str(caught.value)
    assert listener.calls
    assert listener.heard == b""
    server.close()


async def test_a_real_server_without_tls_is_not_spoken_to(server: NatsServer) -> None:
    with pytest.raises(NotConnected, match="no TLS"):
        await NatsConnection(NatsOptions(url=server.url.replace("nats://", "tls://me:hidden@"))).connect()


async def test_a_server_with_tls_is_reached_by_it(secured: tuple[NatsServer, Path], tmp_path: Path) -> None:
    server, cert = secured
    address = server.url.removeprefix("nats://")
    (tmp_path / "password").write_text("s@crt\n")
    for options in (
        NatsOptions(url=f"tls://me:s%40crt@{address}", ca_file=str(cert)),
        NatsOptions(url=f"tls://{address}", user="me", password_file=str(tmp_path / "password"), ca_file=str(cert)),
        NatsOptions.from_environment(
            f"tls://{address}", {"NATS_USER": "me", "NATS_PASSWORD": "s@crt", "NATS_CA": str(cert)}
        ),
    ):
        async with NatsConnection(options) as connection:
            store = await connection.store("tls")
            await store.writer.put("a", b"1")
            assert connection.client._transport._io_writer.get_extra_info("ssl_object") is not None
    with pytest.raises(NotConnected, match="certificate"):
        await NatsConnection(NatsOptions(url=f"tls://me:s%40crt@{address}", operation_seconds=5)).connect()


@pytest.mark.parametrize(
    "url",
    [
        "nats://me:hidd/en@host:4222", "nats://me:hid#den@host", "nats://me:hid?den@host:1", "nats://me:hidden@[host",
        "nats://me:hidden@host:port", "nats://me:hid\u2100den@host:1", "http://me:hidden@host:4222",
    ],
)  # fmt: skip
def test_an_address_that_cannot_be_read_is_never_quoted(url: str) -> None:
    with pytest.raises(OptionsError) as caught:
        NatsOptions(url=url).servers()
    shown = f"{caught.value} {caught.value.__cause__} {NatsOptions(url=url)!r}"
    assert "hid" not in shown
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_credentials_come_from_files_and_environment_and_are_never_shown(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hidden\n")
    options = NatsOptions(user="me", password_file=str(tmp_path / "password"))
    assert options.credentials() == {"user": "me", "password": "hidden"}
    given = {"NATS_USER": "me", "NATS_PASSWORD": "hidden", "NATS_CREDS": "", "HOME": "/"}
    found = NatsOptions.from_environment("nats://localhost", given)
    assert found.credentials() == {"user": "me", "password": "hidden"}
    assert NatsOptions.from_environment("nats://x", {"NATS_CREDS": "/u.creds"}).credentials() == {
        "user_credentials": "/u.creds"
    }
    assert NatsOptions(url="nats://hidden@localhost").credentials() == {"token": "hidden"}
    for one in (options, found, NatsOptions(url="nats://hidden@localhost")):
        assert "hidden" not in repr(one)
    with pytest.raises(OptionsError, match="cannot be read"):
        NatsOptions(user="me", password_file=str(tmp_path / "absent")).credentials()
    with pytest.raises(OptionsError, match="needs a user"):
        NatsOptions(password="hidden")
    with pytest.raises(OptionsError, match="absent"):
        NatsOptions(url="tls://x", ca_file=str(tmp_path / "absent")).tls_context()
