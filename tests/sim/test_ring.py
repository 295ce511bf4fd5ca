"""All-reduce on modelled clusters: what a round takes where a pencil can say it, its numbers, and deaths."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import squall
from squall.record.rows import ProgressRow
from squall.report import Reader
from squall.settings import Settings
from squall.sim.cluster.forecast import Forecast
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.parts import FailureLaw, Link, MachineKind, Preemption
from squall.sim.cluster.ring import BUCKET, FIRST_BUCKET, FORM_S, buckets_of
from squall.sim.cluster.simulate import simulate
from squall.sim.cluster.split_step import ParallelStep
from squall.sim.planning.candidates import Candidate
from squall.sim.planning.planner import plan_cluster
from squall.sim.planning.reasons import reason
from squall.sim.planning.speed import speed_of
from squall.sim.planning.survival import survival_of
from squall.vector import Layout
from tests import deep
from tests.sim.test_simulate import NO_SNAPSHOTS, STEP_S, blobs, untested, workers

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
LENGTH = 96  # of the vector of `untested`, padding included
ROUND_S = 2e-3  # of so many elements
BOX = MachineKind(
    name="box", cores=2, step_s=STEP_S, slowdown=(1.0, 1.2), exchange=((1, 1e-9), (10, 1e-9)),
    reduce=((1, 0.5e-3), (LENGTH, ROUND_S)),
)  # fmt: skip


FREE: dict[str, object] = {"reduce": ((10**9, 1e-9),), "exchange": ((10**9, 1e-9),)}


def round_of(replicas: int, cluster: Cluster, task: squall.TaskFunction = untested, parts: int = 1) -> float:
    """Seconds of a round, without those of the group's beginning."""
    strategy = squall.AllReduce(replicas=replicas, optimizer=SGD)
    settings = dataclasses.replace(NO_SNAPSHOTS, parts=parts)
    short, long = (
        simulate(task, strategy, cluster, gradients="none", steps=steps * replicas, settings=settings)
        for steps in (10, 60)
    )
    return (long.training_s - short.training_s) / (long.updates - short.updates)


# ---------------------------------------------------------------- what a pencil can say


def test_two_replicas_of_a_machine_take_what_was_measured() -> None:
    assert round_of(2, Cluster(machines=(BOX,))) == pytest.approx(1.2 * STEP_S + ROUND_S, rel=1e-3)
    assert round_of(1, Cluster(machines=(BOX,))) == pytest.approx(STEP_S, rel=1e-3)


def test_more_replicas_than_cores_share_them_and_the_ring_carries_more() -> None:
    """Four on two cores: each computes for twice as long, and three halves of the bytes go through each."""
    beyond_s = 2 * (0.5e-3 + 1.5 * (ROUND_S - 0.5e-3))
    assert round_of(4, Cluster(machines=(BOX,))) == pytest.approx(2 * 1.2 * STEP_S + beyond_s, rel=0.02)


def test_between_machines_the_interface_and_the_latency_of_each_step_of_the_ring_count() -> None:
    cluster = dataclasses.replace(workers(4, interface=20e3, **FREE), between=Link(latency_s=1e-4))
    beyond_s = 1.5 * 4 * LENGTH / 20e3 + 2 * 3 * 1e-4
    assert round_of(4, cluster) == pytest.approx(STEP_S + beyond_s, rel=0.02)


def test_the_parts_of_replicas_reduce_their_shares_at_the_same_time() -> None:
    """On two cores for each part, and on one interface for all that are on a machine."""
    send_s, halves = 1e-4, ParallelStep(shares=(0.5, 0.5))
    box = dataclasses.replace(BOX, cores=4, slowdown=(), send=((1, send_s), (10, send_s)))
    half_s = 0.5e-3 + (ROUND_S - 0.5e-3) * (LENGTH // 2 - 1) / (LENGTH - 1)
    told_s = agreed_s = 2 * send_s
    cluster = Cluster(machines=(box,), split=halves)
    assert round_of(2, cluster, parts=2) == pytest.approx(STEP_S / 2 + told_s + half_s + agreed_s, rel=0.01)
    far = dataclasses.replace(workers(4, interface=20e3, cores=2, **FREE), between=Link(latency_s=1e-4), split=halves)
    beyond_s = 1.5 * 4 * LENGTH / 20e3 + 2 * 3 * 1e-4
    assert round_of(4, far, parts=2) == pytest.approx(STEP_S / 2 + beyond_s, rel=0.1)


def layers() -> squall.Task:
    """Four layers of 4 MB: buckets of 4, and of 12."""
    task = untested()
    model = nn.Sequential(nn.Linear(40, 1000, bias=False), *(nn.Linear(1000, 1000, bias=False) for _ in range(4)))
    return dataclasses.replace(task, model=model)


def test_a_bucket_is_on_its_way_while_the_gradients_of_others_are_computed() -> None:
    """The last one is waited for; the first is over by then."""
    first, last = (4 * size for size in buckets_of(_layout(layers().model)))
    fast = workers(2, interface=10 * last / STEP_S, **FREE)
    assert round_of(2, fast, layers) == pytest.approx(STEP_S + 0.1 * STEP_S, rel=0.02)
    slow = workers(2, interface=last / STEP_S, **FREE)
    begins_s = STEP_S / 3 + 2 / 3 * STEP_S * first / (first + last)
    first_s = first / last * STEP_S
    assert begins_s + first_s < STEP_S
    assert round_of(2, slow, layers) == pytest.approx(2 * STEP_S, rel=0.02)


def _layout(model: nn.Module) -> Layout:
    return Layout.of(model, [list(model.parameters())])


def test_buckets_are_those_that_torch_makes() -> None:
    model = nn.Sequential(*(nn.Linear(1600, width, bias=False) for width in (4096, 16, 64, 1600, 128, 4096, 170)))
    order = list(model.parameters())[::-1]  # in which gradients come
    buckets, _ = dist._compute_bucket_assignment_by_size(order, [FIRST_BUCKET, BUCKET])  # type: ignore[attr-defined]
    assert list(buckets_of(_layout(model))) == [sum(order[i].numel() for i in bucket) for bucket in buckets]
    assert len(buckets) == 3


def test_a_slow_replica_holds_all_and_they_say_so() -> None:
    cluster = workers(4, **FREE)
    settings = Settings(snapshot_every_s=None, slow=0.25)
    found = simulate(
        untested, squall.AllReduce(replicas=4, optimizer=SGD), cluster, gradients="none", epochs=2, settings=settings
    )  # fmt: skip
    assert found.examples_per_second == pytest.approx(4 * 4 / (4 * STEP_S), rel=0.05)
    assert found.idle == pytest.approx(9 / 16, abs=0.05)


# ---------------------------------------------------------------- numbers


def simulated(
    cluster: Cluster, directory: Path, replicas: int = 3, shares: bool = False, **settings: object
) -> Forecast:
    strategy = squall.AllReduce(replicas=replicas, optimizer=SGD, shard_optimizer=shares)
    given = Settings(**{"snapshot_every_s": None, **settings})  # type: ignore[arg-type]
    return simulate(blobs, strategy, cluster, epochs=2, seed=5, run_dir=directory, settings=given)


@pytest.mark.parametrize(("replicas", "shares"), deep.sweep([(3, False), (2, True)], 1))
def test_the_numbers_are_those_of_an_inline_run(tmp_path: Path, replicas: int, shares: bool) -> None:
    found = simulated(Cluster(machines=(BOX,)), tmp_path / "simulated", replicas, shares)
    settings = Settings(launcher="inline", threads=1, progress=False)
    strategy = squall.AllReduce(replicas=replicas, optimizer=SGD, shard_optimizer=shares)
    run = squall.fit(blobs, strategy, epochs=2, seed=5, run_dir=tmp_path / "inline", settings=settings)
    ours = squall.Run(tmp_path / "simulated", blobs).model.state_dict()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in run.model.state_dict().items())
    assert found.metrics["accuracy"] > 0.9


def test_the_forecast_and_the_record_count_the_bytes_of_a_ring(tmp_path: Path) -> None:
    """Each of three replicas sends, and receives, four thirds of the vector in a round."""
    found = simulated(Cluster(machines=(BOX,)), tmp_path / "run")
    reader = Reader(tmp_path / "run" / "run.sqlite")
    rows = reader.rows(ProgressRow)
    reader.close()
    each_way = found.updates * 3 * 4 * LENGTH * 4 // 3
    assert sum(row.pushed_bytes for row in rows) == sum(row.fetched_bytes for row in rows) == each_way
    shown = found.bytes - 2 * each_way
    assert shown % (4 * LENGTH) == 0, "else the weights that the evaluator is shown"


def test_members_with_shares_send_the_weights_as_well() -> None:
    """Half as much again as the gradients, in every round."""
    whole = squall.AllReduce(replicas=2, optimizer=SGD)
    found = [
        simulate(untested, strategy, workers(2), gradients="none", epochs=2, settings=NO_SNAPSHOTS)
        for strategy in (whole, dataclasses.replace(whole, shard_optimizer=True))
    ]
    assert found[1].training_s > found[0].training_s
    assert found[1].bytes >= 1.5 * found[0].bytes


# ---------------------------------------------------------------- deaths


@pytest.mark.parametrize("gradients", ["real", "none"])
@deep.only
def test_replicas_that_fail_are_replaced_and_all_is_trained(gradients: str, tmp_path: Path) -> None:
    cluster = dataclasses.replace(workers(4), failures={"replica": FailureLaw(every_s=3.0, repair_s=0.5)})
    strategy = squall.AllReduce(replicas=4, optimizer=SGD)
    found = simulate(
        untested, strategy, cluster, gradients=gradients, epochs=8, settings=NO_SNAPSHOTS, run_dir=tmp_path / "run"
    )  # fmt: skip
    assert (found.status, found.examples, found.restarts) == ("finished", 6400, 0)
    assert found.lost > 3
    calm = simulate(untested, strategy, workers(4), gradients="none", epochs=8, settings=NO_SNAPSHOTS)
    assert found.training_s > calm.training_s + found.lost * FORM_S


def test_replicas_that_are_lost_together_go_on_from_the_snapshot() -> None:
    gone = Preemption(at_s=1.0, machine="worker", count=2, for_s=0.5)
    cluster = dataclasses.replace(workers(2), preemptions=(gone,), lost_after_s=0.1)
    found = simulate(
        untested, squall.AllReduce(replicas=2, optimizer=SGD), cluster, gradients="none", epochs=2,
        settings=Settings(snapshot_every_s=0.3),
    )  # fmt: skip
    assert (found.status, found.examples, found.lost, found.restarts) == ("finished", 1600, 2, 1)
    assert 0.7 < found.goodput < 1.0


# ---------------------------------------------------------------- plans


def flat() -> squall.Task:
    """Its one parameter is a matrix."""
    return dataclasses.replace(untested(), model=nn.Linear(40, 2, bias=False))


def test_where_an_optimizer_needs_whole_tensors_the_plan_is_all_reduce_and_names_the_others() -> None:
    own = squall.AllReduce(optimizer=partial(torch.optim.Muon, lr=0.01))
    ranking = plan_cluster(flat, Cluster(machines=(BOX,)), from_file=[own])
    assert {entry.candidate.family for entry in ranking.entries} == {"all_reduce"}
    why = reason(ranking)
    assert "Not ranked: single_process, synchronous, bounded_delay, downpour. Muon is not elementwise" in why
    assert "or AllReduce, which has no shards" in why
    assert set(ranking.to_json_dict()["unfit"]) > {"downpour", "synchronous"}


def test_a_plan_with_a_mistake_of_its_own_is_refused_as_before() -> None:
    with pytest.raises(ValueError, match="until names the metric 'accuracy'"):
        plan_cluster(untested, Cluster(machines=(BOX,)), until="accuracy=0.9")


def test_of_few_equal_machines_all_reduce_uses_every_core() -> None:
    """A shard would take a core that is needed to compute."""
    both = {"all_reduce": squall.AllReduce(optimizer=SGD), "synchronous": squall.Synchronous(optimizer=SGD)}
    ranking = plan_cluster(untested, Cluster(machines=(BOX,)), strategies=both)
    assert str(ranking.first.candidate) == "all_reduce, 2 replicas"
    assert ranking.first.candidate.sizes == "2 + 0"
    assert ranking.first.useful == pytest.approx(2 * 4 / (1.2 * STEP_S + ROUND_S), rel=0.02)


def test_replicas_that_wait_for_their_sum_are_named_in_the_reason() -> None:
    box = dataclasses.replace(BOX, cores=4, slowdown=(), reduce=((1, 0.5e-3), (LENGTH, 2 * STEP_S)))
    both = {"all_reduce": squall.AllReduce(optimizer=SGD), "downpour": squall.Downpour(optimizer=SGD)}
    ranking = plan_cluster(untested, Cluster(machines=(box,)), strategies=both)
    assert ranking.first.candidate.family == "downpour"
    assert "of their time for the slowest, and for the sum of their gradients" in reason(ranking)


def test_a_plan_for_several_machines_ranks_it() -> None:
    cluster = Cluster(machines=(dataclasses.replace(BOX, count=2),))
    ranking = plan_cluster(untested, cluster, strategies={"all_reduce": squall.AllReduce(optimizer=SGD)})
    assert ranking.first.candidate.family == "all_reduce"
    assert not ranking.unfit


@deep.only
def test_charged_failures_agree_with_simulated_ones() -> None:
    strategy = squall.AllReduce(replicas=4, optimizer=SGD)
    failing = dataclasses.replace(workers(4), failures={"replica": FailureLaw(every_s=20.0, repair_s=2.0)})
    speed = speed_of(Candidate("", strategy), untested(), failing, 0)
    found = simulate(untested, strategy, failing, gradients="none", epochs=200, settings=NO_SNAPSHOTS)
    charged = survival_of(strategy.recipe(), failing, speed.round_s).left
    assert found.lost > 10
    assert charged == pytest.approx(found.examples_per_second / speed.examples_per_second, abs=0.06)
