"""All-reduce of replicas of several parts, in whole runs: what they train, and what becomes of one whose part dies."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import squall
from squall.record.rows import ExtraRow, MemberRow, ProgressRow
from squall.report import Reader
from squall.run import Run
from squall.runtime.seeds import epoch_order
from squall.task import TaskFunction
from tests import deep
from tests.launchers.blobs import EXAMPLES
from tests.launchers.processes import START_S, Started, training_all, wait_for
from tests.launchers.test_all_reduce import check_end, examples
from tests.parts.test_branches import Columns, entropy, images
from tests.parts.test_pipeline import Tied, tokens
from tests.parts.test_pipeline import entropy as words
from tests.strategies.test_all_reduce import Lars, Matrices, OneNorm
from tests.tasks import INLINE, LOCAL, difference, mean_square, numbers, regression
from tests.test_equality import two_rates, warm_up_then_cosine

Fit = Callable[..., Run]
TWO = dataclasses.replace(LOCAL, parts=2)
PIPED = Path(__file__).with_name("piped.py")


MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
PIPELINE, SLICES = squall.Pipeline(microbatches=4), squall.Tensor({"0": "column", "2": "row"})
several = partial(regression, examples=110, batch_size=8)  # 14 batches: of 3 replicas one has none in each fifth round


def deeper() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def noisy() -> nn.Module:
    first = nn.Linear(6, 8, bias=False)  # a bias before BatchNorm has a gradient of rounding alone
    return nn.Sequential(
        first, nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)
    )


ALIKE: dict[str, TaskFunction] = {
    "pipeline": several(deeper, split=PIPELINE, groups=two_rates),
    "branches": regression(Columns, train=images(), loss=entropy, split=squall.Branches("column0", "column1")),
    "tied weights": regression(
        Tied,
        train=tokens(),
        loss=words,
        split=squall.Pipeline(stages=lambda m: [m.front, m.block, m.head], microbatches=4),
    ),
    "clipped": several(wide, split=SLICES, schedule=warm_up_then_cosine, clip_norm=0.2),
    "slices": several(wide, split=SLICES, schedule=warm_up_then_cosine),
}


@pytest.mark.parametrize("name", deep.sweep([*ALIKE], 1))
def test_replicas_of_parts_make_the_updates_of_lock_step_training(run_dir: Path, inline: Fit, name: str) -> None:
    chosen: dict[str, Any] = {"replicas": 3, "optimizer": MOMENTUM}  # on shards each one's gradient would be clipped
    epochs = 10 if ALIKE[name]().examples == 110 else 25
    grid = squall.fit(ALIKE[name], squall.AllReduce(**chosen), run_dir=run_dir, settings=TWO, epochs=epochs)
    assert grid.summary().updates == 50
    with closing(Reader(run_dir / "run.sqlite")) as reader:
        told = sum(row.examples for row in reader.rows(ExtraRow) if row.name == "right")
    assert told == (grid.summary().examples if name in ("branches", "tied weights") else 0)
    clipped = ALIKE[name]().clip_norm is not None
    for whole in (squall.AllReduce(**chosen), *([] if clipped else [squall.Synchronous(shards=2, **chosen)])):
        assert difference(grid.model, inline(ALIKE[name], whole, epochs=epochs).model) < 1e-6


NOISY: dict[str, TaskFunction] = {
    "pipeline": regression(noisy, examples=192, split=squall.Pipeline(microbatches=2)),
    "slices": regression(noisy, examples=192, split=squall.Tensor({"3": "column", "6": "row"})),
}


@pytest.mark.usefixtures("without_report")
@pytest.mark.parametrize("name", deep.sweep([*NOISY], 1))
@deep.only
def test_batch_norm_and_dropout_are_those_of_parts_on_shards(run_dir: Path, tmp_path: Path, name: str) -> None:
    chosen: dict[str, Any] = {"replicas": 2, "optimizer": MOMENTUM}
    grid, shards = (
        squall.fit(NOISY[name], strategy, run_dir=directory, settings=TWO, epochs=9)
        for strategy, directory in (
            (squall.AllReduce(**chosen), run_dir),
            (squall.Synchronous(**chosen), tmp_path / "shards"),
        )
    )
    assert difference(grid.model, shards.model) < 1e-6


@deep.only
def test_an_optimizer_of_whole_tensors_steps_on_stages(run_dir: Path, inline: Fit) -> None:
    task, strategy = (
        several(Matrices, split=squall.Pipeline(stages=lambda m: [*m.layers], microbatches=4)),
        squall.AllReduce(replicas=2, optimizer=Lars),
    )
    grid = squall.fit(task, strategy, run_dir=run_dir, settings=TWO, epochs=6)
    assert difference(grid.model, inline(task, strategy, epochs=6).model) < 1e-6


@pytest.mark.parametrize("name", deep.sweep(["pipeline", "branches", "slices"], 1))
@deep.only
def test_a_run_is_resumed_with_another_number_of_parts(run_dir: Path, inline: Fit, name: str) -> None:
    """From processes to one, and back: AdamW's state has to come along, each time from and to other pieces."""
    task, strategy = ALIKE[name], squall.AllReduce(replicas=2, optimizer=ADAMW)
    squall.fit(task, strategy, epochs=2, run_dir=run_dir, settings=TWO)
    squall.resume(run_dir, epochs=4, settings=INLINE)
    grid = squall.resume(run_dir, epochs=6, settings=TWO)
    assert difference(grid.model, inline(task, strategy, epochs=6).model) < 1e-5


def place() -> str:
    """Of this process in the run, such as "1" and "1 part 1"; empty in one that is no replica."""
    title = Path("/proc/self/cmdline").read_text()
    return title.removeprefix("squall replica ").partition(" of ")[0] if title.startswith("squall replica ") else ""


@pytest.mark.usefixtures("without_report")
@pytest.mark.parametrize("victim", deep.sweep(["1", "0 part 1", "1 part 1"], 1))
@deep.only
def test_a_newcomers_parts_take_the_same_steps_as_those_of_the_others(
    run_dir: Path, tmp_path: Path, victim: str
) -> None:
    """Each has the weights and the optimizer's state of its own slices, else its next weights were others.

    A member steps with the others also where it has no batch of a round itself.
    """
    killed = tmp_path / "killed"

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if place() == victim and not killed.exists() and (batch[2] == 40).any():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return mean_square(model, batch)

    class Noting(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            tried = len(self.param_groups[0]["params"]) == 1  # on a copy, to see what a state looks like
            if place() and killed.exists() and not tried:
                number, _, part = place().partition(" ")
                with (tmp_path / f"{number} {part}").open("a") as file:
                    file.write(f"{[p.tolist() for group in self.param_groups for p in group['params']]}\n")

    data = TensorDataset(*numbers(96).tensors, torch.arange(96))
    task = regression(wide, train=data, batch_size=8, loss=loss, split=SLICES)
    strategy = squall.AllReduce(replicas=2, optimizer=partial(Noting, lr=0.01, weight_decay=0.1))
    run = squall.fit(task, strategy, run_dir=run_dir, settings=TWO, epochs=10)
    assert run.summary().examples == 10 * 96
    for part in ("", "part 1"):
        old, new = (
            set((tmp_path / f"{n} {part}").read_text().splitlines()) for n in ("01" if victim[0] == "1" else "10")
        )
        assert len(new) > 1
        assert new <= old


@pytest.mark.usefixtures("without_report")
@pytest.mark.parametrize("times", [1, 1000])
@deep.only
def test_a_nan_is_left_out_by_all_parts_or_ends_the_run_with_its_batch(
    run_dir: Path, tmp_path: Path, times: int
) -> None:
    counts = tmp_path / "counts"

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = mean_square(model, batch)
        if place() and (batch[2] == 40).any():
            with counts.open("a") as file:
                file.write(".")
            if counts.stat().st_size <= times:
                return value * float("nan")
        return value

    data = TensorDataset(*numbers(96).tensors, torch.arange(96))
    poisoned, clean = (
        regression(deeper, train=data, batch_size=8, loss=each, split=PIPELINE) for each in (loss, mean_square)
    )
    fit = partial(squall.fit, strategy=squall.AllReduce(replicas=2, optimizer=MOMENTUM), settings=TWO, epochs=3)
    if times == 1:
        run = fit(poisoned, run_dir=run_dir)
        assert run.summary().examples == 3 * 96
        assert difference(run.model, fit(clean, run_dir=tmp_path / "clean").model) == 0.0
        return
    with pytest.raises(squall.NotFinite, match=r"examples \d+ to \d+ of epoch 0 \(lease \d+\)") as caught:
        fit(poisoned, run_dir=run_dir)
    named = re.search(r"examples (\d+) to (\d+)", str(caught.value))
    assert named is not None
    assert int(named[1]) <= epoch_order(0, 0, 96, shuffle=True).tolist().index(40) < int(named[2]) + 1


@pytest.mark.parametrize(
    ("split", "optimizer", "message"),
    [
        (SLICES, Lars, "Lars is not elementwise, and each part has slices of tensors"),
        (PIPELINE, OneNorm, "OneNorm looks at all parameters together"),
    ],
)
def test_optimizers_that_parts_cannot_have_are_refused(run_dir: Path, split: Any, optimizer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        squall.fit(regression(wide, split=split), squall.AllReduce(optimizer=optimizer), run_dir=run_dir, settings=TWO)
    assert not run_dir.exists()


# ---------------------------------------------------------------- deaths


PIPED = Path(__file__).with_name("piped.py")


@contextmanager
def training(directory: Path, replicas: int, epochs: int, *flags: str) -> Iterator[Started]:
    """So many replicas of two parts, which have all trained."""
    at = directory / f"run-{uuid4().hex[:8]}"
    size = ("--replicas", str(replicas), "--parts", "2", "--epochs", str(epochs))
    run = Started(at, "train", str(PIPED), "--run-dir", str(at), "--strategy", "all_reduce", *size, *flags)
    with training_all(run, replicas):
        yield run


@pytest.mark.parametrize("victim", deep.sweep(["replica 1 part 1", "replica 0", "replica 0 part 1"], 1))
@deep.only
def test_a_part_that_dies_is_its_replicas_death_and_no_example_is_lost(tmp_path: Path, victim: str) -> None:
    with training(tmp_path, 2, 2) as run:
        run.kill(victim)
        check_end(run, 2)
        assert len(joined(run)) == 3


@deep.only
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", deep.seeds(1, 6))
def test_kills_of_parts_at_any_moment_lose_no_example(tmp_path: Path, seed: int) -> None:
    chance, replicas = random.Random(seed), 2 + seed % 2
    with training(tmp_path, replicas, 3) as run:
        for kills in range(4):

            def over() -> bool:  # the others may come to the end before a newcomer has started
                return run.process.poll() is not None

            wait_for(lambda kills=kills: over() or complete(run, replicas, kills), START_S, "the replacement to train")
            moment = examples(run) + chance.randrange(1000)
            wait_for(lambda moment=moment: over() or examples(run) >= moment, START_S, f"{moment} examples")
            if victims := sorted(role for role in run.processes() if role.startswith("replica")):
                run.kill(chance.choice(victims))
        check_end(run, 3)


def joined(run: Started) -> list[MemberRow]:
    return [row for row in run.rows(MemberRow) if row.change == "joined" and row.node.startswith("replica")]


def complete(run: Started, replicas: int, kills: int) -> bool:
    """Whether all have trained since the last of them came: before that a newcomer may have no weights yet."""
    if len(joins := joined(run)) < replicas + kills:
        return False
    newest = max(row.time_s for row in joins)
    return len({row.replica for row in run.rows(ProgressRow) if row.time_s > newest}) == replicas


@deep.only
def test_an_interrupted_run_is_resumed_with_one_part_and_more_replicas(tmp_path: Path) -> None:
    with training(tmp_path, 2, 1000) as run:
        run.process.send_signal(signal.SIGINT)
        assert wait_for(run.gone, 10.0, "the children to be gone") < 3.0
        status, _, err = run.finish()
        assert status == 130, err
        assert "Traceback" not in err
    epochs = examples(run) // EXAMPLES + 1
    command = ("resume", str(run.directory), "--epochs", str(epochs), "--parts", "1", "--replicas", "3")
    check_end(Started(run.directory, *command), epochs)
