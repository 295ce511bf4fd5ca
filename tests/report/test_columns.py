import math
from pathlib import Path

from squall.record.rows import MetricRow, StateRow
from squall.run import Run
from tests.report.conftest import write


def test_evaluations_and_progress_are_columns_of_one_length(run_dir: Path) -> None:
    evaluations, progress = Run(run_dir).history
    assert evaluations == {
        "time_s": [5.0, 10.0], "epoch": [0, 1], "examples": [1000, 2000], "updates": [20, 40],
        "loss": [0.5, 0.125], "accuracy": [0.5, 0.875],
    }  # fmt: skip
    assert sum(progress["examples"]) == 2000
    assert {len(column) for column in progress.values()} == {20}


def test_what_an_evaluation_did_not_measure_is_none_and_nan_stays(run_dir: Path) -> None:
    write(run_dir / "run.sqlite", [MetricRow(11.0, 2, 2200, 44, "loss", math.nan)])
    evaluations = Run(run_dir).history.evaluations
    assert math.isnan(evaluations["loss"][2])
    assert evaluations["accuracy"] == [0.5, 0.875, None]


def test_a_run_that_has_not_been_measured_has_the_columns_of_every_run(tmp_path: Path) -> None:
    write(tmp_path / "run.sqlite", [StateRow("status", "running")])
    evaluations, progress = Run(tmp_path).history
    assert evaluations == {"time_s": [], "epoch": [], "examples": [], "updates": []}
    assert not any(progress.values())


def test_a_notebook_shows_a_table_and_no_markup_of_the_run(run_dir: Path) -> None:
    write(run_dir / "run.sqlite", [StateRow("strategy", "<b>")])
    shown = Run(run_dir)._repr_html_()
    assert repr(Run(run_dir)) == f"Run({str(run_dir)!r})"
    assert "<td>&lt;b&gt;</td>" in shown
    assert "<th>accuracy</th><td>0.875</td>" in shown
    assert run_dir.name in shown
