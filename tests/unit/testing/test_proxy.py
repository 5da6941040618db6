"""The proxy does to bytes what it says: nothing else would make a test of it worth anything."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from penstock.testing.proxy import TcpProxy


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        yield server


@pytest.fixture
def proxy(listener: socket.socket) -> Iterator[TcpProxy]:
    with TcpProxy(listener.getsockname()[1]) as between:
        yield between


def dial(proxy: TcpProxy, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(("127.0.0.1", proxy.port), 60)
    server, _ = listener.accept()
    server.settimeout(60)
    return client, server


def receive(side: socket.socket, length: int) -> bytes:
    """Return exactly so many bytes; a socket with a timeout hands out what there is."""
    found = b""
    while len(found) < length and (more := side.recv(length - len(found))):
        found += more
    return found


def test_bytes_go_both_ways(proxy: TcpProxy, listener: socket.socket) -> None:
    client, server = dial(proxy, listener)
    with client, server:
        data = bytes(range(256)) * 8192
        client.sendall(data[:1000])
        assert receive(server, 1000) == data[:1000]
        server.sendall(data[:100_000])
        assert receive(client, 100_000) == data[:100_000]
        assert (proxy.passed, proxy.accepted) == (100_000, 1)


def test_a_stalled_network_closes_nothing_and_loses_nothing(proxy: TcpProxy, listener: socket.socket) -> None:
    client, server = dial(proxy, listener)
    with client, server:
        proxy.stall(after=3)
        server.sendall(b"abcdef")
        assert proxy.broken()
        assert receive(client, 3) == b"abc"
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(100)
        client.sendall(b"up")
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.recv(2)
        proxy.heal()
        client.settimeout(60)
        server.settimeout(60)
        assert receive(client, 3) == b"def"
        assert receive(server, 2) == b"up"


def test_what_was_sent_before_the_server_was_there_is_not_lost(proxy: TcpProxy, listener: socket.socket) -> None:
    proxy.stall()
    with socket.create_connection(("127.0.0.1", proxy.port), 60) as client:
        client.sendall(b"early")
        while not proxy.accepted:
            time.sleep(0.001)
        proxy.heal()
        with listener.accept()[0] as server:
            server.settimeout(60)
            assert receive(server, 5) == b"early"


def test_a_connection_left_dead_stays_so_and_new_ones_work(proxy: TcpProxy, listener: socket.socket) -> None:
    client, server = dial(proxy, listener)
    with client, server:
        proxy.stall()
        proxy.heal(old="dead")
        server.sendall(b"x")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        again, peer = dial(proxy, listener)
        with again, peer:
            peer.sendall(b"y")
            assert again.recv(1) == b"y"


def test_a_cut_network_resets_what_is_there_and_what_comes(proxy: TcpProxy, listener: socket.socket) -> None:
    client, server = dial(proxy, listener)
    with client, server:
        proxy.cut()
        for side in (client, server):
            with pytest.raises(ConnectionResetError):
                side.recv(1)
        with pytest.raises(ConnectionResetError), socket.create_connection(("127.0.0.1", proxy.port), 60) as late:
            late.recv(1)
        proxy.heal()
        again, peer = dial(proxy, listener)
        with again, peer:
            peer.sendall(b"z")
            assert again.recv(1) == b"z"
