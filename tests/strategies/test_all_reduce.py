"""All-reduce: what it refuses, and optimizers that look at whole tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import squall
from squall.run import Run
from squall.runtime.run_plan import Aims
from squall.script import script_plan
from tests import deep
from tests.tasks import INLINE, LOCAL, by_hand, difference, regression

Fit = Callable[..., Run]


class Lars(Optimizer):
    """SGD at a rate by the ratio of two norms of each whole tensor; it counts its steps in its param groups."""

    def __init__(self, params: Any, lr: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                gradient: Tensor = parameter.grad
                rate = group["lr"] * parameter.norm() / (gradient.norm() + 1e-3) / group["k"] ** 0.5
                moved = self.state[parameter].setdefault("moved", torch.zeros_like(parameter))
                parameter.sub_(moved.mul_(group["momentum"]).add_(gradient * rate))


class OneNorm(Optimizer):
    """SGD at a rate by the norm of all gradients."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            parameter.sub_(parameter.grad * self.param_groups[0]["lr"] / norm)


class Matrices(nn.Module):
    """No vectors: Muon takes none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 9, bias=False), nn.Tanh(), nn.Linear(9, 1, bias=False))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


WHOLE: dict[str, Any] = {
    "Muon": partial(torch.optim.Muon, lr=0.02),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.02),
    "LARS": Lars,
}


@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_of_whole_tensors_trains_as_in_one_process(inline: Fit, name: str) -> None:
    union = inline(
        regression(Matrices, examples=110, batch_size=8), squall.AllReduce(replicas=3, optimizer=WHOLE[name]), epochs=6
    )
    assert (
        difference(union.model, by_hand(regression(Matrices, examples=110, batch_size=24), WHOLE[name], epochs=6))
        < 2e-5
    )


@pytest.mark.parametrize("name", [*WHOLE, "AdamW"])
def test_a_resumed_run_ends_where_one_without_a_break_does(inline: Fit, name: str) -> None:
    task = regression(Matrices, schedule=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95))
    optimizer = WHOLE.get(name, partial(torch.optim.AdamW, lr=0.01))
    strategy = squall.AllReduce(replicas=2, optimizer=optimizer)
    broken = inline(task, strategy, epochs=3)
    resumed = squall.resume(broken.directory, epochs=6)
    assert difference(resumed.model, inline(task, strategy, epochs=6).model) == 0.0


@pytest.mark.parametrize(("before", "after"), [("synchronous", "all_reduce"), ("all_reduce", "synchronous")])
def test_momentum_goes_from_shards_to_all_reduce_and_back(inline: Fit, before: str, after: str) -> None:
    optimizer = partial(torch.optim.AdamW, lr=0.01)
    strategies: dict[str, Any] = {
        "synchronous": squall.Synchronous(replicas=3, shards=2, optimizer=optimizer),
        "all_reduce": squall.AllReduce(replicas=3, optimizer=optimizer),
    }
    task = regression()
    broken = inline(task, strategies[before], epochs=3)
    resumed = squall.resume(broken.directory, epochs=6, strategy=strategies[after])
    assert difference(resumed.model, inline(task, strategies[after], epochs=6).model) < 1e-6


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(6, 9, bias=False), nn.Tanh(), nn.Linear(9, 9, bias=False), nn.Tanh()]
        self.layers = nn.Sequential(*layers, nn.Linear(9, 9, bias=False), nn.Tanh(), nn.Linear(9, 1, bias=False))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


# Of the members, and whether each has a share: before and after.
CHANGES = [((3, True), (4, True)), ((4, True), (2, False)), ((2, False), (3, True))]


@pytest.mark.parametrize(
    ("before", "after", "name"),
    deep.sweep([(*change, name) for change in CHANGES for name in (*WHOLE, "AdamW")], 4),
)
def test_shares_of_the_optimizers_state_go_on_in_other_shares_or_whole(
    inline: Fit, name: str, before: tuple[int, bool], after: tuple[int, bool]
) -> None:
    task = regression(Deep, schedule=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95))
    optimizer = WHOLE.get(name, partial(torch.optim.AdamW, lr=0.01))

    def strategy(replicas: int, shares: bool) -> squall.AllReduce:
        return squall.AllReduce(replicas=replicas, optimizer=optimizer, shard_optimizer=shares)

    runs = [inline(task, strategy(before[0], shares), epochs=3) for shares in (False, before[1])]
    resumed = [squall.resume(run.directory, epochs=6, strategy=strategy(*after)) for run in runs]
    assert difference(resumed[0].model, resumed[1].model) == 0.0


def test_shares_of_the_optimizers_state_go_on_on_shards(inline: Fit) -> None:
    optimizer = partial(torch.optim.AdamW, lr=0.01)
    task, three = regression(), squall.Synchronous(replicas=3, shards=2, optimizer=optimizer)
    reduced = squall.AllReduce(replicas=3, optimizer=optimizer, shard_optimizer=True)
    for first, then in ((reduced, three), (three, reduced)):
        resumed = squall.resume(inline(task, first, epochs=3).directory, epochs=6, strategy=then)
        assert difference(resumed.model, inline(task, three, epochs=6).model) < 1e-6


def test_a_slow_replica_is_one(inline: Fit) -> None:
    """The inline world's time is real time; virtual where a speed is asked for."""
    run = inline(regression(), squall.AllReduce(replicas=2), settings=dataclasses.replace(INLINE, slow=0.1))
    assert run.summary().status == "finished"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a share for one": (
        {"strategy": squall.AllReduce(replicas=1, shard_optimizer=True)},
        "shard_optimizer with one replica: there is nobody to share with, leave it out",
    ),
    "fewer tensors than replicas": (
        {"strategy": squall.AllReduce(replicas=5, shard_optimizer=True)},
        "shard_optimizer gives each of 5 replicas a tensor at least, and the model trains 4: use fewer replicas",
    ),
    "an optimizer of all parameters": (
        {"strategy": squall.AllReduce(optimizer=OneNorm, shard_optimizer=True)},
        "OneNorm looks at all parameters together, .*: leave shard_optimizer out",
    ),
    "no replicas": ({"strategy": squall.AllReduce(replicas=0)}, "replicas is 0: it must be at least 1"),
    "GPUs of several machines": (
        {"settings": dataclasses.replace(LOCAL, machines=2, listen="127.0.0.1:0"), "device": "cuda"},
        "machines is 2, and AllReduce computes on CPUs there for now: use device='cpu', or Synchronous",
    ),
    "GPUs on Ray": (
        {"settings": dataclasses.replace(LOCAL, launcher="ray"), "device": "cuda"},
        "the launcher is ray, and AllReduce computes on CPUs there for now: use device='cpu', or Synchronous",
    ),
    "shard threads": (
        {"settings": dataclasses.replace(LOCAL, shard_threads=2)},
        "shard_threads is 2: AllReduce has no shards, leave it out",
    ),
    "the last snapshots": (
        {"settings": dataclasses.replace(LOCAL, keep_schedule="last:3")},
        "keep_schedule is 'last:3' with AllReduce, .*: its replay begins where the run did: give gigabytes",
    ),
    "closure": (
        {"strategy": squall.AllReduce(optimizer=torch.optim.LBFGS)},
        "LBFGS cannot step on a gradient alone: use SGD or AdamW",
    ),
    "vectors for Muon": (
        {"strategy": squall.AllReduce(optimizer=torch.optim.Muon)},
        "the optimizer does not take the task's parameters: Muon only supports 2D parameters",
    ),
    "Muon on shards": (
        {"strategy": squall.Synchronous(optimizer=torch.optim.Muon)},
        "Muon is not elementwise: .* or AllReduce, which has no shards",
    ),
    "Adafactor on shards": (
        {"strategy": squall.Synchronous(optimizer=torch.optim.Adafactor)},
        "Adafactor is not elementwise: .* or AllReduce, which has no shards",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_all_reduce_cannot_do_is_refused_with_the_remedy(name: str, run_dir: Path) -> None:
    options, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        squall.fit(regression(), **{"strategy": squall.AllReduce(), "run_dir": run_dir, "settings": LOCAL} | options)
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("strategy", "settings", "device", "words"),
    [
        (squall.AllReduce(), dataclasses.replace(LOCAL, parts=2), "cpu", "parts is 2, which AllReduce is not for in"),
        (squall.AllReduce(shard_optimizer=True), LOCAL, "cpu", "shard_optimizer is set, which .* leave it out"),
        (squall.AllReduce(), LOCAL, "cuda", "device is 'cuda', .* or use Synchronous, which makes the same updates"),
    ],
)
def test_what_a_group_of_scripts_cannot_do_is_refused_with_the_remedy(
    strategy: squall.AllReduce, settings: squall.Settings, device: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        script_plan(strategy, settings, Aims(), device=device)


def test_a_replay_says_why_there_is_none(inline: Fit) -> None:
    run = inline(regression(), squall.AllReduce())
    with pytest.raises(ValueError, match=r"holds no schedule: .* with AllReduce .*in one process"):
        squall.replay(run.directory)
