"""Write those parts of the docs that can be read from the code; `make docs` runs it, a test compares."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import get_args

from squall.protocol.exchanges import Rules
from squall.record.rows import Row, table_name
from squall.record.writer import SQL_TYPE
from squall.runtime.optimizers import in_words
from squall.strategies import STRATEGIES, Strategy
from squall.strategies.work import BatchMethod, Collective, Loop

BEGIN, END = "<!-- table: written by `make docs` from the code -->\n", "<!-- end of table -->"
COLUMNS = (
    "strategy", "by default", "pushes", "every", "a batch moves", "one update is", "staleness", "waits for",
    "tolerates",
)  # fmt: skip


def table() -> str:
    """One row a strategy, with its default settings, and below it the sources and the reasons against each."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    notes = []
    for name, kind in STRATEGIES.items():
        strategy = kind()
        rows.append(_row(kind, strategy))
        source, against = _paragraph(kind, "Source"), _paragraph(kind, "Not to be used")
        notes.append(f"- **{kind.__name__}** (`{name}`). {source[:1].upper()}{source[1:]} *Not to be used* {against}")
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", *notes, ""])


def _row(kind: type[Strategy], strategy: Strategy) -> tuple[str, ...]:
    recipe = strategy.recipe()
    name = f"`{kind.__name__}`"
    if isinstance(recipe.work, BatchMethod):
        every = recipe.work.push_every
        return (
            name, in_words(recipe), "sum of gradients", f"{every} portions", f"2 P / {every}",
            "a step along a direction", "0", "the batch", "slow replicas, lost replicas",
        )  # fmt: skip
    if isinstance(recipe.work, Collective):
        return (
            name, in_words(recipe), "gradient, to each other", "batch", "4 P (N - 1) / N", "mean of all", "0",
            "all, each time", "lost replicas",
        )  # fmt: skip
    if recipe.alone:
        return (name, in_words(recipe), "nothing", "-", "0", "one batch", "0", "-", "-")
    loop, rules = recipe.loop, recipe.loop.exchanges.rules
    return (
        name, in_words(recipe), _pushes(loop), _every(loop), _moves(loop), _update(loop), _staleness(rules),
        _waits(rules), _tolerates(loop),
    )  # fmt: skip


def _pushes(loop: Loop) -> str:
    if loop.local is not None:
        return {"delta": "the way it went", "weights": "its weights"}[loop.local.pushes]
    return "gradient" if loop.every == 1 else "sum of gradients"


def _every(loop: Loop) -> str:
    return "batch" if loop.every == 1 else f"{loop.every} batches"


def _moves(loop: Loop) -> str:
    return "2 P" if loop.every == 1 else f"2 P / {loop.every}"


def _update(loop: Loop) -> str:
    if loop.exchanges.rules.gather == "mean":
        return "mean of all"
    if loop.exchanges.rules.scaled:
        return "each push, at rate / staleness"
    return "each push" if loop.update.compensation is None else "each push, corrected"


def _staleness(rules: Rules) -> str:
    if rules.gather == "mean":
        return "0"
    if rules.max_delay is None:
        return "any; about N - 1"
    return "at most (N - 1)(2τ + 1)"


def _waits(rules: Rules) -> str:
    if rules.gather == "mean":
        return "all, each time"
    return "nobody" if rules.max_delay is None else f"who is {rules.max_delay} behind"


def _tolerates(loop: Loop) -> str:
    slow = "" if loop.exchanges.rules.gather == "mean" else "slow replicas, "
    network = "a slow network, " if loop.every >= 8 else ""
    return f"{slow}{network}lost replicas"


def _paragraph(kind: type[Strategy], start: str) -> str:
    """A docstring's paragraph, without its first words, on one line."""
    text = inspect.getdoc(kind) or ""
    found = re.search(rf"^{start}:? (.*?)(?=\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"{kind.__name__} has no paragraph that begins with {start!r}"
    return " ".join(found.group(1).split())


def tables() -> str:
    """Every table of a run's record: what its class says of it, and its columns."""
    return "\n".join(_table(row) for row in get_args(Row))


def _table(row: type[Row]) -> str:
    about = (inspect.getdoc(row) or "").replace("``", "`")
    said = _comments(row)
    columns = [("column", "type", ""), ("---",) * 3]
    columns += [(f"`{f.name}`", SQL_TYPE[f.type].split()[0], said.get(f.name, "")) for f in fields(row)]
    return "\n".join([f"### {table_name(row)}", "", about, "", *(f"| {' | '.join(line)} |" for line in columns), ""])


def _comments(row: type[Row]) -> dict[str, str]:
    """Field -> the comment above its line, and that on it."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(row).splitlines():
        if above_it := re.fullmatch(r"    # (.*)", line):
            above.append(above_it[1])
        elif field := re.fullmatch(r"    (\w+): \w+(?: = \S+)?(?:  # (.*))?", line):
            found[field[1]] = " ".join([*above, *([field[2]] if field[2] else [])])
            above = []
    return found


PAGES: dict[str, Callable[[], str]] = {"strategies.md": table, "record.md": tables}


def page(name: str) -> str:
    """The text of a page as it should be: what is between the marks is written anew."""
    before, _, rest = Path(__file__).with_name(name).read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{PAGES[name]()}\n{END}{after}"


if __name__ == "__main__":
    for name in PAGES:
        Path(__file__).with_name(name).write_text(page(name))
