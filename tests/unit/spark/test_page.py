"""The page of the report: one file, well formed, that shows what it was given."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

from penstock.spark.pipelines import svg
from penstock.spark.pipelines.page import OTHERS, ChannelPart, Lag, Report, TopKey, render

VOID = {"meta", "br"}


class Outline(HTMLParser):
    """Checks that every element is closed, and keeps the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def report(channels: int = 3, slots: int = 10) -> Report:
    parts = [
        ChannelPart(
            f"site/<{n}>", records=slots * (n + 1), bytes=1000, kinds=1, largest=99, first_time=0.0, last_time=100.0,
            slot_records=[n + 1] * slots, slot_bytes=[100] * slots, sizes={3: slots, 5: n},
            silences=[(10.0, 40.0)] if not n else [],
        )
        for n in range(channels)
    ]  # fmt: skip
    return Report(
        title="a & b",
        made=1e9,
        slots=[10.0 * n for n in range(slots)],
        slot_seconds=10,
        channels=parts,
        delays=[(None, None), *[(0.1, 0.5)] * (slots - 1)],
        lags=[Lag("site/<0>", "billing", 12, 3.5)],
        keys=[TopKey("site/<0>", "devices/<7>", 9)],
        checks=[
            {
                "channel": "x",
                "records": 3,
                "gaps": 1,
                "disorder": 0,
                "back_in_time": 0,
                "problems": ["a<b"],
                "ok": False,
            }
        ],
    )


def read(page: str) -> Outline:
    outline = Outline()
    outline.feed(page)
    outline.close()
    assert outline.open == []
    return outline


def test_a_page_is_whole_shows_what_it_was_given_and_asks_for_nothing_else() -> None:
    page = render(report())
    outline = read(page)
    text = " ".join(outline.text)
    for shown in ("a & b", "site/<2>", "devices/<7>", "billing · site/<0>", "a<b", "30 s", "Delay", "broken"):
        assert shown in text, shown
    assert outline.links == []
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "prefers-color-scheme:dark" in page


def test_every_drawing_is_xml_and_stays_in_its_box() -> None:
    drawings = re.findall(r"<svg.*?</svg>", render(report()), re.DOTALL)
    assert len(drawings) == 7
    for drawing in drawings:
        root = ET.fromstring(drawing)
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        for mark in root.iter("{http://www.w3.org/2000/svg}rect"):
            x, y, wide, high = (float(mark.attrib[name]) for name in ("x", "y", "width", "height"))
            middle = mark.attrib["class"] == "hit"  # those of a line reach half a slot to both sides
            assert -40 * middle <= x <= x + wide <= width + 40 * middle
            assert 0 <= y <= y + high <= height
        for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
            for point in line.attrib["points"].split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= width
                assert 0 <= y <= height


def test_many_channels_are_drawn_as_few() -> None:
    page = render(report(channels=30))
    assert OTHERS in read(page).text
    assert page.count("<polyline") == 2 * 8 + 2  # two charts of rates, and two lines of delay


def test_an_empty_report_is_a_page() -> None:
    assert "no such" not in " ".join(read(render(Report(title="nothing", made=0.0))).text)
    assert read(render(Report(title="t", made=0.0, channels=[ChannelPart("empty")]))).open == []


def test_times_and_amounts_are_round() -> None:
    assert svg.ticks(0.9) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [label for _, label in svg.time_ticks(0, 0.01, 2)] == ["00:00:00.000", "00:00:00.005", "00:00:00.010"]
    assert [label for _, label in svg.time_ticks(0, 10 * 86400, 3)][1] == "1970-01-08"
    assert svg.short_seconds(2e-9) == "2 ns"
    assert svg.short_seconds(0) == "0 s"


def test_amounts_are_never_written_with_an_exponent_where_people_read_them() -> None:
    assert [svg.short_bytes(n) for n in (999.6, 1000, 1023, 1000 << 10)] == ["1000 B", "1000 B", "1023 B", "1000 KiB"]
    assert [svg.number(n) for n in (999.6, 999_999)] == ["1000", "1000k"]
    assert [svg.short_bytes(mark) for mark in svg.ticks(1100, unit=1024)] == ["0 B", "512 B", "1 KiB", "1.5 KiB"]


def test_one_record_is_a_point_that_can_be_seen() -> None:
    one = ChannelPart("ticks", records=1, slot_records=[1], slot_bytes=[37], first_time=5.0, last_time=5.0)
    page = render(Report(title="t", made=0.0, slots=[5.0], channels=[one]))
    found = re.findall(r'<circle class="fill s0" cx="([^"]+)" cy="([^"]+)" r="3">', page)
    assert found[0] == ("342.0", "12.0")  # in the middle, at the top
    assert ">00:00:05<" in page  # and its moment below it
    assert "record" in read(page).text
    assert "channel" in read(page).text


def test_a_name_of_any_length_stays_in_its_place() -> None:
    page = render(
        Report(
            title="t",
            made=0.0,
            slots=[1.0, 2.0],
            channels=[ChannelPart("w" * 90, slot_records=[1, 0], slot_bytes=[1, 0])],
        )
    )
    drawn = re.findall(r'class="name end"[^>]*>([^<]*)<', page)
    assert drawn
    assert all(len(name) <= 14 for name in drawn)
    assert ".legend span{overflow-wrap:anywhere}" in page


def test_a_page_says_that_it_does_not_draw_the_gaps_of_all() -> None:
    def note(count: int) -> str:
        parts = [ChannelPart(str(n), slot_records=[1], slot_bytes=[1]) for n in range(count)]
        return " ".join(read(render(Report(title="t", made=0.0, slots=[1.0], channels=parts))).text)

    assert "when each channel was written to" in note(40)
    assert "when each of the 40 largest channels was written to" in note(41)


def test_a_channel_without_times_says_so_wherever_times_are_drawn() -> None:
    timed = ChannelPart("ticks", records=2, slot_records=[1, 1], slot_bytes=[1, 1], first_time=1.0, last_time=2.0)
    queue = ChannelPart("queue", records=1234, timeless=1234, slot_records=[0, 0], slot_bytes=[0, 0])
    text = " ".join(read(render(Report(title="t", made=0.0, slots=[1.0, 2.0], channels=[timed, queue]))).text)
    assert "queue (no times)" in text
    assert "its records have no time" in text
    assert "of 1 of 2 channels the records have no time" in text
    assert text.count("1,234") == 1  # in the table, as every count is written
    assert "1.23k" not in text.replace("1.25k", "")
    page = render(Report(title="t", made=0.0, slots=[1.0, 2.0], channels=[timed, queue]))
    assert page.count("<polyline") == 2  # no line at zero for what has no times
    alone = " ".join(read(render(Report(title="t", made=0.0, channels=[queue]))).text)
    assert alone.count("nothing to draw") == 3


def test_a_line_that_covers_another_leaves_it_visible() -> None:
    slots = [float(n) for n in range(10)]
    same = svg.lines(slots, [("a", [1.0] * 10), ("b", [1.0] * 10), ("c", [9.0] * 10)])
    assert same.count('class="line s1 over"') == 1
    assert same.count(" over") == 1
    assert " over" not in svg.lines(slots, [("a", [1.0] * 10), ("b", [5.0] * 10)])
    many = svg.lines(slots, [(name, [1.0] * 10) for name in "abcd"])
    dashes = re.findall(r'stroke-dasharray="7 21" stroke-dashoffset="-(\d+)"', many)
    assert dashes == ["7", "14", "21"]  # each is seen where the others are not
    parted = svg.lines(slots, [("a", [0.0] * 10), ("b", [9.0] * 3 + [0.0] * 7)])
    assert re.findall(r'class="line s1( over)?"', parted) == ["", " over"]  # and whole where it is alone


def test_the_clock_of_a_device_that_was_never_set_leaves_the_axis_readable() -> None:
    marks = svg.time_ticks(0.0, 1_795_000_000.0)
    assert [label for _, label in marks] == ["1970", "1980", "1990", "2000", "2010", "2020"]
    assert [label for _, label in svg.time_ticks(1_600_000_000.0, 1_700_000_000.0)] == ["2021", "2022", "2023"]
    assert len(svg.time_ticks(0.0, 9_223_372_036.0)) == 6


def test_a_name_does_not_turn_round_what_stands_beside_it() -> None:
    part = ChannelPart("a\u202egnp.exe", records=1, slot_records=[1], slot_bytes=[1], first_time=1.0, last_time=1.0)
    lines = ChannelPart("two\nlines", records=1, slot_records=[1], slot_bytes=[1], first_time=1.0, last_time=1.0)
    page = render(Report(title="t", made=0.0, slots=[1.0], channels=[part, lines], keys=[TopKey("two\nlines", "", 3)]))
    assert "\u202e" not in page
    text = " ".join(read(page).text)
    assert r"a\u202egnp.exe" in text
    assert r"two\nlines" in text
    assert "(empty)" in text


def test_delays_are_marked_at_round_times() -> None:
    drawn = svg.lines([1.0, 2.0], [("middle", [0.0, 5 * 86400.0])], form=svg.short_seconds)
    assert re.findall(r'class="tick end"[^>]*>([^<]*)<', drawn) == ["0 s", "2 d", "4 d", "6 d"]
