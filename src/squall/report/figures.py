"""The charts of a report, as SVG that takes its colours from the page it stands in."""

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from squall.record.rows import MetricRow, ProgressRow
from squall.report.reader import Reader
from squall.report.svg import GRID, INK, SERIES, engineering, name_lines, new_figure, scale, style, to_svg
from squall.report.words import plural, trains

BINS = 40  # points of throughput, bars of a histogram
ROWS = 12  # replicas with a histogram of their own
COLUMNS = 4  # of a legend
NO_VALUE = "No finite value was recorded."

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """A titled picture; without `svg` the note says what is missing."""

    title: str
    svg: str
    note: str = ""


def charts(reader: Reader) -> list[Chart]:
    """Every chart of a run, in reading order; of one that answers, how fast it did."""
    if not trains(reader.state()):
        return [throughput_chart(reader, reader.end_s())]
    results: dict[str, list[MetricRow]] = defaultdict(list)
    for metric in reader.rows(MetricRow):
        results[metric.name].append(metric)
    duration_s = max((work.time_s for work in reader.progress()), default=0.0)
    duration_s = max([duration_s, *(metric.time_s for metrics in results.values() for metric in metrics)])
    found = [loss_chart(reader, results.pop("loss", []), duration_s)]
    for name, metrics in results.items():
        time = [(metric.time_s, metric.value) for metric in metrics]
        examples = [(float(metric.examples), metric.value) for metric in metrics]
        found.append(_lines(f"{name} over time", {"validation": time}, duration_s))
        found.append(_lines(f"{name} over examples", {"validation": examples}, None))
    for name, curve in reader.extras(duration_s / (5 * BINS) or 1.0).items():
        found.append(_lines(f"{name} over time", {"training": curve}, duration_s))
    if not results:
        found.append(Chart("metrics", "", "No metric was recorded: give the task `metrics` and `validate`."))
    return [*found, throughput_chart(reader, duration_s), staleness_chart(reader)]


def loss_chart(reader: Reader, validation: list[MetricRow], duration_s: float) -> Chart:
    """Training loss, a mean over all replicas in each of many moments, and the validation losses."""
    moments: dict[int, list[ProgressRow]] = defaultdict(list)
    width = duration_s / (5 * BINS) or 1.0
    for work in reader.progress(width):
        if math.isfinite(work.loss) and work.examples:
            moments[int(work.time_s / width)].append(work)
    training = []
    for rows in moments.values():
        examples = sum(row.examples for row in rows)
        training.append((rows[-1].time_s, sum(row.loss * row.examples for row in rows) / examples))
    lines = {"training": training, "validation": [(metric.time_s, metric.value) for metric in validation]}
    return _lines("loss over time", lines, duration_s, "No loss was recorded.")


def throughput_chart(reader: Reader, duration_s: float) -> Chart:
    """Examples per second of every replica."""
    # What was trained until the edges of the chart's bins is interpolated: a report seldom lies within one
    # bin, and counting it where it ends would draw a saw.
    trained: dict[int, Points] = {}
    for work in reader.progress(duration_s / (25 * BINS) or 1.0):
        points = trained.setdefault(work.replica, [(0.0, 0.0)])
        points.append((work.time_s, points[-1][1] + work.examples))
    edges = np.linspace(0, duration_s or 1.0, BINS + 1)
    middles = ((edges[:-1] + edges[1:]) / 2).tolist()
    lines: dict[str, Points] = {}
    for replica, points in sorted(trained.items()):
        times, totals = zip(*points, strict=True)
        rates = np.diff(np.interp(edges, times, totals)) / (edges[1] - edges[0])
        lines[f"replica {replica}"] = list(zip(middles, rates.tolist()))
    return _lines("examples per second", lines, duration_s, "No work of a replica was recorded.", zero=True)


def staleness_chart(reader: Reader) -> Chart:
    """For each replica, which share of its pushes was applied with which staleness."""
    title = "staleness of pushes"
    pushes: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    rows = reader.staleness()
    if not rows:
        return Chart(title, "", "No push was recorded.")
    width = math.ceil((max(row.staleness for row in rows) + 1) / BINS)
    named = sorted({row.replica for row in rows})[:ROWS]
    for row in rows:
        name = f"replica {row.replica}" if row.replica in named else "the others"
        pushes[name][row.staleness // width] += row.count
    figure = new_figure(0.55 * len(pushes) + 0.7, letters=max(map(len, pushes)))
    grid = figure.subplots(len(pushes), 1, sharex=True, sharey=True, squeeze=False)
    for index, (axes, (name, counts)) in enumerate(zip(grid[:, 0], pushes.items(), strict=True)):
        places, total = [bin * width for bin in counts], sum(counts.values())
        color = SERIES[index % len(SERIES)] if len(pushes) <= len(SERIES) else SERIES[0]
        axes.bar(places, [count / total for count in counts.values()], 0.8 * width, color=color)
        axes.set_ylabel(name, rotation=0, ha="right", va="center", color=INK)
        axes.set_yticks([])
        style(axes)
    grid[-1, 0].set_xlabel("updates between fetch and push", color=INK)
    grid[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    return Chart(title, to_svg(figure, title), "Height: share of the replica's pushes.")


def traffic_charts(machines: dict[int, list[int]]) -> list[Chart]:
    """Bytes that each machine has sent, and received, where there are several."""
    return [
        bars_chart(f"bytes {what} by machine", {f"machine {machine}": told[way] for machine, told in machines.items()})
        for way, what in enumerate(("sent", "received") if machines else ())
    ]


def _lines(
    title: str, lines: dict[str, Points], duration_s: float | None, missing: str = NO_VALUE, zero: bool = False
) -> Chart:  # fmt: skip
    """A chart of named lines over training time, or over examples when `duration_s` is None."""
    drawn = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in lines.items()}
    drawn = {name: points for name, points in drawn.items() if points}
    if not drawn:
        return Chart(title, "", missing)
    named = 1 < len(drawn) <= len(SERIES)
    figure = new_figure(2.6, legend=-(-len(drawn) // COLUMNS) if named else 0)
    axes = figure.subplots()
    unit_s, label = (1.0, "examples trained") if duration_s is None else _time_unit(duration_s)
    many = len(drawn) > len(SERIES)
    for index, (name, points) in enumerate(drawn.items()):
        color, alpha = (SERIES[0], 0.4) if many else (SERIES[index], 1.0)
        x, y = [x / unit_s for x, _ in points], [y for _, y in points]
        (line,) = axes.plot(x, y, color=color, alpha=alpha, linewidth=1.4, markersize=3, label=name)
        if len(points) == 1 or (name == "validation" and len(points) <= BINS):
            line.set_marker("o")
    scale(axes, [y for points in drawn.values() for _, y in points], zero)
    style(axes)
    axes.set_xlabel(label, color=INK)
    if named:
        name_lines(figure, COLUMNS, size=9)
    lost = sum(map(len, lines.values())) - sum(map(len, drawn.values()))
    note = f"{len(drawn)} replicas, one line each. " if many else ""
    note += f"Not drawn because not finite: {plural(lost, 'value')}." if lost else ""
    return Chart(title, to_svg(figure, title), note)


def lines_chart(title: str, lines: dict[str, list[Points]], duration_s: float | None) -> Chart:
    """Several runs' lines under one name and colour, over training time, or over examples when `duration_s` is None."""
    drawn = {name: [points for points in several if points] for name, several in lines.items()}
    values = [y for several in drawn.values() for points in several for _, y in points]
    if not values:
        return Chart(title, "", NO_VALUE)
    figure = new_figure(3.0, legend=-(-len(drawn) // 2))
    axes = figure.subplots()
    unit_s, label = (1.0, "examples trained") if duration_s is None else _time_unit(duration_s)
    for index, (name, several) in enumerate(drawn.items()):
        color, dashes = SERIES[index % len(SERIES)], ("-", "--", ":")[index // len(SERIES) % 3]
        for number, points in enumerate(several):
            x, y = [x / unit_s for x, _ in points], [y for _, y in points]
            label_once = name if number == 0 else None
            marker = "o" if len(points) == 1 else None  # else nothing would be seen of it
            axes.plot(
                x, y, color=color, linestyle=dashes, linewidth=1.3, marker=marker, markersize=4, label=label_once
            )  # fmt: skip
    scale(axes, values, False)
    style(axes)
    axes.set_xlabel(label, color=INK)
    name_lines(figure, columns=2, size=8)
    return Chart(title, to_svg(figure, title))


def bars_chart(title: str, values: dict[str, float | None]) -> Chart:
    """One bar a name; a name without a value says so."""
    known = {name: value for name, value in values.items() if value is not None}
    missing = [name for name in values if name not in known]
    note = f"No value: {', '.join(missing)}." if missing else ""
    if not known:
        return Chart(title, "", note)
    figure = new_figure(0.3 * len(known) + 0.6, letters=max(map(len, known)))
    axes = figure.subplots()
    order = list(values)
    colors = [SERIES[order.index(name) % len(SERIES)] for name in known]
    axes.barh(list(known), list(known.values()), 0.7, color=colors)
    axes.invert_yaxis()
    style(axes)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.grid(visible=False, axis="y")
    engineering(axes.xaxis, max(known.values()))
    return Chart(title, to_svg(figure, title), note)


def _time_unit(duration_s: float) -> tuple[float, str]:
    for unit_s, name in ((3600.0, "hours"), (60.0, "minutes")):
        if duration_s > 5 * unit_s:
            return unit_s, name
    return 1.0, "seconds"
