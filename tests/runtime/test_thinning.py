"""Old reports are few, and say what all of them said: in all, at a snapshot that a resume goes back to, and drawn."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from squall.record.rows import ExtraRow, PartRow, ProgressRow, StalenessRow
from squall.record.writer import Record
from squall.report import Reader
from squall.runtime import thinning
from squall.runtime.snapshot import Snapshots
from squall.runtime.thinning import FRESH_S, Thinning

HOUR_S, EVERY_S = 3600.0, 0.5
REPORTS = round(HOUR_S / EVERY_S)
MOMENTS = 256  # fewer than there are, so that an hour shows what a week does


def reports(number: int) -> list[ProgressRow | PartRow | ExtraRow | StalenessRow]:
    time_s, replica = number * EVERY_S, number % 2
    loss = math.nan if number % 50 == 0 else math.exp(-time_s / HOUR_S)
    return [
        ProgressRow(time_s, replica, 64, 2, loss, 0.25, 0.125, 400, 800),
        PartRow(time_s, replica, number // 2 % 2, 0.25, 0.125, 0.5, number),
        ExtraRow(time_s, replica, 64, "accuracy", 1 - math.exp(-time_s / HOUR_S)),
        StalenessRow(time_s, replica, number % 3, 2),
    ]


def examples_by(rows: list[ProgressRow], time_s: float) -> int:
    return sum(row.examples for row in rows if row.time_s <= time_s)


def test_an_hour_of_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot is asked for every 100 s, and published 3 s later; the record then goes back to the last but one."""
    monkeypatch.setattr(thinning, "MOMENTS", MOMENTS)
    path, asked = tmp_path / "run.sqlite", []
    with closing(Record(path)) as record, closing(Reader(path)) as reader:
        ageing = Thinning(record, 0.0, Snapshots(tmp_path))
        seen, place = 0, 0
        for number in range(REPORTS):
            for row in reports(number):
                record.add(row)
            time_s = number * EVERY_S
            if time_s % 100 == 50:
                asked.append(time_s)
                ageing.asked(time_s)
            elif asked and time_s == asked[-1] + 3:
                ageing.published()
            if number % 2:
                record.commit(time_s)
                ageing.look(time_s)
                fresh, place = reader.since(ProgressRow, place)
                seen += sum(row.examples for row in fresh)
        record.commit(1e9, force=True)
        assert seen == 64 * REPORTS, "who watches reads each report once"
        rows = reader.rows(ProgressRow)
        assert examples_by(rows, math.inf) == 64 * REPORTS
        assert len(rows) < REPORTS / 3
        old = [row.time_s for row in rows if row.time_s < HOUR_S - 3 * FRESH_S and row.replica == 0]
        gap = max(later - earlier for earlier, later in pairwise(old))
        assert gap <= HOUR_S / MOMENTS + 2 * EVERY_S, "a curve is drawn as before"
        for time_s in (1000.0, 2000.0, 3000.0):
            assert abs(examples_by(rows, time_s) - 64 * time_s / EVERY_S) <= 64 * HOUR_S / MOMENTS / EVERY_S + 128
        assert len(reader.rows(StalenessRow)) < 2 * 3 * (10 + 4 * FRESH_S / EVERY_S)
        assert Counter({row.staleness: row.count for row in reader.staleness() if row.replica}) == Counter(
            dict.fromkeys(range(3), 2 * REPORTS // 6)
        )
        assert sum(row.examples for row in reader.rows(ExtraRow)) == 64 * REPORTS
        assert len(reader.rows(PartRow)) < REPORTS / 2
        assert sum(part.bubble_s for part in reader.parts()) == 0.5 * REPORTS
        assert max(part.memory for part in reader.parts()) == REPORTS - 1
        for back_s in reversed(asked[-2:]):
            record.rewind(back_s, 0, 0, [])
            assert sum(part.wait_s for part in reader.parts()) == 0.125 * (back_s / EVERY_S + 1)
            assert examples_by(reader.rows(ProgressRow), math.inf) == 64 * (back_s / EVERY_S + 1)
            assert sum(row.count for row in reader.rows(StalenessRow)) == 2 * (back_s / EVERY_S + 1)


def test_a_run_that_has_gone_on_may_go_back_to_the_same_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {1: 950.0, 2: 1050.0}
    monkeypatch.setattr(thinning, "MOMENTS", MOMENTS)
    monkeypatch.setattr(Snapshots, "numbers", lambda self: list(asked))
    monkeypatch.setattr(Snapshots, "manifest", lambda self, number: SimpleNamespace(asked_s=asked[number]))
    path = tmp_path / "run.sqlite"
    with closing(Record(path)) as record, closing(Reader(path)) as reader:
        for number in range(3000):
            for row in reports(number):
                record.add(row)
            if number * EVERY_S == asked[2]:
                record.commit(0.0, force=True)
                ageing = Thinning(record, asked[2] + 1, Snapshots(tmp_path))
        record.commit(1e9, force=True)
        ageing.look(3000 * EVERY_S)
        assert len(reader.rows(ProgressRow)) < 1500
        for back_s in (asked[2], asked[1]):
            record.rewind(back_s, 0, 0, [])
            assert examples_by(reader.rows(ProgressRow), math.inf) == 64 * (back_s / EVERY_S + 1)
