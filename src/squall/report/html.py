"""A run on one page: `report.html`, self-contained, without scripts, nothing fetched from a network."""

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from html import escape
from pathlib import Path
from typing import Any

from squall.record.rows import EventRow, MemberRow, RecordError
from squall.report.coverage import audit
from squall.report.figures import Chart, charts, traffic_charts
from squall.report.parts import parts_charts
from squall.report.reader import Reader
from squall.report.summary import Summary, summarize
from squall.report.words import ANSWERING, LOSSES, TRAINING, clock, number, rate_text, size, words_of

NEEDED = ("plan", "versions")  # what a page without would be poor
TIMELINE = 300  # entries shown; of more, the last
VALUE_LENGTH = 400  # characters shown of one setting

PALETTE = """
:root { color-scheme: light dark; --paper: #fff; --card: #f5f6f8; --ink: #1d2430; --faint: #667085;
  --grid: #d8dce3; --alert: #b54708;
  --series-0: #2563eb; --series-1: #d97706; --series-2: #059669; --series-3: #db2777;
  --series-4: #7c3aed; --series-5: #0891b2; --series-6: #dc2626; --series-7: #65a30d; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171c; --card: #1e232b; --ink: #e6e9ee;
  --faint: #98a2b3; --grid: #39414d; --alert: #fdb022;
  --series-0: #6ea0ff; --series-1: #f5b14c; --series-2: #3ecf9a; --series-3: #f47fb8;
  --series-4: #b197fc; --series-5: #4dd0e1; --series-6: #ff8a80; --series-7: #a8d65c; } }
"""
STYLE = (
    PALETTE
    + """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 62rem; font: 1rem/1.5 system-ui, sans-serif;
  background: var(--paper); color: var(--ink); overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .75rem; }
.faint { color: var(--faint); } .alert { color: var(--alert); } p { margin: .25rem 0; }
.cards, .charts { display: grid; gap: 1rem; }
.cards { grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); margin-top: 1.5rem; }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); align-items: start; }
.cards div, figure { background: var(--card); border-radius: .6rem; padding: .8rem 1rem; margin: 0; }
.cards b { display: block; font-size: 1.5rem; font-weight: 600; line-height: 1.3; }
.cards small { color: var(--faint); display: block; }
figcaption { font-weight: 600; } figure p { font-size: .85rem; color: var(--faint); }
svg { width: 100%; height: auto; display: block; margin-top: .4rem; }
svg text { font-family: system-ui, sans-serif; }
table { border-collapse: collapse; width: 100%; }
td { padding: .3rem 1rem .3rem 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
td:not(:last-child) { color: var(--faint); min-width: 4.5rem; width: 30%; }
.wide td, .wide th { color: var(--ink); width: auto; text-align: right; padding: .3rem .4rem;
  font-variant-numeric: tabular-nums; }
.wide td:first-child, .wide th:first-child { text-align: left; }
@media (min-width: 50rem) { .wide td, .wide th { overflow-wrap: break-word; } }
.named td:nth-child(-n+4), .named th:nth-child(-n+4) { text-align: left; }
.times td:not(:last-child) { white-space: nowrap; width: 1%; }
pre { white-space: pre-wrap; font: inherit; margin: 0; }
"""
)


def prepare_report() -> None:
    """Import what a report needs, so that the end of a run does not wait for it."""
    import matplotlib.backends.backend_svg
    import matplotlib.figure  # noqa: F401


def write_report(run_dir: str | Path) -> Path:
    """Write the page of a run, whole or not, into its folder; return the page's path."""
    folder = Path(run_dir)
    if not folder.is_dir():
        raise ValueError(f"no run at {folder}: give the folder of a run, such as runs/<name>")
    settings, missing = _settings(folder / "run.json")
    body = ""
    try:
        with closing(Reader(folder / "run.sqlite")) as reader:
            summary = summarize(reader)
            missing += gaps(reader, summary)
            proof = escape(str(audit(reader)))
            body = (
                _cards(summary)
                + _machines(summary)
                + _charts(
                    [
                        *charts(reader),
                        *parts_charts(summary.parts, summary.least_bubble),
                        *traffic_charts(summary.machines),
                    ]
                )
                + _timeline(reader)
            )
            body += f"<h2>Which examples were {words_of(reader.state()).done}</h2><pre>{proof}</pre>"
    except RecordError as error:
        missing.append(f"Nothing of the training is known: {error}.")
    page = folder / "report.html"
    write_whole(page, _page(folder.resolve().name, missing, body + settings))
    return page


def write_whole(path: Path, text: str) -> None:
    """Write a file that is seen whole or not at all: a browser may be reloading it."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def page_of(title: str, found: Iterable[Chart], top: str, missing: Sequence[str] = ()) -> str:
    """A page of charts below some HTML of the caller's, and below what is missing, in sentences."""
    return _page(title, missing, top + _charts(found))


def _page(name: str, missing: Sequence[str], body: str) -> str:
    notes = "".join(f'<p class="alert">{escape(note)}</p>' for note in missing)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(name)}</h1>{notes}{body}</body></html>\n"
    )


def gaps(reader: Reader, summary: Summary) -> list[str]:
    """What a finished run would have and this one lacks, in sentences."""
    found = []
    if not reader.state():
        found.append("The record is empty: the run ended before it began to train.")
    elif summary.status != "finished":
        found.append(f"The run had not finished when this page was written; its status was: {summary.status}.")
    if summary.diverged:
        found.append(f"The training has diverged: {summary.diverged}.")
    if not summary.examples:
        found.append(f"No example has been {words_of(reader.state()).done}.")
    if summary.trains and not summary.metrics:
        found.append("There is no validation result.")
    return found


def _cards(summary: Summary) -> str:
    """The headline figures."""
    words = TRAINING if summary.trains else ANSWERING
    began = "" if summary.first_step_s is None else f"first {words.first} after {clock(summary.first_step_s)}"
    updates = "" if summary.updates is None else f" in {summary.updates:,} updates"
    results = sorted(summary.metrics.items(), key=lambda result: result[0] in LOSSES)  # losses come last
    cards = [(name, number(value), "last validation") for name, value in results]
    cards += [
        (words.time, clock(summary.training_s), began),
        ("examples/s", rate_text(summary.examples_per_second), f"{summary.examples:,} examples{updates}"),
    ]
    if summary.staleness_mean is not None:
        cards.append(("mean staleness", f"{summary.staleness_mean:.2f}", f"{summary.staleness_max} at most"))
    if not summary.trains:
        cards.append(("deaths", number(summary.deaths), f"{summary.given_back:,} examples were dealt again"))
        cards.append(("workers", number(len(summary.shares)), f"{summary.found:,} examples were answered before"))
    texts = ((escape(name), escape(value), escape(more)) for name, value, more in cards)
    boxes = "".join(f"<div>{name}<b>{value}</b><small>{more}</small></div>" for name, value, more in texts)
    title = escape(f"{summary.strategy}, {summary.status}")
    return f'<p class="faint">{title}</p><div class="cards">{boxes}</div>'


def _charts(found: Iterable[Chart]) -> str:
    boxes = []
    for chart in found:
        note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
        boxes.append(f"<figure><figcaption>{escape(chart.title)}</figcaption>{chart.svg}{note}</figure>")
    return f'<h2>Curves</h2><div class="charts">{"".join(boxes)}</div>'


def _machines(summary: Summary) -> str:
    """What ran where, and what the machines have sent each other, where there are several."""
    inventory, sent = summary.inventory, summary.machines
    placed = {machine: told for machine, *told in inventory.machines}
    if not placed and not sent:
        return ""
    rows = [
        [str(machine), *placed.get(machine, ["", "", "nothing"]), *map(size, sent.get(machine, [0, 0]))]
        for machine in sorted(placed.keys() | sent.keys())
    ]
    columns = ("machine", "name", "has", "ran there at the last beginning", "sent", "received")
    why = f'<p class="faint">What runs where: {escape(inventory.why)}.</p>' if inventory.why else ""
    return f"<h2>Machines</h2>{table_of(rows, 'wide named', columns)}{why}"


def _timeline(reader: Reader) -> str:
    """Events and members, by time."""
    entries = [(event.time_s, event.kind, event.text) for event in reader.rows(EventRow)]
    for member in reader.rows(MemberRow):
        why = f": {member.why}" if member.why else ""
        process = f", process {member.pid}" if member.pid else ""  # known of those that join
        entries.append((member.time_s, member.change, f"{member.node}{process}{why}"))
    entries.sort(key=lambda entry: entry[0])
    rows = [(clock(time_s), kind, text) for time_s, kind, text in entries[-TIMELINE:]]
    hidden = len(entries) - len(rows)
    text = f"<p>The first {hidden:,} are left out.</p>" if hidden else ""
    return f"<h2>What happened</h2>{text}{table_of(rows, 'times') if rows else '<p>Nothing was recorded.</p>'}"


def _settings(path: Path) -> tuple[str, list[str]]:
    """`run.json` as tables, and what is missing of it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "", [f"{path.name} is missing: the plan and the versions are not known."]
    except (OSError, ValueError) as error:
        return "", [f"{path.name} cannot be read ({error}): the plan and the versions are not known."]
    if not isinstance(content, dict):
        return "", [f"{path.name} holds no settings: the plan and the versions are not known."]
    missing = [f"{path.name} does not hold the {key}." for key in NEEDED if not content.get(key)]
    sections = {key: value for key, value in content.items() if isinstance(value, dict)}
    sections["settings"] = sections.get("settings", {}) | {
        key: value for key, value in content.items() if key not in sections
    }
    filled = {key.capitalize(): table_of(flat(rows)) for key, rows in sections.items() if rows}
    return "".join(f"<h2>{escape(title)}</h2>{table}" for title, table in filled.items()), missing


def flat(value: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as rows: ``strategy.replicas``, 4."""
    rows: list[tuple[str, str]] = []
    for key, item in value.items():
        if isinstance(item, dict) and item:
            rows += flat(item, f"{prefix}{key}.")
        else:
            text = item if isinstance(item, str) else json.dumps(item, default=str)
            rows.append((f"{prefix}{key}", text if len(text) <= VALUE_LENGTH else text[:VALUE_LENGTH] + " …"))
    return rows


def table_of(rows: Iterable[Sequence[str]], kind: str = "", columns: Sequence[str] = ()) -> str:
    """A table of plain text, with a line of the columns' names where there are such."""
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    head = ["".join(f"<th>{escape(column)}</th>" for column in columns)] if columns else []
    return f'<table class="{kind}">{"".join(f"<tr>{line}</tr>" for line in [*head, *lines])}</table>'
