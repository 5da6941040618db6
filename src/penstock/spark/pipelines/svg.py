"""Small charts as SVG text: lines over time, stacked columns, bars, strips.  Pure: numbers in, markup out.

Colours are CSS classes, so that one drawing serves light and dark; the page defines them.  Every mark has a title,
which browsers show when the pointer rests on it.
"""

from __future__ import annotations

import datetime as dt
import itertools
import math
import unicodedata
from collections.abc import Callable, Sequence
from html import escape
from typing import Final

__all__ = [
    "bars",
    "columns",
    "cut",
    "legible",
    "lines",
    "number",
    "short_bytes",
    "short_seconds",
    "strip",
    "ticks",
    "time_ticks",
    "whole",
]

WIDTH: Final = 640
HEIGHT: Final = 240
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 28
COLOURS: Final = 8
STEPS: Final = (
    0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600,
    43200, 86400, 172800, 604800, 1209600, 2592000, 7776000, *(years * 31557600 for years in (1, 2, 5, 10, 20, 50)),
)  # fmt: skip
YEAR: Final = 31557600
TURNING: Final = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Letters that change the direction of those behind them."""
DASH: Final = 7
"""How long a line is seen where it lies on others."""


def number(value: float) -> str:
    """Return a number as people read it.

    >>> number(1234567), number(950), number(0.25), number(999.9)
    ('1.23M', '950', '0.25', '1000')
    """
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{_three(value / size)}{unit}"
    return _three(value)


def whole(value: float) -> str:
    """Return a count as it is.

    >>> whole(1234567)
    '1,234,567'
    """
    return f"{value:,.0f}"


def short_bytes(value: float) -> str:
    """Return an amount of bytes.

    >>> short_bytes(512), short_bytes(1536), short_bytes(5 << 30), short_bytes(1000)
    ('512 B', '1.5 KiB', '5 GiB', '1000 B')
    """
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(value) >= 1 << power:
            return f"{_three(value / (1 << power))} {unit}"
    return f"{_three(value)} B"


def _three(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def short_seconds(value: float) -> str:
    """Return a length of time.

    >>> short_seconds(0.0005), short_seconds(75), short_seconds(90000), short_seconds(99.9 * 86400)
    ('500 µs', '1.2 min', '1 d', '100 d')
    """
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= size:
            return f"{value / size:.2g} {unit}" if value / size < 10 else f"{value / size:.0f} {unit}"
    return "0 s" if not value else f"{value * 1e9:.0f} ns"


def ticks(top: float, count: int = 4, *, unit: int = 1) -> list[float]:
    """Return round values from 0 to at least ``top``; with a unit of 1024 they are round as KiB, MiB and so on.

    >>> ticks(7), ticks(0), ticks(3 << 20, unit=1024)[1] == 1 << 20
    ([0.0, 2.0, 4.0, 6.0, 8.0], [0.0, 1.0], True)
    """
    if top <= 0:
        return [0.0, 1.0]
    if unit > 1 and top >= unit:
        return [mark * unit for mark in ticks(top / unit, count, unit=unit)]
    raw = top / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    return [step * index for index in range(math.ceil(top / step - 1e-9) + 1)]


def time_ticks(low: float, high: float, count: int = 6) -> list[tuple[float, str]]:
    """Return moments between two times in seconds since 1970, with their labels.

    >>> time_ticks(0, 3600, 4)
    [(0, '00:00'), (900, '00:15'), (1800, '00:30'), (2700, '00:45'), (3600, '01:00')]
    """
    span = max(high - low, 1e-6)
    if high <= low:
        return [(low, dt.datetime.fromtimestamp(low, dt.UTC).strftime("%H:%M:%S"))]
    step = next((step for step in STEPS if span / step <= count), STEPS[-1])
    form = "%Y" if step >= YEAR else "%Y-%m-%d" if step >= 86400 else "%H:%M" if step >= 60 else "%H:%M:%S"
    into = 86400 * 2 if step >= YEAR else 0  # years of 365 and a quarter days begin up to two days off
    first = math.ceil(low / step - 1e-9)
    found: list[tuple[float, str]] = []
    while first * step <= high + 1e-9 and len(found) <= count:
        moment = dt.datetime.fromtimestamp(first * step + into, dt.UTC)
        label = moment.strftime(form) + (f".{moment.microsecond // 1000:03d}" if step < 1 else "")
        found.append((first * step, label))
        first += 1
    return found


def lines(
    slots: Sequence[float],
    series: Sequence[tuple[str, Sequence[float | None]]],
    *,
    form: Callable[[float], str] = number,
    label: str = "",
) -> str:
    """Draw lines over time: ``slots`` are moments, each series a name and its values; None leaves a hole.

    Of lines that lie on one another each is seen in turn.
    """
    top = max((value for _, values in series for value in values if value is not None), default=0.0)
    marks = _time_marks(top) if form is short_seconds else ticks(top, unit=1024 if form is short_bytes else 1)
    across, up = _across(slots[0], slots[-1]) if slots else _across(0, 1), _up(marks[-1])
    parts = [_frame(marks, up, form), _time_axis(slots, across)]
    if all(value is None for _, values in series for value in values):
        parts.append(_nothing())
    near = marks[-1] / (HEIGHT - TOP - BOTTOM) * 2
    for index, (name, values) in enumerate(series):
        title, colour = f"<title>{escape(name)}</title>", f"s{index % COLOURS}"
        for begin, end, together in _stretches([values for _, values in series], index, near):
            points = [(across(slots[at]), up(value)) for at in range(begin, end) if (value := values[at]) is not None]
            if len(points) == 1:
                (x, y) = points[0]
                parts.append(f'<circle class="fill {colour}" cx="{x:.1f}" cy="{y:.1f}" r="3">{title}</circle>')
                continue
            drawn, turn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points), together.index(index)
            over, dashes = "", ""
            if turn:
                over, gap = " over", DASH * (len(together) - 1)
                dashes = f' stroke-dasharray="{DASH} {gap}" stroke-dashoffset="-{DASH * turn}"'
            parts.append(f'<polyline class="line {colour}{over}" points="{drawn}"{dashes}>{title}</polyline>')
    width = (WIDTH - LEFT - RIGHT) / max(len(slots), 1)
    for place, moment in enumerate(slots):
        when = dt.datetime.fromtimestamp(moment, dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
        told = [f"{name}: {form(value)}" for name, values in series if (value := values[place]) is not None]
        parts.append(
            f'<rect class="hit" x="{across(moment) - width / 2:.1f}" y="{TOP}" width="{width:.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"><title>{escape(chr(10).join([when, *told]))}</title></rect>'
        )
    return _svg(parts, HEIGHT, label)


def _time_marks(top: float) -> list[float]:
    """Return values that are round as seconds, minutes, hours or days, whichever fits.

    >>> _time_marks(7200), _time_marks(3)
    ([0.0, 1800.0, 3600.0, 5400.0, 7200.0], [0.0, 1.0, 2.0, 3.0])
    """
    unit = next((size for size in (86400, 3600, 60) if top >= size), 1)
    return [mark * unit for mark in ticks(top / unit)]


def _stretches(
    series: Sequence[Sequence[float | None]], index: int, near: float
) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return the stretches of one line, from and up to which slot, and which lines lie on one another there.

    >>> _stretches([[1.0, 1.0, 5.0], [1.0, 1.0, 1.0]], 1, 0.1)
    [(0, 2, (0, 1)), (1, 3, (1,))]
    """
    values, begin = series[index], 0
    found: list[tuple[int, int, tuple[int, ...]]] = []
    for there, run in itertools.groupby(values, lambda value: value is not None):
        end = begin + len(list(run))
        if there and end - begin == 1:
            found.append((begin, end, (index,)))
        elif there:
            steps = [(_together(series, index, place, near), place) for place in range(begin, end - 1)]
            for together, run_of in itertools.groupby(steps, lambda step: step[0]):
                places = [place for _, place in run_of]
                found.append((places[0], places[-1] + 2, together))
        begin = end
    return found


def _together(series: Sequence[Sequence[float | None]], index: int, place: int, near: float) -> tuple[int, ...]:
    """Return the lines that lie on this one between two slots, and itself."""

    def same(other: int) -> bool:
        return other == index or all(
            (a := series[index][at]) is not None and (b := series[other][at]) is not None and abs(a - b) <= near
            for at in (place, place + 1)
        )

    return tuple(filter(same, range(len(series))))


def columns(
    names: Sequence[str],
    series: Sequence[tuple[str, Sequence[float]]],
    *,
    form: Callable[[float], str] = number,
    label: str = "",
) -> str:
    """Draw stacked columns: ``names`` stand below, each series a name and a value for each column."""
    totals = [sum(values[place] for _, values in series) for place in range(len(names))]
    marks = ticks(max(totals, default=0.0))
    up, step = _up(marks[-1]), (WIDTH - LEFT - RIGHT) / max(len(names), 1)
    parts = [_frame(marks, up, form)]
    if not any(totals):
        parts.append(_nothing())
    every = max(1, math.ceil(len(names) / 10))
    for place, name in enumerate(names):
        base, x = 0.0, LEFT + place * step
        for index, (told, values) in enumerate(series):
            if values[place] <= 0:
                continue
            y, bottom = up(base + values[place]), up(base)
            told = escape(f"{name}, {told}: {form(values[place])}")
            parts.append(
                f'<rect class="fill s{index % COLOURS}" x="{x + 1:.1f}" y="{y:.1f}" width="{max(step - 2, 1):.1f}" '
                f'height="{max(bottom - y, 0.5):.1f}"><title>{told}</title></rect>'
            )
            base += values[place]
        if place % every == 0:
            parts.append(f'<text class="tick mid" x="{x + step / 2:.1f}" y="{HEIGHT - 10}">{escape(name)}</text>')
    return _svg(parts, HEIGHT, label)


def bars(rows: Sequence[tuple[str, float, str]], *, label: str = "") -> str:
    """Draw one bar a row: its name, its length, and what stands at its end."""
    top = max((value for _, value, _ in rows), default=0.0) or 1.0
    left, right, high = 190, 110, 24
    parts = []
    for place, (name, value, said) in enumerate(rows):
        y = place * high
        width = (WIDTH - left - right) * value / top
        parts.append(_name(name, left, y))
        parts.append(
            f'<rect class="fill s0" x="{left}" y="{y + 4}" width="{max(width, 1.5):.1f}" height="{high - 8}" rx="2">'
            f"<title>{escape(f'{name}: {said}')}</title></rect>"
        )
        parts.append(
            f'<text class="tick" x="{left + max(width, 1.5) + 6:.1f}" y="{y + 16}">{escape(cut(said, 17))}</text>'
        )
    return _svg(parts, max(len(rows) * high, high), label)


def strip(
    slots: Sequence[float],
    rows: Sequence[tuple[str, Sequence[bool], Sequence[tuple[float, float]]]],
    *,
    unknown: Sequence[str] = (),
    label: str = "",
) -> str:
    """Draw when each row was heard: its name, whether in each slot, and its silences as (from, to).

    Of the names in ``unknown`` nobody knows: they say so.
    """
    left, high = 190, 24
    across = _across(slots[0], slots[-1], left) if slots else _across(0, 1, left)
    width = (WIDTH - left - RIGHT) / max(len(slots) - 1, 1)
    parts = []
    for place, (name, heard, silences) in enumerate(rows):
        y = place * high
        parts.append(_name(name, left, y))
        parts.append(
            f'<rect class="quiet" x="{left}" y="{y + 5}" width="{WIDTH - left - RIGHT}" height="{high - 10}"/>'
        )
        if name in unknown:
            parts.append(f'<text class="tick" x="{left + 6}" y="{y + 16}">its records have no time</text>')
        for start, stop in _runs(heard):
            x = max(across(slots[start]) - width / 2, left)
            until = min(across(slots[stop - 1]) + width / 2, WIDTH - RIGHT)
            parts.append(
                f'<rect class="fill s0" x="{x:.1f}" y="{y + 5}" width="{max(until - x, 1):.1f}" height="{high - 10}"/>'
            )
        for begin, end in silences:
            told = f"{name}: nothing for {short_seconds(end - begin)}"
            x = min(max(across(begin), left), WIDTH - RIGHT)
            until = min(max(across(end), left), WIDTH - RIGHT)
            parts.append(
                f'<rect class="hit" x="{x:.1f}" y="{y}" width="{max(until - x, 2):.1f}" height="{high}">'
                f"<title>{escape(told)}</title></rect>"
            )
    bottom = len(rows) * high
    for moment, text in time_ticks(slots[0], slots[-1], 5) if slots else []:
        parts.append(f'<text class="tick mid" x="{across(moment):.1f}" y="{bottom + 16}">{text}</text>')
    return _svg(parts, bottom + 24, label)


def legible(text: str) -> str:
    r"""Return a name with what is not seen, or turns what stands beside it round, written out.

    >>> legible("a\nb"), legible("\u202egnp.exe"), legible("日本")
    ('a\\nb', '\\u202egnp.exe', '日本')
    """
    odd = (letter for letter in set(text) if unicodedata.category(letter) in ("Cc", "Zl", "Zp"))
    told = {letter: letter.encode("unicode_escape").decode() for letter in (*odd, *(set(text) & set(TURNING)))}
    return "".join(told.get(letter, letter) for letter in text)


def cut(text: str, room: int) -> str:
    """Return what of a text fits into so many places, of which wide letters take two.

    >>> cut("site/ticks", 6), cut("日本語チャンネル", 8), cut("short", 6)
    ('site/…', '日本語…', 'short')
    """
    widths = [2 if unicodedata.east_asian_width(letter) in "WF" or letter in "WMwm" else 1 for letter in text]
    if sum(widths) <= room:
        return text
    kept = sum(total < room for total in itertools.accumulate(widths))
    return text[:kept] + "…"


def _name(name: str, left: int, y: int) -> str:
    """Draw what a row is called, left of where it begins."""
    shown = escape(cut(name, 26))
    return f'<text class="name end" x="{left - 8}" y="{y + 16}">{shown}<title>{escape(name)}</title></text>'


def _runs(heard: Sequence[bool]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for place, value in enumerate(heard):
        if value and runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        elif value:
            runs.append((place, place + 1))
    return runs


def _across(low: float, high: float, left: float = LEFT) -> Callable[[float], float]:
    if high <= low:  # one moment stands in the middle
        return lambda _: left + (WIDTH - left - RIGHT) / 2
    return lambda value: left + (WIDTH - left - RIGHT) * (value - low) / (high - low)


def _up(top: float) -> Callable[[float], float]:
    return lambda value: HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top


def _frame(marks: Sequence[float], up: Callable[[float], float], form: Callable[[float], str]) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(mark):.1f}" y2="{up(mark):.1f}"/>'
        f'<text class="tick end" x="{LEFT - 6}" y="{up(mark) + 4:.1f}">{escape(form(mark))}</text>'
        for mark in marks
    )


def _nothing() -> str:
    return f'<text class="tick mid" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT / 2}">nothing to draw</text>'


def _time_axis(slots: Sequence[float], across: Callable[[float], float]) -> str:
    if not slots:
        return ""
    return "".join(
        f'<text class="tick mid" x="{min(max(across(moment), LEFT), WIDTH - 32):.1f}" y="{HEIGHT - 10}">{text}</text>'
        for moment, text in time_ticks(slots[0], slots[-1])
    )


def _svg(parts: Sequence[str], height: float, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
