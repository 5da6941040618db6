"""Promise: LMDB follows no page number, length or offset that was not looked at; an intact store is never refused."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import CorruptionError, PenstockError
from penstock.store import LmdbStore
from penstock.store.lmdbpages import META, META_BYTES, TRANSACTION_AT
from penstock.types import KvUpdate, WatchCursor

PAGE = 4096
BRANCH, LEAF, OVERFLOW = 1, 2, 4


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with every kind of page: branches, leaves, long values, lists of free pages."""
    folder = tmp_path_factory.mktemp("lmdb") / "fold"
    with LmdbStore.open(folder, map_bytes=1 << 22) as store:
        store.apply(
            [KvUpdate.put(f"key{n:04}", b"%d" % n * (5000 if n % 50 == 0 else 40), 1) for n in range(600)],
            WatchCursor.of(1),
        )
        for number in range(0, 600, 7):
            store.apply([KvUpdate.delete(f"key{number:04}", 2)], WatchCursor.of(2 + number))
    return folder


def pages(data: bytes, flags: int) -> list[int]:
    """Return the pages of a kind that say their own number."""
    count = len(data) // PAGE
    heads = [struct.unpack_from("<QHH", data, PAGE * number) for number in range(count)]
    return [number for number in range(2, count) if heads[number][0] == number and heads[number][2] == flags]


def tables(data: bytes) -> tuple[int, int]:
    """Return where the newest meta page begins, and the root of its table of tables."""
    metas = [META.unpack(data[at : at + META_BYTES]) for at in (0, PAGE)]
    newest = max((0, 1), key=lambda number: metas[number][6])
    return newest * PAGE, struct.unpack_from("<40xQ", metas[newest][4])[0]


def reached(data: bytes, page: int) -> list[int]:
    """Return a page and all below it."""
    flags, lower = struct.unpack_from("<10xHH", data, PAGE * page)
    found = [page]
    for slot in range(PAGE * page + 16, PAGE * page + lower, 2) if flags == BRANCH else ():
        at = PAGE * page + struct.unpack_from("<H", data, slot)[0]
        low, high, more = struct.unpack_from("<HHH", data, at)
        found += reached(data, low | high << 16 | more << 32)
    return found


def root_of(data: bytes, name: bytes) -> int:
    """Return the root of a named table."""
    _, main = tables(data)
    at = data.index(name, PAGE * main)
    return int(struct.unpack_from("<40xQ", data, at + len(name))[0])


def node(data: bytes, page: int, index: int) -> int:
    """Return where a node of a page begins."""
    return PAGE * page + int(struct.unpack_from("<H", data, PAGE * page + 16 + 2 * index)[0])


def refused(made: Path, tmp_path: Path, data: bytearray, words: str) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "data.mdb").write_bytes(data)
    for read_only in (True, False):
        with pytest.raises(CorruptionError, match=words) as caught:
            LmdbStore.open(folder, read_only=read_only)
        assert caught.value.file.endswith("data.mdb")
        assert 0 < caught.value.byte <= len(data)
        assert (folder / "data.mdb").read_bytes() == bytes(data)


def test_a_page_behind_the_file_is_refused(made: Path, tmp_path: Path) -> None:
    data = bytearray((made / "data.mdb").read_bytes())
    branch = root_of(data, b"data")
    struct.pack_into("<H", data, node(data, branch, 1) + 2, 1)  # 65536 pages further on
    refused(made, tmp_path, data, "is not in the file")


def test_a_tree_that_leads_back_is_refused(made: Path, tmp_path: Path) -> None:
    data = bytearray((made / "data.mdb").read_bytes())
    branch = root_of(data, b"data")
    first = node(data, branch, 0)
    data[node(data, branch, 1) : node(data, branch, 1) + 6] = data[first : first + 6]
    refused(made, tmp_path, data, "is used twice")


def test_a_branch_that_leads_to_itself_is_refused(made: Path, tmp_path: Path) -> None:
    data = bytearray((made / "data.mdb").read_bytes())
    branch = root_of(data, b"data")
    struct.pack_into("<HHH", data, node(data, branch, 1), branch, 0, 0)
    refused(made, tmp_path, data, "is used twice|another kind")


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (2, 0x7FFF, "a value reaches out of its page"),
        (4, 4, "has the flags 4"),
        (6, 0xFFF0, "a key reaches out of its page"),
        (6, 0, "a key of 0 bytes"),
    ],
)
def test_a_node_that_reaches_out_of_its_page_is_refused(
    offset: int, value: int, words: str, made: Path, tmp_path: Path
) -> None:
    data = bytearray((made / "data.mdb").read_bytes())
    leaf = reached(data, root_of(data, b"data"))[-1]
    struct.pack_into("<H", data, node(data, leaf, 0) + offset, value)
    refused(made, tmp_path, data, words)


def test_a_long_value_with_too_few_or_too_many_pages_is_refused(made: Path, tmp_path: Path) -> None:
    data = bytearray((made / "data.mdb").read_bytes())
    for page in pages(data, OVERFLOW):
        struct.pack_into("<I", data, PAGE * page + 12, 1 << 20)
    refused(made, tmp_path, data, "bytes on 1048576 pages")


def test_keys_out_of_order_are_refused(made: Path, tmp_path: Path) -> None:
    data = bytearray((made / "data.mdb").read_bytes())
    leaf = reached(data, root_of(data, b"data"))[-1]
    data[node(data, leaf, 0) + 8] = ord("z")
    refused(made, tmp_path, data, "out of order")


def test_a_list_of_free_pages_that_names_one_in_use_is_refused(made: Path, tmp_path: Path) -> None:
    data = bytearray((made / "data.mdb").read_bytes())
    meta, _ = tables(data)
    root = struct.unpack_from("<40xQ", data, meta + 40)[0]
    leaf = reached(data, root)[-1]
    first = node(data, leaf, 0)
    struct.pack_into("<Q", data, first + 8 + 8 + 8, root_of(data, b"data"))
    refused(made, tmp_path, data, "used twice|out of order")
    struct.pack_into("<Q", data, first + 8 + 8, 1 << 40)
    shutil.rmtree(tmp_path / "copy")
    refused(made, tmp_path, data, "free pages in")


def test_a_table_of_another_kind_is_refused(made: Path, tmp_path: Path) -> None:
    data = bytearray((made / "data.mdb").read_bytes())
    meta, _ = tables(data)
    struct.pack_into("<H", data, meta + 88 + 4, 4)
    refused(made, tmp_path, data, "has the flags 4")


def test_a_file_that_lacks_only_free_pages_is_opened(tmp_path: Path) -> None:
    """LMDB does not write pages that a transaction took at the end and gave back: its file may be short of them."""
    for seed in range(60):
        folder = tmp_path / str(seed)
        have = _history(folder, random.Random(seed))
        data = (folder / "data.mdb").read_bytes()
        meta, _ = tables(data)
        if (META.unpack(data[meta : meta + META_BYTES])[5] + 1) * PAGE > len(data):
            break
    else:
        pytest.fail("no such file was made")
    with LmdbStore.open(folder, read_only=True) as store:
        assert {entry.key for entry in store.range()} == have
        assert list(store.verify()) == []


def _history(folder: Path, rng: random.Random) -> set[str]:
    """Put and delete in the same transactions; return what is there."""
    have: set[str] = set()
    with LmdbStore.open(folder, map_bytes=1 << 24, sync="none") as store:
        for version in range(1, 12):
            new = {f"k{rng.randrange(4000):05}" for _ in range(rng.choice([3, 30, 100]))}
            old = sorted(have - new)
            gone = rng.sample(old, int(len(old) * rng.choice([0, 0.5, 0.9, 1])))
            have = (have | new) - set(gone)
            puts = [KvUpdate.put(key, bytes(rng.choice([10, 100, 900, 1900])), version) for key in sorted(new)]
            store.apply(puts + [KvUpdate.delete(key, version) for key in gone], WatchCursor.of(version))
    return have


def test_a_meta_page_that_became_older_is_refused(made: Path, tmp_path: Path) -> None:
    data = bytearray((made / "data.mdb").read_bytes())
    meta, _ = tables(data)
    data[meta + TRANSACTION_AT] ^= 0x10
    refused(made, tmp_path, data, "may be lost")


WRITER = """
import sys
from penstock.store import LmdbStore
from penstock.types import KvUpdate, WatchCursor
with LmdbStore.open(sys.argv[1], sync="none") as store:
    for version in range(1, 1 << 30):
        updates = [KvUpdate.put(f"key{n:03}", b"%d" % version * (n % 30), version) for n in range(version % 7, 200, 7)]
        store.apply(updates, WatchCursor.of(version))
        if version == 5:
            print("on", flush=True)
"""


def test_a_store_that_is_written_meanwhile_is_never_called_damaged(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "fold")], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"on\n"
            before = 0
            for _ in range(60):
                with LmdbStore.open(tmp_path / "fold", read_only=True) as store:
                    assert list(store.verify()) == []
                    versions = {entry.version.as_int() for entry in store.range()}
                    assert before <= max(versions)
                    before = max(versions)
            assert writer.poll() is None
        finally:
            writer.kill()


def test_any_flipped_byte_of_a_store_in_use_is_an_answer(made: Path, tmp_path: Path, long_run: bool) -> None:
    """Opened for writing and written to: the lists of free pages are followed too."""
    data = (made / "data.mdb").read_bytes()
    used = [at for at in range(len(data)) if data[at]] if not long_run else range(len(data))
    script = FLIP.replace("PLACES", repr(list(used)[:: 7 if long_run else len(used) // 40]))
    run = subprocess.run(
        [sys.executable, "-c", script, str(made / "data.mdb"), str(tmp_path / "copy")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, f"at byte {run.stdout.split()[-1:]}: {run.stderr[-2000:]}"


FLIP = """
import shutil, sys
from pathlib import Path
from penstock.errors import PenstockError
from penstock.store import LmdbStore
from penstock.types import KvUpdate, WatchCursor
data, copy = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2])
for at in PLACES:
    print(at, flush=True)
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    changed = bytearray(data)
    changed[at] ^= 1 << (at % 8)
    (copy / "data.mdb").write_bytes(changed)
    try:
        with LmdbStore.open(copy, sync="none") as store:
            for turn in range(3):
                store.apply(
                    [KvUpdate.put(f"new{n}", b"x" * (700 * n), 1) for n in range(turn, 12)]
                    + [KvUpdate.delete(f"key{n:04}", 2) for n in range(turn, 300, 3)], WatchCursor.of(9000 + turn))
            store.range()
            list(store.verify())
    except (PenstockError, OSError):
        pass
"""


def test_errors_of_damage_are_ours(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"\xff" * 65536)
    with pytest.raises(PenstockError, match=r"data\.mdb"):
        LmdbStore.open(tmp_path, read_only=True)
