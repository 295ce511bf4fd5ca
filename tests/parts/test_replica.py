"""What holds inside every replica of several processes: errors and deaths, chance, finiteness."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import squall
from squall.parts.neighbours import NeighbourLost
from squall.protocol.effects import Compute, End, Expect, UseWeights
from squall.runtime.driver import Host
from squall.runtime.job import Job
from tests import deep
from tests.parts.replica import answers, compute, replica, train
from tests.tasks import mean_square, numbers

SPLIT = squall.Pipeline(microbatches=4)


def task(*modules: nn.Module, **options: Any) -> squall.Task:
    options = {"loss": mean_square, "train": numbers(64), "batch_size": 16, "split": SPLIT} | options
    return squall.Task(model=nn.Sequential(*modules), **options)


class Event(nn.Module):
    """Does something as it is called so many times."""

    def __init__(self, what: Callable[[], None], call: int = 30) -> None:
        super().__init__()
        self.what, self.left = what, call

    def forward(self, inputs: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            self.what()
        return inputs


@pytest.mark.parametrize("dying", [0, 1, 2])
def test_a_part_that_dies_ends_the_others(dying: int, tmp_path: Path) -> None:
    def die() -> None:
        (tmp_path / "died").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    modules = [nn.Sequential(nn.Linear(6, 6), Event(die)) if part == dying else nn.Linear(6, 6) for part in range(3)]
    found = answers(task(*modules, nn.Linear(6, 1)), 3, train(), (0, 1, 2))
    died = float((tmp_path / "died").read_text())
    assert sorted(found) == [part for part in range(3) if part != dying]
    for error in found.values():
        assert isinstance(error, NeighbourLost)
        assert error.at - died < 1.0  # type: ignore[attr-defined]


class Sides(nn.Module):
    """Sliced layers, or branches; one of three processes dies in its pass."""

    def __init__(self, what: Callable[[], None]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)
        self.sides = nn.ModuleDict({name: nn.Linear(6, 6) for name in "abc"})
        self.event, self.head = Event(what, 10), nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.event(self.down(self.up(inputs).tanh()))
        a, b, c = self.sides["a"](hidden), self.sides["b"](hidden), self.sides["c"](hidden)
        return self.head(a + b + c)


@pytest.mark.parametrize("dying", [0, 1])
@pytest.mark.parametrize(
    "split", [squall.Tensor({"up": "column", "down": "row"}), squall.Branches("sides.a", "sides.b", "sides.c")]
)
def test_so_it_is_with_slices_and_branches(split: Any, dying: int, tmp_path: Path) -> None:
    def die() -> None:
        if torch.distributed.get_rank() == dying:
            (tmp_path / "died").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    given = squall.Task(model=Sides(die), loss=mean_square, train=numbers(64), batch_size=16, split=split)
    found = answers(given, 3, train())
    died = float((tmp_path / "died").read_text())
    assert sorted(found) == [part for part in range(3) if part != dying]
    for error in found.values():
        assert isinstance(error, NeighbourLost)
        assert error.at - died < 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("failing", [0, 2])
def test_a_users_mistake_in_a_stage_is_told_as_it_is(failing: int) -> None:
    def fail() -> None:
        raise LookupError("no such word")

    modules = [nn.Sequential(nn.Linear(6, 6), Event(fail)) if part == failing else nn.Linear(6, 6) for part in range(3)]
    found = answers(task(*modules, nn.Linear(6, 1)), 3, train(), (0, 1, 2))
    assert {part: type(error) for part, error in found.items()} == {
        part: LookupError if part == failing else NeighbourLost for part in range(3)
    }
    assert "examples" in "".join(found[failing].__notes__)


def test_a_loss_that_uses_parameters_of_another_part_is_refused() -> None:
    def decayed(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return mean_square(model, batch) + sum(parameter.square().sum() for parameter in model.parameters())

    with pytest.raises(ValueError, match=r"Task.loss uses 0.weight, 0.bias beside calling the model"):
        replica(task(nn.Linear(6, 5), nn.Linear(5, 1), loss=decayed), 2, train(1), (0, 1))


def steps(*numbers_: int) -> Callable[[Host, Job], Any]:
    """Gradients of batches, without a step: the events, and what was in the buffer."""

    def script(host: Host, job: Job) -> Any:
        found = []
        host.perform(UseWeights(0), 0.0)
        for number in numbers_:
            event = host.perform(compute(job.task, number), 0.0)
            found.append((event.loss, event.finite, event.extras, job.arena.gradient(0, 0).clone()))  # type: ignore[union-attr]
        host.perform(End("finished"), 0.0)
        return found

    return script


def masks(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """What was dropped from each microbatch, which is named after its first example, as a number."""
    output = model(batch[0])
    return output.sum(), {f"{int(batch[1][0])}": ((output != 0) * 2.0 ** torch.arange(output.numel())
                                                   .view_as(output)).sum()}  # fmt: skip


def test_dropout_differs_by_stage_microbatch_and_batch_and_repeats() -> None:
    front, back = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    for layer in (front, back):
        nn.init.eye_(layer.weight)
    data = TensorDataset(torch.ones(32, 4), torch.arange(32))
    both = task(front, nn.Dropout(0.5), back, nn.Dropout(0.5), loss=masks, train=data, shuffle=False)
    one = task(front, nn.Dropout(0.5), back, loss=masks, train=data, shuffle=False)
    other = task(front, back, nn.Dropout(0.5), loss=masks, train=data, shuffle=False)
    found = {name: replica(t, 2, steps(0, 1, 0), (0, 2 if t is not other else 1))
             for name, t in (("both", both), ("one", one), ("other", other))}  # fmt: skip
    for first, second, again in found.values():
        assert len({*first[2].values(), *second[2].values()}) == 8
        assert first[2] == again[2]
        assert torch.equal(first[3], again[3])
    assert found["one"][0][2] != found["other"][0][2]


def test_what_the_loss_draws_is_the_same_before_the_model_and_behind_it() -> None:
    def denoising(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        noise = torch.randn_like(batch[0])
        return ((model(noise) - noise) ** 2).mean()

    layers = [nn.Linear(6, 6, bias=False) for _ in range(2)]
    for layer in layers:
        nn.init.eye_(layer.weight)
    ((loss, finite, _, gradient),) = replica(
        task(layers[0], nn.Dropout(0.0), layers[1], loss=denoising), 2, steps(0), (0, 2)
    )
    assert (loss, finite) == (0.0, True)
    assert not gradient.any()


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_all_parts_know_of_a_gradient_that_is_not_finite(part: int, clip_norm: float | None) -> None:
    """Nothing is added to the buffer by any of them; the next batch is as good as ever."""

    def script(host: Host, job: Job) -> Any:
        host.perform(UseWeights(0), 0.0)
        good = host.perform(Compute(0, 0, 16, 0, False, False), 0.0)
        before, weight = (
            job.arena.gradient(0, 0).clone(),
            job.arena.weights(0, 0)[job.layout.parameters[2 * part].start :],
        )
        kept = weight[0].item()
        weight[0] = float("nan")
        bad = host.perform(Compute(0, 16, 32, 0, True, True), 0.0)
        unchanged = torch.equal(before, job.arena.gradient(0, 0))
        weight[0] = kept
        again = host.perform(Compute(0, 0, 16, 0, False, False), 0.0)
        host.perform(End("finished"), 0.0)
        same = torch.equal(before, job.arena.gradient(0, 0))
        return good.finite, bad.finite, unchanged, again.finite, same  # type: ignore[union-attr]

    given = task(nn.Linear(6, 5), nn.Linear(5, 1), clip_norm=clip_norm)
    assert replica(given, 2, script, (0, 1)) == (True, False, True, True, True)


def test_local_steps_move_the_weights_of_all_parts() -> None:
    def script(host: Host, job: Job) -> Any:
        job.arena.rates(0, 0).fill_(0.5)
        host.perform(UseWeights(0), 0.0)
        before = job.arena.weights(0, 0).clone()
        host.perform(Compute(0, 0, 16, 0, False, True), 0.0)
        host.perform(End("finished"), 0.0)
        return before - 0.5 * job.arena.gradient(0, 0) - job.arena.weights(0, 0)

    assert replica(task(nn.Linear(6, 5), nn.Linear(5, 1)), 2, script, (0, 1)).abs().max() < 1e-6


def test_autocast_computes_in_the_smaller_type_on_all_stages() -> None:
    def dtype(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        output = model(batch[0])
        return output.float().square().mean(), {"bits": float(torch.finfo(output.dtype).bits)}

    given = task(nn.Linear(6, 5), nn.Linear(5, 1), loss=dtype, autocast=torch.bfloat16)
    ((loss, finite, extras, _),) = replica(given, 2, steps(0), (0, 1))
    assert (finite, extras) == (True, {"bits": 16.0})
    assert loss > 0


@pytest.mark.parametrize(
    "split", deep.sweep([SPLIT, squall.Tensor({"0": "column", "2": "row"}), squall.Branches("0", "2")], 1)
)
def test_a_training_has_the_same_bits_again(split: Any) -> None:
    """Replay counts on it. (The second branch takes what the first returns, so nothing is gained by these two.)"""
    trained = []
    for _ in range(2):
        torch.manual_seed(3)
        given = task(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1), split=split)
        trained.append(replica(given, 2, train(20), (0, 2)))
    assert torch.equal(trained[0].vector, trained[1].vector)
    assert trained[0].losses == trained[1].losses
    assert trained[0].losses[-1] < trained[0].losses[0]


def test_a_long_lease_is_announced_to_all_parts() -> None:
    def script(host: Host, job: Job) -> Any:
        for number in range(50):
            host.perform(Expect(0, number, number + 1), 0.0)
        host.perform(UseWeights(0), 0.0)
        event = host.perform(compute(job.task, 0), 0.0)
        host.perform(End("finished"), 0.0)
        return event.finite  # type: ignore[union-attr]

    assert replica(task(nn.Linear(6, 5), nn.Linear(5, 1)), 2, script, (0, 1)) is True
