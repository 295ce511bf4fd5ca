"""A plan's ranking: a table for the terminal, and a picture."""

from __future__ import annotations

from collections import defaultdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from squall.report.figures import Chart
from squall.report.html import PALETTE, page_of, table_of, write_whole
from squall.report.svg import GRID, INK, SERIES, engineering, new_figure, style, to_svg
from squall.report.words import clock, percent, plain, rate_text, size
from squall.sim.planning.entries import RankingEntry, best_sizes
from squall.sim.planning.ranking import Ranking
from squall.sim.planning.reasons import reason

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROWS = 20  # of the table; --json has all
BARS = 12
LINES = len(SERIES)
APART = 0.065  # of the chart's height, between two names at the ends of lines


def columns(ranking: Ranking) -> list[str]:
    goal = ["to the target"] if _with_target(ranking) else []
    return ["", "strategy", "replicas + shards", *goal, "examples /s", "wait", "network", "good- put"]


def rows(ranking: Ranking) -> list[list[str]]:
    """The table's lines, in its columns."""
    found = []
    for place, entry in enumerate(ranking.shown[:ROWS], 1):
        speed = entry.speed
        goal = [_goal(entry)] if _with_target(ranking) else []
        found.append([
            str(place), entry.candidate.name, entry.candidate.sizes, *goal, rate_text(entry.useful),
            percent(speed.idle, 1), f"{size(round(speed.bytes_per_second))}/s", percent(entry.goodput, 1),
        ])  # fmt: skip
    return found


def _with_target(ranking: Ranking) -> bool:
    return any(entry.trial is not None for entry in ranking.entries)


def _goal(entry: RankingEntry) -> str:
    assert entry.trial is not None
    if entry.reached_s is not None:
        return clock(entry.reached_s)
    return "fails" if entry.failed else f"> {clock(entry.trial.training_s)}"


def text(ranking: Ranking, width: int = 80) -> str:
    """The table and the reason for its first line."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns(ranking):
        table.add_column(
            column.replace("+ ", "+").replace(" ", "\n"), justify="left" if column == "strategy" else "right",
            overflow="fold", no_wrap=column != "strategy",
        )  # fmt: skip
    for row in rows(ranking):
        table.add_row(*row)
    below = [reason(ranking)]
    hidden = len(ranking.entries) - len(rows(ranking))
    if hidden:
        others = "other setting was" if hidden == 1 else "other settings were"
        below.append(f"{hidden:,} {others} simulated for speed; --json has all.")
    if ranking.interrupted:
        below.append("Interrupted: this is what was known by then.")
    return plain(table, *below, width=width)


# ---------------------------------------------------------------- the picture


def write_picture(ranking: Ranking, path: Path) -> Path:
    """The picture, and next to it a page with the picture and the table; returns the page. Neither needs a network."""
    charts = [bars(ranking), speeds(ranking)]
    write_whole(path, _standalone(charts))
    page = path.with_suffix(".html")
    names = [column.replace("- ", "") for column in columns(ranking)[1:]]
    table = table_of([(f"{place}. {name}", *cells) for place, name, *cells in rows(ranking)], "wide", names)
    write_whole(page, page_of("plan", charts, f"<p>{escape(reason(ranking))}</p>{table}"))
    return page


def _standalone(charts: list[Chart]) -> str:
    """Charts below each other in one file, with the colours that a page would give them."""
    width, gap = 331.2, 30.0
    parts, y = [], 0.0
    for chart in charts:
        height = float(chart.svg.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split()[1])
        parts.append(f'<text x="8" y="{y + 20:g}" class="title">{escape(chart.title)}</text>')
        place = f'<svg x="0" y="{y + gap:g}" width="{width:g}" height="{height:g}" '
        parts.append(chart.svg.replace("<svg ", place, 1))
        y += gap + height + 14
        parts.append(f'<text x="8" y="{y - 6:g}" class="note">{escape(chart.note)}</text>')
        y += 12
    look = (
        "text { font-family: system-ui, sans-serif; fill: var(--ink); } "
        ".title { font-size: 13px; font-weight: 600; } .note { font-size: 9px; fill: var(--faint); }"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {y:g}" role="img" aria-label="plan">'
        f'<style>{PALETTE}{look}</style><rect width="100%" height="100%" fill="var(--paper)"/>{"".join(parts)}</svg>\n'
    )


def bars(ranking: Ranking) -> Chart:
    """The first of the ranking: time to the target, or examples a second, and how long replicas wait."""
    timed = _with_target(ranking)
    target = ranking.target
    title = f"time to {target[0]} {target[1]:g}" if timed and target is not None else "useful examples per second"
    shown = ranking.shown[:BARS]
    names = [f"{entry.candidate.name}\n{entry.candidate.sizes}" for entry in shown]
    figure = new_figure(0.36 * len(shown) + 0.5, letters=max(len(line) for name in names for line in name.split("\n")))
    axes = figure.subplots()
    families = _families(ranking)
    lengths = [_length(entry) if timed else entry.useful for entry in shown]
    for place, (entry, length) in enumerate(zip(shown, lengths, strict=True)):
        arrived = not timed or entry.reached_s is not None
        color = SERIES[families.index(entry.candidate.family) % len(SERIES)]
        axes.barh(place, length, 0.62, color=color, alpha=1.0 if arrived else 0.35)
        value = _goal(entry) if timed else rate_text(entry.useful)
        note = f"{value}, wait {percent(entry.speed.idle, 1)}"
        axes.text(length + 0.02 * max(lengths), place, note, va="center", color=INK, fontsize=8)
    axes.set_yticks(range(len(shown)), names, fontsize=7.5)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * max(lengths, default=1.0) or 1.0)
    style(axes)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", labelsize=7.5)
    axes.set_xticks([])
    pale = " Pale: not reached." if timed and any(entry.reached_s is None for entry in shown) else ""
    return Chart(title, to_svg(figure, title), f"Below a name: replicas + shards.{pale}")


def _length(entry: RankingEntry) -> float:
    assert entry.trial is not None
    return entry.reached_s if entry.reached_s is not None else entry.trial.training_s


def _families(ranking: Ranking) -> list[str]:
    """Strategies, the fastest first."""
    return list(dict.fromkeys(entry.candidate.family for entry in best_sizes(ranking.entries)))


def speeds(ranking: Ranking) -> Chart:
    """Each strategy's best speed with every number of replicas, its name at the end of the line."""
    title = "useful examples per second, by replicas"
    best: dict[str, dict[int, float]] = defaultdict(dict)
    for entry in ranking.entries:
        replicas, family = entry.candidate.recipe.replicas, entry.candidate.family
        best[family][replicas] = max(entry.useful, best[family].get(replicas, 0.0))
    figure = new_figure(3.0)
    axes = figure.subplots()
    families = _families(ranking)[:LINES]
    ends = {}
    for number, family in enumerate(families):
        points = sorted(best[family].items())
        x, y = [float(replicas) for replicas, _ in points], [speed for _, speed in points]
        axes.plot(x, y, color=SERIES[number], linewidth=1.4, marker="o", markersize=3)
        ends[family] = (x[-1], y[-1])
    top = max(y for _, y in ends.values())
    axes.set_ylim(0, 1.08 * top or 1.0)
    _scale_replicas(axes, sorted({replicas for of_family in best.values() for replicas in of_family}))
    _name_ends(axes, ends, top)
    style(axes)
    engineering(axes.yaxis, top)
    axes.set_xlabel("replicas", color=INK)
    return Chart(title, to_svg(figure, title), "With its best settings and number of shards.")


def _scale_replicas(axes: Axes, replicas: list[int]) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    powers = [n for n in replicas if n & (n - 1) == 0]
    axes.set_xticks(powers, [str(n) for n in powers])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(replicas[0] / 1.1, replicas[-1] * 1.1)


def _name_ends(axes: Axes, ends: dict[str, tuple[float, float]], top: float) -> None:
    """Names right of the chart at the heights of their lines, moved apart where they would cover each other."""
    right = max(x for x, _ in ends.values())
    below = 1.08 * top
    heights = []
    for family, (_, y) in sorted(ends.items(), key=lambda end: -end[1][1]):
        below = min(y, below - APART * top)
        heights.append((family, below))
    lift = max(0.0, -min(height for _, height in heights))
    for number, (family, height) in enumerate(heights):
        color = SERIES[list(ends).index(family)]
        axes.annotate(
            family, (ends[family][0], ends[family][1]), xytext=(right * 1.2, height + lift), textcoords="data",
            va="center", fontsize=8, color=color, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": GRID, "linewidth": 0.6} if number or lift else None,
        )  # fmt: skip
