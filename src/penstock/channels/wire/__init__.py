"""The wire of the channel server: frames, one client's link, the server, modulators and resume."""

from __future__ import annotations

from penstock.channels.wire.blocking import BlockingClient
from penstock.channels.wire.client import Client
from penstock.channels.wire.modulator import Challenge
from penstock.channels.wire.news import Gap, Heard, HeardDirect, HeardEvent
from penstock.channels.wire.options import ChannelServerOptions, ModulatorLink
from penstock.channels.wire.server import ChannelServer
from penstock.channels.wire.settings import WireSettings

__all__ = [
    "ChannelServer",
    "ChannelServerOptions",
    "WireSettings",
    "ModulatorLink",
    "Challenge",
    "Client",
    "BlockingClient",
    "Heard",
    "HeardEvent",
    "HeardDirect",
    "Gap",
]
