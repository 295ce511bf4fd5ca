"""What TensorBoard reads of a run is read back with its own reader."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import squall
from squall.record.rows import EventRow, ExtraRow, PartRow, StalenessRow
from squall.report.tensorboard import FOLDER, TensorBoardViewer, begin_tensorboard, histogram, write_record
from squall.run import Run
from squall.task import TaskFunction
from tests.report.conftest import state, work, write
from tests.tasks import INLINE, LOCAL, assert_same, numbers, regression

Fit = Callable[..., Run]
WATCHED = dataclasses.replace(INLINE, tensorboard=True)


def read(run_dir: Path) -> Any:
    """The folder as a TensorBoard would show it, with every event kept."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sizes = dict.fromkeys(("scalars", "histograms", "compressedHistograms", "tensors"), 0)
    found = EventAccumulator(str(run_dir / FOLDER), size_guidance=sizes)
    found.Reload()
    return found


def curve(shown: Any, tag: str) -> list[tuple[int, float]]:
    return [(point.step, round(point.value, 4)) for point in shown.Scalars(tag)]


def text(shown: Any, tag: str) -> str:
    written: str = shown.Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0].decode()
    return written


def test_curves_lie_at_the_examples_and_at_the_time_of_the_run(run_dir: Path) -> None:
    rows = [*state(began_at=1e9), ExtraRow(4.5, 0, 10, "penalty", 0.25)]
    write(run_dir / "run.sqlite", [*rows, PartRow(10.0, 1, 2, 6.0, 3.0, 1.0, 0)])
    write_record(run_dir)
    shown = read(run_dir)
    assert curve(shown, "accuracy/validation") == [(1000, 0.5), (2000, 0.875)]
    assert [point.wall_time for point in shown.Scalars("accuracy/validation")] == [1e9 + 5, 1e9 + 10]
    assert [step for step, _ in curve(shown, "loss/training")][:3] == [150, 200, 350], "of both replicas, as they tell"
    assert curve(shown, "loss/validation")[-1] == (2000, 0.125)
    assert curve(shown, "penalty/training") == [(800, 0.25)], "what was trained after 4 s"
    assert curve(shown, "waiting/replica_1")[0] == (200, 0.25)
    assert curve(shown, "waiting/replica_1_part_2") == [(2000, 0.3)]
    assert {rate for _, rate in curve(shown, "examples_per_second/replica_0")} == {150}
    assert curve(shown, "examples_per_second/all")[-1] == (2000, 200)
    assert text(shown, "events") == "finished 2 epochs"


def test_a_histogram_of_staleness_is_made_of_counts(run_dir: Path) -> None:
    write(run_dir / "run.sqlite", [StalenessRow(11.0, 30, staleness, 10**9) for staleness in (2, 3, 7)])
    write_record(run_dir)
    shown = read(run_dir)
    assert len(shown.Histograms("staleness/replica_0")) == 10
    (point,) = shown.Histograms("staleness/others")
    found = point.histogram_value
    assert (point.step, found.num, found.min, found.max, found.sum) == (2000, 3e9, 2, 7, 12e9)
    assert list(zip(found.bucket_limit, found.bucket)) == [
        (1.5, 0), (2.5, 1e9), (3.5, 1e9), (6.5, 0), (7.5, 1e9)
    ]  # fmt: skip
    assert histogram({0: 4}) == {
        "min": 0, "max": 0, "num": 4, "sum": 0, "sum_squares": 0, "bucket_limits": [-0.5, 0.5], "bucket_counts": [0, 4]
    }  # fmt: skip


def test_a_run_that_went_back_to_a_snapshot_counts_from_there(tmp_path: Path) -> None:
    rows = [work(1.0, 0, 100), work(2.0, 0, 100), EventRow(1.0, "left", "machine 1"), work(1.5, 0, 30)]
    write(tmp_path / "run.sqlite", rows)
    write_record(tmp_path)
    assert curve(read(tmp_path), "loss/training")[-1] == (130, 1.0)


def test_what_is_known_of_a_long_run_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("squall.report.tensorboard.KNOWN_S", 10.0)
    viewer = TensorBoardViewer(tmp_path)
    for second in range(1, 101):
        viewer.show([work(second, 0, 100)], second)
        assert len(viewer._times) <= 22
    viewer.show([work(95.0, 0, 100), ExtraRow(95.0, 0, 10, "penalty", 0.25)], 101)
    viewer.close()
    shown = read(tmp_path)
    assert [step for step, _ in curve(shown, "loss/training")] == [*range(100, 10_001, 100), 9600]
    assert {rate for _, rate in curve(shown, "examples_per_second/all")[:100]} == {100}
    assert curve(shown, "penalty/training") == [(9600, 0.25)]


def test_it_is_written_with_the_models_graph_and_changes_nothing(inline: Fit) -> None:
    task, strategy = regression(validate=numbers(20)), squall.Downpour(replicas=2)
    run = inline(task, strategy, epochs=2, settings=WATCHED)
    assert_same(run, inline(task, strategy, epochs=2), task)
    for _ in range(2):  # from the record, and once more: nothing is there twice
        shown = read(run.directory)
        assert curve(shown, "loss/training")[-1][0] == 180
        assert len(shown.Tensors("plan/text_summary")) == 1
        assert "| plan.strategy | downpour |" in text(shown, "plan")
        names = [node.name for node in shown.Graph().node]
        assert sum("Linear" in name and "weight" in name for name in names) == 2
        assert Run(run.directory, task).tensorboard() == run.directory / FOLDER


def test_it_is_written_while_processes_train(tmp_path: Path, without_report: None) -> None:
    settings = dataclasses.replace(LOCAL, tensorboard=True)
    squall.fit(regression(), squall.Downpour(replicas=2), epochs=2, run_dir=tmp_path / "run", settings=settings)
    shown = read(tmp_path / "run")
    assert curve(shown, "loss/training")[-1][0] == 180
    pushed = [name for name in shown.Tags()["histograms"] if name.startswith("staleness/")]  # one may do all the work
    assert sum(point.histogram_value.num for name in pushed for point in shown.Histograms(name)) == 12
    assert shown.Graph().node


class Named(nn.Module):
    """Called by name, with something that is no tensor, and answers with names, as a model of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, *, inputs: Tensor, factor: float, labels: Tensor) -> dict[str, Any]:
        found = factor * self.layer(inputs)
        return {"loss": ((found - labels) ** 2).mean(), "hidden": (found,)}


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        if not isinstance(inputs, Tensor) or torch.jit.is_tracing():
            raise RuntimeError("this model goes its own ways\nin several lines")
        out: Tensor = self.layer(inputs)
        return out


def by_name(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(inputs=batch[0], factor=2.0, labels=batch[1])["loss"]
    return loss


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (regression(Branching), "it cannot be traced (RuntimeError: this model goes its own ways)"),
        (
            regression(loss=lambda model, batch: model[2](model[1](model[0](batch[0]))).mean()),
            "it cannot be traced (ValueError: Task.loss does not call the model itself (`model(...)`), but something in"
            " it, so there is no one function that is the model: let the model's forward do what the loss needs)",
        ),
        (None, "a script makes its model itself"),
        (regression(Named, loss=by_name), ""),
    ],
)
def test_a_model_that_cannot_be_traced_is_told_of(
    task: TaskFunction | None, why: str, tmp_path: Path, capsys: Any
) -> None:
    begin_tensorboard(tmp_path, why if task is None else task())
    shown = read(tmp_path)
    if why:
        assert text(shown, "graph") == f"There is no graph of the model: {why}."
    else:
        assert any("Linear[layer]" in node.name for node in shown.Graph().node)
    assert "The plan is not known: run.json cannot be read" in text(shown, "plan")
    assert capsys.readouterr().out == "", "standard output is for results"


def test_a_record_without_its_code_is_shown_without_a_graph(run_dir: Path) -> None:
    (run_dir / "run.json").write_text('{"plan": {"seed": 0}}')
    Run(run_dir).tensorboard()
    shown = read(run_dir)
    assert "the task cannot be built" in text(shown, "graph")
    assert "it has no code.pickle" in text(shown, "graph")
    assert curve(shown, "accuracy/validation") == [(1000, 0.5), (2000, 0.875)]


def test_without_tensorboard_nothing_is_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("squall.checks.find_spec", lambda package: None)
    with pytest.raises(ValueError, match=r"TensorBoard is not installed: pip install 'squall-train\[tensorboard\]'"):
        squall.fit(regression(), squall.Downpour(), run_dir=tmp_path / "run", settings=WATCHED)
    assert not (tmp_path / "run").exists()
