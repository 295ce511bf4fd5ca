"""What a user is told at the end of a run that can go on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from squall import Downpour
from squall.attending import raise_for
from squall.errors import Interrupted
from squall.evaluation_callback import EvaluationCallback
from squall.protocol.effects import End
from squall.record.rows import ProgressRow
from squall.record.writer import Record
from squall.run import Run
from tests.tasks import numbers, regression

Fit = Callable[..., Run]
WATCH = EvaluationCallback(None)


def told(run: Run) -> str:
    try:
        raise_for(End("interrupted", "interrupted"), run.directory, WATCH)
    except Interrupted as interrupted:
        return str(interrupted)
    raise AssertionError("it was interrupted")


def test_what_was_trained_since_the_newest_snapshot_is_told_with_it(inline: Fit) -> None:
    run = inline(regression(train=numbers(40)), Downpour(replicas=2))
    resume = f"go on from snapshot 1 with: squall resume {run.directory}"
    assert told(run) == f"interrupted; {resume}"
    trained_s = run.summary().training_s
    with closing(Record(run.directory / "run.sqlite")) as record:
        record.add(ProgressRow(trained_s + 12.5, 0, 1500, 150, 0.1, 1.0, 1.0, 0, 0))
    assert told(run) == f"interrupted; the last 12.5 s of training (1,500 examples) are not saved; {resume}"
    (run.directory / "snapshots" / "000001" / "manifest.json").write_text("{}")
    assert told(run) == f"interrupted; {resume}", "what is wrong with it, a resume says"
