"""Key-value buckets: roles that callers hold, and the backends behind them.

>>> from penstock.kv import StoreConfig
>>> StoreConfig(name="routes").discard
'new'
"""

from penstock.kv.embedded import EmbeddedConnection, EmbeddedKvStore, EmbeddedOptions, embedded_connect
from penstock.kv.nats import NatsConnection, NatsOptions, nats_connect
from penstock.kv.roles import (
    ConnectionCapabilities,
    KvConnection,
    KvReader,
    KvStore,
    KvWatcher,
    KvWriter,
    StoreConfig,
    Watch,
)

__all__ = [
    "KvConnection",
    "ConnectionCapabilities",
    "KvStore",
    "KvReader",
    "KvWatcher",
    "Watch",
    "KvWriter",
    "StoreConfig",
    "EmbeddedConnection",
    "EmbeddedKvStore",
    "EmbeddedOptions",
    "embedded_connect",
    "NatsConnection",
    "NatsOptions",
    "nats_connect",
]
