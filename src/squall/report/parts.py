"""What the parts of replicas do with their time, and their memory: as a table, and as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from squall.report.figures import Chart
from squall.report.reader import Reader
from squall.report.svg import GRID, INK, SERIES, name_lines, new_figure, style, to_svg
from squall.report.words import percent, plain, size

SHOWN = 16  # parts with a line of their own


@dataclass(frozen=True, slots=True)
class PartShare:
    """One part of a replica, over the whole run; the three shares of its time add up to 1."""

    replica: int
    part: int
    seconds: float  # in which the replica was at work
    computing: float
    waiting: float  # for other parts
    bubble: float  # the rest of the time in which a pipeline's schedule ran: it had no microbatch
    memory: int  # bytes of its own, the most that was seen; 0: it ended before anybody looked


def parts_of(reader: Reader) -> list[PartShare]:
    """Every part of every replica that was at work; none where replicas are one process each."""
    found = []
    for row in reader.parts():
        seconds = row.compute_s + row.wait_s + row.bubble_s
        if seconds > 0:
            shares = (row.compute_s / seconds, row.wait_s / seconds, row.bubble_s / seconds)
            found.append(PartShare(row.replica, row.part, seconds, *shares, row.memory))
    return found


def bubble_of(parts: Sequence[PartShare]) -> float:
    """The mean share of the bubble in what parts computed and the bubble, as (p - 1) / (m + p - 1) counts it."""
    idle = sum(part.seconds * part.bubble for part in parts)
    spent = idle + sum(part.seconds * part.computing for part in parts)
    return idle / spent if spent > 0 else 0.0


def bubble_text(parts: Sequence[PartShare], least: float | None) -> str:
    """In words, and what it is with equal stages; empty where there is no pipeline."""
    bubble = bubble_of(parts)
    equal = "" if least is None else f"; equal stages without transfers have {percent(least, 1)}"
    return f"{percent(bubble, 1)}{equal}" if bubble else ""


def parts_table(parts: Sequence[PartShare]) -> str:
    """For a terminal: a line for each part, up to `SHOWN`."""
    piped = any(part.bubble for part in parts)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("replica", "part", "computing", "waiting", "bubble", "memory"):
        table.add_column(name, justify="right")
    for part in parts[:SHOWN]:
        table.add_row(
            str(part.replica), str(part.part), percent(part.computing, 1), percent(part.waiting, 1),
            percent(part.bubble, 1) if piped else "-", size(part.memory) if part.memory else "unknown",
        )  # fmt: skip
    if len(parts) > SHOWN:
        table.add_row(f"{len(parts) - SHOWN} more")
    return plain(table)


def parts_charts(parts: Sequence[PartShare], least_bubble: float | None) -> list[Chart]:
    """How each part has spent its time, and its memory, where replicas have parts."""
    if not parts:
        return []
    shown = parts[:SHOWN]
    names = [f"{part.replica}, part {part.part}" for part in shown]
    rest = f"The first {SHOWN} of {len(parts)}. " if len(parts) > SHOWN else ""
    bubble = f"Bubble: {text}. " if (text := bubble_text(parts, least_bubble)) else ""
    times = {
        "computing": [part.computing for part in shown],
        "waiting": [part.waiting for part in shown],
        "bubble": [part.bubble for part in shown],
    }
    times = {what: shares for what, shares in times.items() if any(shares)}
    percents = {what: [100 * share for share in shares] for what, shares in times.items()}
    note = f"{rest}{bubble}By replica and part, in percent of the time in which the replica was at work."
    memory = {"memory": [part.memory / 1e6 for part in shown]}
    return [
        _bars("what parts do", names, percents, note),
        _bars("memory of parts", names, memory, f"{rest}Megabytes of its own, the most that was seen."),
    ]


def _bars(title: str, names: list[str], values: dict[str, list[float]], note: str) -> Chart:
    """A bar a name, of pieces behind one another."""
    named = len(values) > 1
    figure = new_figure(0.3 * len(names) + 0.6 + 0.2 * named, letters=max(map(len, names)), legend=int(named))
    axes = figure.subplots()
    begins = [0.0] * len(names)
    for (what, pieces), color in zip(values.items(), SERIES):
        axes.barh(names, pieces, 0.7, left=begins, color=color, label=what)
        begins = [begin + piece for begin, piece in zip(begins, pieces)]
    axes.invert_yaxis()
    style(axes)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="x", colors=INK)
    if named:
        name_lines(figure, len(values), size=9)
    return Chart(title, to_svg(figure, title), note)
