"""A running training, shown in a terminal or told line by line in a log."""

import math
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from squall.record.rows import EventRow, Row
from squall.report.totals import ReplicaTally, Totals, loss, staleness, waiting
from squall.report.words import clock, loss_text, number, percent, plural, rate_text, words_of

SHOWN, SHARDS_SHOWN = 12, 4  # replicas, and shards, with a line of their own
COLUMNS = ("replica", "examples/s", "loss", "staleness", "max", "waiting", "share")
OF_TRAINING = ("loss", "staleness", "max")  # the columns that a run has that trains
SILENT_S = 10.0  # who is silent for so long is named, or for longer where a replica's reports lie further apart
TROUBLE = dict.fromkeys(("lost", "restarted", "warning", "nonfinite", "best"), "yellow")
TROUBLE |= {"diverged": "red", "error": "red"}


class ProgressViewer:
    """The viewer of a terminal or a log.

    With a terminal a picture is redrawn in place. Without one a plain line is printed every `interval_s`
    seconds, and every event when it comes.
    """

    def __init__(
        self, console: Console | None = None, interval_s: float = 5.0, causes: Callable[[], Sequence[str]] = tuple,
        known: int = 0,
    ) -> None:  # fmt: skip
        """`causes` is called when replicas are silent, and names what is known to stand still.

        So many events are `known`, and not printed.
        """
        self._known = known
        self._causes = causes
        self._silence = Silence()
        # Results may be piped from standard output, so progress keeps to the other one.
        self._console = console or Console(stderr=True)
        self._interval_s = interval_s
        self._tally = Totals()
        self._live: Live | None = None
        self._printed = -math.inf  # the `now` of the last line
        self._line = ""  # the last line
        self._silent = ""  # who is not heard of, in words

    def show(self, rows: Sequence[Row], now: float) -> None:
        self._tally.take(rows)
        self._silent = self._silence.told(self._tally.reports, self._tally.state.get("evaluating", ""), now)
        if self._silent:
            self._silent = "; ".join([self._silent, *self._causes()])
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._redraw()
            return
        events = [row for row in rows if isinstance(row, EventRow)]
        for row in events[self._known :]:
            if row.kind != "snapshot":  # regular, and of no interest in a log
                self._print(_event(row).plain)
        self._known = max(0, self._known - len(events))
        if self._tally.replicas and now - self._printed >= self._interval_s:
            self._printed, self._line = now, self._sentence()
            self._print(self._line)

    def close(self) -> None:
        """Give the terminal back."""
        if self._live:
            self._live.stop()
        elif self._tally.replicas and self._sentence() != self._line:
            self._print(self._sentence())

    def _redraw(self) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="ellipsis")
            self._live.start()
        parts = [picture(self._tally), *([Text(self._silent, "yellow")] if self._silent else [])]
        self._live.update(Group(*parts), refresh=True)

    def _sentence(self) -> str:
        return sentence(self._tally) + (f"  {self._silent}" if self._silent else "")

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)


class Silence:
    """Who has been silent for how long, on the viewer's clock: the record's stands still when all hang."""

    def __init__(self) -> None:
        self._heard: dict[int, tuple[float, float]] = {}  # replica -> time of its last report, and when it was seen
        self._longest: dict[int, float] = {}  # seconds between two of its reports
        self._asked = "", 0.0  # the evaluation under way, and when it was first seen
        self._slowest_s = 0.0  # of the evaluations so far

    def told(self, reports: Mapping[int, float], evaluating: str, now: float) -> str:
        """In words; empty when nobody is silent.

        `reports` has the time of each living replica's last, `evaluating` names the evaluation under way, if there is
        one.
        """
        before, asked_at = self._asked
        if evaluating != before:
            self._slowest_s = max(self._slowest_s, now - asked_at if before else 0.0)
            self._asked = evaluating, now
        asked_s = now - self._asked[1] if evaluating else 0.0
        late = asked_s >= max(SILENT_S, 2 * self._slowest_s)
        evaluator = f"the evaluator has not answered for {asked_s:.0f} s" if late else ""
        return "; ".join(filter(None, [self._replicas(reports, now), evaluator]))

    def _replicas(self, reports: Mapping[int, float], now: float) -> str:
        silent = []
        for replica, report in sorted(reports.items()):
            known, seen_at = self._heard.get(replica, (report, now))
            if known != report:
                self._longest[replica] = max(self._longest.get(replica, 0.0), now - seen_at)
                seen_at = now
            self._heard[replica] = report, seen_at
            if now - seen_at >= max(SILENT_S, 2 * self._longest.get(replica, 0.0)):
                silent.append(f"replica {replica} for {now - seen_at:.0f} s")
        if not silent:
            return ""
        unwritten = "" if len(silent) < len(reports) else " (or the record cannot be written)"
        return f"not heard of: {', '.join(silent)}{unwritten}"


def sentence(tally: Totals) -> str:
    """The state of a run in one line."""
    replicas = tally.replicas.values()
    parts = [
        clock(tally.time_s),
        reached(tally),
        f"{rate_text(tally.rate(replicas))} examples/s",
    ]
    if tally.trains:
        parts.append(f"loss {loss_text(loss(replicas))}")
    if math.isfinite(stale := staleness(replicas)):
        parts.append(f"staleness {stale:.1f}")
    parts += [f"validation {metric.name} {number(metric.value)}" for metric in tally.metrics.values()]
    return "  ".join(parts)


def reached(tally: Totals) -> str:
    """How far a run is."""
    name, done, total = tally.limit()
    return f"{name} {_amount(done)}" + (f" of {_amount(total)}" if total > 0 else "")


def picture(tally: Totals) -> RenderableType:
    """The state of a run in a few lines, for a terminal at least 80 columns wide."""
    if not tally.replicas:
        waits = f"waiting for the first {words_of(tally.state).first}"
        return Group(_heading(tally), Text(waits, "dim"), *_last_events(tally))
    parts: list[RenderableType] = [_heading(tally), _bar(tally), Text(), _replicas(tally), *_shards(tally), Text()]
    if tally.metrics:
        latest = max(tally.metrics.values(), key=lambda metric: metric.time_s)
        results = [f"{metric.name} {number(metric.value)}" for metric in tally.metrics.values()]
        parts.append(Text.assemble((f"validation at {clock(latest.time_s)}  ", "dim"), "  ".join(results)))
    return Group(*parts, *_last_events(tally))


def _heading(tally: Totals) -> Text:
    state = tally.state
    heading = Text(state.get("strategy", "training"), "bold", no_wrap=True, overflow="ellipsis")
    for noun in ("replica", "shard"):
        if (count := state.get(noun + "s", "")).isdecimal():
            heading.append(f"  {plural(int(count), noun)}", "not bold dim")
    return heading.append(f"  {state.get('status', '')}", "not bold dim")


def _bar(tally: Totals) -> Table:
    _, done, total = tally.limit()
    known = total > 0
    # Its own clock would be read otherwise, and would go on pulsing while training hangs.
    bar = ProgressBar(total if known else None, done, pulse=not known, animation_time=tally.time_s)
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    times = clock(tally.time_s)
    if known and done > 0:
        times = f"{percent(done, total)}  {times}"
        if done < total:
            times += f", {clock(tally.time_s * (total - done) / done)} left"
    line.add_row(reached(tally), bar, times)
    return line


def _replicas(tally: Totals) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    names = [name for name in COLUMNS if tally.trains or name not in OF_TRAINING]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("now", no_wrap=True, overflow="ellipsis")
    ordered = sorted(tally.replicas.items())
    # When not all fit, the last line stands for the rest.
    shown = len(ordered) if len(ordered) <= SHOWN else SHOWN - 1
    for index, replica in ordered[:shown]:
        cells = _cells(tally, str(index), [replica])
        table.add_row(*map(cells.get, names), tally.activity.now(f"replica {index}"))
    if rest := [replica for _, replica in ordered[shown:]]:
        table.add_row(*map(_cells(tally, f"{len(rest)} more", rest).get, names))
    if len(ordered) > 1:
        table.add_row(*map(_cells(tally, "all", list(tally.replicas.values())).get, names), style="bold")
    return table


def _shards(tally: Totals) -> list[Text]:
    doing = [(index, tally.activity.now(f"shard {index}")) for index in range(SHARDS_SHOWN)]
    return [Text.assemble((f"shard {index}  ", "dim"), text) for index, text in doing if text]


def _cells(tally: Totals, name: str, replicas: list[ReplicaTally]) -> dict[str, str]:
    mean = staleness(replicas)
    most = max((r.staleness_max for r in replicas if r.staleness_max is not None), default=None)
    spent = waiting(replicas)
    return {
        "replica": name,
        "examples/s": rate_text(tally.rate(replicas)),
        "loss": loss_text(loss(replicas)),
        "staleness": f"{mean:.1f}" if math.isfinite(mean) else "-",
        "max": "-" if most is None else str(most),
        "waiting": percent(spent, 1) if math.isfinite(spent) else "-",
        "share": percent(sum(replica.examples for replica in replicas), tally.examples),
    }


def _last_events(tally: Totals) -> list[Text]:
    return [_event(event) for event in tally.events]


def _event(event: EventRow) -> Text:
    # Texts such as "replica 1 lost: ..." name their kind already.
    text = event.text if event.kind in event.text else f"{event.kind} {event.text}"
    return Text.assemble((f"{clock(event.time_s)}  ", "dim"), (text.rstrip(), TROUBLE.get(event.kind, "")))


def _amount(value: float) -> str:
    """How far: one decimal for a fraction of few, none for many."""
    return f"{value:.1f}" if value < 100 and value != int(value) else f"{value:,.0f}"
