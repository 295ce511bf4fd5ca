"""A trained model's outputs for every example of a dataset, computed by many processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from squall.errors import SquallError
from squall.export.loading import load
from squall.plan import make_plan
from squall.prediction import Prediction
from squall.protocol.ledger import gaps
from squall.report import Reader, summarize
from squall.report.words import size, two_columns
from squall.run import Run
from squall.runtime.answering import Nothing, Predict, PredictionTask, call
from squall.runtime.answers import FORMATS, ONE, Answers, described, modelless
from squall.runtime.best import kept
from squall.runtime.lock import hold
from squall.runtime.snapshot import Snapshots
from squall.settings import Settings
from squall.task import Task
from squall.train import Launch
from squall.usercode.kept import Code

if TYPE_CHECKING:
    from squall.launchers.local import LocalRun

SAME_PATHS = "several machines answer together where each has the run, or the file, and the data at the same paths"
Data = Callable[[], Any]  # builds a dataset, (dataset, predict) or a Task


def predict(
    run: str | Path, data: Data, *, predict: Predict | None = None, replicas: int = 2, best: bool = False,
    out: str | Path | None = None, format: str = "numpy", batch_size: int = 256, device: str = "cpu", seed: int = 0,
    settings: Settings | None = None,
) -> Predictions:  # fmt: skip
    """Answer every example of a dataset once, in order. What is there already is not computed again.

    Replicas are dealt ranges of the data, as in training, and write what the model says of each into a file of its own.
    So a replica that dies costs its range, which goes to another; and after Ctrl-C or a crash the same call goes on
    with the ranges that no file has. In the end all is in one file.

    Args:
        run: directory of a run that has a snapshot.
        data: function without arguments that builds a map-style dataset, or (dataset, predict), or a `Task`, of which
            the validation set is taken (the training set, where it has none).
        predict: `predict(model, batch)`, the outputs for a collated batch: a tensor, or several in a dict or tuple,
            each with a row for each example. Default: the model is called with the batch, or the first of its tensors.
        replicas: processes that run the model, which is in evaluation mode and without gradients.
        best: the weights of the best evaluation (`keep_best`) instead of the last.
        out: directory of the predictions; by default `predictions` in that of the run.
        format: "numpy" (`predictions.npy`, or a file for each of several outputs) or "arrow" (`predictions.arrow`, a
            column for each; the extra `arrow`).
        batch_size: examples that the model is called with.
        device: "cpu", "cuda" (replicas take the GPUs in turn) or "cuda:1".
        seed: of whatever the model, or the dataset, draws; each batch has its own, whoever answers it.
        settings: launcher, machines and threads, as of `fit`. Several machines need the run and the data at the same
            paths on each.

    Raises:
        ValueError: there is no such model, the data do not fit it, or `out` holds something else; nothing was launched.
        SquallError: the prediction ended with an error (see `squall.errors`).
        Interrupted: Ctrl-C or SIGTERM; nothing is left running, and what was answered is kept.
    """
    what = Prediction(
        replicas=replicas, model=model_in_words(run, best), data=name_of(data),
        format=format, batch_size=batch_size, again="the same call of squall.predict goes on with the rest",
    )  # fmt: skip
    task = partial(build, str(Path(run).resolve()), best, data, predict, batch_size, format)
    return carry_out(task, what, Path(out or Path(run) / ONE), settings, device=device, seed=seed)


def name_of(function: Callable[..., Any]) -> str:
    """A function's, by which what it builds is known again; of a partial one that of what it calls."""
    inner = getattr(function, "func", function)
    return f"{inner.__module__}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"


def model_in_words(run: str | Path, best: bool) -> str:
    """Which run, and which state of it. Raises `ValueError` where there is none."""
    path = Path(run)
    if path.is_file() and not best:
        return str(path.resolve())
    if not (path / "run.json").is_file():
        raise ValueError(f"{run} is no run that has trained a model, such as runs/NAME, and no exported file")
    if best:
        found = kept(path)
        if found is None:
            raise ValueError(f"{run} keeps no best weights: leave best out, or train with keep_best='accuracy', say")
        return f"{path.resolve()}, best {found.metric} {found.value:g}"
    if why := modelless(path):
        raise ValueError(why)
    numbers = Snapshots(path).numbers()
    if not numbers:
        raise ValueError(f"{run} has no snapshot: nothing was trained yet, `squall resume {run}` goes on with it")
    return f"{path.resolve()}, snapshot {numbers[-1]}"


def build(
    run: str, best: bool, data: Data, predict: Predict | None, batch_size: int, format: str, known: int | None = None,
    out: Path | None = None,
) -> PredictionTask:  # fmt: skip
    """What is answered, in the process that all replicas are forked from. `known`: examples that there were before.

    `out` is where the answers will be.
    """
    if not Path(run).exists():  # here, for where it was asked for it is
        raise SquallError(f"{run} is not on this machine: {SAME_PATHS}")
    found: Any = data()
    loader: dict[str, Any] = {}
    if isinstance(found, tuple) and len(found) == 2 and callable(found[1]):
        found, predict = found
    if isinstance(found, Task):
        loader = {name: value for name, value in found.loader.items() if name != "drop_last"}
        found = found.validate if found.validate is not None else found.train
    if found is None:
        raise ValueError(f"{name_of(data)} returned None: return a dataset")
    if known is not None and hasattr(found, "__len__") and len(found) != known:
        raise ValueError(f"the data have {len(found):,} examples, and had {known:,} before: predict to another `out`")
    return PredictionTask(
        model=Nothing(), loss=_nothing, train=found, batch_size=batch_size, shuffle=False, network=model(run, best),
        predict=predict or call, format=format, loader=loader, out=out, file=Path(run) if Path(run).is_file() else None,
    )  # fmt: skip


def model(run: str, best: bool) -> nn.Module:
    """That of a run, or of a file that `squall export` has written, in evaluation mode."""
    return Run(run).best if best else load(run)


def _nothing(model: nn.Module, batch: Any) -> Any:
    raise AssertionError("nothing is trained")


def carry_out(
    task: Callable[..., PredictionTask], what: Prediction, out: Path, settings: Settings | None = None, *,
    device: str = "cpu", seed: int = 0, local: LocalRun | None = None, commanded_at: float | None = None,
) -> Predictions:  # fmt: skip
    """Answer what has no answer yet, and put the answers together."""
    if what.format not in FORMATS:
        raise ValueError(f"format is {what.format!r}: use one of {', '.join(FORMATS)}")
    if what.format == "arrow" and find_spec("pyarrow") is None:
        raise ValueError("format 'arrow' needs pyarrow: pip install 'squall-train[arrow]', or use 'numpy'")
    settings = dataclasses.replace(
        settings or Settings(), snapshot_every_s=None, evaluate_every_s=None, keep_schedule=0.0, restarts=0
    )
    plan = make_plan(what, settings, seed=seed, device=device)
    again, answers = begun(out, what), Answers(out, what.format)
    if done := Predictions(out).files:
        raise ValueError(f"{out} holds these predictions already, in {done[0].name}: choose another `out`")
    known = Predictions(out).examples if again else None
    if known is None or gaps(answers.found(), known):
        if again:
            with hold(out):  # what is answered the files tell; the record is that of the rest
                for file in out.glob("run.sqlite*"):
                    file.unlink()
        code = Code(task=partial(task, known=known, out=out), strategy=what, settings=settings, plan=plan)
        Launch(code, local, commanded_at).go(out, again=again)
    predictions = Predictions(out)
    assert predictions.examples is not None
    with hold(out):
        answers.put_together(predictions.examples)
    return predictions


def begun(out: Path, what: Prediction) -> bool:
    """Whether the same prediction was begun there. Raises `ValueError` where something else is."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    there = described(out)
    if there is None:
        raise ValueError(f"{out} exists already, and holds no predictions: choose another `out`")
    differs = [name for name in ("model", "data", "format") if there.get(name) != getattr(what, name)]
    if differs:
        was = "; ".join(f"{name} was {there.get(name)}, and is {getattr(what, name)}" for name in differs)
        raise ValueError(f"{out} holds other predictions: {was}: choose another `out`, or remove it")
    return True


class Predictions:
    """A directory that `squall.predict` has made."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    @property
    def files(self) -> list[Path]:
        """What all is in, in order; nothing before all is answered."""
        if (self.directory / "answers").exists():
            return []
        return sorted(path for path in self.directory.glob(f"{ONE}.*") if path.suffix in (".npy", ".arrow"))

    @property
    def examples(self) -> int | None:
        """Of the data; None where none was answered yet."""
        if not (self.directory / "run.sqlite").exists():
            return None
        with closing(Reader(self.directory / "run.sqlite")) as reader:
            counted = reader.state().get("examples_per_epoch")
        return int(counted) if counted else None

    def load(self) -> np.ndarray[Any, Any] | dict[str, np.ndarray[Any, Any]]:
        """The outputs in the data's order, [examples, ...] by memory map; of several, a dict of them.

        Raises `ValueError` where not all is answered.
        """
        if not self.files:
            raise ValueError(f"{self.directory} has not all predictions yet: what made them, given again, goes on")
        if self.files[0].suffix == ".arrow":
            from squall.runtime import arrow_files

            found = dict(arrow_files.read(self.files[0]))
        else:
            names = [path.stem.removeprefix(f"{ONE}.") for path in self.files]
            found = {name: np.load(path, mmap_mode="r") for name, path in zip(names, self.files)}
        return found[ONE] if list(found) == [ONE] else found

    def to_json_dict(self) -> dict[str, Any]:
        """What was answered, how fast, and where it is, in JSON's types."""
        with closing(Reader(self.directory / "run.sqlite")) as reader:
            found = summarize(reader)
        return {
            **(described(self.directory) or {}), "examples": self.examples, "found": found.found,
            "seconds": found.training_s, "examples_per_second": found.examples_per_second,
            "shares": {str(replica): share for replica, share in found.shares.items()},
            "files": [str(path) for path in self.files],
        }  # fmt: skip

    def __str__(self) -> str:
        what = described(self.directory) or {}
        lines = [(name, what.get(name, "unknown")) for name in ("model", "data")]
        with closing(Reader(self.directory / "run.sqlite")) as reader:
            lines += summarize(reader).lines()
        return two_columns([*lines, *(("file", f"{path}, {size(path.stat().st_size)}") for path in self.files)])

    def __repr__(self) -> str:
        return f"Predictions({str(self.directory)!r})"
