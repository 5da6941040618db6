"""What the demo's writers remember is what is in their channels."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from penstock.cli.demo_readings import RETIRED, SITES, load_written, share, write_readings
from penstock.log import open_log
from penstock.log.envelope import open_envelopes
from penstock.log.xchannel import Writer
from penstock.types import Op


def test_every_reading_is_someones() -> None:
    assert sum(share(1_000_003).values()) == 1_000_003


@pytest.mark.parametrize("site", SITES)
def test_a_writer_remembers_what_is_in_its_channel(tmp_path: Path, site: str) -> None:
    (tmp_path / "voices").mkdir()
    (tmp_path / "channels").mkdir()
    Writer.precreate(tmp_path / "voices" / site)
    write_readings(str(tmp_path), site, 3_210, 0.0)
    (written,) = load_written(str(tmp_path))
    latest: dict[str, str] = {}
    total = count = 0
    with open_log(str(tmp_path / "channels" / site)) as log:
        assert log.format == SITES[site]
        at = log.first_position
        while len(batch := log.read(at)):
            for row in open_envelopes(batch).to_pylist():
                count += 1
                key = row["key"].decode()
                if row["op"] == Op.DELETE:
                    del latest[key]
                    continue
                latest[key] = row["payload"].decode()
                total += round(msgspec.json.decode(row["payload"])["celsius"] * 100)
            at = batch.next_position
    assert (written.readings, written.records, count) == (3_210, 3_210 + RETIRED, 3_210 + RETIRED)
    assert (written.latest, written.hundredths) == (latest, total)
