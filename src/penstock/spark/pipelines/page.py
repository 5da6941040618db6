"""The page of pipeline ``report``: one HTML file that needs nothing else, in light and in dark.  Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from html import escape
from typing import Final

import msgspec

from penstock.spark.pipelines import svg
from penstock.spark.pipelines.svg import cut, legible, short_bytes, short_seconds, whole

__all__ = ["ChannelPart", "Lag", "Report", "TopKey", "render"]

SHOWN: Final = 7
"""Channels with a colour of their own; the others are drawn as one."""
OTHERS: Final = "others"
STRIPS: Final = 40
"""Channels whose gaps are drawn, the largest."""
LEGEND: Final = 48
"""Letters of a name in a legend."""

STYLE: Final = (
    """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1b2430;--soft:#5c6877;--line:#e3e7ec;--quiet:#eceff3;
--bad:#c62b36;--good:#1d8a4e;--s0:#3a6fd8;--s1:#e08a00;--s2:#1f9d6b;--s3:#d1495b;--s4:#8757d6;--s5:#0f9bb3;--s6:#b0852a;
--s7:#7a8594}
@media (prefers-color-scheme:dark){:root{--bg:#12161c;--card:#1a2028;--ink:#e6eaf0;--soft:#97a3b3;--line:#2b333e;
--quiet:#242c36;--bad:#ff7a82;--good:#5fd08f;--s0:#6ea0ff;--s1:#ffb547;--s2:#4fd0a0;--s3:#ff7f8e;--s4:#b794ff;
--s5:#4fd0e6;--s6:#dcb566;--s7:#9aa6b5}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 20px 48px}
h1,p.note,.legend span{overflow-wrap:anywhere}h1{font-size:24px;margin:0}h2{font-size:15px;margin:0 0 2px}
p.note{color:var(--soft);margin:2px 0 12px;font-size:13px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:20px 0}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px;align-items:start}
.cards>*{min-width:0}
.card,.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px}
.tile b{display:block;font-size:22px;font-variant-numeric:tabular-nums}.tile span{color:var(--soft);font-size:13px}
.wide{grid-column:1/-1}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{fill:var(--soft);font-size:11px}svg .name{fill:var(--ink);font-size:12px}
.mid{text-anchor:middle}.end{text-anchor:end}.grid{stroke:var(--line)}.quiet{fill:var(--quiet)}
.hit{fill:transparent}.hit:hover{fill:var(--ink);fill-opacity:.08}.line{fill:none;stroke-width:1.8;stroke-linejoin:round;
stroke-linecap:round}.line.over{stroke-linecap:butt;stroke-width:2.4}
"""
    + "".join(f".line.s{n}{{stroke:var(--s{n})}}.fill.s{n}{{fill:var(--s{n})}}" for n in range(svg.COLOURS))
    + """
.legend{display:flex;flex-wrap:wrap;gap:4px 14px;margin-top:8px;font-size:12.5px;color:var(--soft)}
.legend i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px}
"""
    + "".join(f".legend .s{n}{{background:var(--s{n})}}" for n in range(svg.COLOURS))
    + """
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th{color:var(--soft);font-weight:500}th,td{text-align:right;padding:5px 10px;border-bottom:1px solid var(--line);
white-space:nowrap}th:first-child,td:first-child{text-align:left}
td:first-child{white-space:normal;overflow-wrap:anywhere;min-width:180px}tr:last-child td{border-bottom:0}
td.told,th.told{text-align:left}td.told{white-space:normal;overflow-wrap:anywhere;min-width:260px}
.bad{color:var(--bad)}.good{color:var(--good)}
"""
)


class ChannelPart(msgspec.Struct):
    """What is known of one channel; the lists have one value for each slot of the report.

    >>> ChannelPart("ticks").records
    0
    """

    name: str
    records: int = 0
    bytes: int = 0
    kinds: int = 0
    largest: int = 0
    first_time: float | None = None
    last_time: float | None = None
    timeless: int = 0
    """Records without a time: they are in no chart over time."""
    slot_records: list[int] = []
    slot_bytes: list[int] = []
    sizes: dict[int, int] = {}
    """Records by the step their payload is below: four to each power of two, see ``step_bytes``."""

    @property
    def has_no_times(self) -> bool:
        """Whether it has records, and none of them a time."""
        return self.records > 0 and self.timeless == self.records

    silences: list[tuple[float, float]] = []
    """The longest times without a record, longest first."""


class Lag(msgspec.Struct):
    """How far someone is behind the end of a channel.

    >>> Lag("ticks", "billing", 12, 3.5).records
    12
    """

    channel: str
    who: str
    records: int
    seconds: float | None = None


class TopKey(msgspec.Struct):
    """A key and how often it was written.

    >>> TopKey("ticks", "devices/7", 12).count
    12
    """

    channel: str
    key: str
    count: int


class Report(msgspec.Struct, kw_only=True):
    """Everything the page shows.

    >>> Report(title="data", made=0.0).channels
    []
    """

    title: str
    made: float
    slots: list[float] = []
    """The middle of each slot of time, in seconds since 1970."""
    slot_seconds: float = 1.0
    channels: list[ChannelPart] = []
    delays: list[tuple[float | None, float | None]] = []
    """For each slot: how long after its event a record was written, the middle one and the 95th of a hundred."""
    lags: list[Lag] = []
    keys: list[TopKey] = []
    checks: list[dict[str, object]] = []
    """What ``audit_logs`` found, if it was asked."""


def render(report: Report) -> str:
    """Return the page.

    >>> render(Report(title="data", made=0.0)).startswith("<!doctype html>")
    True
    """
    report = _legible(report)
    shown = _shown(report.channels)
    names = [f"{name} (no times)" if all(part.has_no_times for part in parts) else name for name, parts in shown]
    without = sum(part.has_no_times for part in report.channels)
    note = f"; of {without} of {len(report.channels)} channels the records have no time" if without else ""
    records = [(name, _rates(report, parts, [part.slot_records for part in parts])) for name, parts in shown]
    sizes = [(name, _rates(report, parts, [part.slot_bytes for part in parts])) for name, parts in shown]
    cards = [
        _card("Records a second", f"a point every {short_seconds(report.slot_seconds)}{note}", svg.lines(
            report.slots, records, label="records a second over time"), names),
        _card("Bytes a second", f"payload only{note}", svg.lines(
            report.slots, sizes, form=short_bytes, label="bytes a second over time"), names),
        _card("Payload sizes", "records, by what the payload is below: four steps to a power of two", _sizes(shown),
            names),
        _keys(report.keys),
        *_lag(report),
        _silence(report),
        *_checks(report.checks),
        _table(report.channels),
    ]  # fmt: skip
    made = dt.datetime.fromtimestamp(report.made, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{escape(report.title)}</h1><p class="note">made {made}; times are UTC</p>'
        f'<div class="tiles">{_tiles(report)}</div><div class="cards">{"".join(filter(None, cards))}</div>'
        "</main></body></html>\n"
    )


def _legible(report: Report) -> Report:
    """Return the report with names as they can be shown."""
    replaced = msgspec.structs.replace
    return replaced(
        report,
        title=legible(report.title),
        channels=[replaced(part, name=legible(part.name)) for part in report.channels],
        lags=[replaced(lag, channel=legible(lag.channel), who=legible(lag.who)) for lag in report.lags],
        keys=[replaced(key, channel=legible(key.channel), key=legible(key.key)) for key in report.keys],
        checks=[{**check, "channel": legible(str(check["channel"]))} for check in report.checks],
    )


def _rates(report: Report, parts: Sequence[ChannelPart], slots: Sequence[Sequence[int]]) -> list[float | None]:
    """Return what some channels had a second in each slot; nothing where none of their records has a time."""
    if all(part.has_no_times for part in parts):
        return [None] * len(report.slots)
    return [sum(values[place] for values in slots) / report.slot_seconds for place in range(len(report.slots))]


def _shown(channels: Sequence[ChannelPart]) -> list[tuple[str, list[ChannelPart]]]:
    """Return the channels that are drawn, largest first, and the rest as one."""
    ranked = sorted(channels, key=lambda part: -part.records)
    shown = [(part.name, [part]) for part in ranked[:SHOWN]]
    return [*shown, (OTHERS, ranked[SHOWN:])] if len(ranked) > SHOWN else shown


def _tiles(report: Report) -> str:
    parts = report.channels
    times = [time for part in parts for time in (part.first_time, part.last_time) if time is not None]
    longest = max((end - begin for part in parts for begin, end in part.silences), default=0.0)
    behind = max((lag.records for lag in report.lags), default=0)
    records = sum(part.records for part in parts)
    tiles = [
        (whole(len(parts)), "channel" if len(parts) == 1 else "channels"),
        (whole(records), "record" if records == 1 else "records"),
        (short_bytes(sum(part.bytes for part in parts)), "of payload"),
        (short_seconds(max(times) - min(times)) if times else "–", "from first to last"),
        (short_seconds(longest) if longest else "–", "longest silence"),
    ]
    if report.lags:
        tiles.append((whole(behind), "records behind, at most"))
    return "".join(f'<div class="tile"><b>{escape(value)}</b><span>{what}</span></div>' for value, what in tiles)


def _card(title: str, note: str, body: str, legend: Sequence[str] = (), *, wide: bool = False) -> str:
    keys = "".join(
        f'<span title="{escape(name)}"><i class="s{n % svg.COLOURS}"></i>{escape(cut(name, LEGEND))}</span>'
        for n, name in enumerate(legend)
    )
    kind = "card wide" if wide else "card"
    return (
        f'<section class="{kind}"><h2>{escape(title)}</h2><p class="note">{escape(note)}</p>{body}'
        + (f'<div class="legend">{keys}</div>' if len(legend) > 1 else "")
        + "</section>"
    )


def _sizes(shown: Sequence[tuple[str, list[ChannelPart]]]) -> str:
    powers = [power for _, parts in shown for part in parts for power in part.sizes]
    reach = list(range(min(powers, default=0), max(powers, default=0) + 1))
    series = [
        (name, [float(sum(part.sizes.get(power, 0) for part in parts)) for power in reach]) for name, parts in shown
    ]
    return svg.columns([short_bytes(step_bytes(power)) for power in reach], series, label="records by size of payload")


def step_bytes(step: int) -> float:
    """Return the size that payloads of a step are below: 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5 and so on.

    >>> [step_bytes(step) for step in (0, 1, 4, 5, 8, 41)]
    [1.0, 1.25, 2.0, 2.5, 4.0, 1280.0]
    """
    power, quarter = divmod(step, 4)
    return float(2**power * (1 + quarter / 4))


def _keys(keys: Sequence[TopKey]) -> str:
    if not keys:
        return ""
    rows = [(item.key or "(empty)", float(item.count), f"{whole(item.count)} · {item.channel}") for item in keys]
    return _card("Top keys", "written most often", svg.bars(rows, label="keys written most often"))


def _lag(report: Report) -> list[str]:
    found = []
    if report.lags:
        rows = []
        for lag in sorted(report.lags, key=lambda lag: -lag.records):
            late = "" if not lag.seconds else f", {short_seconds(lag.seconds)}"
            rows.append((f"{lag.who} · {lag.channel}", float(lag.records), f"{whole(lag.records)}{late}"))
        body = svg.bars(rows, label="records behind the end of the channel")
        found.append(_card("Lag", "records between a cursor, or a table, and the end of its channel", body))
    if any(middle is not None for middle, _ in report.delays):
        series = [("middle", [middle for middle, _ in report.delays]), ("95 of 100", [far for _, far in report.delays])]
        body = svg.lines(report.slots, series, form=short_seconds, label="delay over time")
        found.append(
            _card("Delay", "from the time of the event to the time it was written", body, ["middle", "95 of 100"])
        )
    return found


def _silence(report: Report) -> str:
    if not report.slots:
        return ""
    ranked = sorted(report.channels, key=lambda part: -part.records)[:STRIPS]
    rows = [(part.name, [count > 0 for count in part.slot_records], part.silences) for part in ranked]
    unknown = [part.name for part in ranked if part.has_no_times]
    worst = sorted(
        ((end - begin, part.name, begin) for part in report.channels for begin, end in part.silences), reverse=True
    )[:3]
    told = "; ".join(
        f"{name} {short_seconds(length)} from {dt.datetime.fromtimestamp(begin, dt.UTC):%H:%M:%S}"
        for length, name, begin in worst
    )
    which = "each channel" if len(ranked) == len(report.channels) else f"each of the {STRIPS} largest channels"
    note = f"when {which} was written to" + (f"; longest of all: {told}" if told else "")
    return _card("Gaps", note, svg.strip(report.slots, rows, unknown=unknown, label="when each channel was written to"))


def _checks(checks: Sequence[dict[str, object]]) -> list[str]:
    if not checks:
        return []
    head = ("channel", "records", "gaps", "disorder", "back_in_time", "verdict", "problems")
    body = []
    for check in checks:
        problems = check["problems"]
        assert isinstance(problems, list)
        verdict = '<span class="good">whole</span>' if check["ok"] else '<span class="bad">broken</span>'
        cells = [_cell(check[name]) for name in head[:5]]
        told = f'<td class="told">{"<br>".join(map(escape, problems)) or "–"}</td>'
        body.append("".join(f"<td>{cell}</td>" for cell in cells) + f"<td>{verdict}</td>{told}")
    return [
        _card(
            "Checks",
            "every record read again",
            _grid([name.replace("_", " ") for name in head], body, told="problems"),
            wide=True,
        )
    ]


def _cell(value: object) -> str:
    return whole(value) if isinstance(value, int) else escape(str(value))


def _table(channels: Sequence[ChannelPart]) -> str:
    head = ("channel", "records", "payload", "mean", "largest", "kinds", "first", "last", "without a time")
    body = []
    for part in sorted(channels, key=lambda part: part.name):
        cells = [
            escape(part.name), whole(part.records), short_bytes(part.bytes),
            short_bytes(part.bytes / part.records) if part.records else "–", short_bytes(part.largest),
            whole(part.kinds), _moment(part.first_time), _moment(part.last_time),
            "all" if part.has_no_times else whole(part.timeless),
        ]  # fmt: skip
        body.append("".join(f"<td>{cell}</td>" for cell in cells))
    return _card("Channels", f"{whole(len(channels))} in all", _grid(head, body), wide=True)


def _grid(head: Sequence[str], rows: Sequence[str], *, told: str = "") -> str:
    top = "".join(f'<th class="told">{name}</th>' if name == told else f"<th>{name}</th>" for name in head)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _moment(time: float | None) -> str:
    return "–" if time is None else dt.datetime.fromtimestamp(time, dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
