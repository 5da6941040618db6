"""Promise: allow-lists narrow and widen exactly as the protocol says."""

from __future__ import annotations

import pytest

from penstock.channels.ids import Nid
from penstock.channels.model import Allow, ChannelType, Config, Limits, StoredConfig
from penstock.errors import OptionsError

ANN, BOB, DOMAIN = Nid("ann", "x.io"), Nid("bob", "x.io"), Nid("", "x.io")
ELSEWHERE = Nid("ann", "y.io")


def test_an_empty_list_allows_everyone() -> None:
    assert Allow().allows(ANN)


def test_a_whole_domain_allows_its_people_and_nobody_else() -> None:
    allow = Allow().add([DOMAIN])
    assert allow.allows(ANN)
    assert not allow.allows(ELSEWHERE)


def test_a_name_narrows_a_whole_domain() -> None:
    allow = Allow().add([DOMAIN]).add([ANN])
    assert allow.allows(ANN)
    assert not allow.allows(BOB)


def test_a_domain_does_not_widen_listed_names() -> None:
    assert Allow().add([ANN]).add([DOMAIN]) == Allow().add([ANN])


def test_a_domain_goes_with_its_last_name() -> None:
    assert Allow().add([ANN, BOB]).remove([ANN]) == Allow().add([BOB])
    assert Allow().add([ANN]).remove([ANN]) == Allow()


def test_a_bare_domain_is_removed_only_where_no_names_are_listed() -> None:
    assert Allow().add([DOMAIN]).remove([DOMAIN]) == Allow()
    assert Allow().add([ANN]).remove([DOMAIN]) == Allow().add([ANN])


def test_a_name_that_is_not_listed_takes_nothing_away() -> None:
    assert Allow().add([DOMAIN]).remove([ANN]) == Allow().add([DOMAIN])
    assert Allow().remove([ANN]) == Allow()


def test_entries_are_in_nid_order_and_only_names_count() -> None:
    allow = Allow().add([ELSEWHERE, BOB, ANN, Nid("", "z.io")])
    assert allow.entries() == [Nid("", "z.io"), ANN, ELSEWHERE, BOB]
    assert allow.names == 3


def test_what_is_found_on_disk_is_persistent_and_takes_the_limits_where_it_says_nothing() -> None:
    config = Config.of_stored(StoredConfig(), Limits(max_clients_per_channel=7))
    assert config == Config(7, 65_536, 1000, persist=True, message_flush_interval=0)
    assert Config.of_stored(StoredConfig(max_persist_messages=0, persist=False), Limits()).persist
    assert Config.of_stored(StoredConfig(max_persist_messages=0), Limits()).max_persist_messages == 1000
    assert Config.of_stored(StoredConfig(max_clients=0), Limits()).max_clients == 0


def test_a_limit_fits_the_field_it_limits() -> None:
    with pytest.raises(OptionsError, match="max_channels=-1"):
        Limits(max_channels=-1)


def test_an_unknown_type_is_called_by_its_name() -> None:
    with pytest.raises(OptionsError, match="unknown channel type: lifo"):
        ChannelType.of("lifo")
