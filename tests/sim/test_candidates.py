"""What a plan tries: within the budget, on machines that may have it, with the file's own settings."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import squall
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.parts import MachineKind
from squall.sim.planning.candidates import cores, counts, default_strategies, sweep

ADAGRAD = partial(torch.optim.Adagrad, lr=0.02)


def cluster(*sizes: tuple[int, int]) -> Cluster:
    return Cluster(machines=tuple(
        MachineKind(name=f"m{i}", count=count, cores=cores, step_s=0.01) for i, (count, cores) in enumerate(sizes)
    ))  # fmt: skip


@given(
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 8)), min_size=1, max_size=3), budget=st.integers(2, 100)
)
def test_numbers_of_processes_stay_within_the_budget_and_the_cores(sizes: list[tuple[int, int]], budget: int) -> None:
    there = cluster(*sizes)
    found = counts(there, budget)
    assert found
    assert len(set(found)) == len(found)
    for replicas, shards in found:
        assert 1 <= replicas <= cores(there, "replica")
        assert replicas + shards <= budget
        assert shards == 1 or replicas >= 4 * shards
    assert min(budget - 1, cores(there)) in {replicas for replicas, _ in found}


def test_sizes_that_leave_out_the_last_kinds_of_machines_are_tried() -> None:
    replicas = {replicas for replicas, _ in counts(cluster((5, 2), (1, 1)), 12)}
    assert {5, 10, 11} <= replicas


def test_rounds_that_do_not_wait_for_all_have_one_shard() -> None:
    found = sweep(default_strategies(names=["synchronous"]), counts(cluster((16, 1)), 20), 20)
    whole = {c.recipe.shards for c in found if c.name == "synchronous"}
    backup = {c.recipe.shards for c in found if c.name == "synchronous, 1 backup"}
    assert whole == {1, 2, 4}
    assert backup == {1}


def test_without_shards_a_replica_has_their_place() -> None:
    found = sweep(default_strategies(names=["all_reduce"]), counts(cluster((4, 2)), 6), 6)
    assert {(c.recipe.replicas, c.recipe.shards) for c in found} == {(2, 0), (4, 0), (6, 0)}
    assert str(found[-1]) == "all_reduce, 6 replicas"
    assert found[-1].coupling == (1, 0, 6)


def test_one_replica_is_tried_once() -> None:
    found = sweep(default_strategies(), counts(cluster((8, 1)), 8), 8)
    assert sum(c.recipe.replicas == 1 for c in found) == 1


def test_the_files_own_settings_are_taken() -> None:
    own = (
        squall.Downpour(optimizer=ADAGRAD),
        squall.DiLoCo(optimizer=ADAGRAD, outer_lr=1.0),
        squall.DiLoCo(optimizer=ADAGRAD, outer_lr=0.5, form="asynchronous"),
    )
    found = default_strategies(own)
    assert found["diloco, 20 steps"].outer_lr == 1.0
    assert found["diloco, 20 steps, async"].outer_lr == 0.5
    assert found["bounded_delay, tau 4"].optimizer is ADAGRAD


def test_inner_loops_longer_than_an_epoch_are_left_out() -> None:
    found = default_strategies(names=["diloco", "averaging"], batches=30)
    assert list(found) == ["diloco, 20 steps", "diloco, 20 steps, async", "averaging, every 8"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "there is no strategy 'nothing': use all_reduce, asynchronous_sgd, averaging"),
        ("sandblaster", "leave|simulate"),
    ],
)
def test_what_cannot_be_planned_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        default_strategies(names=[name])


def test_a_budget_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="budget is 1: it must be at least 2"):
        counts(cluster((4, 1)), 1)
    with pytest.raises(ValueError, match="backup is 1 of 1"):
        sweep({"backed up": squall.Synchronous(replicas=2, backup=1)}, counts(cluster((4, 1)), 2), 2)
    nowhere = Cluster(machines=(MachineKind(name="m", roles=("replica", "coordinator", "evaluator")),))
    with pytest.raises(ValueError, match="no machine of the cluster may have a shard: add 'shard' to the roles"):
        counts(nowhere, 4)
