"""Floor 7: channels with members, rules and history that survive.

>>> import asyncio, tempfile
>>> async def demo(folder):
...     async with await ChannelManager.open(folder) as manager:
...         jobs = manager.channel("jobs")
...         await jobs.join("ann@localhost")
...         await jobs.configure("ann@localhost", persist=True, type="fifo")
...         await jobs.push("ann@localhost", b"mend pump 7")
...         return (await jobs.pop("ann@localhost")).payload
>>> with tempfile.TemporaryDirectory() as folder:
...     asyncio.run(demo(folder))
b'mend pump 7'
"""

from penstock.channels.channel import Channel
from penstock.channels.commands import ChannelMessage, Event, Page, StoredMessage
from penstock.channels.ids import ChannelId, Nid
from penstock.channels.manager import ChannelManager
from penstock.channels.model import Allow, ChannelAcl, ChannelType, Config, Limits, PersistedChannel, StoredConfig
from penstock.channels.options import ManagerOptions
from penstock.channels.session import ChannelSession
from penstock.channels.store import (
    ChannelStore,
    FileChannelStore,
    MemoryChannelStore,
    channel_hash,
)
from penstock.channels.wire import BlockingClient, ChannelServer, ChannelServerOptions, Client, WireSettings

__all__ = [
    "ChannelManager",
    "ManagerOptions",
    "Channel",
    "ChannelSession",
    "StoredMessage",
    "Event",
    "ChannelMessage",
    "Page",
    "Nid",
    "ChannelId",
    "Limits",
    "Config",
    "ChannelType",
    "ChannelAcl",
    "Allow",
    "PersistedChannel",
    "StoredConfig",
    "ChannelStore",
    "FileChannelStore",
    "MemoryChannelStore",
    "channel_hash",
    "ChannelServer",
    "ChannelServerOptions",
    "WireSettings",
    "Client",
    "BlockingClient",
]
