"""Fuzz the MQTT codec: any bytes, never a crash, the same cuts as the plain twin, and only BadPacket from the rest.

python fuzz/mqtt_packets.py --inputs 100000 --seed 1
"""

from __future__ import annotations

import random
from typing import Any

from _run import main
from penstock.kernel import mqtt
from penstock.kernel.twin import mqtt as twin
from penstock.mqtt import packets as p
from penstock.mqtt.codec import decode_body, encode
from penstock.mqtt.packets import BadPacket, Kind, Properties

GIVEN = Properties(payload_format=1, message_expiry=7, topic_alias=3, response_topic="r", user=(("k", "v"), ("k", "w")))
WILL = p.Will("w", b"gone", 1, True, Properties(will_delay=5, content_type="t"))
FILTERS = (p.Filter("a/#", 2, True, True, 1), p.Filter("$share/g/b"))
SAMPLES: list[p.Packet] = [
    p.Connect("dev", 5, False, 60, "ann", b"pw", WILL, Properties(session_expiry=9, receive_maximum=3)),
    p.Connack(True, 0, Properties(assigned_client_id="x", server_keep_alive=3)),
    p.Publish("a/b", b"hello"),
    p.Publish("a/b", b"hello", 1, True, False, 7, GIVEN),
    p.Publish("a/b", b"hello", 2, False, True, 8),
    p.Ack(Kind.PUBACK, 7),
    p.Ack(Kind.PUBREC, 8, 0x10),
    p.Ack(Kind.PUBREL, 8, 0x92, Properties(reason_string="no")),
    p.Ack(Kind.PUBCOMP, 8),
    p.Subscribe(3, FILTERS, Properties(subscription_ids=(268_435_455,))),
    p.Suback(3, (0, 0x80)),
    p.Unsubscribe(4, ("a/#", "b")),
    p.Unsuback(4, (0, 0x11)),
    p.Ping(),
    p.Pong(),
    p.Disconnect(0x8E, Properties(server_reference="there")),
    p.Auth(0x18, Properties(authentication_method="SCRAM-SHA-256", authentication_data=b"n,,n=a,r=b")),
]
PIECES = [encode(packet, 5) for packet in SAMPLES] + [
    encode(packet, 4) for packet in SAMPLES if not isinstance(packet, p.Connect | p.Auth)
]


def one_input(rng: random.Random) -> bytes:
    """Return packets with some damage."""
    data = bytearray(b"".join(rng.choices(PIECES, k=rng.randrange(1, 5))))
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                data[at:at] = rng.randbytes(rng.randrange(1, 5))
            case 1:
                del data[at : at + rng.randrange(6)]
            case 2 if at < len(data):
                data[at] = rng.randrange(256)
            case 3 if at < len(data):
                data[at] = data[at] ^ (1 << rng.randrange(8))
            case _:
                del data[at:]
        if not data:
            break
    return bytes(data)


def shown(item: Any) -> Any:
    """Return what one side says about an item."""
    if isinstance(item, tuple):
        return item
    parts = (item.topic, item.forward, item.count, item.longest, item.qos, item.first_id, item.alias, item.expiry)
    return parts, item.retain, item.dup, item.payloads(), item.frames(True, 2, b"t", b"", 1)


def run(inputs: int, seed: int) -> None:
    """Try that many inputs."""
    rng = random.Random(seed)
    for number in range(inputs):
        data, version = one_input(rng), rng.choice([4, 5])
        items, *rest = mqtt.cut(data, 0, version == 5, 1 << 20)
        if number % 10 == 0:
            theirs, *their_rest = twin.cut(data, 0, version == 5, 1 << 20)
            assert rest == their_rest, (number, data.hex())
            assert [shown(item) for item in items] == [shown(item) for item in theirs], (number, data.hex())
        for item in items:
            if isinstance(item, tuple) and item[1] >= 0:
                try:
                    packet = decode_body(item[0], item[1], data, item[2], item[3], version)
                except BadPacket:
                    continue
                if not isinstance(packet, p.Connect):
                    encode(packet, version)


if __name__ == "__main__":
    main(__doc__, run)
