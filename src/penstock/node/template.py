"""The configuration that ``penstock init`` writes: every key with its default, said in a line."""

from __future__ import annotations

from typing import Final

__all__ = ["TEMPLATE"]

TEMPLATE: Final = """\
# A Penstock node.  Everything here is a default: a line without # in front changes it.
# Any key can also come from the environment, as PENSTOCK__MQTT__PORT=1884; ${NAME} in a text is a variable of it.
# penstock check penstock.toml explains every mistake; penstock serve --config penstock.toml runs it.

# data = "./penstock-data"      # where everything is kept; one node at a time
# on_failure = "serve"          # a part that cannot start: "serve" the rest and try again, or "stop"
# drain_seconds = 10.0          # how long clients have to leave when the node stops
# log_format = "text"           # or "json"

[mqtt]                          # MQTT 3.1, 3.1.1 and 5.0
# enabled = true
# bind = "127.0.0.1"            # other machines reach it only when this says so
# port = 1883                   # 0 picks a free one
# ws_port = 8083                # WebSocket
# tls_port = 8883               # needs cert and key
# cert = "server.pem"
# key = "server.key"
# passwords = "passwords"       # penstock mqtt passwd passwords USER
# acl = "acl"                   # mosquitto's form
# anonymous = true              # default: only on loopback and without a password file

# [mqtt.broker]
# max_queued_messages = 100000  # for one session that is away
# max_queued_bytes = 67108864

# Broker traffic is copied into a log before its publisher gets an answer.
# [[mqtt.taps]]
# filter = "plant/#"
# path = "penstock-data/logs/plant"
# sync = "none"                 # or "always": acknowledgements wait for the disk

# The records of a log are published.
# [[mqtt.feeds]]
# log = "penstock-data/logs/alerts"
# topic = "alerts/{key}"
# retain = true

[channels]                      # channels with members: narwhal's protocol
# enabled = true
# bind = "127.0.0.1"
# port = 22622                  # TLS; a certificate for localhost is made unless cert and key are given
# plain_port = 22623            # without TLS
# sync = "always"               # or "interval", "none"
# modulator = "module:Class"    # who may log in, join and broadcast
# [channels.tap]                # copies into logs: handler, or "*" for all
# "*" = "penstock-data/logs/said"

[ingest]                        # other processes of this machine hand records to the node, which writes them
# enabled = true
# unix = "penstock-data/ingest.sock"
# port = 8781                   # TCP, loopback only
# any_channel = true            # whether a channel that is not named below is made on first use

[disk]                          # an alarm before, what may go first, and refusal at the end
# budget_bytes = 0              # for the data directory; 0: what the disk has
# reserve_bytes = 67108864      # stays free whatever the budget says
# alarm_at = 0.8
# sacrifice_at = 0.9            # channels with sacrifice = 1 and more lose their oldest segments

[ledger]                        # penstock ledger penstock-data
# look_seconds = 10.0
# keep_hours = 2160

# [telemetry]                   # traces go to a collector of OpenTelemetry; needs the extra otel
# enabled = true
# endpoint = "http://127.0.0.1:4318"

[http]                          # /livez /readyz /metrics /api
# enabled = true
# bind = "127.0.0.1"
# port = 8780
# token = "${PENSTOCK_TOKEN}"   # asked for under /api when it is not empty

# A local table that follows a log of keyed records; as many as you like.
# [[fold]]
# name = "latest"
# log = "penstock-data/readings"
# store = "penstock-data/latest.snap"
# backend = "append-log"        # or "rocksdb", "lmdb"
# bootstrap = "s3://bucket/folds/latest"    # an artifact to begin with where there is no store yet

# A channel that ingest writes; without one it is a message log with these defaults.
# [[channel]]
# name = "readings"
# format = "messagelog"         # or "xchannel"
# content = "raw"               # or "envelope/1"
# sync = "interval"             # or "always": acknowledged when it survives a power cut; "none"
# max_messages = 0              # how many it keeps at least; 0 keeps all
# max_payload_bytes = 1048576
# sacrifice = 0                 # what may go when the disk budget is used up: the highest number first, 0 never

# A channel and MQTT topics that say the same: devices and people share a channel.
# [[meeting]]
# channel = "ops/east"
# filter = "plant/7/chat"       # with wildcards only together with topic = "…" or direction = "to_channel"
# persist = false               # whether the channel is kept; needs channels.modulator

# A fold is published as an artifact, for other nodes to begin with.
# [[export]]
# fold = "latest"
# url = "s3://bucket/folds"
# every_seconds = 300.0

# Sealed segments of a log go to an object store as they are.
# [[ship]]
# log = "penstock-data/logs/readings"
# url = "s3://bucket/edge-1"
# delete_local = false
# roll_seconds = 60.0           # seal the open segment when its oldest record is older than this
# paused = false                # send nothing for now; what is not shipped is kept
"""
