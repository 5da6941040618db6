"""Promises of TLS: verified both ways, reloaded without dropping anyone, and a bad certificate replaces nothing."""

from __future__ import annotations

import asyncio
import datetime as dt
import importlib
import os
import shutil
import ssl
from pathlib import Path
from typing import Any

import pytest
from net_use import RUNNER_NAMES, RUNNERS, Cores, Noting, eventually, open_raw

from penstock.errors import NotConnected, OptionsError, ProtocolError
from penstock.net import (
    Admission,
    ConnectionLimits,
    ConnectionOptions,
    Endpoint,
    Target,
    Tls,
    TlsFiles,
    dial,
    listen,
    make_development_certificate,
)
from penstock.testing.clock import FakeClock

both_loops = pytest.mark.parametrize("runner", RUNNERS, ids=RUNNER_NAMES)


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return make_development_certificate(str(tmp_path / "server"))


def trusting(files: TlsFiles, **loaded: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files.certificate)
    if loaded:
        context.load_cert_chain(**loaded)
    return context


def target(address: str) -> Target:
    host, _, port = address.rpartition(":")
    return Target(host=host, port=int(port), tls=True)


class Echo(Noting):
    def received(self, data: bytes) -> None:
        super().received(data)
        self.connection.write(data)


@both_loops
def test_bytes_go_both_ways_in_long_runs_and_one_by_one(runner: Any, files: TlsFiles) -> None:
    async def main() -> None:
        async with await listen([Endpoint(name="tls", tls=Tls(files))], cores := Cores(Echo)) as listeners:
            caller = Noting()
            connection = await dial(target(listeners.addresses["tls"]), caller, tls=trusting(files))
            assert connection.peer.tls
            long = os.urandom(3 << 20)
            for number in range(0, len(long), 100_000):
                connection.write(long[number : number + 100_000])
                await asyncio.sleep(0)
            for _ in range(50):
                connection.write(b".")
                await asyncio.sleep(0)
            await caller.gets(long + b"." * 50)
            connection.close()
            core = await cores.nth()
            assert await core.hears("closed") == "the peer closed the connection"

    runner(main())


@both_loops
def test_a_foreign_client_speaks_1_2_and_1_3_and_nothing_older(runner: Any, files: TlsFiles) -> None:
    async def main() -> None:
        async with await listen([Endpoint(name="tls", tls=Tls(files))], Cores(Echo)) as listeners:
            host, _, port = listeners.addresses["tls"].rpartition(":")
            for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
                context = trusting(files)
                context.minimum_version = context.maximum_version = version
                reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
                writer.write(b"hello")
                assert await reader.readexactly(5) == b"hello"
                writer.close()
                await writer.wait_closed()
        async with await listen(
            [
                Endpoint(
                    name="tls", tls=Tls(TlsFiles(certificate=files.certificate, key=files.key, minimum_version="1.3"))
                )
            ],
            Cores(Echo),
        ) as listeners:
            context = trusting(files)
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            with pytest.raises(ProtocolError, match="TLS handshake"):
                await dial(target(listeners.addresses["tls"]), Noting(), tls=context)

    runner(main())


@both_loops
def test_a_server_that_is_not_believed_is_not_spoken_to(runner: Any, files: TlsFiles) -> None:
    async def main() -> None:
        async with await listen([Endpoint(name="tls", tls=Tls(files))], Cores()) as listeners:
            with pytest.raises(ProtocolError, match="certificate"):
                await dial(target(listeners.addresses["tls"]), Noting())

    runner(main())


@both_loops
def test_the_name_in_a_client_certificate_is_the_identity(runner: Any, files: TlsFiles, tmp_path: Path) -> None:
    pump = make_development_certificate(str(tmp_path / "client"), ["pump-7"])
    stranger = make_development_certificate(str(tmp_path / "stranger"), ["pump-7"])
    mutual = TlsFiles(
        certificate=files.certificate, key=files.key, client_ca=pump.certificate, require_client_certificate=True
    )

    async def main() -> None:
        async with await listen([Endpoint(name="tls", tls=Tls(mutual))], cores := Cores()) as listeners:
            context = trusting(files, certfile=pump.certificate, keyfile=pump.key)
            connection = await dial(target(listeners.addresses["tls"]), Noting(), tls=context)
            connection.write(b"x")
            assert (await cores.nth()).connection.peer.identity == "pump-7"
            for refused in (trusting(files), trusting(files, certfile=stranger.certificate, keyfile=stranger.key)):
                caller = Noting()
                try:  # TLS 1.3: a client learns that it was refused after its own handshake
                    await dial(target(listeners.addresses["tls"]), caller, tls=refused)
                    await caller.hears("closed")
                except (NotConnected, ProtocolError):
                    pass
            assert len(cores.made) == 1

    runner(main())


@both_loops
def test_a_client_certificate_may_be_optional(runner: Any, files: TlsFiles) -> None:
    optional = TlsFiles(certificate=files.certificate, key=files.key, client_ca=files.certificate)

    async def main() -> None:
        async with await listen([Endpoint(name="tls", tls=Tls(optional))], cores := Cores()) as listeners:
            await dial(target(listeners.addresses["tls"]), Noting(), tls=trusting(files))
            assert (await cores.nth()).connection.peer.identity is None

    runner(main())


@both_loops
def test_new_connections_get_the_reloaded_certificate_and_old_ones_go_on(
    runner: Any, files: TlsFiles, tmp_path: Path
) -> None:
    other = make_development_certificate(str(tmp_path / "other"))

    async def main() -> None:
        tls = Tls(files)
        async with await listen([Endpoint(name="tls", tls=tls)], Cores(Echo)) as listeners:
            old = await dial(target(listeners.addresses["tls"]), caller := Noting(), tls=trusting(files))
            before = trusting(files)
            shutil.copy(other.certificate, files.certificate)
            assert "mismatch" in listeners.reload_certificates()[0]  # the key has not followed yet
            await dial(target(listeners.addresses["tls"]), Noting(), tls=before)
            shutil.copy(other.key, files.key)
            assert tls.reload_if_changed()
            assert not tls.reload_if_changed()
            assert tls.problem is None
            await dial(target(listeners.addresses["tls"]), Noting(), tls=trusting(other))
            with pytest.raises(ProtocolError):
                await dial(target(listeners.addresses["tls"]), Noting(), tls=before)
            old.write(b"still here")
            await caller.gets(b"still here")

    runner(main())


def test_a_bad_certificate_keeps_the_old_one_loudly(files: TlsFiles, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock(now_ns=dt_ns(dt.datetime.now(dt.UTC)))
    tls = Tls(files, clock)
    context = tls.context
    good = Path(files.certificate).read_text()
    for bad in ("", "nonsense", good[: len(good) // 2]):
        Path(files.certificate).write_text(bad)
        assert tls.reload_if_changed()
        assert tls.problem is not None
        assert tls.context is context
    os.unlink(files.certificate)
    assert "No such file" in str(tls.reload())
    Path(files.certificate).write_text(good)
    clock.jump(400 * 86_400.0)
    assert "expired" in str(tls.reload())
    clock.jump(-800 * 86_400.0)
    assert "not valid before" in str(tls.reload())
    assert tls.context is context
    assert caplog.text.count("NOT replaced") == 6


def dt_ns(moment: dt.datetime) -> int:
    return int(moment.timestamp()) * 1_000_000_000


def test_what_cannot_serve_is_refused_at_the_start(files: TlsFiles, tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match=r"missing\.pem"):
        Tls(TlsFiles(certificate=str(tmp_path / "missing.pem"), key=files.key))
    with pytest.raises(OptionsError, match="minimum_version"):
        TlsFiles(certificate="c", key="k", minimum_version="1.1")
    with pytest.raises(OptionsError, match="client_ca"):
        TlsFiles(certificate="c", key="k", require_client_certificate=True)
    with pytest.raises(OptionsError, match="nobody"):
        Tls(TlsFiles(certificate=files.certificate, key=files.key, client_ca=str(tmp_path / "nobody.pem")))


def test_a_development_key_is_for_its_owner_only(files: TlsFiles) -> None:
    assert os.stat(files.key).st_mode & 0o777 == 0o600


@both_loops
@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n", bytes(2000)])
def test_a_peer_that_does_not_shake_hands_is_dropped(runner: Any, files: TlsFiles, said: bytes) -> None:
    async def main() -> None:
        endpoint = Endpoint(name="tls", tls=Tls(files), options=ConnectionOptions(handshake_seconds=0.3))
        async with await listen([endpoint], cores := Cores()) as listeners:
            reader, writer = await open_raw(listeners.addresses["tls"])
            writer.write(said)
            try:
                await reader.read()
            except ConnectionResetError:
                pass
            assert not cores.made
            await eventually(lambda: not listeners.connections)
            writer.close()

    runner(main())


@both_loops
def test_tls_behind_a_proxy_header_in_the_same_packet(runner: Any, files: TlsFiles) -> None:
    async def main() -> None:
        async with await listen([Endpoint(name="tls", tls=Tls(files), proxy=True)], cores := Cores(Echo)) as listeners:
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            client = trusting(files).wrap_bio(incoming, outgoing, server_hostname="localhost")
            with pytest.raises(ssl.SSLWantReadError):
                client.do_handshake()
            reader, writer = await open_raw(listeners.addresses["tls"])
            writer.write(b"PROXY TCP6 2001:db8::7 ::1 1 2\r\n" + outgoing.read())
            while True:
                incoming.write(await reader.read(65_536))
                try:
                    client.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    continue
            client.write(b"hello")
            writer.write(outgoing.read())
            core = await cores.nth()
            await core.gets(b"hello")
            assert core.connection.peer.address == "[2001:db8::7]:1"
            writer.close()

    runner(main())


@both_loops
def test_who_is_turned_away_costs_no_handshake(runner: Any, files: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        module = importlib.import_module("penstock.net.listen")

        made = []
        original = module.TlsFilter

        def counted(*args: Any) -> Any:
            made.append(args)
            return original(*args)

        monkeypatch.setattr(module, "TlsFilter", counted)
        admission = Admission(ConnectionLimits(connects_per_second_per_address=1))
        async with await listen([Endpoint(name="tls", tls=Tls(files))], Cores(), admission=admission) as listeners:
            for _ in range(10):
                _, writer = await open_raw(listeners.addresses["tls"])
                writer.close()
            await eventually(lambda: admission.refused + len(made) == 10)
            assert len(made) <= 3

    runner(main())


@both_loops
def test_a_certificate_is_replaced_when_its_files_change(runner: Any, files: TlsFiles, tmp_path: Path) -> None:
    other = make_development_certificate(str(tmp_path / "other"))

    async def main() -> None:
        tls = Tls(files)
        before = tls.context
        async with await listen([Endpoint(name="door", tls=tls)], Cores(Echo), look_seconds=0.01) as listeners:
            shutil.copy(other.key, files.key)
            await eventually(lambda: tls.problem is not None)  # the certificate has not followed yet: loud, and kept
            assert tls.context is before
            shutil.copy(other.certificate, files.certificate)
            await eventually(lambda: tls.context is not before)
            connection = await dial(target(listeners.addresses["door"]), Noting(), tls=trusting(other))
            connection.close()

    runner(main())
