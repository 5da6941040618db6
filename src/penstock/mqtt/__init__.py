"""Floor 7: MQTT 3.1, 3.1.1 and 5.0: the broker, and a client on the same codec.

codec turns packets into bytes and back (the hot ones are cut and framed in penstock/kernel/mqtt.pyx), topics knows
names and filters, routes who gets what, session is what a client leaves behind, broker decides, link is one connection
of it, server is the shell with listeners, timers and signals.

>>> import asyncio
>>> from penstock.mqtt import MqttServer, ServerOptions
>>> async def demo():
...     server = MqttServer(ServerOptions(port=0))
...     await server.start()
...     server.broker.publish_message("plant/state", b"on", retain=True)
...     address = server.addresses["mqtt"]
...     await server.stop()
...     return address
>>> asyncio.run(demo()).partition(":")[0]
'127.0.0.1'
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.mqtt.bridge import Bridge, BridgeRule, BridgeSpec
    from penstock.mqtt.broker import Broker
    from penstock.mqtt.client import Client, ClientOptions, Message
    from penstock.mqtt.feed import Feed, FeedSpec
    from penstock.mqtt.mirror import Mirror, MirrorSpec
    from penstock.mqtt.options import BrokerOptions
    from penstock.mqtt.outbox import Outbox
    from penstock.mqtt.outbox_paho import durable_client
    from penstock.mqtt.remote import RemoteSpec
    from penstock.mqtt.server import MqttServer, ServerOptions
    from penstock.mqtt.tap import Tap
    from penstock.mqtt.tapspec import TapSpec

__all__ = [
    "MqttServer",
    "ServerOptions",
    "Broker",
    "BrokerOptions",
    "Client",
    "ClientOptions",
    "Message",
    "Tap",
    "TapSpec",
    "Feed",
    "FeedSpec",
    "Bridge",
    "BridgeRule",
    "BridgeSpec",
    "Mirror",
    "MirrorSpec",
    "Outbox",
    "RemoteSpec",
    "durable_client",
]

_HOMES = {
    "MqttServer": "penstock.mqtt.server",
    "ServerOptions": "penstock.mqtt.server",
    "Broker": "penstock.mqtt.broker",
    "BrokerOptions": "penstock.mqtt.options",
    "Client": "penstock.mqtt.client",
    "ClientOptions": "penstock.mqtt.client",
    "Message": "penstock.mqtt.client",
    "Tap": "penstock.mqtt.tap",
    "TapSpec": "penstock.mqtt.tapspec",
    "Feed": "penstock.mqtt.feed",
    "FeedSpec": "penstock.mqtt.feed",
    "Bridge": "penstock.mqtt.bridge",
    "BridgeRule": "penstock.mqtt.bridge",
    "BridgeSpec": "penstock.mqtt.bridge",
    "Mirror": "penstock.mqtt.mirror",
    "MirrorSpec": "penstock.mqtt.mirror",
    "Outbox": "penstock.mqtt.outbox",
    "RemoteSpec": "penstock.mqtt.remote",
    "durable_client": "penstock.mqtt.outbox_paho",
}

if not TYPE_CHECKING:  # imported when first asked for: a client needs no broker, and the codec neither

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return found
