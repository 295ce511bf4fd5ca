"""Pages of docs/ say what the code does, and queries that they show work on a run."""

from __future__ import annotations

import importlib.util
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import squall
from squall.record.rows import StateRow
from squall.run import Run
from tests.tasks import numbers, regression

DOCS = Path(__file__).parents[1] / "docs"


def made() -> Any:
    spec = importlib.util.spec_from_file_location("docs_make", DOCS / "make.py")
    assert spec is not None
    assert spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    return make


@pytest.mark.parametrize("name", ["strategies.md", "record.md"])
def test_tables_are_the_codes(name: str) -> None:
    assert (DOCS / name).read_text() == made().page(name), "run `make docs`"


def test_every_column_of_the_record_has_its_line() -> None:
    text = (DOCS / "record.md").read_text()
    assert "| `bubble_s` | REAL | seconds, the rest of the time" in text
    assert "| `kind` | TEXT | started, joined, " in text, "of a comment above the field"
    assert "finished, error |" in text


def test_queries_of_the_page_and_its_list_of_facts_hold_for_a_run(inline: Callable[..., Run]) -> None:
    run = inline(regression(validate=numbers(20)), squall.Downpour(replicas=2), epochs=2)
    queries = re.findall("```sql\n(.*?)```", (DOCS / "record.md").read_text(), re.DOTALL)
    with closing(sqlite3.connect(f"file:{run.directory}/run.sqlite?mode=ro", uri=True)) as db:
        last, target, work, seconds, stale, happened = (db.execute(query).fetchall() for query in queries)
        facts = {key for (key,) in db.execute("SELECT key FROM state")}
    found, losses = run.summary(), run.history.evaluations["loss"]
    assert [row[:2] for row in last] == [("loss", losses[-1])]
    assert target == [(run.history.evaluations["time_s"][0], run.history.evaluations["examples"][0])]
    assert [examples for _, examples, _ in work] == [round(180 * share) for share in found.shares.values()]
    assert sum(examples for _, examples, _ in seconds) == 180
    assert all(loss > 0 for _, _, loss in seconds)
    assert sum(s * n for s, n in stale) / sum(n for _, n in stale) == found.staleness_mean
    assert {"started", "finished", "joined", "left"} <= {kind for _, kind, _ in happened}
    assert facts <= set(re.findall(r"`(\w+)`", StateRow.__doc__ or ""))
