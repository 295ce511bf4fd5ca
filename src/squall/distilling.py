"""A smaller model trained on the outputs of a larger one, and both beside the smaller one that was trained alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.table import Table
from torch import nn

from squall.checks import require
from squall.errors import Interrupted, SquallError
from squall.lessons import heard, questions, taught
from squall.plan import make_plan
from squall.predicting import Predictions, begun, build, carry_out, model, model_in_words, name_of
from squall.prediction import Prediction
from squall.report.words import number, plain, size
from squall.run import Run, new_directory
from squall.runtime.answering import PredictionTask
from squall.runtime.evaluate import evaluate
from squall.runtime.run_plan import Aims, Plan
from squall.runtime.seeds import chance_kept, seed_everything
from squall.settings import Settings, with_given
from squall.strategies import Strategy
from squall.task import Batch, Task, TaskFunction, check_task, first_batch, untouched
from squall.train import Launch, resume
from squall.usercode.kept import Code

TEACHER_BATCHES = 4  # of the student's size, in one of the teacher's: it keeps no graph
SETTLED = ("strategy", "strategy_fields", "epochs", "steps", "until", "seed")  # of a plan, when a run has begun
MEASURED_S = 0.3  # how long a model is run to tell how fast it is


@chance_kept()
def distill(
    teacher: str | Path, student: TaskFunction, strategy: Strategy, *, temperature: float = 2.0, mix: float = 0.5,
    dim: int = -1, best: bool = False, alone: bool = True, epochs: int | None = None, steps: int | None = None,
    seconds: float | None = None, until: str | None = None, seed: int = 0, device: str = "cpu",
    run_dir: str | Path | None = None, settings: Settings | None = None,
) -> Distilled:  # fmt: skip
    """Train a student on a teacher's outputs, beside the labels (Hinton et al. 2015).

    The teacher answers the student's training set once, by as many replicas as the strategy has, and its outputs are
    kept (`run_dir/teacher`, float16). The student is then trained without them (`run_dir/alone`), and with them
    (`run_dir/distilled-2-0.5`, by temperature and mix). Called again with the same directory, it goes on where it was,
    or tries another temperature: what is there is not computed again.

    The teacher's outputs are those of the examples as the dataset gives them once: one that draws its augmentation
    gives the student other ones.

    Args:
        teacher: directory of a run that has a snapshot.
        student: function without arguments that builds the student's `Task`. Its loss calls the model once, and what
            the model returns there, [batch, ...] with the classes along `dim`, is compared with what the teacher
            returns when it is called in its place.
        strategy: any of `fit`, which trains the student.
        temperature: softens both outputs: they are divided by it before the softmax.
        mix: share of the teacher in the loss, 0 to 1: (1 - mix) loss + mix temperature^2 KL(teacher || student).
        best: the teacher's weights of its best evaluation (`keep_best`) instead of the last.
        alone: also train the student without the teacher, to compare.
        epochs, steps, seconds, until, seed, device, settings: as of `fit`, of each training.
        run_dir: where all is kept; a new directory under runs/ by default.

    Raises:
        ValueError: a setting, the teacher or the student is wrong, or their outputs do not fit; nothing was launched.
        SquallError: a run ended with an error. What was before it is kept.
        Interrupted: Ctrl-C or SIGTERM; the same call goes on.
    """
    require("temperature", temperature, math.isfinite(temperature) and temperature > 0, "positive")
    require("mix", mix, 0 <= mix <= 1, "from 0 to 1")
    settings = with_given(settings, seconds=seconds)
    plan = make_plan(strategy, settings, Aims(epochs=epochs, steps=steps, until=until), seed=seed, device=device)
    words = model_in_words(teacher, best)
    seed_everything(seed)
    task, original = check_task(student()), model(str(teacher), best)
    _check_fit(task, original, dim)
    directory = Path(run_dir) if run_dir is not None and _begun(Path(run_dir)) else new_directory(run_dir)
    what = Prediction(
        replicas=strategy.recipe().replicas, model=words, batch_size=TEACHER_BATCHES * task.batch_size,
        data=f"training set of {name_of(student)}", again="the distillation goes on with the rest",
    )  # fmt: skip
    lessons = partial(
        build, str(Path(teacher).resolve()), best, partial(questions, student), None, what.batch_size, what.format
    )
    train = partial(_trained, strategy=strategy, settings=settings, plan=plan)
    with _goes_on(directory):
        outputs = _answered(lessons, what, directory / "teacher", settings, device=device, seed=seed)
        runs = {"student alone": train(student, run_dir=directory / "alone")} if alone else {}
        learns = partial(taught, student, outputs.resolve(), temperature, mix, dim)
        runs["student distilled"] = train(learns, run_dir=directory / f"distilled-{temperature:g}-{mix:g}")
    models = {"teacher": original, **{name: run.model for name, run in runs.items()}}
    return Distilled(directory, {name: _measured(task, each) for name, each in models.items()}, runs)


@dataclass(frozen=True)
class Distilled:
    """What came of it.

    Attributes:
        directory: with the teacher's outputs and the runs.
        models: "teacher", "student alone", "student distilled" -> parameters, bytes, examples_per_second of one
            thread, and loss and metrics of the student's task on its validation set.
        runs: of the students.
    """

    directory: Path
    models: dict[str, dict[str, float]]
    runs: dict[str, Run]

    @property
    def run(self) -> Run:
        """Of the student that had a teacher."""
        return self.runs["student distilled"]

    def to_json_dict(self) -> dict[str, Any]:
        return {"directory": str(self.directory), "models": self.models}

    def __str__(self) -> str:
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        names = list(self.models["teacher"])
        table.add_column("")
        for name in names:
            table.add_column({"bytes": "size", "examples_per_second": "examples/s"}.get(name, name), justify="right")
        for name_of_model, values in self.models.items():
            texts = [size(int(values[name])) if name == "bytes" else number(values[name]) for name in names]
            table.add_row(name_of_model, *texts)
        return plain(table)


def _check_fit(task: Task, teacher: nn.Module, dim: int) -> None:
    """Raise `ValueError` where the outputs of the two differ, or have no classes."""
    batch = first_batch(task, task.train)
    own, other = _outputs(task, task.model, batch), _outputs(task, teacher, batch)
    if own.shape != other.shape:
        raise ValueError(
            f"the student's outputs are {list(own.shape)} for a batch, and the teacher's {list(other.shape)}: a student"
            " has the classes of its teacher, in the same places"
        )
    if not -own.ndim <= dim < own.ndim or own.shape[dim] == 1:
        raise ValueError(f"the outputs are {list(own.shape)}, with no classes along dimension {dim}: name another dim")


def _outputs(task: Task, network: nn.Module, batch: Batch) -> torch.Tensor:
    with untouched(network), torch.no_grad():
        network.eval()
        try:
            return heard(task.loss, network, batch)[1]
        except (RuntimeError, TypeError, AttributeError, KeyError, IndexError) as error:
            who = "the student's" if network is task.model else "the teacher's"
            raise ValueError(
                f"the student's loss cannot call {who} model on a batch of its training set: {type(error).__name__}:"
                f" {error}\nboth are called with the same, so train a teacher that takes it"
            ) from error


@contextmanager
def _goes_on(directory: Path) -> Iterator[None]:
    """What ends one of the runs says how to go on with that one; here with all of them."""
    try:
        yield
    except (SquallError, Interrupted) as error:
        error.args = (f"{error}\nor with all of the distillation: the same again, in the run directory {directory}",)
        raise


def _begun(directory: Path) -> bool:
    return (directory / "teacher" / "run.json").exists()


def _answered(
    lessons: Callable[..., PredictionTask], what: Prediction, out: Path, settings: Settings, **given: Any
) -> Path:
    """The file of the teacher's outputs."""
    settings = replace(settings, seconds=None, parts=1, spread_parts=False, shard_threads=1, least_replicas=None)
    if not begun(out, what) or not Predictions(out).files:
        carry_out(lessons, what, out, settings, **given)
    return Predictions(out).files[0]


def _trained(task: TaskFunction, run_dir: Path, strategy: Strategy, settings: Settings, plan: Plan) -> Run:
    """A run of the task that has finished, whether it was begun before or not.

    Raises `ValueError` where it was begun with other settings.
    """
    if not (run_dir / "code.pickle").exists():
        return Launch(Code(task=task, strategy=strategy, settings=settings, plan=plan)).go(run_dir)
    before = msgspec.json.decode((run_dir / "run.json").read_bytes())["plan"]
    now = msgspec.to_builtins(plan)
    differs = [f"{name} was {before[name]}, and is {now[name]}" for name in SETTLED if before[name] != now[name]]
    if differs:
        raise ValueError(f"{run_dir} was begun otherwise ({'; '.join(differs)}): choose another run directory")
    run = Run(run_dir, task)
    return run if run.summary().status == "finished" else resume(run_dir, task=task)


def _measured(task: Task, network: nn.Module) -> dict[str, float]:
    network.eval()
    parameters = [*network.parameters(), *network.buffers()]
    batch = first_batch(task, task.train)
    rows = min(task.batch_size, task.examples)
    found = {
        "parameters": float(sum(parameter.numel() for parameter in network.parameters())),
        "bytes": float(sum(tensor.numel() * tensor.element_size() for tensor in parameters)),
        "examples_per_second": rows / _seconds(partial(task.loss, network, batch)),
    }
    return found | (evaluate(task, network, torch.device("cpu")) if task.validate is not None else {})


@torch.no_grad()
def _seconds(call: Callable[[], Any]) -> float:
    """Of the fastest of many calls, on one thread: two that wait for each other tell more of who else is here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found, until = math.inf, time.perf_counter() + MEASURED_S
        while time.perf_counter() < until or found == math.inf:
            began = time.perf_counter()
            call()
            found = min(found, time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    return found
