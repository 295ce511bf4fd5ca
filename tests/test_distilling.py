"""`squall.distill`: a teacher, a student alone, and a student that was taught."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import squall
from squall import distilling
from squall.cli import main
from squall.errors import NotFinite
from tests.tasks import INLINE

SGD = partial(torch.optim.SGD, lr=0.5)
STRATEGY = squall.Synchronous(replicas=2, optimizer=SGD)


def corners(examples: int = 96, seed: int = 1) -> TensorDataset:
    """Points of the plane and in which of its quarters they lie. Rule: torch.Generator."""
    points = torch.randn(examples, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long())


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def right(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float()


def task(width: int = 0, classes: int = 4, inputs: int = 2) -> squall.Task:
    layers = [nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, classes)] if width else [nn.Linear(inputs, classes)]
    return squall.Task(
        model=nn.Sequential(*layers), loss=loss, train=corners(), validate=corners(32, 2),
        batch_size=16, metrics={"accuracy": right},
    )  # fmt: skip


student: Callable[[], squall.Task] = task


@pytest.fixture(autouse=True)
def quick(without_report: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No report is drawn, and speed is told by a few calls."""
    monkeypatch.setattr(distilling, "MEASURED_S", 0.01)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(squall.Run, "report", lambda run: run.directory / "report.html")
        directory = tmp_path_factory.mktemp("teacher") / "run"
        squall.fit(partial(task, 16), STRATEGY, epochs=20, run_dir=directory, settings=INLINE)
    return directory


def distill(teacher: Path, run_dir: Path, student: Any = student, **given: Any) -> squall.Distilled:
    return squall.distill(teacher, student, STRATEGY, epochs=2, run_dir=run_dir, settings=INLINE, **given)


def test_teacher_student_alone_and_distilled_are_compared(teacher: Path, run_dir: Path) -> None:
    found = distill(teacher, run_dir)
    assert list(found.models) == ["teacher", "student alone", "student distilled"]
    assert [found.models[name]["parameters"] for name in found.models] == [116, 12, 12]
    assert found.models["teacher"]["accuracy"] > 0.9
    assert found.models["student distilled"]["loss"] != found.models["student alone"]["loss"]
    assert found.run.directory == run_dir / "distilled-2-0.5"
    assert {"labels", "teacher"} <= found.run.summary().extras.keys()
    said = np.load(run_dir / "teacher" / "predictions.npy")
    with torch.no_grad():
        outputs = squall.Run(teacher).model(corners().tensors[0])
    assert said.dtype == np.float16
    assert np.allclose(said, outputs, atol=1e-2)
    assert [line.split("  ")[0] for line in str(found).splitlines()[1:]] == list(found.models)


def test_what_is_there_is_not_computed_again(teacher: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distill(teacher, run_dir)
    kept = {
        path: path.stat().st_mtime_ns
        for path in run_dir.rglob("*")
        if path.name in ("predictions.npy", "manifest.json")
    }
    assert len(kept) == 3
    other = distill(teacher, run_dir, temperature=1.0, mix=1.0)
    assert other.run.directory == run_dir / "distilled-1-1"
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    with pytest.raises(ValueError, match=r"was begun otherwise \(seed was 0, and is 1\): choose another run directory"):
        distill(teacher, run_dir, seed=1)
    again = squall.resume(run_dir / "distilled-2-0.5", epochs=3)
    assert again.summary().examples == 3 * 96


def test_with_all_of_the_labels_it_is_the_student_alone(teacher: Path, run_dir: Path) -> None:
    found = distill(teacher, run_dir, mix=0.0)
    alone, distilled = (found.runs[name].model.state_dict() for name in ("student alone", "student distilled"))
    assert all(torch.allclose(alone[name], distilled[name]) for name in alone)


def twice() -> squall.Task:
    found = task()
    found.__dict__["loss"] = lambda model, batch: loss(model, batch) + loss(model, batch)
    return found


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "other classes": (
        partial(task, 0, 5),
        {},
        r"outputs are \[16, 5\] for a batch, and the teacher's \[16, 4\]",
    ),
    "calls twice": (twice, {}, "calls the model 2 times"),
    "no classes": (student, {"dim": 2}, r"the outputs are \[16, 4\], with no classes along dimension 2"),
    "temperature": (student, {"temperature": 0.0}, "temperature"),
    "mix": (student, {"mix": 1.5}, "mix"),
    "best": (student, {"best": True}, "keeps no best weights"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_launched(what: str, teacher: Path, run_dir: Path) -> None:
    built, given, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        distill(teacher, run_dir, built, **given)
    assert not run_dir.exists()


def test_the_command_goes_with_the_file_s_own_strategy(
    teacher: Path, run_dir: Path, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "student.py"
    file.write_text("from tests.test_distilling import STRATEGY as strategy, task\nepochs = 1\n")
    flags = ["--run-dir", str(run_dir), "--launcher", "inline", "--mix", "1", "--not-alone", "--json"]
    assert main(["distill", str(teacher), str(file), *flags]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["models"]) == ["teacher", "student distilled"]
    assert (run_dir / "distilled-2-1" / "snapshots").is_dir()


def not_finite(model: nn.Module, batch: list[Tensor]) -> Tensor:
    found = loss(model, batch)
    return found * float("nan") if model.training else found


def test_what_ends_a_student_says_how_all_of_it_goes_on(teacher: Path, run_dir: Path) -> None:
    with pytest.raises(NotFinite, match=f"or with all of the distillation: .* in the run directory {run_dir}"):
        distill(teacher, run_dir, lambda: replace(task(), loss=not_finite))
