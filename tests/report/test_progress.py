import io
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from squall.record.rows import EventRow, MemberRow, MetricRow, Row, StalenessRow, StateRow
from squall.record.writer import Record
from squall.report import ProgressViewer, Viewers
from squall.report.totals import RECENT_S, Totals, loss, staleness, waiting
from tests.report.conftest import state, work, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "run.sqlite", state(strategy="downpour", replicas=2, shards=1, status="training"))


def terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width, height=40, force_terminal=True, color_system=None)


def pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def shown(path: Path, rows: list[Row], console: Console | None = None) -> str:
    """What one look at these rows shows."""
    console = console or terminal()
    with closing(Viewers(write(path, rows), [ProgressViewer(console)])) as viewers:
        viewers.look(now=0.0)
        return text(console)


def test_a_terminal_shows_epochs_replicas_validation_and_events(path: Path) -> None:
    rows = state(epochs=4, examples_per_epoch=1000)
    rows += [work(float(t), r, 150 - 100 * r, 0.5 + r) for t in range(1, 8) for r in (0, 1)]
    rows += [StalenessRow(7.0, 1, 3, 4), StalenessRow(7.0, 1, 5, 4), MetricRow(5.0, 0, 1000, 20, "accuracy", 0.875)]
    rows += [EventRow(3.0, "lost", "replica 1 lost: killed by SIGKILL; replacement joined")]
    found = shown(path, rows)
    assert "downpour  2 replicas  1 shard  training" in found
    assert "epoch 1.4 of 4" in found
    assert "35 %" in found
    assert "7.0 s, 13.0 s left" in found
    cells = [line.split() for line in found.splitlines()]
    assert ["0", "150", "0.5000", "-", "-", "25", "%", "75", "%"] in cells
    assert ["1", "50", "1.5000", "4.0", "5", "25", "%", "25", "%"] in cells
    assert ["all", "200", "0.7500", "4.0", "5", "25", "%", "100", "%"] in cells
    assert "accuracy 0.875" in found
    assert "3.0 s  replica 1 lost: killed by SIGKILL; replacement joined" in found
    assert max(map(len, found.splitlines())) <= 80


def test_the_end_is_shown_and_the_terminal_given_back(path: Path) -> None:
    console = terminal()
    with closing(Viewers(path, [ProgressViewer(console)])) as viewers:
        viewers.look(now=0.0)
        write(path, [work(1.0, 0, 100), EventRow(1.0, "finished", "")])
    assert "waiting for the first step" in text(console)
    assert "1.0 s  finished" in text(console)
    assert text(console).rindex("\x1b[?25h") > text(console).rindex("\x1b[?25l"), "the cursor is visible again"


def test_many_replicas_are_summed_up(path: Path) -> None:
    found = shown(path, [work(1.0, replica, 10) for replica in range(100)])
    cells = [line.split()[:3] for line in found.splitlines()]
    assert ["10", "10", "1.0000"] in cells
    assert ["89", "more", "890"] in cells
    assert ["all", "1,000", "1.0000"] in cells
    assert len(found.splitlines()) < 25


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"steps": 100}, "step 8.0 of 100"),
        ({"seconds": 60}, "second 2 of 60"),
        ({"epochs": "unlimited"}, "step 8"),
        ({}, "step 8"),
    ],
)
def test_without_epochs_it_counts_steps_or_seconds(path: Path, limits: dict[str, int], expected: str) -> None:
    found = shown(path, [*state(**limits), work(1.0, 0, 200), work(2.0, 0, 200)])
    assert expected.replace("8.0", "8") in found


def test_text_of_others_is_not_markup(path: Path) -> None:
    rows: list[Row] = [work(1.0, 0, 10), EventRow(1.0, "warning", "[bold]batch [/] :smile: [red")]
    assert "[bold]batch [/] :smile: [red" in shown(path, rows)
    assert "[bold]batch [/] :smile: [red" in shown(path, [], pipe())


def test_without_a_terminal_a_line_comes_every_interval_and_events_at_once(path: Path) -> None:
    console = pipe()
    write(path, state(epochs=10, examples_per_epoch=100))
    with closing(Record(path)) as record, closing(Viewers(path, [ProgressViewer(console, interval_s=5.0)])) as viewers:
        for now in range(0, 13):
            record.add(work(now + 1.0, 0, 50, 0.25))
            if now == 7:
                record.add(EventRow(8.0, "lost", "replica 1 lost: killed by SIGKILL"))
                record.add(EventRow(8.0, "snapshot", "snapshots/000008"))
            record.commit(now=float(now), force=True)
            viewers.look(now=float(now))
    assert text(console).splitlines() == [
        "1.0 s  epoch 0.5 of 10  50 examples/s  loss 0.2500",
        "6.0 s  epoch 3 of 10  50 examples/s  loss 0.2500",
        "8.0 s  replica 1 lost: killed by SIGKILL",
        "11.0 s  epoch 5.5 of 10  50 examples/s  loss 0.2500",
        "13.0 s  epoch 6.5 of 10  50 examples/s  loss 0.2500",
    ]


def test_a_line_is_not_wrapped_nor_said_again_at_the_end(path: Path) -> None:
    metrics = [MetricRow(1.0, 0, 10, 1, f"metric number {i}", 0.5) for i in range(10)]
    (line,) = shown(path, [work(1.0, 0, 10), *metrics], pipe()).splitlines()
    assert line.endswith("validation metric number 9 0.5")


def test_rates_are_those_of_the_last_seconds() -> None:
    rows: list[Row] = [work(float(t), 0, 100 if t <= 20 else 300, 4.0 if t <= 20 else 1.0) for t in range(1, 41)]
    rows += [work(float(t), 1, 100) for t in range(1, 11)]
    rows += [StalenessRow(5.0, 0, 9, 1), StalenessRow(35.0, 0, 2, 3)]
    tally = Totals()
    tally.take(rows)
    fast, dead = tally.replicas[0], tally.replicas[1]
    assert len(fast.work) == RECENT_S
    assert (tally.rate([fast]), tally.rate([dead])) == (300.0, 0.0)
    assert (loss([fast]), staleness([fast]), fast.staleness_max, waiting([fast])) == (1.0, 2.0, 9, 0.25)
    assert (fast.examples, dead.examples, tally.examples) == (8000, 1000, 9000)


@pytest.mark.parametrize("console", [terminal, pipe])
def test_replicas_that_are_not_heard_of_are_named_with_what_stands_still(
    path: Path, console: Callable[[], Console]
) -> None:
    def after(seconds: float, *rows: Row) -> str:
        nonlocal now
        before, now = text(out), now + seconds
        write(path, list(rows))
        viewers.look(now)
        return text(out).removeprefix(before)

    now, out = 100.0, console()
    write(path, [MemberRow(f"replica-{r}.0", 7, 0.0, "joined", "") for r in range(3)])
    write(path, [*(work(1.0, r, 50) for r in range(3)), MemberRow("replica-2.0", 7, 1.0, "left", "")])
    progress = ProgressViewer(out, interval_s=0.0, causes=lambda: ["shard 1 is stopped"])
    with closing(Viewers(path, [progress])) as viewers:
        assert "not heard of" not in after(0)
        assert "not heard of" not in after(8, work(2.0, 0, 50))
        assert "not heard of: replica 1 for 11 s; shard 1 is stopped" in after(3)
        assert "replica 0 for 12 s" not in after(9), "its reports lie far apart"
        told = " ".join(after(5).split())
        assert "replica 0 for 17 s, replica 1 for 25 s (or the record cannot be written); shard 1 is stopped" in told
        assert "not heard of" not in after(5, work(3.0, 0, 50), work(3.0, 1, 50))
        assert "evaluator" not in after(1, StateRow("evaluating", "0"))
        told = " ".join(after(11, work(4.0, 0, 50), work(4.0, 1, 50)).split())
        assert "the evaluator has not answered for 11 s; shard 1 is stopped" in told
        assert "evaluator" not in after(1, StateRow("evaluating", "1")), "it has answered, and another one is asked for"
