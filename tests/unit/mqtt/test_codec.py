"""Promise: every packet of both versions has the bytes of the standard, and bad bytes get their reason code."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, strategies as st

from penstock.mqtt import packets as p
from penstock.mqtt.codec import decode, encode
from penstock.mqtt.packets import BadPacket, Kind, Properties

TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=8)
IDS = st.integers(1, 65535)
USER = st.lists(st.tuples(TEXT, TEXT), max_size=2).map(tuple)
TOPIC = TEXT.map(lambda text: text.replace("+", "p").replace("#", "h") or "t")
PUBLISH_PROPERTIES = st.builds(
    Properties,
    payload_format=st.sampled_from([None, 0, 1]),
    message_expiry=st.none() | st.integers(0, 2**32 - 1),
    content_type=st.none() | TEXT,
    response_topic=st.none() | TOPIC,
    correlation_data=st.none() | st.binary(max_size=5),
    topic_alias=st.none() | IDS,
    user=USER,
)
REASON = st.builds(Properties, reason_string=st.none() | TEXT, user=USER)
WILL = st.none() | st.builds(
    p.Will,
    TOPIC,
    st.binary(max_size=5),
    st.integers(0, 2),
    st.booleans(),
    st.builds(Properties, will_delay=st.none() | IDS),
)
OF_CONNECT = st.builds(
    Properties, session_expiry=st.none() | st.integers(0, 2**32 - 1), receive_maximum=st.none() | IDS
)
NAME = TEXT.filter(bool)
FILTERS = st.builds(p.Filter, NAME, st.integers(0, 2), st.booleans(), st.booleans(), st.integers(0, 2))
PACKETS_5 = st.one_of(
    st.builds(
        p.Connect,
        TEXT,
        st.just(5),
        st.booleans(),
        st.integers(0, 65535),
        st.none() | TEXT,
        st.none() | st.binary(max_size=4),
        WILL,
        OF_CONNECT,
    ),
    st.builds(
        p.Connack, st.booleans(), st.integers(0, 255), st.builds(Properties, assigned_client_id=st.none() | TEXT)
    ),
    st.builds(p.Publish, TOPIC, st.binary(max_size=300), st.just(0), st.booleans(), properties=PUBLISH_PROPERTIES),
    st.builds(
        p.Publish,
        TOPIC,
        st.binary(max_size=9),
        st.integers(1, 2),
        st.booleans(),
        st.booleans(),
        IDS,
        PUBLISH_PROPERTIES,
    ),
    st.builds(p.Ack, st.sampled_from([Kind.PUBACK, Kind.PUBREC]), IDS, st.sampled_from([0, 0x10, 0x97]), REASON),
    st.builds(p.Ack, st.sampled_from([Kind.PUBREL, Kind.PUBCOMP]), IDS, st.sampled_from([0, 0x92]), REASON),
    st.builds(
        p.Subscribe,
        IDS,
        st.lists(FILTERS, min_size=1, max_size=3).map(tuple),
        st.builds(Properties, subscription_ids=st.sampled_from([(), (1,), (268_435_455,)]), user=USER),
    ),
    st.builds(p.Suback, IDS, st.lists(st.integers(0, 255), min_size=1, max_size=3).map(tuple), REASON),
    st.builds(p.Unsubscribe, IDS, st.lists(NAME, min_size=1, max_size=3).map(tuple), st.builds(Properties, user=USER)),
    st.builds(p.Unsuback, IDS, st.lists(st.integers(0, 255), max_size=3).map(tuple), REASON),
    st.sampled_from([p.Ping(), p.Pong(), p.Disconnect(), p.Disconnect(0x8E), p.Auth(0)]),
    st.builds(p.Disconnect, st.just(0x04), st.builds(Properties, session_expiry=st.none() | IDS, user=USER)),
    st.builds(
        p.Auth,
        st.just(0x18),
        st.builds(Properties, authentication_method=TEXT, authentication_data=st.binary(max_size=5)),
    ),
)


@given(PACKETS_5, st.binary(max_size=3))
def test_what_is_encoded_for_version_5_is_decoded_again(packet: p.Packet, behind: bytes) -> None:
    raw = encode(packet, 5)
    assert decode(raw + behind, 5) == (packet, len(raw))
    for cut in range(len(raw)):
        with pytest.raises(BadPacket):
            decode(raw[:cut], 5)


@given(st.sampled_from([3, 4]), TEXT, st.booleans(), WILL)
def test_a_connect_of_version_3_is_decoded_again(version: int, client: str, clean: bool, will: Any) -> None:
    if will is not None:
        will.properties = Properties()
    packet = p.Connect(client, version, clean, 30, "user", b"word", will)
    assert decode(encode(packet, version), version)[0] == packet


@pytest.mark.parametrize(
    ("packet", "version", "raw"),
    [
        (p.Publish("a/b", b"x", 1, False, False, 10), 4, "32 08 00 03 61 2f 62 00 0a 78"),
        (p.Publish("a/b", b"x", 1, True, True, 10), 5, "3b 09 00 03 61 2f 62 00 0a 00 78"),
        (p.Ack(Kind.PUBREL, 7), 5, "62 02 00 07"),
        (p.Ack(Kind.PUBACK, 7, 0x10), 5, "40 03 00 07 10"),
        (p.Suback(10, (0, 0x80)), 4, "90 04 00 0a 00 80"),
        (p.Unsuback(10, (0, 0x11)), 5, "b0 05 00 0a 00 00 11"),
        (p.Unsuback(10, (0, 0x11)), 4, "b0 02 00 0a"),
        (p.Disconnect(0x8E), 5, "e0 01 8e"),
        (p.Connack(True, 0), 5, "20 03 01 00 00"),
        (p.Connect("ab", 4, True, 60), 4, "10 0e 00 04 4d 51 54 54 04 02 00 3c 00 02 61 62"),
    ],
)
def test_a_packet_has_the_bytes_of_the_standard(packet: p.Packet, version: int, raw: str) -> None:
    assert encode(packet, version).hex(" ") == raw
    if not (isinstance(packet, p.Unsuback) and version == 4):
        assert decode(bytes.fromhex(raw), version)[0] == packet


MALFORMED = [
    ("a length of five bytes", 5, "c0 80 80 80 80 01", 0x81),
    ("a length that is not the shortest", 5, "c0 80 00", 0x81),
    ("kind 0", 5, "00 00", 0x81),
    ("AUTH in version 3.1.1", 4, "f0 00", 0x81),
    ("flags of PINGREQ", 5, "c1 00", 0x81),
    ("flags of PUBREL", 5, "60 02 00 01", 0x81),
    ("flags of SUBSCRIBE", 4, "80 06 00 01 00 01 61 00", 0x81),
    ("QoS 3", 4, "36 05 00 01 61 00 01", 0x81),
    ("DUP with QoS 0", 4, "38 03 00 01 61", 0x81),
    ("packet id 0 of PUBLISH", 4, "32 05 00 01 61 00 00", 0x82),
    ("packet id 0 of SUBSCRIBE", 4, "82 06 00 00 00 01 61 00", 0x82),
    ("a topic past the end", 4, "30 03 00 05 61", 0x81),
    ("an empty topic in version 3.1.1", 4, "30 03 00 00 61", 0x81),
    ("a wildcard in a topic", 5, "30 05 00 02 61 23 00", 0x90),
    ("U+0000 in a topic", 5, "30 05 00 02 61 00 00", 0x81),
    ("a surrogate in a topic", 5, "30 06 00 03 ed a0 80 00", 0x81),
    ("a property twice", 5, "30 08 00 01 61 04 01 01 01 01", 0x82),
    ("a property of another packet", 5, "30 09 00 01 61 05 11 00 00 00 01", 0x81),
    ("a property that does not exist", 5, "30 05 00 01 61 01 7f", 0x81),
    ("topic alias 0", 5, "30 07 00 01 61 03 23 00 00", 0x94),
    ("payload format 2", 5, "30 06 00 01 61 02 01 02", 0x82),
    ("no properties at all", 5, "32 05 00 01 61 00 01", 0x81),
    ("no filter to subscribe", 4, "82 02 00 01", 0x82),
    ("reserved options", 4, "82 06 00 01 00 01 61 04", 0x81),
    ("reserved options of version 5", 5, "82 07 00 01 00 00 01 61 40", 0x81),
    ("retain handling 3", 5, "82 07 00 01 00 00 01 61 30", 0x82),
    ("subscribe with QoS 3", 4, "82 06 00 01 00 01 61 03", 0x81),
    ("subscription identifier 0", 5, "82 09 00 01 02 0b 00 00 01 61 00", 0x82),
    ("an empty filter to subscribe", 4, "82 05 00 01 00 00 00", 0x81),
    ("an empty filter to unsubscribe", 5, "a2 05 00 01 00 00 00", 0x81),
    ("no filter to unsubscribe", 5, "a2 03 00 01 00", 0x82),
    ("a body of PINGREQ", 4, "c0 01 00", 0x81),
    ("a body of DISCONNECT in version 3.1.1", 4, "e0 01 00", 0x81),
    ("a reason that DISCONNECT has not", 5, "e0 01 10", 0x82),
    ("a reason that PUBACK has not", 5, "40 03 00 01 92", 0x82),
    ("trailing bytes of an ack", 4, "40 03 00 01 00", 0x81),
    ("reserved flag of CONNECT", 4, "10 0e 00 04 4d 51 54 54 04 03 00 3c 00 02 61 62", 0x81),
    ("will QoS without a will", 4, "10 0e 00 04 4d 51 54 54 04 0a 00 3c 00 02 61 62", 0x81),
    ("will retain without a will", 4, "10 0e 00 04 4d 51 54 54 04 22 00 3c 00 02 61 62", 0x81),
    ("will QoS 3", 4, "10 14 00 04 4d 51 54 54 04 1e 00 3c 00 02 61 62 00 01 77 00 01 78", 0x81),
    ("password without user name", 4, "10 11 00 04 4d 51 54 54 04 42 00 3c 00 02 61 62 00 01 70", 0x81),
    ("another protocol", 4, "10 0e 00 04 4d 51 54 58 04 02 00 3c 00 02 61 62", 0x84),
    ("level 6", 4, "10 0e 00 04 4d 51 54 54 06 02 00 3c 00 02 61 62", 0x84),
    ("trailing bytes of CONNECT", 4, "10 0f 00 04 4d 51 54 54 04 02 00 3c 00 02 61 62 00", 0x81),
    ("receive maximum 0", 5, "10 12 00 04 4d 51 54 54 05 02 00 3c 03 21 00 00 00 02 61 62", 0x82),
]  # fmt: skip


@pytest.mark.parametrize(("version", "raw", "code"), [row[1:] for row in MALFORMED], ids=[row[0] for row in MALFORMED])
def test_bad_bytes_get_their_reason_code(version: int, raw: str, code: int) -> None:
    with pytest.raises(BadPacket) as caught:
        decode(bytes.fromhex(raw), version)
    assert caught.value.code == code, str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args


def test_a_byte_order_mark_is_a_character_like_any_other() -> None:
    packet, _ = decode(encode(p.Publish("\ufeffa", b"")), 4)
    assert packet == p.Publish("\ufeffa", b"")


def test_a_connect_that_is_full_of_properties_is_read_at_once() -> None:
    """Each one more must not cost what all before it did: 1 MiB of them stopped everybody for minutes."""
    user = (("", ""),) * 200_000
    connect = p.Connect("dev", 5, properties=p.Properties(user=user))
    assert decode(encode(connect, 5), 5)[0] == connect
