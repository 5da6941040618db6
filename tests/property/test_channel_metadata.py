"""Law: what was encoded is decoded again, and no bytes at all do more than raise CorruptionError."""

from __future__ import annotations

import msgspec
from hypothesis import given, strategies as st

from penstock.channels import postcard
from penstock.channels.ids import Nid
from penstock.channels.model import Allow, ChannelAcl, ChannelType, PersistedChannel, StoredConfig
from penstock.channels.postcard import decode, encode
from penstock.errors import CorruptionError

domains = st.sampled_from(["localhost", "x.io", "example.com", "10.0.0.1:80"])
usernames = st.text("abcXYZ019._-é日", min_size=1, max_size=40)
nids = st.builds(Nid, usernames, domains)
u32 = st.none() | st.integers(0, (1 << 32) - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
allows = st.builds(Allow, st.dictionaries(text, st.frozensets(text, max_size=4), max_size=4))
channels = st.builds(
    PersistedChannel,
    text,
    st.none() | nids,
    st.builds(StoredConfig, u32, u32, u32, st.none() | st.booleans(), u32),
    st.builds(ChannelAcl, allows, allows, allows),
    st.lists(nids, max_size=20).map(lambda found: tuple(sorted(found))),
    st.sampled_from(ChannelType),
)


def attempt(data: bytes) -> PersistedChannel | CorruptionError:
    try:
        return decode(data)
    except CorruptionError as exc:
        return exc


@given(channels)
def test_a_channel_comes_back_as_it_was(channel: PersistedChannel) -> None:
    assert decode(encode(channel)) == channel


@given(channels, st.binary(max_size=8))
def test_bytes_behind_the_type_are_ignored(channel: PersistedChannel, tail: bytes) -> None:
    assert decode(encode(channel) + tail) == channel


@given(channels, st.data())
def test_a_shorter_file_is_refused_or_is_of_the_old_layout(channel: PersistedChannel, data: st.DataObject) -> None:
    whole = encode(channel)
    cut = data.draw(st.integers(0, len(whole) - 1))
    found = attempt(whole[:cut])
    if isinstance(found, CorruptionError):
        assert 0 <= found.byte <= cut
    else:
        assert cut == len(whole) - 1
        assert found.members == channel.members


@given(st.binary(max_size=300))
def test_no_bytes_do_more_than_raise(data: bytes) -> None:
    found = attempt(data)
    if isinstance(found, CorruptionError):
        assert 0 <= found.byte <= len(data)


def told(found: PersistedChannel | CorruptionError) -> PersistedChannel | str:
    return str(found) if isinstance(found, CorruptionError) else found


@given(channels, channels, st.data())
def test_what_was_decoded_before_makes_no_difference(
    before: PersistedChannel, channel: PersistedChannel, data: st.DataObject
) -> None:
    """The rules of the channel before are remembered: bytes that are not quite the same must not get them."""
    rules = data.draw(st.sampled_from([channel, before]))
    whole = encode(msgspec.structs.replace(channel, config=rules.config, acl=rules.acl))
    start, end = sorted(data.draw(st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole)))))
    damaged = data.draw(st.sampled_from([whole, whole[:start] + data.draw(st.binary(max_size=4)) + whole[end:]]))
    postcard._Decoder.rules_before = None
    alone = attempt(damaged)
    attempt(encode(before))
    assert told(attempt(damaged)) == told(alone)
