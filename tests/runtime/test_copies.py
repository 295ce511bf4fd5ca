"""A copy of a shard's numbers: what it holds, when it counts, and how often it is made."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from squall.protocol.effects import Term
from squall.protocol.events import CopyMade
from squall.protocol.nodes import Node
from squall.runtime.arena import Arena, Shape
from squall.runtime.copies import SELDOM_S, SHARE, Copying
from squall.runtime.hosts import ShardHost
from squall.runtime.job import initial_vector
from squall.runtime.legacy import Copy, Legacy
from squall.runtime.machines import with_legacies
from squall.runtime.store import Store
from squall.strategies import AsynchronousSGD, Downpour, Strategy
from squall.vector import Layout
from tests.parts.replica import job_of
from tests.tasks import regression

ADAM = Downpour(replicas=1, optimizer=partial(torch.optim.Adam, lr=0.1))
COMPENSATED = AsynchronousSGD(replicas=1, staleness="compensate", max_delay=2)


class Shard:
    """One of a small model, with what it leaves."""

    def __init__(self, strategy: Strategy) -> None:
        torch.manual_seed(0)
        self.task, self.recipe = regression()(), strategy.recipe()
        self.layout = Layout.of(self.task.model, [group["params"] for group in self.task.param_groups()])
        self.arena = Arena.private(Shape(self.layout.length, 1, groups=len(self.layout.group_starts)))
        self.initial = initial_vector(self.layout, self.task)
        self.legacy = Legacy(self.layout.length)
        self.arena.gradient(0, 0).normal_()
        self.store = self.process()

    def process(self) -> Store:
        return Store(self.task, self.recipe, self.layout, 0, self.arena, self.initial, self.legacy.numbers)


def update(store: Store) -> None:
    store.apply([Term(Node("replica", 0), 0, 1.0, 1)], 1.0)


def as_it_is(store: Store) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in store.state().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("before", [0, 3], ids=["a copy of the beginning", "a copy of later"])
@pytest.mark.parametrize("strategy", [ADAM, COMPENSATED], ids=["adam", "compensated"])
def test_who_goes_back_goes_on_as_from_the_copy(strategy: Strategy, before: int) -> None:
    shard = Shard(strategy)
    store, legacy = shard.store, shard.legacy
    store.leave()
    for _ in range(before):
        update(store)
    legacy.copy.make(store.weights)
    kept = as_it_is(store)
    update(store)
    then = as_it_is(store)
    legacy.numbers.begin()  # somebody dies over this update
    store.weights.fill_(7.0)
    other = shard.process()
    assert legacy.numbers.torn
    other.go_back(legacy.copy, legacy.numbers.updates)
    assert not legacy.numbers.torn
    assert legacy.numbers.updates == before + 1, "updates go on counting"
    assert same(as_it_is(other), kept)
    update(other)
    assert same(as_it_is(other), then)


def test_the_copy_of_the_beginning_has_what_a_resume_has_brought() -> None:
    before, shard = Shard(ADAM), Shard(ADAM)
    update(before.store)
    shard.store.take_up(as_it_is(before.store), 1)
    shard.store.leave()
    shard.legacy.copy.make(shard.store.weights)
    shard.legacy.numbers.begin()
    shard.store.weights.fill_(7.0)
    other = shard.process()
    other.go_back(shard.legacy.copy, 1)
    assert same(as_it_is(other), as_it_is(before.store))


def test_who_succeeds_one_that_died_over_a_copy_makes_another(tmp_path: Path) -> None:
    job = with_legacies(replace(job_of(regression()()), directory=tmp_path))
    legacy = job.legacies[0]
    assert ShardHost(job, 0).poll() == CopyMade(0)
    assert ShardHost(job, 0).poll() is None
    with pytest.raises(RuntimeError):
        legacy.copy.make(torch.zeros(1 + job.layout.length))
    assert ShardHost(job, 0).poll() == CopyMade(0)
    assert legacy.copy.updates == 0


def test_a_copy_counts_when_it_is_whole() -> None:
    shard = Shard(ADAM)
    store, legacy = shard.store, shard.legacy
    store.leave()
    assert legacy.copy.updates == -1
    legacy.copy.make(store.weights)
    assert legacy.copy.updates == 0
    update(store)
    with pytest.raises(RuntimeError):
        legacy.copy.make(torch.zeros(1 + len(store.weights)))  # it dies over the weights
    assert legacy.copy.updates == -1
    legacy.copy.make(store.weights)
    assert legacy.copy.updates == 1


class Slow(Copy):
    """Takes so many seconds of its clock."""

    took_s = now = 0.0

    def make(self, weights: Tensor) -> None:
        super().make(weights)
        self.now += self.took_s


@pytest.mark.parametrize("took_s", [0.0001, 0.02])
def test_copies_take_a_hundredth_of_the_time_at_most(took_s: float) -> None:
    shard = Shard(ADAM)
    store, legacy = shard.store, shard.legacy
    legacy.copy = clock = Slow(legacy.numbers, len(store.weights))
    clock.took_s = took_s
    copying = Copying(legacy, store.weights, 100, lambda: clock.now)
    copying.make()
    assert copying.told() == CopyMade(100)
    assert copying.told() is None
    made = 0
    while clock.now < 100.0:
        clock.now += 0.01
        update(store)
        copying.rest()
        made += copying.told() is not None
        copying.rest()
        assert copying.told() is None, "there is nothing new"
    pause_s = max(SELDOM_S, SHARE * took_s)
    assert 100.0 / (pause_s + 0.03) - 1 <= made <= 100.0 / pause_s
    assert made * took_s <= 100.0 / SHARE


def test_of_what_cannot_be_succeeded_there_are_no_copies_and_nothing_is_remembered() -> None:
    shard = Shard(ADAM)
    store, legacy = shard.store, shard.legacy
    legacy.numbers.hold("0:who", object())
    copying = Copying(legacy, store.weights, 0)
    copying.make()
    assert legacy.copy.updates == -1
    assert copying.told() == CopyMade(0)


def test_a_legacy_of_no_elements_is_there() -> None:
    legacy = Legacy(0)
    legacy.copy.make(torch.zeros(0))
    assert legacy.copy.updates == 0
