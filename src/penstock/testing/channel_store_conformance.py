"""The promises of a channel store, run on every form of it.

A subclass says how to make one; ``make_store`` may be called again with the same ``place`` to see what a restart
would find.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.channels.ids import Nid
from penstock.channels.model import Allow, ChannelAcl, ChannelType, PersistedChannel, StoredConfig
from penstock.channels.store import ChannelStore, channel_hash

__all__ = ["ChannelStoreConformance", "FULL"]

FULL = PersistedChannel(
    "ops/east",
    Nid("zoe", "localhost"),
    StoredConfig(100, 65_536, 1000, True, 250),
    ChannelAcl(
        join=Allow({"localhost": frozenset({"zoe", "ann"})}),
        read=Allow({"example.com": frozenset()}),
    ),
    (Nid("ann", "localhost"), Nid("zoe", "localhost")),
    ChannelType.FIFO,
)
"""A channel in which every field has something to lose."""


class ChannelStoreConformance:
    """Subclass, say how to make the store, and let pytest collect it."""

    def make_place(self, tmp_path: Any) -> Any:
        """Return what a store is made on; the same place is opened twice to play a restart."""
        return tmp_path

    def make_store(self, place: Any) -> ChannelStore:
        """Return a store on a place."""
        raise NotImplementedError

    @pytest.fixture
    def place(self, tmp_path: Any) -> Any:
        return self.make_place(tmp_path)

    @pytest.fixture
    def store(self, place: Any) -> ChannelStore:
        return self.make_store(place)

    def test_every_field_survives_a_round_trip(self, store: ChannelStore, place: Any) -> None:
        saved = store.save(FULL)
        assert saved == channel_hash("ops/east")
        assert store.load(saved) == FULL
        assert self.make_store(place).load(saved) == FULL

    def test_the_hashes_of_all_channels_are_listed(self, store: ChannelStore, place: Any) -> None:
        saved = sorted(store.save(PersistedChannel(handler)) for handler in ("a", "b", "c/d"))
        assert store.hashes() == saved
        assert self.make_store(place).hashes() == saved

    def test_an_empty_store_lists_nothing(self, store: ChannelStore) -> None:
        assert store.hashes() == []

    def test_a_deleted_channel_is_gone(self, store: ChannelStore, place: Any) -> None:
        saved, other = store.save(FULL), store.save(PersistedChannel("other"))
        store.delete(saved)
        assert store.hashes() == [other]
        assert self.make_store(place).hashes() == [other]
        with pytest.raises(FileNotFoundError):
            store.load(saved)

    def test_deleting_what_is_not_there_succeeds(self, store: ChannelStore) -> None:
        store.delete(channel_hash("never"))
        saved = store.save(FULL)
        store.delete(saved)
        store.delete(saved)

    def test_the_log_goes_after_the_decision_and_before_the_rest(self, store: ChannelStore) -> None:
        saved = store.save(FULL)
        listed: list[list[str]] = []
        store.delete(saved, lambda: listed.append(store.hashes()))
        assert len(listed) == 1

    def test_a_delete_whose_log_will_not_go_still_counts(self, store: ChannelStore, place: Any) -> None:
        saved = store.save(FULL)

        def stuck() -> None:
            raise OSError(5, "Input/output error")

        with pytest.raises(OSError, match="Input/output"):
            store.delete(saved, stuck)
        assert self.make_store(place).hashes() == []

    def test_a_second_save_replaces_the_first(self, store: ChannelStore) -> None:
        saved = store.save(FULL)
        newer = PersistedChannel("ops/east", members=(Nid("bob", "localhost"),))
        assert store.save(newer) == saved
        assert store.load(saved) == newer
        assert store.hashes() == [saved]

    def test_loading_what_is_not_there_fails(self, store: ChannelStore) -> None:
        with pytest.raises(FileNotFoundError):
            store.load(channel_hash("never"))

    def test_a_deleted_channel_can_be_saved_again(self, store: ChannelStore) -> None:
        saved = store.save(FULL)
        store.delete(saved)
        assert store.save(FULL) == saved
        assert store.load(saved) == FULL
