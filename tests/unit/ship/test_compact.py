"""Compacted files hold every record of every log once, and originals go only after their manifest is in place."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from ship_use import FORMATS, fill, open_writer, seal

from penstock.disk import object_store_for
from penstock.disk.failpoint import arm
from penstock.errors import ConflictError, CorruptionError, OptionsError, ReplacedError
from penstock.ship import Shipper, open_shipped
from penstock.ship.compact import compact_fleet, forget_compacted, read_compacted


def ship(tmp_path: Path, node: str, format: str, start: int, count: int) -> list[bytes]:
    (tmp_path / node).mkdir(exist_ok=True)
    with open_writer(format, tmp_path / node / "ticks") as writer:
        wanted = [p for at in range(start, start + count, 10) for p in fill(format, writer, at, 10)]
    store = object_store_for(tmp_path / "up" / node)
    with Shipper(tmp_path / node / "ticks", store, node=node) as shipper:
        while shipper.step():
            pass
    return wanted


def rows(tmp_path: Path) -> dict[str, list[bytes]]:
    store = object_store_for(tmp_path / "up")
    found: dict[str, list[bytes]] = {}
    for file in read_compacted(store)[0].files:
        table = parquet.read_table(io.BytesIO(store.get(file.key)[0]))
        assert table.num_rows == file.rows
        for node, payload in zip(table["node"].to_pylist(), table["payload"].to_pylist(), strict=True):
            found.setdefault(node, []).append(payload)
    return found


def test_every_record_of_every_node_is_in_the_files_once(tmp_path: Path) -> None:
    place = str(tmp_path / "up")
    wanted = {f"node-{kind}": ship(tmp_path, f"node-{kind}", kind, 0, 40) for kind in FORMATS}
    first = compact_fleet(place)
    assert len(first.files) == 1
    assert rows(tmp_path) == wanted
    assert compact_fleet(place) == first  # nothing came since
    for kind in FORMATS:
        wanted[f"node-{kind}"] += ship(tmp_path, f"node-{kind}", kind, 40, 20)
    assert len(compact_fleet(place, file_bytes=100).files) > 2
    assert rows(tmp_path) == wanted


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_is_full_by_its_records_as_well_as_by_their_payload(kind: str, tmp_path: Path) -> None:
    (tmp_path / "n").mkdir()
    with open_writer(kind, tmp_path / "n" / "ticks") as writer:
        writer.append_many([b""] * 70 + [b"x" * 1000] * 5 + [b"y"] * 25)
        seal(kind, writer)
    with Shipper(tmp_path / "n" / "ticks", object_store_for(tmp_path / "up" / "n"), node="n") as shipper:
        shipper.step()
    made = compact_fleet(str(tmp_path / "up"), file_bytes=64 * 20)
    assert [file.rows for file in made.files] == [20, 20, 20, 11, 2, 2, 20, 5]
    assert rows(tmp_path)["n"] == [b""] * 70 + [b"x" * 1000] * 5 + [b"y"] * 25
    forget_compacted(str(tmp_path / "up"))


@pytest.mark.parametrize("size", [0, -1, (1 << 29) + 1])
def test_a_size_that_no_reader_would_take_is_refused(size: int) -> None:
    with pytest.raises(OptionsError, match=f"file_bytes={size}"):
        compact_fleet("/nowhere", file_bytes=size)


@pytest.mark.parametrize("where", ["ship.compact.written", "ship.compact.named"])
def test_a_crash_leaves_the_originals_and_repeats_nothing(where: str, tmp_path: Path) -> None:
    place = str(tmp_path / "up")
    wanted = {"n": ship(tmp_path, "n", "messagelog", 0, 40)}

    def crash() -> None:
        raise KeyboardInterrupt

    with arm(where, crash), pytest.raises(KeyboardInterrupt):
        compact_fleet(place)
    if where.endswith("written"):
        assert forget_compacted(place) == []
    with open_shipped(place + "/n/ticks") as log:
        assert log.first_position == 1
    compact_fleet(place)
    assert rows(tmp_path) == wanted
    assert forget_compacted(place) == [place + "/n/ticks"]
    with open_shipped(place + "/n/ticks") as log:
        assert log.first_position == 31  # the last segment may still grow and stays


def test_what_a_compaction_wrote_that_another_one_outran_goes_again(tmp_path: Path) -> None:
    place = str(tmp_path / "up")
    ship(tmp_path, "n", "messagelog", 0, 40)
    raced = [False]

    def outrun() -> None:
        if not raced[0]:
            raced[0] = True
            ship(tmp_path, "n", "messagelog", 40, 10)  # so that what the other one writes is another file
            compact_fleet(place)

    with arm("ship.compact.written", outrun), pytest.raises(ConflictError):
        compact_fleet(place)
    named = {file.key for file in read_compacted(object_store_for(place))[0].files}
    assert {f"compacted/{file.name}" for file in (tmp_path / "up" / "compacted").iterdir()} == named
    assert len(rows(tmp_path)["n"]) == 50


def test_a_log_made_again_is_compacted_from_its_beginning(tmp_path: Path) -> None:
    place = str(tmp_path / "up")
    old = ship(tmp_path, "n", "messagelog", 0, 40)
    compact_fleet(place)
    shutil.rmtree(tmp_path / "n")
    shutil.rmtree(tmp_path / "up" / "n")  # someone makes room for a new log under the same name
    new = ship(tmp_path, "n", "messagelog", 900, 20)
    assert forget_compacted(place) == []
    with open_shipped(place + "/n/ticks") as log:
        assert log.first_position == 1
    compact_fleet(place)
    assert rows(tmp_path) == {"n": [*old, *new]}
    assert forget_compacted(place) == [place + "/n/ticks"]


@pytest.mark.parametrize("more", [0, 40])
def test_a_log_whose_backup_was_shipped_anew_is_refused_and_its_originals_stay(more: int, tmp_path: Path) -> None:
    place = str(tmp_path / "up")
    old = ship(tmp_path, "n", "messagelog", 0, 20)
    shutil.copytree(tmp_path / "n", tmp_path / "kept")
    old += ship(tmp_path, "n", "messagelog", 20, 20)
    compact_fleet(place)
    shutil.rmtree(tmp_path / "n")
    shutil.rmtree(tmp_path / "up" / "n")
    (tmp_path / "kept").rename(tmp_path / "n")
    ship(tmp_path, "n", "messagelog", 900, more)
    wanted = ship(tmp_path, "m", "messagelog", 0, 20)
    told = "record at" if more else "ends at"
    with pytest.raises(ReplacedError, match=told):
        compact_fleet(place)
    assert rows(tmp_path) == {"n": old, "m": wanted}  # the other log is compacted all the same
    with pytest.raises(ReplacedError, match=told):
        forget_compacted(place)
    with open_shipped(place + "/n/ticks") as log:
        assert log.first_position == 1


def test_a_manifest_is_not_written_longer_than_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(tmp_path / "up")
    wanted = {"n": ship(tmp_path, "n", "messagelog", 0, 40)}
    compact_fleet(place, file_bytes=100)
    wanted["n"] += ship(tmp_path, "n", "messagelog", 40, 200)
    size = (tmp_path / "up" / "compacted.json").stat().st_size
    monkeypatch.setattr("penstock.ship.compact.MANIFEST_BYTES", size + 2000)
    for _ in range(2):
        with pytest.raises(OptionsError, match="as long as readers take it"):
            compact_fleet(place, file_bytes=100)
        found = rows(tmp_path)  # what had room is named, in its order
        assert found["n"] == wanted["n"][: len(found["n"])]
        assert 40 < len(found["n"]) < 240
        assert len(list((tmp_path / "up" / "compacted").iterdir())) == len(
            read_compacted(object_store_for(place))[0].files
        )
    forget_compacted(place)
    with open_shipped(place + "/n/ticks") as log:
        assert log.first_position <= 1 + len(found["n"])
    monkeypatch.undo()
    compact_fleet(place)
    assert rows(tmp_path) == wanted


@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_originals_stay_when_a_compacted_file_is_not_there(harm: str, tmp_path: Path) -> None:
    place = str(tmp_path / "up")
    ship(tmp_path, "n", "messagelog", 0, 40)
    (file,) = compact_fleet(place).files
    path = tmp_path / "up" / file.key
    path.unlink() if harm == "gone" else path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptionError, match="compacted/"):
        forget_compacted(place)
    with open_shipped(place + "/n/ticks") as log:
        assert log.first_position == 1


def test_a_compacted_file_that_unpacks_to_far_more_than_it_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa

    from penstock.errors import CorruptionError
    from penstock.ship import compacted

    part = compacted.CompactedPart("place", "key", 1, "", 1, "log", "node", "channel", "raw", 0, 1 << 40)

    def packed(value: bytes, count: int) -> bytes:
        columns = {
            "log": pa.repeat(pa.scalar("log"), count),
            "position": pa.array([0] * count, pa.int64()),
            "timestamp_ns": pa.nulls(count, pa.int64()),
            "kind": pa.nulls(count, pa.int32()),
            "from": pa.nulls(count, pa.binary()),
            "payload": pa.DictionaryArray.from_arrays(
                pa.array([0] * count, pa.int32()), pa.array([value], pa.binary())
            ),
        }
        sink = io.BytesIO()
        parquet.write_table(pa.table(columns), sink, compression="zstd")
        return sink.getvalue()

    monkeypatch.setattr(compacted, "UNPACKED_BYTES", 1 << 20)
    for value, count in ((bytes(1 << 16), 1000), (bytes(1 << 26), 1), (b"", 300_000)):
        data = packed(value, count)
        assert len(data) < 1 << 18
        monkeypatch.setattr(compacted, "UNPACKED_TIMES", 1)
        with pytest.raises(CorruptionError, match="unpack to"):
            compacted._batch(data, part)
    assert len(compacted._batch(packed(b"v", 100), part)) == 100


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("harm", ["segment", "manifest"])
def test_one_bad_log_keeps_no_other_from_being_compacted(harm: str, format: str, tmp_path: Path) -> None:
    place = str(tmp_path / "up")
    wanted = {node: ship(tmp_path, node, format, 0, 40) for node in ("a", "m", "z")}
    bad = tmp_path / "up/m/ticks.shipped.json"
    if harm == "segment":
        with open_shipped(place + "/m/ticks") as log:
            bad = tmp_path / "up/m" / log.entries(log.first_position, log.next_position)[2].key
    good = bad.read_bytes()
    bad.write_bytes(good[:-5] + b"?" + good[-4:])
    with pytest.raises(CorruptionError, match="/m/"):
        compact_fleet(place)
    found = rows(tmp_path)
    assert (found["a"], found["z"]) == (wanted["a"], wanted["z"])
    assert found.get("m", []) == wanted["m"][: len(found.get("m", []))]
    if harm == "manifest":
        with pytest.raises(CorruptionError, match="/m/"):
            forget_compacted(place)
    assert place + "/a/ticks" not in forget_again(place)
    bad.write_bytes(good)
    compact_fleet(place)
    assert rows(tmp_path) == wanted


def forget_again(place: str) -> list[str]:
    """Forget what is compacted, and once more; return what became shorter the second time."""
    for _ in range(2):
        try:
            done = forget_compacted(place)
        except CorruptionError:
            done = []
    return done
