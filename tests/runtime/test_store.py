"""The shards' numbers: every elementwise optimizer of torch, split anywhere, stopped and gone on with anywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import squall
from squall.protocol.effects import Term
from squall.protocol.messages import Factors
from squall.protocol.nodes import Node
from squall.runtime.arena import Arena, Shape
from squall.runtime.job import initial_vector
from squall.runtime.optimizers import build_optimizer
from squall.runtime.snapshot import Manifest, Restored, Snapshots
from squall.runtime.store import Store
from squall.strategies import Recipe
from squall.strategies.work import Loop, Update
from squall.task import TaskFunction
from squall.vector import Layout
from tests.tasks import regression

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "Adamax": partial(torch.optim.Adamax, lr=0.1),
    "NAdam": partial(torch.optim.NAdam, lr=0.1),
    "RAdam": partial(torch.optim.RAdam, lr=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.1, momentum=0.5, centered=True),
    "Rprop": partial(torch.optim.Rprop, lr=0.1),
    "ASGD": partial(torch.optim.ASGD, lr=0.1),
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 1))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model[0].parameters())}, {"params": list(model[1:].parameters()), "lr": 0.05}]


def schedule(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=[0.2, 0.1], total_steps=40, cycle_momentum=False)


class Shards:
    """The stores of one vector, stepped together on a made-up gradient."""

    def __init__(self, task: TaskFunction, optimizer: Any, count: int, restored: Restored | None = None) -> None:
        torch.manual_seed(0)
        built = task()
        self.layout = Layout.of(built.model, [group["params"] for group in built.param_groups()])
        self.arena = Arena.private(Shape(self.layout.length, 1, groups=len(self.layout.group_starts)))
        initial = initial_vector(self.layout, built)
        recipe = Recipe(replicas=1, shards=count, work=Loop(update=Update(optimizer=optimizer)))
        self.stores = [Store(built, recipe, self.layout, i, self.arena, initial) for i in range(count)]
        self.number = 0
        if restored is not None:
            self.number = restored.updates
            for store in self.stores:
                store.restore(restored.tensors, restored.updates)

    def step(self, times: int, factors: Factors = ()) -> Tensor:
        """The weights after so many more updates."""
        for _ in range(times):
            generator = torch.Generator().manual_seed(self.number)
            self.arena.gradient(0, 0).copy_(torch.randn(self.layout.length, generator=generator))
            self.number += 1
            for store in self.stores:
                store.apply((Term(Node("replica"), 0, 1.0, 1),), 1.0, factors=factors)
                store.deliver(0, 0)
        return self.arena.weights(0, 0).clone()

    def snapshot(self, directory: Path) -> Restored:
        snapshots, checksums = Snapshots(directory), []
        for number, store in enumerate(self.stores):
            written = snapshots.write_shard(1, number, len(self.stores), store)
            assert written.error == ""
            checksums.append(written.checksum)
        versions = tuple(self.number for _ in self.stores)
        snapshots.publish(Manifest(1, self.layout, versions, {}, {}, 0.0, 0.0, "Adam", tuple(checksums)))
        return snapshots.restore(1, self.layout)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_number_of_shards_makes_the_same_updates(name: str) -> None:
    task = regression(model, groups=groups)
    whole = Shards(task, OPTIMIZERS[name], 1).step(6)
    for count in (2, 3, 7):
        torch.testing.assert_close(Shards(task, OPTIMIZERS[name], count).step(6), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_snapshot_of_two_shards_goes_on_in_three_exactly(tmp_path: Path, name: str, scheduled: bool) -> None:
    task = regression(model, groups=groups, schedule=schedule if scheduled else None)
    straight, others = Shards(task, OPTIMIZERS[name], 2), Shards(task, OPTIMIZERS[name], 3)
    straight.step(5)
    others.step(5)
    again = Shards(task, OPTIMIZERS[name], 3, straight.snapshot(tmp_path))
    assert torch.equal(torch.cat([s.weights for s in again.stores]), torch.cat([s.weights for s in straight.stores]))
    torch.testing.assert_close(again.step(3), straight.step(3), rtol=1e-6, atol=1e-7)
    assert torch.equal(again.arena.rates(0, 0), straight.arena.rates(0, 0))
    (tmp_path / "three").mkdir()
    same = Shards(task, OPTIMIZERS[name], 3, others.snapshot(tmp_path / "three"))
    assert torch.equal(same.step(3), others.step(3)), "kernels on the same ranges give the same bits"


def test_factors_are_of_one_step_and_a_group_without_one_takes_no_part() -> None:
    task, adam = regression(model, groups=groups), OPTIMIZERS["Adam"]
    shards = Shards(task, adam, 2)
    second, tail = shards.layout.group_starts[1], shards.layout.tail
    begin = torch.cat([store.weights for store in shards.stores])
    assert torch.equal(shards.step(1, (0.0, None))[:tail], begin[:tail]), "neither moves"
    stepped = {piece.group for s in shards.stores for piece, p in zip(s.pieces, s.parameters) if s.optimizer.state[p]}
    assert stepped == {0}, "and the second has no state yet"
    whole, half = Shards(task, adam, 2).step(1), Shards(task, adam, 2).step(1, (0.5, None))
    torch.testing.assert_close(half[:second] - begin[:second], (whole[:second] - begin[:second]) / 2)
    assert torch.equal(half[second:tail], begin[second:tail])
    assert torch.equal(Shards(task, adam, 2).step(3), Shards(task, adam, 2).step(3, (1.0, 1.0)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_runs_train_with_it(inline: Callable[..., Any], name: str) -> None:
    strategy = squall.Downpour(replicas=2, shards=3, optimizer=OPTIMIZERS[name])
    run = inline(regression(model, groups=groups, examples=32), strategy)
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_kernels_are_used_where_torch_has_them(name: str) -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = build_optimizer(OPTIMIZERS[name], [{"params": [parameter]}])
    parameter.grad = torch.ones(4)
    optimizer.step()
    assert bool(optimizer.param_groups[0].get("fused")) == (name in FUSED)


def test_a_choice_of_kernels_is_respected() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(4))]}]
    optimizer = build_optimizer(partial(torch.optim.SGD, lr=0.1, foreach=True), groups)
    assert optimizer.param_groups[0]["foreach"]
    assert not optimizer.param_groups[0]["fused"]


class LayerwiseRates(torch.optim.Optimizer):
    """LARS-like: the rate of a tensor depends on its norm."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(self.param_groups[0]["lr"] * p.norm() / p.grad.norm() * p.grad)


def not_elementwise() -> Iterator[Any]:
    yield partial(torch.optim.LBFGS, lr=0.1)
    yield partial(torch.optim.Adafactor, lr=0.1)
    yield partial(LayerwiseRates, lr=0.1)
    if hasattr(torch.optim, "Muon"):
        yield partial(torch.optim.Muon, lr=0.1)


@pytest.mark.parametrize("optimizer", list(not_elementwise()), ids=lambda factory: factory.func.__name__)
def test_optimizers_that_look_at_whole_tensors_are_refused(optimizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not elementwise: .* use for example SGD, Adagrad or AdamW"):
        fit_inline(optimizer, tmp_path / "run")
    assert not (tmp_path / "run").exists(), "before anything is launched"


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [(partial(torch.optim.SGD, lr=-1.0), "Invalid learning rate"), (partial(torch.optim.SGD, rate=1), "rate")],
)
def test_an_elementwise_optimizer_with_wrong_settings_is_not_called_something_else(
    optimizer: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        fit_inline(optimizer, tmp_path / "run")
    assert "elementwise" not in str(caught.value)


def fit_inline(optimizer: Any, directory: Path) -> None:
    strategy = squall.Downpour(optimizer=optimizer)
    squall.fit(regression(), strategy, run_dir=directory, settings=squall.Settings(launcher="inline", progress=False))


def test_shards_train_in_the_memory_of_the_initial_weights() -> None:
    shards = Shards(regression(), OPTIMIZERS["SGD"], 2)
    shards.step(1)
    first, second = (store.weights for store in shards.stores)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert torch.equal(torch.cat([first, second]), shards.arena.weights(0, 0))


def test_an_update_reads_the_pushed_gradient_where_it_lies() -> None:
    shards = Shards(regression(), partial(torch.optim.SGD, lr=0.1), 2)
    shards.step(1)
    whole = shards.arena.gradient(0, 0)
    for store in shards.stores:
        for piece, parameter in zip(store.pieces, store.parameters):
            assert parameter.grad is not None
            assert parameter.grad.data_ptr() == whole[piece.start :].data_ptr()


class Clamped(torch.optim.SGD):
    """A user's optimizer, its step decorated as torch's own is."""

    @functools.wraps(torch.optim.SGD.step)
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(min=0.0)


def test_a_users_own_step_is_called_whole() -> None:
    task = regression()()
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    arena = Arena.private(Shape(layout.length, 1))
    arena.gradient(0, 0).fill_(1.0)
    store = Store(
        task,
        Recipe(replicas=1, shards=1, work=Loop(update=Update(optimizer=partial(Clamped, lr=1e3)))),
        layout,
        0,
        arena,
        initial_vector(layout, task),
    )
    store.apply((Term(Node("replica"), 0, 1.0, 1),), 1.0)
    assert store.weights[: layout.tail].max() == 0.0
