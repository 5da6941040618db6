"""The suite every store passes: what SnapshotStore promises, tried on a real folder.

A backend's test module subclasses StoreConformance and says how to open a store:

    class TestMyStore(StoreConformance):
        def open(self, path, *, read_only=False): ...

The methods are pytest tests; each is named after the promise it holds.  ``opener`` is an importable
``module:function`` that opens the store in another process, which is then killed.
"""

from __future__ import annotations

import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.batch import UpdateBatch
from penstock.errors import ClosedError, LockedError, OptionsError
from penstock.store.digest import digest_entries
from penstock.types import KvEntry, KvUpdate, Op, VersionToken, WatchCursor

__all__ = ["StoreConformance", "fixture_batches", "model_of"]

WRITER = """
import importlib, sys
module, name = sys.argv[1].split(":")
import operator
opened = operator.attrgetter(name)(importlib.import_module(module))(sys.argv[2])
from penstock.types import KvUpdate, WatchCursor
for n in range(1, 1_000_000):
    batch = [KvUpdate.put(f"k{i}", b"%d" % n, n) for i in range(50)] + [KvUpdate.put(f"n{n % 100}", b"x" * 200, n)]
    opened.apply(batch, WatchCursor.of(n))
    print(n, flush=True)
"""


def fixture_batches() -> list[tuple[list[KvUpdate], int]]:
    """Return a short history: three puts, an overwrite with a delete, and one more put."""
    put, delete = KvUpdate.put, KvUpdate.delete
    return [
        ([put("node.a", b"v1", 1), put("node.b", b"v2", 2), put("svc.x", b"sx", 3)], 3),
        ([put("node.a", b"v1b", 4), delete("node.b", 5), put("node.c", b"v3", 6)], 6),
        ([put("svc.y", b"sy", 7)], 7),
    ]


def model_of(batches: list[list[KvUpdate]]) -> dict[str, KvEntry]:
    """Return what a store must hold after these batches."""
    state: dict[str, KvEntry] = {}
    for update in (update for batch in batches for update in batch):
        if update.op is Op.PUT:
            state[update.key] = KvEntry(update.key, update.value, update.version)
        else:
            state.pop(update.key, None)
    return state


class StoreConformance:
    """Subclass it for a backend; see the head of this module."""

    opener = ""
    longest_key = 65535
    takes_empty_key = True

    def open(self, path: str, *, read_only: bool = False) -> Any:
        """Return the backend's store at ``path``."""
        raise NotImplementedError

    def filled(self, path: str) -> Any:
        """Return a store with the fixture's history."""
        store = self.open(path)
        for batch, cursor in fixture_batches():
            store.apply(batch, WatchCursor.of(cursor))
        return store

    # --- Folding

    def test_the_last_update_of_a_key_counts_and_the_cursor_moves_with_it(self, tmp_path: Path) -> None:
        with self.filled(str(tmp_path / "fold")) as store:
            keys = ["node.a", "node.c", "svc.x", "svc.y"]
            assert [entry.key for entry in store.range()] == keys
            assert store.get("node.a") == KvEntry("node.a", b"v1b", VersionToken.of(4))
            assert store.get("node.b") is None
            assert store.cursor() == WatchCursor.of(7)
            assert store.count() == 4
            assert list(store.keys()) == keys

    def test_a_reopened_store_is_the_same(self, tmp_path: Path) -> None:
        path = str(tmp_path / "fold")
        with self.filled(path) as store:
            before = store.range(), store.cursor(), store.count(), store.digest()
        with self.open(path) as store:
            assert (store.range(), store.cursor(), store.count(), store.digest()) == before
        with self.open(path, read_only=True) as store:
            assert (store.range(), store.cursor(), store.count(), store.digest()) == before
            assert list(store.verify()) == []

    def test_a_new_store_is_empty_and_has_no_cursor(self, tmp_path: Path) -> None:
        with self.open(str(tmp_path / "fold")) as store:
            assert (store.range(), store.count(), store.cursor()) == ([], 0, WatchCursor())
            assert store.digest() == "0" * 32
            assert store.get("a") is None

    def test_an_empty_batch_still_moves_the_cursor(self, tmp_path: Path) -> None:
        path = str(tmp_path / "fold")
        with self.filled(path) as store:
            store.apply([], WatchCursor.of(9))
        with self.open(path) as store:
            assert store.cursor() == WatchCursor.of(9)
            assert store.count() == 4

    def test_a_cursor_can_go_back_to_none(self, tmp_path: Path) -> None:
        path = str(tmp_path / "fold")
        with self.filled(path) as store:
            store.apply([], WatchCursor())
            assert store.cursor().at_start
        with self.open(path) as store:
            assert store.cursor().at_start
            assert store.count() == 4

    def test_a_purge_is_a_delete(self, tmp_path: Path) -> None:
        with self.filled(str(tmp_path / "fold")) as store:
            store.apply([KvUpdate.purge("node.a", 8), KvUpdate.purge("absent", 9)], WatchCursor.of(9))
            assert store.get("node.a") is None
            assert store.count() == 3

    def test_an_empty_value_is_there(self, tmp_path: Path) -> None:
        path = str(tmp_path / "fold")
        with self.open(path) as store:
            store.apply([KvUpdate.put("a", b"", 2)], WatchCursor.of(2))
        with self.open(path) as store:
            assert store.get("a") == KvEntry("a", b"", VersionToken.of(2))

    def test_versions_of_every_length_come_back_as_they_were(self, tmp_path: Path) -> None:
        path = str(tmp_path / "fold")
        tokens = [VersionToken(bytes(range(length))) for length in range(11)]
        batch = [KvUpdate(Op.PUT, f"k{n:02}", b"v", token) for n, token in enumerate(tokens)]
        with self.open(path) as store:
            store.apply(batch, WatchCursor(tokens[10]))
        with self.open(path) as store:
            assert [entry.version for entry in store.range()] == tokens
            assert store.cursor().token == tokens[10]

    def test_the_same_key_twice_in_a_batch_leaves_the_last(self, tmp_path: Path) -> None:
        put, delete = KvUpdate.put, KvUpdate.delete
        with self.open(str(tmp_path / "fold")) as store:
            store.apply([put("a", b"1", 1), put("a", b"2", 2), put("b", b"1", 3), delete("b", 4)], WatchCursor.of(4))
            store.apply([delete("a", 5), put("a", b"3", 6)], WatchCursor.of(6))
            assert [(entry.key, entry.value) for entry in store.range()] == [("a", b"3")]
            assert store.digest() == digest_entries(store.range())

    def test_a_batch_of_columns_is_the_same_as_a_list(self, tmp_path: Path) -> None:
        updates = [update for batch, _ in fixture_batches() for update in batch]
        with self.open(str(tmp_path / "a")) as one, self.open(str(tmp_path / "b")) as two:
            one.apply(updates, WatchCursor.of(7))
            two.apply(UpdateBatch.of(updates), WatchCursor.of(7))
            assert one.range() == two.range()
            assert one.digest() == two.digest()

    def test_a_store_is_a_function_of_its_log(self, tmp_path: Path) -> None:
        """Whether folded in one go, with a stop at any cursor, or with the tail once more: it is the same."""
        with self.filled(str(tmp_path / "once")) as store:
            expected = store.range(), store.cursor(), store.digest()
        batches = fixture_batches()
        for stop in range(len(batches) + 1):
            path = str(tmp_path / f"stop{stop}")
            with self.open(path) as store:
                for batch, cursor in batches[:stop]:
                    store.apply(batch, WatchCursor.of(cursor))
            for again in (0, 1):  # what came after the cursor, and then all of it once more
                with self.open(path) as store:
                    for batch, cursor in batches[0 if again else stop :]:
                        store.apply(batch, WatchCursor.of(cursor))
                    assert (store.range(), store.cursor(), store.digest()) == expected

    def test_any_history_folds_to_the_same_as_a_dict(self, tmp_path: Path) -> None:
        rng = random.Random(7)
        path, batches = str(tmp_path / "fold"), []
        store = self.open(path)
        for number in range(60):
            batch = [self.random_update(rng) for _ in range(rng.choice((0, 1, 5, 40)))]
            store.apply(batch, WatchCursor.of(number + 1))
            batches.append(batch)
            if number % 20 == 19:
                store.close()
                store = self.open(path)
            expected = sorted(model_of(batches).values(), key=lambda entry: entry.key.encode())
            assert store.range() == expected
            assert store.digest() == digest_entries(expected)
            assert store.count() == len(expected)
        assert list(store.verify()) == []
        store.close()

    @staticmethod
    def random_update(rng: random.Random) -> KvUpdate:
        key = f"{rng.choice('abc')}/{rng.randrange(40)}"
        if rng.random() < 0.3:
            return KvUpdate.delete(key, 1)
        return KvUpdate.put(key, rng.randbytes(rng.choice((0, 3, 90))), rng.choice((None, rng.randrange(1 << 40))))

    # --- All or nothing

    @pytest.mark.parametrize(
        "bad",
        [
            KvUpdate.put("k" * 65536, b"1", 1),
            KvUpdate.delete("k" * 65536, 1),
            KvUpdate.put("big", bytes((1 << 24) + 1), 1),
            KvUpdate.put("\udc80", b"1", 1),
        ],
        ids=["key", "deleted key", "value", "surrogate"],
    )
    def test_a_batch_with_a_bad_update_changes_nothing(self, tmp_path: Path, bad: KvUpdate) -> None:
        path = str(tmp_path / "fold")
        with self.filled(path) as store:
            before = store.range(), store.cursor(), store.digest()
            with pytest.raises(OptionsError):
                store.apply([KvUpdate.put("new", b"1", 8), bad, KvUpdate.delete("svc.x", 9)], WatchCursor.of(9))
            assert (store.range(), store.cursor(), store.digest()) == before
            store.apply([KvUpdate.put("later", b"1", 10)], WatchCursor.of(10))
        with self.open(path) as store:
            assert store.get("new") is None
            assert store.get("later") is not None

    def test_the_longest_key_and_value_are_taken_and_longer_ones_refused_by_name(self, tmp_path: Path) -> None:
        path = str(tmp_path / "fold")
        longest = "k" * self.longest_key
        with self.open(path) as store:
            store.apply([KvUpdate.put(longest, b"1", 1), KvUpdate.put("v", bytes(1 << 24), 2)], WatchCursor.of(2))
            with pytest.raises(OptionsError, match="update 0 has a key of"):
                store.apply([KvUpdate.put(longest + "k", b"1", 1)], WatchCursor.of(3))
            if self.takes_empty_key:
                store.apply([KvUpdate.put("", b"empty", 3)], WatchCursor.of(3))
            else:
                with pytest.raises(OptionsError, match="a key of 0 bytes"):
                    store.apply([KvUpdate.put("", b"empty", 3)], WatchCursor.of(3))
        with self.open(path) as store:
            assert store.get(longest) is not None
            assert len(store.get("v").value) == 1 << 24
            assert (store.get("") is not None) == self.takes_empty_key

    # --- Reading

    def test_keys_are_in_byte_order_and_prefixes_end_where_they_should(self, tmp_path: Path) -> None:
        keys = ["a", "a.", "a/b", "a0", "aé", "a\uffff", "a\U00010000", "a\U0010ffff", "b", "é", "\U0010ffff", "~"]
        batch = [KvUpdate.put(key, key.encode(), 1) for key in keys]
        random.Random(1).shuffle(batch)
        with self.open(str(tmp_path / "fold")) as store:
            store.apply(batch, WatchCursor.of(1))
            for prefix in ["", "a", "a\U0010ffff", "aé", "\U0010ffff", "b", "c", "zz", "a/b/c", "\x00"]:
                expected = sorted((k for k in keys if k.startswith(prefix)), key=str.encode)
                assert [entry.key for entry in store.range(prefix)] == expected
                assert list(store.keys(prefix)) == expected

    def test_a_scan_gives_what_range_gives_in_batches(self, tmp_path: Path) -> None:
        with self.open(str(tmp_path / "fold")) as store:
            store.apply([KvUpdate.put(f"k{n:04}", b"%d" % n, n) for n in range(1000)], WatchCursor.of(1000))
            batches = list(store.scan("k", limit=300))
            assert [len(batch) for batch in batches] == [300, 300, 300, 100]
            found = [KvEntry(u.key, u.value, u.version) for batch in batches for u in batch]
            assert found == store.range("k")
            assert {u.op for batch in batches for u in batch} == {Op.PUT}

    def test_a_scan_sees_the_store_as_it_was_when_it_began(self, tmp_path: Path) -> None:
        with self.open(str(tmp_path / "fold")) as store:
            store.apply([KvUpdate.put(f"k{n}", b"old", n) for n in range(200)], WatchCursor.of(1))
            scan = store.scan(limit=50)
            first = next(scan)
            store.apply([KvUpdate.put(f"k{n}", b"new", n) for n in range(300)], WatchCursor.of(2))
            rest = [update for batch in (first, *scan) for update in batch]
            assert len(rest) == 200
            assert {update.value for update in rest} == {b"old"}

    def test_multi_get_answers_in_order_with_none_for_what_is_absent(self, tmp_path: Path) -> None:
        with self.filled(str(tmp_path / "fold")) as store:
            store.apply([KvUpdate.put("empty", b"", 8)], WatchCursor.of(8))
            keys = ["svc.x", "absent", "node.a", "node.b", "svc.x", "x" * 70000, "\udc80", "empty"]
            assert store.multi_get(keys) == [store.get(key) for key in keys]
            assert [entry and entry.value for entry in store.multi_get(keys)] == [
                b"sx", None, b"v1b", None, b"sx", None, None, b"",
            ]  # fmt: skip
            assert store.multi_get([]) == []

    def test_readers_see_whole_batches_while_someone_applies(self, tmp_path: Path) -> None:
        store = self.open(str(tmp_path / "fold"))
        keys = [f"k{n}" for n in range(20)]
        store.apply([KvUpdate.put(key, b"0", 0) for key in keys], WatchCursor.of(0))
        stop, looks = threading.Event(), [0]
        problems: list[object] = []

        def read() -> None:
            with store.reader() as reader:
                while not stop.is_set():
                    values = {entry.value for entry in reader.range("k")}
                    if len(values) != 1:
                        problems.append(values)
                    if reader.get("k3") is None or reader.count() != len(keys):
                        problems.append("missing")
                    looks[0] += 1
                    time.sleep(0.001)

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for number in range(1, 150):
            store.apply([KvUpdate.put(key, b"%d" % number, number) for key in keys], WatchCursor.of(number))
        while looks[0] < 2:
            time.sleep(0.001)
        stop.set()
        for thread in threads:
            thread.join()
        store.close()
        assert not problems

    def test_closing_waits_for_those_who_are_reading(self, tmp_path: Path) -> None:
        store = self.open(str(tmp_path / "fold"))
        keys = [f"k{n}" for n in range(3000)]
        store.apply([KvUpdate.put(key, b"v", 1) for key in keys], WatchCursor.of(1))
        begun, odd = threading.Event(), list[object]()

        def read(what: Callable[[], object]) -> None:
            try:
                while True:
                    what()
                    begun.set()
            except ClosedError:
                pass
            except Exception as exc:  # noqa: BLE001 - the test tells
                odd.append(exc)

        reads = (lambda: store.multi_get(keys), lambda: list(store.keys()), lambda: store.get("k7"))
        threads = [threading.Thread(target=read, args=(what,)) for what in reads]
        for thread in threads:
            thread.start()
        begun.wait()
        store.close()
        for thread in threads:
            thread.join()
        assert not odd
        with self.open(str(tmp_path / "fold")) as again:
            assert len(list(again.keys())) == len(keys)

    # --- Digest, settle, export

    def test_the_digest_is_that_of_the_entries_however_they_came(self, tmp_path: Path) -> None:
        with self.filled(str(tmp_path / "a")) as store:
            assert store.digest() == digest_entries(store.range())
            with self.open(str(tmp_path / "b")) as other:
                other.apply(
                    [KvUpdate(Op.PUT, e.key, e.value, e.version) for e in reversed(store.range())], WatchCursor.of(1)
                )
                assert other.digest() == store.digest()
                other.apply([KvUpdate.put("svc.y", b"sy", 8)], WatchCursor.of(8))
                assert other.digest() != store.digest()

    def test_settling_changes_nothing_that_is_read(self, tmp_path: Path) -> None:
        path = str(tmp_path / "fold")
        with self.filled(path) as store:
            before = store.range(), store.cursor(), store.digest()
            store.settle()
            assert (store.range(), store.cursor(), store.digest()) == before
        with self.open(path) as store:
            assert (store.range(), store.cursor(), store.digest()) == before

    def test_what_write_data_writes_is_the_store_at_its_cursor(self, tmp_path: Path) -> None:
        with self.filled(str(tmp_path / "fold")) as store:
            cursor = store.write_data(str(tmp_path / "artifact"))
            assert cursor == WatchCursor.of(7)
            store.apply([KvUpdate.put("later", b"1", 8)], WatchCursor.of(8))
            with self.open(self.exported(tmp_path / "artifact" / "data"), read_only=True) as copy:
                assert copy.range() == store.range("node.") + store.range("svc.")
                assert copy.cursor() == cursor

    def exported(self, data: Path) -> str:
        """Return what to open of an exported data folder."""
        return str(data)

    def test_a_big_batch_is_folded_whole(self, tmp_path: Path) -> None:
        path = str(tmp_path / "fold")
        batch = UpdateBatch.of(KvUpdate.put(f"key/{n * 7919 % 50000:06}", b"v" * 100, n) for n in range(50_000))
        with self.open(path) as store:
            store.apply(batch, WatchCursor.of(1))
            assert store.count() == 50_000
        with self.open(path) as store:
            assert store.count() == 50_000
            assert sum(len(part) for part in store.scan("key/0")) == 50_000
            keys = list(store.keys("key/0000"))
            assert keys == sorted(keys)
            assert len(keys) == 100

    # --- Owners

    def test_a_second_owner_is_refused(self, tmp_path: Path) -> None:
        path = str(tmp_path / "fold")
        store = self.filled(path)
        with pytest.raises(LockedError):
            self.open(path)
        store.close()
        self.open(path).close()

    def test_a_closed_store_says_so(self, tmp_path: Path) -> None:
        store = self.filled(str(tmp_path / "fold"))
        reader = store.reader()
        store.close()
        store.close()
        for use in (store.range, store.cursor, store.count, store.digest, reader.range, store.settle):
            with pytest.raises(ClosedError):
                use()
        with pytest.raises(ClosedError):
            store.apply([], WatchCursor())

    def test_a_store_opened_for_reading_refuses_to_apply(self, tmp_path: Path) -> None:
        path = str(tmp_path / "fold")
        with pytest.raises(OptionsError, match="no store here"):
            self.open(path, read_only=True)
        self.filled(path).close()
        with self.open(path, read_only=True) as store, pytest.raises(OptionsError, match="for reading"):
            store.apply([], WatchCursor())

    def test_a_store_does_not_travel_by_pickle(self, tmp_path: Path) -> None:
        with self.filled(str(tmp_path / "fold")) as store, pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(store)

    # --- Death

    def test_what_was_applied_survives_the_death_of_its_process(self, tmp_path: Path) -> None:
        path = str(tmp_path / "fold")
        command = [sys.executable, "-c", WRITER, self.opener, path]
        for kill_after in (1, 12):
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                last = 0
                for line in process.stdout:
                    last = int(line)
                    if last >= kill_after:
                        process.send_signal(signal.SIGKILL)
                        break
                for line in process.stdout:
                    last = int(line)
            with self.open(path) as store:
                revision = store.cursor().token.as_int()
                assert revision is not None
                assert revision >= last
                values = {int(entry.value) for entry in store.range("k")}
                assert values <= {revision, revision + 1}  # an apply cut short may be ahead, never behind
                assert store.count() == len(store.range())
                assert store.digest() == digest_entries(store.range())
                assert list(store.verify()) == []
