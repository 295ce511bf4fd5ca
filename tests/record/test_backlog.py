"""Rows that wait are few, and say the same."""

from __future__ import annotations

import math

import pytest

from squall.record.backlog import AT_MOST, Backlog
from squall.record.rows import EventRow, MetricRow, ProgressRow, Row, StalenessRow
from tests import deep


def work(number: int, replica: int) -> ProgressRow:
    loss = math.nan if number % 10 == 9 else float(number % 4)
    return ProgressRow(number / 8, replica, 64, 2, loss, 0.25, 0.125, 400, 800)


def waiting(backlog: Backlog, table: type[Row]) -> list[Row]:
    return backlog.rows[table]


@pytest.mark.parametrize("replicas", [1, 3, AT_MOST + 1])
def test_reports_are_added_up(replicas: int) -> None:
    backlog, told = Backlog(), [work(number, number % replicas) for number in range(50_000)]
    for row in told:
        backlog.add(row)
    rows = [row for row in waiting(backlog, ProgressRow) if isinstance(row, ProgressRow)]
    assert len(rows) <= max(AT_MOST, 4 * replicas)
    for name in ("examples", "batches", "compute_s", "wait_s", "pushed_bytes", "fetched_bytes"):
        assert sum(getattr(row, name) for row in rows) == sum(getattr(row, name) for row in told)
    assert {row.replica for row in rows} == set(range(replicas))
    assert max(row.time_s for row in rows) == told[-1].time_s


def test_the_mean_loss_is_of_the_examples_that_have_one() -> None:
    reports = ((10, 1.0), (90, math.nan), (30, 3.0))
    first, none, last = (ProgressRow(0, 0, examples, 1, loss, 0, 0, 0, 0) for examples, loss in reports)
    assert first.merged(last).loss == 2.5
    assert first.merged(none).loss == 1.0
    assert none.merged(last).loss == 3.0
    assert math.isnan(none.merged(none).loss)


def test_pushes_keep_their_count_by_staleness() -> None:
    backlog = Backlog()
    for number in range(40_000):
        backlog.add(StalenessRow(number / 8, number % 2, number % 7, 1 + number % 3))
    rows = [row for row in waiting(backlog, StalenessRow) if isinstance(row, StalenessRow)]
    assert len(rows) <= AT_MOST
    for replica in range(2):
        for staleness in range(7):
            told = sum(1 + n % 3 for n in range(40_000) if (n % 2, n % 7) == (replica, staleness))
            assert sum(row.count for row in rows if row.alike() == (replica, staleness)) == told


def test_what_a_resume_may_go_back_to_stays_apart() -> None:
    backlog = Backlog()
    for number in range(3 * AT_MOST):
        if number in (AT_MOST // 2, 2 * AT_MOST):
            backlog.seal()
        backlog.add(work(number, 0))
    before = [
        row for row in waiting(backlog, ProgressRow) if isinstance(row, ProgressRow) and row.time_s < AT_MOST / 16
    ]
    assert sum(row.examples for row in before) == 64 * AT_MOST // 2


def test_snapshots_without_end_do_not_keep_all_rows_apart() -> None:
    """What a resume may go back to is the last two that were published."""
    backlog, published = Backlog(), []
    for number in range((100 if deep.wanted else 20) * AT_MOST):
        if number % 1000 == 0:
            backlog.seal()
            if number % 7000:  # others cannot be written
                backlog.published()
                published.append(number)
        backlog.add(work(number, 0))
    rows = [row for row in waiting(backlog, ProgressRow) if isinstance(row, ProgressRow)]
    assert len(rows) <= 4 * AT_MOST
    for kept in published[-2:]:
        assert sum(row.examples for row in rows if row.time_s < kept / 8) == 64 * kept


def test_events_are_all_kept_and_curves_keep_their_end() -> None:
    backlog = Backlog()
    for number in range(3 * AT_MOST):
        backlog.add(EventRow(number, "warning", str(number)))
        backlog.add(MetricRow(number, 0, number, number, "loss", 1 / (1 + number)))
    assert len(waiting(backlog, EventRow)) == 3 * AT_MOST
    curve = waiting(backlog, MetricRow)
    assert len(curve) <= AT_MOST
    assert curve[-1] == MetricRow(3 * AT_MOST - 1, 0, 3 * AT_MOST - 1, 3 * AT_MOST - 1, "loss", 1 / (3 * AT_MOST))
