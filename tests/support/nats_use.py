"""What tests of NATS buckets share: a bucket of their own, a watch on it, history taken away."""

from __future__ import annotations

import uuid
from typing import Any

from penstock.kv import NatsConnection, StoreConfig
from penstock.kv.nats.bucket import NatsKvStore
from penstock.kv.nats.watch import NatsWatch

WAIT_SECONDS = 60.0


async def new_store(connection: NatsConnection, **settings: Any) -> NatsKvStore:
    return await connection.store_with_config(StoreConfig(name=f"t{uuid.uuid4().hex}", **settings))


def watch_of(store: NatsKvStore, revision: int | None, *, guarded: bool = True, **seconds: float) -> NatsWatch:
    prefix = f"$KV.{store.name}."
    return NatsWatch(store._api, prefix.encode(), [prefix + ">"], revision, guarded=guarded, **seconds)


async def purge_below(store: NatsKvStore, sequence: int) -> None:
    await store._api.call(f"STREAM.PURGE.{store._api.stream}", {"seq": sequence})
