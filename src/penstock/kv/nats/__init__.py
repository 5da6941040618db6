"""Buckets on NATS JetStream."""

from penstock.kv.nats.connection import NatsConnection, nats_connect
from penstock.kv.nats.options import NatsOptions

__all__ = ["NatsConnection", "NatsOptions", "nats_connect"]
