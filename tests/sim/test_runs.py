"""Whole runs without kills: what is trained, how stale it is, when the run ends, and what its snapshots hold."""

from collections import Counter
from functools import partial
from typing import Literal

import pytest
import torch

from squall.protocol.effects import Compute, Effect
from squall.protocol.events import Event
from squall.protocol.leases import Limits
from squall.protocol.nodes import Node
from squall.protocol.notes import Remark, WeightsMeasured, WorkReported
from squall.runtime.wire import Network
from squall.sim.proof.phantoms import COMPUTE_S
from squall.strategies import Averaging, DiLoCo, Downpour, ElasticAveraging, Synchronous
from tests.sim.sim_bench import Bench, mean_of_three

NETWORKS = {
    "none": Network(),
    "clean": Network(latency_s=0.001),
    "faulty": Network(latency_s=0.001, jitter_s=0.004, loss=0.02, duplication=0.02),
}
SGD = partial(torch.optim.SGD, lr=0.1)
RECIPES = {
    "downpour": Downpour(replicas=2, shards=2).recipe(),
    "push 4, fetch 2": Downpour(replicas=2, shards=2, push_every=4, fetch_every=2).recipe(),
    "overlap": Downpour(replicas=2, shards=2, overlap=True).recipe(),
    "overlap, push 2": Downpour(replicas=2, shards=2, overlap=True, push_every=2).recipe(),
    "delay 0": Downpour(replicas=3, shards=2, max_delay=0).recipe(),
    "delay 3": Downpour(replicas=3, shards=2, max_delay=3).recipe(),
    "warm start": Downpour(replicas=2, shards=2, warm_start=12).recipe(),
    "delay 1, warm start": Downpour(replicas=2, shards=2, warm_start=12, max_delay=1).recipe(),
    "synchronous": Synchronous(replicas=3, shards=2).recipe(),
    "mean of 3": mean_of_three(replicas=3, shards=1),
    "averaging": Averaging(replicas=3, shards=2, every=3).recipe(),
    "elastic averaging": ElasticAveraging(replicas=3, shards=2, every=2).recipe(),
    "diloco": DiLoCo(replicas=3, shards=2, inner_steps=2).recipe(),
    "asynchronous diloco": DiLoCo(replicas=3, shards=2, inner_steps=2, form="asynchronous").recipe(),
    "decoupled diloco": DiLoCo(replicas=3, inner_steps=2, form="decoupled").recipe(),
    "backup, fold": Synchronous(replicas=3, backup=1, late="fold").recipe(),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", RECIPES)
def test_every_example_of_every_epoch_is_applied_once_by_every_shard(name: str, network: str) -> None:
    for seed in range(3 if network == "faulty" else 1):
        bench = Bench(RECIPES[name], network=NETWORKS[network], seed=seed).go()
        assert (bench.end.status, bench.end.reason) == ("finished", "all data is trained")
        bench.expect_all_trained()
        for shard in bench.shards:
            assert sum(len(applied.gradients) for applied in shard.applied) == 12
        assert bench.computed == 12
        reported = [report.stats for report in bench.noted(WorkReported)]
        assert sum(stats.examples for stats in reported) == 44
        assert sum(stats.batches for stats in reported) == 12


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("late", ["drop", "fold"])
def test_backup_replicas_are_not_waited_for_and_their_examples_are_trained(
    late: Literal["drop", "fold"], network: str
) -> None:
    recipe = Synchronous(replicas=3, backup=1, late=late).recipe()
    took = []
    for slow in (1.0, 8.0):
        bench = Bench(recipe, network=NETWORKS[network], seed=3, examples=480)
        bench.compute_s = lambda node, slow=slow: COMPUTE_S * (slow if node.index == 2 else 1.0)
        took.append(bench.go().world.now)
        bench.expect_all_trained()
        if slow > 1:
            stale = [applied.staleness for shard in bench.shards for applied in shard.applied]
            assert (max(stale) > 0) == (late == "fold"), "what is dropped was never applied"
    assert took[1] < 2.0 * took[0]


def test_a_dropped_push_is_trained_again_by_whoever_asks_and_counts_once() -> None:
    recipe = Synchronous(replicas=3, backup=1).recipe()
    for seed in range(10):
        bench = Bench(recipe, network=NETWORKS["faulty"], seed=seed, examples=100)
        bench.compute_s = lambda node: COMPUTE_S * (1 + node.index)
        bench.go()
        bench.expect_all_trained()
        assert bench.computed > 50, "some were dropped"
        assert sum(report.stats.examples for report in bench.noted(WorkReported)) == 200


@pytest.mark.parametrize("late", ["drop", "fold"])
def test_rounds_that_do_not_wait_for_all_go_on_when_all_are_equally_fast(late: Literal["drop", "fold"]) -> None:
    recipe = Synchronous(replicas=4, backup=2, late=late).recipe()
    for seed in range(5):
        bench = Bench(recipe, network=Network(latency_s=0.001, jitter_s=0.004), seed=seed, examples=200)
        bench.compute_s = lambda node: COMPUTE_S
        bench.go().expect_all_trained()


@pytest.mark.parametrize("name", RECIPES)
def test_reported_staleness_is_what_the_shards_applied(name: str) -> None:
    bench = Bench(RECIPES[name], network=NETWORKS["faulty"], seed=1, examples=100).go()
    measured = Counter(applied.staleness for shard in bench.shards for applied in shard.applied)
    reported: Counter[int] = Counter()
    for report in bench.noted(WorkReported):
        reported.update(report.stats.staleness)
    assert reported == measured
    assert sum(measured.values()) >= 16


@pytest.mark.parametrize(("delay", "overlap"), [(0, False), (1, False), (3, False), (0, True), (1, True)])
@pytest.mark.parametrize("replicas", [2, 4])
def test_a_max_delay_bounds_staleness(replicas: int, delay: int, overlap: bool) -> None:
    bound = (replicas - 1) * (2 * delay + 1)
    if overlap:
        bound = (replicas - 1) * 2 * (delay + 1) + 1
    recipe = Downpour(replicas=replicas, shards=2, max_delay=delay, overlap=overlap).recipe()
    for seed in range(3):
        bench = Bench(recipe, network=NETWORKS["faulty"], seed=seed, examples=120)
        paces = [COMPUTE_S * (1, 3, 0.5, 1)[(slot + seed) % 4] for slot in range(replicas)]
        bench.compute_s = lambda node, paces=paces: paces[node.index]
        bench.go()
        worst = max(applied.staleness for shard in bench.shards for applied in shard.applied)
        assert worst <= bound
        assert worst >= min(bound, replicas - 1)  # the schedule does try


def test_overlap_costs_one_update_of_staleness() -> None:
    for overlap, staleness in ((False, {0}), (True, {0, 1})):
        bench = Bench(Downpour(replicas=1, overlap=overlap).recipe(), network=NETWORKS["clean"]).go()
        assert {applied.staleness for applied in bench.shards[0].applied} == staleness


def test_overlap_hides_the_exchange() -> None:
    slow = Network(latency_s=COMPUTE_S / 2.1)  # there and back while a batch is computed
    times = [
        Bench(Downpour(replicas=1, overlap=overlap).recipe(), network=slow, examples=400).go().world.now
        for overlap in (False, True)
    ]
    assert times[1] < 0.6 * times[0]


def test_lock_step_has_no_staleness_and_weighs_by_examples() -> None:
    bench = Bench(RECIPES["synchronous"], network=NETWORKS["faulty"], seed=4).go()
    for shard in bench.shards:
        assert {applied.staleness for applied in shard.applied} == {0}
        short = [applied for applied in shard.applied if applied.gradients[0].stop == 22]
        assert [applied.weight for applied in short] == [pytest.approx(2 / 10)] * 2  # beside two batches of 4
        assert sum(applied.weight for applied in shard.applied) == pytest.approx(shard.version)


def test_push_every_sums_the_batches_between_two_pushes() -> None:
    recipe = Downpour(replicas=1, push_every=4, fetch_every=2).recipe()
    bench = Bench(recipe, network=NETWORKS["none"], examples=64, limits=Limits(epochs=1)).go()
    assert [len(applied.gradients) for applied in bench.shards[0].applied] == [4, 4, 4, 4]
    stats = [report.stats for report in bench.noted(WorkReported)]
    assert sum(s.pushes for s in stats) == 4
    assert sum(s.fetches for s in stats) == 8  # every second batch; the first weights do not count


@pytest.mark.parametrize("name", ["warm start", "delay 1, warm start"])
def test_warm_start_is_one_replicas_alone(name: str) -> None:
    bench = Bench(RECIPES[name], network=NETWORKS["clean"], examples=400)
    order: list[int] = []
    trace = bench.world.trace

    def record(now: float, node: Node, what: Event | Effect) -> None:
        trace(now, node, what)
        if isinstance(what, Compute):
            order.append(node.index)

    bench.world.trace = record
    bench.go()
    assert order.index(1) >= 12 // bench.batch_size
    assert order.count(1) > 50  # later it takes its share
    bench.expect_all_trained()


# ---------------------------------------------------------------- limits and snapshots


def test_limits() -> None:
    clean = NETWORKS["clean"]
    steps = Bench(RECIPES["downpour"], network=clean, limits=Limits(epochs=5, steps=9)).go()
    assert sum(steps.whole().values()) == steps.computed == 9
    timed = Bench(RECIPES["downpour"], network=clean, limits=Limits(), seconds=0.5).go()
    assert timed.end.reason == "the time given is over"
    assert 0.5 < timed.world.now < 0.6
    falling = iter([0.9, 0.5, 0.2, 0.1, 0.1])
    until = Bench(RECIPES["downpour"], network=clean, limits=Limits(), until=("loss", 0.3))
    until.metrics = lambda: {"loss": next(falling)}
    until.go()
    assert until.end.reason == "loss 0.2000 reached 0.3"
    values = [note.values["loss"] for note in until.noted(WeightsMeasured)]
    assert values[:3] == [0.9, 0.5, 0.2]
    assert values[-1] == 0.1  # the final weights are evaluated as well


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_resumed_from_any_snapshot_trains_all_that_is_missing(name: str) -> None:
    for network in NETWORKS.values():
        bench = Bench(RECIPES[name], network=network, examples=50, snapshot_every_s=0.013).go()
        assert len(bench.published) >= 4
        bench.expect_nothing_lost()
        bench.expect_all_trained()
        last = bench.published[-1]
        assert last.versions == tuple(shard.version for shard in bench.shards)
        assert last.ledger["trained"] == 100


def test_a_snapshot_that_fails_is_noted_and_training_goes_on() -> None:
    bench = Bench(RECIPES["downpour"], network=NETWORKS["clean"], examples=50, snapshot_every_s=0.03)
    bench.disk = lambda number: "no space left on device" if number == 1 else ""
    bench.go()
    assert bench.noted(Remark) == [Remark("error", "snapshot 1 could not be written: no space left on device")]
    assert [manifest.number for manifest in bench.published][:2] == [2, 3]
    assert bench.end.status == "finished"
    bench.expect_all_trained()


def test_evaluations_are_of_newer_weights_each_time_and_the_last_of_all_that_was_trained() -> None:
    bench = Bench(RECIPES["downpour"], network=NETWORKS["faulty"], seed=2, examples=50, evaluate_every_s=0.02).go()
    answers = bench.noted(WeightsMeasured)
    assert len(answers) >= 5
    updates = [note.weights.updates for note in answers]
    assert updates == sorted(updates)
    assert answers[-1].weights.updates == bench.shards[0].version
    assert answers[-1].weights.examples == bench.coordinator.trained
