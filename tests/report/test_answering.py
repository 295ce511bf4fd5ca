"""What is told of a run that answers, and trains nothing: `squall predict`."""

import io
import math
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from squall.record.rows import EventRow, LeaseRow, MemberRow, Row
from squall.report import ProgressViewer, Reader, Viewers, audit, summarize, write_report
from tests.report.conftest import lease, state, work, write

OF_TRAINING = ("loss", "epoch", "update", "staleness", "train", "metric", "validation")


def answers(*leases: LeaseRow, **facts: object) -> list[Row]:
    """Two replicas, of which one dies, and its lease is dealt again; 100 of 1,000 examples were answered before."""
    rows = state(strategy="Prediction", optimizer="", epochs=1, examples_per_epoch=1000, replicas=2, shards=0)
    rows += state(found=100, training_s=9.0, first_step_s=2.0, **facts)
    rows += [work(float(second), second % 2, 100, math.nan) for second in range(1, 10)]
    return [*rows, *leases, EventRow(0.0, "started", ""), MemberRow("replica-1.0", 7, 5.0, "lost", "killed by SIGKILL")]


@pytest.fixture
def done(tmp_path: Path) -> Path:
    leases = [lease(0, 0, 100), lease(0, 100, 500), lease(0, 500, 800, 700), lease(0, 700, 1000)]
    write(
        tmp_path / "run.sqlite", answers(*leases, status="finished", ended="data", reason="all examples are answered")
    )
    return tmp_path


def test_a_summary_tells_what_was_answered_and_who_died(done: Path) -> None:
    with closing(Reader(done / "run.sqlite")) as reader:
        lines = dict(summarize(reader).lines())
    assert lines == {
        "status": "finished: all examples are answered", "answered": "1,000 examples, 100 of them before",
        "time": "9.0 s", "until the first answer": "2.0 s", "examples/s": "100",
        "deaths": "1, 100 examples were dealt again", "share of replica": "0: 44 %, 1: 56 %",
    }  # fmt: skip


def test_the_page_speaks_of_answers(done: Path) -> None:
    page = write_report(done).read_text().partition("</style>")[2]
    assert "Which examples were answered" in page
    assert "each of 1,000 examples answered exactly once." in page
    assert "<small>100 examples were dealt again</small>" in page
    assert page.count("<figure>") == 1
    assert [word for word in OF_TRAINING if word in page.lower()] == []


def test_an_audit_speaks_of_answers(tmp_path: Path) -> None:
    write(tmp_path / "run.sqlite", answers(lease(0, 0, 300), lease(0, 200, 500), lease(0, 500, 800, 700)))
    with closing(Reader(tmp_path / "run.sqlite")) as reader:
        assert str(audit(reader)) == (
            "The data, unfinished: 700 of 1,000 answered so far. Answered more than once: 100, at 200 to 299 (2 times)."
        )


def test_the_progress_has_no_columns_of_training(done: Path) -> None:
    console = Console(file=io.StringIO(), width=80, height=40, force_terminal=True, color_system=None)
    with closing(Viewers(done / "run.sqlite", [ProgressViewer(console)])) as viewers:
        viewers.look(now=0.0)
        assert isinstance(console.file, io.StringIO)
        shown = console.file.getvalue()
    assert "example 1,000 of 1,000" in shown
    assert ["all", "100", "25", "%", "100", "%"] in [line.split() for line in shown.splitlines()]
    assert [word for word in OF_TRAINING if word in shown] == []
