"""A NATS bucket passes the one suite of key-value backends, against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.kv import KvConnection, KvStore, NatsConnection, NatsOptions
from penstock.testing.kv_conformance import KvConformance
from penstock.testing.nats import NatsServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(str(tmp_path_factory.mktemp("nats"))) as running:
        yield running


class TestNats(KvConformance):
    url = ""

    @pytest.fixture(autouse=True)
    def _address(self, server: NatsServer) -> None:
        self.url = server.url

    def new_connection(self) -> KvConnection:
        return NatsConnection(NatsOptions(url=self.url))

    async def compact(self, store: KvStore, revision: int) -> None:
        api: Any = store._api  # type: ignore[attr-defined]
        await api.call(f"STREAM.PURGE.{api.stream}", {"seq": revision + 1})


class TestNatsWithoutTheFastLane(TestNats):
    """The documented way of nats-py gives the same answers, only later."""

    @pytest.fixture(autouse=True)
    def _plain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("penstock.kv.nats.lane", "penstock.kv.nats.connection"):
            monkeypatch.setattr(f"{module}.lane_of", lambda client: None)
