"""Replicas of several parts on modelled clusters: a pencil's figures, every strategy, deaths, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import squall
from squall.settings import Settings
from squall.sim.cluster.forecast import Forecast
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.own_split import own_split
from squall.sim.cluster.parts import FailureLaw, Link, MachineKind, Preemption
from squall.sim.cluster.simulate import simulate
from squall.sim.cluster.split_step import ParallelStep, PipelineStep
from squall.sim.planning.planner import plan_cluster
from squall.strategies import STRATEGIES
from tests.rehearsal import same
from tests.sim.test_simulate import NO_SNAPSHOTS, STEP_S, blobs, untested

MICROBATCHES = 8
IDEAL = PipelineStep(shares=(0.5, 0.5), passed=(0,), microbatches=MICROBATCHES)
TAKES = (MICROBATCHES + 1) / (2 * MICROBATCHES)  # of a step
SPLIT_IN_HALVES = ParallelStep(shares=(0.5, 0.5), waits=())
NOTHING = ((10**12, 1e-12),)


def boxes(cores: int, count: int = 1, **changes: object) -> Cluster:
    """Machines on which nothing but gradients takes time."""
    free = {"exchange": NOTHING, "send": NOTHING, "memory": 1e18, **changes}
    machine = MachineKind(name="box", count=count, cores=cores, step_s=STEP_S, **free)  # type: ignore[arg-type]
    return Cluster(machines=(machine,), within=Link(latency_s=0.0), between=Link(latency_s=0.0))


def hollow(
    strategy: squall.Strategy, cluster: Cluster, parts: int = 2, split: object = IDEAL, **arguments: object
) -> Forecast:
    cluster = dataclasses.replace(cluster, split=split)
    settings = dataclasses.replace(NO_SNAPSHOTS, parts=parts)
    return simulate(untested, strategy, cluster, gradients="none", **{"epochs": 2, "settings": settings, **arguments})


# ---------------------------------------------------------------- what a pencil can say


def test_one_part_takes_what_it_takes_without_any_word_of_parts() -> None:
    cluster = boxes(3, exchange=((1000, 1e-3),))
    one = hollow(squall.Downpour(replicas=2), cluster, parts=1)
    plain = simulate(untested, squall.Downpour(replicas=2), cluster, gradients="none", epochs=2, settings=NO_SNAPSHOTS)
    assert dataclasses.replace(one, wall_s=0.0) == dataclasses.replace(plain, wall_s=0.0)


@pytest.mark.parametrize(
    "name", [name for name in STRATEGIES if name not in ("single_process", "all_reduce", "sandblaster")]
)
def test_where_links_cost_nothing_every_strategy_gains_what_the_bubble_leaves(name: str) -> None:
    strategy = STRATEGIES[name](replicas=2)
    whole, parts = (hollow(strategy, boxes(6), parts=parts) for parts in (1, 2))
    assert (parts.status, parts.examples, parts.parts) == ("finished", 1600, 2)
    assert parts.training_s == pytest.approx(TAKES * whole.training_s, rel=1e-3)


def test_parts_of_a_batch_method_take_less_time_too(tmp_path: Path) -> None:
    cluster = dataclasses.replace(boxes(6), split=IDEAL)
    strategy = squall.Sandblaster(replicas=2, batch=400, portions=2)
    times = [
        simulate(
            untested, strategy, cluster, steps=3, run_dir=tmp_path / str(parts),
            settings=dataclasses.replace(NO_SNAPSHOTS, parts=parts),
        ).training_s
        for parts in (1, 2)
    ]  # fmt: skip
    assert times[1] == pytest.approx(TAKES * times[0], rel=0.01)


def test_more_parts_than_cores_share_them_and_fill_each_others_bubbles() -> None:
    """Two replicas of two parts on two cores compute as much as two of one part."""
    found = hollow(squall.Downpour(replicas=2), boxes(2), epochs=4)
    assert found.examples_per_second == pytest.approx(2 * 4 / STEP_S, rel=0.01)
    alone = hollow(squall.Downpour(replicas=1), boxes(1), epochs=4)
    assert alone.examples_per_second == pytest.approx(4 / STEP_S, rel=0.01), "the bubble costs nothing on one core"


def test_parts_slow_each_other_as_computations_do() -> None:
    found = hollow(squall.Downpour(replicas=1), boxes(2, slowdown=(1.0, 1.5)), split=ParallelStep(shares=(0.5, 0.5)))
    assert found.examples_per_second == pytest.approx(4 / (0.5 * 1.5 * STEP_S), rel=0.01)


def test_what_parts_send_within_a_machine_takes_its_time() -> None:
    """Two sums, and to be told of a batch and to tell that it is done."""
    split = ParallelStep(shares=(0.5, 0.5), waits=((1000, 1), (1000, 1)))
    found = hollow(squall.Downpour(replicas=1), boxes(3, send=((1, 1e-4), (1000, 1e-3))), split=split)
    assert found.examples_per_second == pytest.approx(4 / (0.5 * STEP_S + 2 * 1e-3 + 2 * 1e-4), rel=0.01)


@pytest.mark.parametrize(("cores", "spread"), [(1, False), (3, True)])
def test_parts_on_machines_of_their_own_send_over_the_link(cores: int, spread: bool) -> None:
    split = ParallelStep(shares=(0.5, 0.5), waits=((1000, 1),))
    link = Link(latency_s=1e-3)
    cluster = dataclasses.replace(boxes(cores, count=3, interface=4e6), between=link, spread_parts=spread)
    servers = MachineKind(name="server", roles=("shard",), exchange=NOTHING, interface=1e12)
    cluster = dataclasses.replace(cluster, machines=(*cluster.machines, servers))
    alone = hollow(squall.Downpour(replicas=1, push_every=100, fetch_every=100), cluster, split=split, epochs=8)
    expected_s = 0.5 * STEP_S + (1e-3 + 1000 * 4 / 4e6) + 2 * (1e-3 + 4 / 4e6)
    assert alone.examples_per_second == pytest.approx(4 / expected_s, rel=0.03)


def test_each_part_exchanges_over_its_own_interface() -> None:
    """So two parts on two machines exchange in half of the time."""

    def wide() -> squall.Task:
        return dataclasses.replace(untested(), model=nn.Linear(40, 3000))

    servers = MachineKind(name="server", roles=("shard", "coordinator", "evaluator"), exchange=NOTHING, interface=1e12)
    cluster = dataclasses.replace(boxes(1, count=2, interface=1e7, roles=("replica",)), split=SPLIT_IN_HALVES)
    cluster = dataclasses.replace(cluster, machines=(*cluster.machines, servers))
    exchange_s = []
    for parts in (1, 2):
        settings = dataclasses.replace(NO_SNAPSHOTS, parts=parts)
        found = simulate(wide, squall.Downpour(replicas=1), cluster, gradients="none", epochs=1, settings=settings)
        exchange_s.append(4 / found.examples_per_second - STEP_S / parts)
    assert exchange_s[1] == pytest.approx(exchange_s[0] / 2, rel=0.02)
    assert exchange_s[0] == pytest.approx(2 * 123_000 * 4 / 1e7, rel=0.02)


def test_the_slowest_machine_of_a_replica_decides() -> None:
    cluster = boxes(1)
    old = dataclasses.replace(cluster.machines[0], name="old", step_s=4 * STEP_S)
    mixed = dataclasses.replace(cluster, machines=(*cluster.machines, old))
    found = hollow(squall.Downpour(replicas=1, push_every=100, fetch_every=100), mixed, epochs=8)
    assert found.examples_per_second == pytest.approx(4 / (TAKES * 4 * STEP_S), rel=0.03)


# ---------------------------------------------------------------- deaths, and real gradients


def test_a_replica_dies_with_the_machine_of_any_of_its_parts() -> None:
    """Its three machines are the first three; the second one goes."""
    split = PipelineStep(shares=(0.3, 0.3, 0.4), passed=(0, 0), microbatches=4)
    cluster = boxes(1, roles=("replica",))
    second = dataclasses.replace(cluster.machines[0], name="second")
    machines = (*cluster.machines, second, dataclasses.replace(second, name="third"))
    gone = Preemption(at_s=0.5, machine="second", count=1, for_s=1.0)
    servers = MachineKind(name="server", roles=("shard", "coordinator", "evaluator"), exchange=NOTHING)
    lost = dataclasses.replace(cluster, machines=(*machines, servers), preemptions=(gone,), lost_after_s=0.1)
    found = hollow(squall.Downpour(replicas=1), lost, parts=3, split=split, epochs=4)
    calm = hollow(
        squall.Downpour(replicas=1), dataclasses.replace(lost, preemptions=()), parts=3, split=split, epochs=4
    )
    assert (found.status, found.lost, found.examples) == ("finished", 1, 3200)
    assert found.training_s > calm.training_s + 0.1


def test_replicas_of_parts_that_fail_are_replaced_and_all_is_trained() -> None:
    failing = dataclasses.replace(boxes(6), failures={"replica": FailureLaw(every_s=1.0, repair_s=0.2)})
    found = hollow(squall.Synchronous(replicas=2), failing, epochs=4)
    assert (found.status, found.examples) == ("finished", 3200)
    assert found.lost > 2


def test_real_gradients_are_those_of_one_part_in_the_time_of_two(tmp_path: Path) -> None:
    cluster = dataclasses.replace(boxes(6), split=IDEAL)
    whole, parts = (
        simulate(
            blobs, squall.Synchronous(replicas=2), cluster, epochs=2, run_dir=tmp_path / str(n),
            settings=dataclasses.replace(NO_SNAPSHOTS, parts=n),
        )
        for n in (1, 2)
    )  # fmt: skip
    assert parts.training_s < 0.7 * whole.training_s
    assert parts.metrics == whole.metrics
    assert same(squall.Run(tmp_path / "1", blobs).model, squall.Run(tmp_path / "2", blobs).model)


# ---------------------------------------------------------------- what the task's split comes to


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(40, 300), nn.Linear(40, 100), nn.Linear(400, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        left, right = self.left(inputs), self.right(inputs)
        found: Tensor = self.head(torch.cat([left, right], 1))
        return found


def split_task(model: nn.Module, split: squall.splits.Split) -> squall.Task:
    return dataclasses.replace(untested(), model=model, split=split, batch_size=40)


def measured(task: squall.Task, parts: int = 2) -> PipelineStep | ParallelStep:
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    found = own_split(task, parts)
    assert all(bool((value == before[name]).all()) for name, value in task.model.state_dict().items())
    assert all(parameter.grad is None for parameter in task.model.parameters())
    assert found.parts == parts
    assert all(share > 0 for share in found.shares)
    return found


def test_of_a_pipeline_stages_and_what_passes_between_them_are_measured() -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 2))
    found = measured(split_task(model, squall.Pipeline(microbatches=4)))
    assert isinstance(found, PipelineStep)
    assert (found.microbatches, found.schedule, len(found.shares)) == (4, "1f1b", 2)
    assert found.passed[0] == 40 * 30, "a batch of 40, of which each example has 30 numbers there"
    four = measured(split_task(model, squall.Pipeline(microbatches=4, schedule="interleaved")))
    assert isinstance(four, PipelineStep)
    assert len(four.shares) == 4


def test_of_slices_the_sums_are_counted() -> None:
    """The column layer's inputs are data, whose gradient nobody needs; the row layer sums 40 x 2 outputs."""
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 2))
    found = measured(split_task(model, squall.Tensor({"0": "column", "2": "row"})))
    assert isinstance(found, ParallelStep)
    assert found.waits == ((80.0, 2),)
    deeper = nn.Sequential(nn.Linear(40, 40), *(nn.Linear(40, 40) for _ in range(2)), nn.Linear(40, 2))
    gathered = measured(split_task(deeper, squall.Tensor({"1": "gathered"})), 4)
    assert isinstance(gathered, ParallelStep)
    assert gathered.waits == ((2 * 0.75 * 1600, 6), (0.75 * 1600, 3)), "gradients of inputs are summed, outputs joined"


def test_of_branches_what_they_share_is_everybodys() -> None:
    found = measured(split_task(Columns(), squall.Branches("left", "right")))
    assert isinstance(found, ParallelStep)
    assert found.waits == ((40 * 300.0, 1),), "the second part waits for the larger one; the inputs are data"


def test_a_task_with_a_split_is_simulated_without_a_word_in_the_cluster() -> None:
    def task() -> squall.Task:
        return split_task(
            nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 2)), squall.Pipeline(microbatches=4)
        )

    settings = Settings(snapshot_every_s=None, parts=2)
    found = simulate(task, squall.Downpour(replicas=2), boxes(6), gradients="none", epochs=2, settings=settings)
    assert (found.status, found.parts, found.examples) == ("finished", 2, 1600)
    assert "downpour, 2 replicas of 2 parts, 1 shard" in str(found)


def test_a_plan_tries_replicas_of_one_part_whatever_the_cluster_says() -> None:
    cluster = boxes(1, count=3)
    both = [
        plan_cluster(untested, each, strategies={"downpour": squall.Downpour(replicas=1)}).first.useful
        for each in (cluster, dataclasses.replace(cluster, split=IDEAL))
    ]
    assert both[0] == both[1]


# ---------------------------------------------------------------- what is refused


def test_what_parts_cannot_be_is_refused_with_the_remedy() -> None:
    def run(strategy: squall.Strategy, cluster: Cluster, parts: int = 2) -> None:
        settings = dataclasses.replace(NO_SNAPSHOTS, parts=parts)
        simulate(untested, strategy, cluster, gradients="none", epochs=1, settings=settings)

    with pytest.raises(ValueError, match=r"does not say how its model is split: give Task\(split=\.\.\.\)"):
        run(squall.Downpour(replicas=1), boxes(2))
    with pytest.raises(ValueError, match=r"parts is 3, and the cluster's \[parts\] has 2: give as many, or leave the"):
        run(squall.Downpour(replicas=1), dataclasses.replace(boxes(2), split=IDEAL), parts=3)
    with pytest.raises(ValueError, match="AllReduce divides the optimizer's state between parts already"):
        run(squall.AllReduce(replicas=2, shard_optimizer=True), dataclasses.replace(boxes(2), split=IDEAL))
