"""Runs in which processes die, or the user stops, at every event there is: they end, and train what they must."""

import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from squall.protocol.closing import STOP_WITHIN_S
from squall.protocol.effects import Compute, WriteSnapshot
from squall.protocol.events import Started
from squall.protocol.leases import Limits
from squall.protocol.nodes import Node
from squall.protocol.notes import MemberDied, Remark, WeightsMeasured
from squall.protocol.replacing import LOST_IN_A_ROW
from squall.runtime.wire import Network
from squall.sim.proof.phantoms import COMPUTE_S
from squall.strategies import Averaging, DiLoCo, Downpour, ElasticAveraging, Synchronous
from tests import deep
from tests.sim.sim_bench import Bench, mean_of_three

CLEAN = Network(latency_s=0.001)
FAULTY = Network(latency_s=0.001, jitter_s=0.004, loss=0.02, duplication=0.02)
SGD = partial(torch.optim.SGD, lr=0.1)
RECIPES = {
    "downpour": Downpour(replicas=2, shards=2).recipe(),
    "push 4, fetch 2": Downpour(replicas=2, shards=2, push_every=4, fetch_every=2).recipe(),
    "overlap": Downpour(replicas=2, shards=3, overlap=True).recipe(),
    "delay 0": Downpour(replicas=3, shards=2, max_delay=0).recipe(),
    "delay 3, overlap": Downpour(replicas=3, shards=1, max_delay=3, overlap=True).recipe(),
    "warm start": Downpour(replicas=2, shards=2, warm_start=8).recipe(),
    "synchronous": Synchronous(replicas=3, shards=2).recipe(),
    "mean of 3": mean_of_three(replicas=2, shards=2),
    "averaging": Averaging(replicas=3, shards=2, every=2).recipe(),
    "elastic averaging": ElasticAveraging(replicas=2, shards=2, every=2).recipe(),
    "matched diloco": DiLoCo(replicas=3, inner_steps=4, form="asynchronous", matched=True).recipe(),
    "decoupled diloco": DiLoCo(replicas=3, inner_steps=2, form="decoupled").recipe(),
    "backup, fold": Synchronous(replicas=3, backup=1, late="fold").recipe(),
    "backup, drop": Synchronous(replicas=3, shards=1, backup=1).recipe(),
}
Act = Callable[[Bench], None]


def kill(*slots: int) -> Act:
    return lambda bench: [bench.kill("replica", slot) for slot in slots]


def kill_evaluator(bench: Bench) -> None:
    bench.kill("evaluator", bench.recipe.replicas)


def events_of(make: Callable[[], Bench], step: int) -> Sequence[int]:
    return deep.sweep(range(0, make().go().steps, step), 8)


def small(name: str, network: Network = CLEAN, seed: int = 0, **policy: object) -> Bench:
    return Bench(RECIPES[name], network=network, seed=seed, examples=10, notice_s=0.002, **policy)


@pytest.mark.parametrize("name", RECIPES)
def test_a_replica_killed_at_any_event(name: str) -> None:
    """Before Welcome, between the exchanges with two shards, while a view is pending, in the final evaluation ..."""
    for slot in range(2):
        for event in events_of(lambda: small(name), step=2):
            bench = small(name).go({event + slot: kill(slot)})
            assert bench.end.status == "finished"
            bench.expect_all_trained()


@pytest.mark.parametrize("name", ["downpour", "delay 0", "synchronous"])
@pytest.mark.parametrize("network", [CLEAN, FAULTY], ids=["clean", "faulty"])
def test_all_replicas_killed_at_once(name: str, network: Network) -> None:
    for event in events_of(lambda: small(name, network), step=4):
        bench = small(name, network).go({event: kill(0, 1, 2)})
        assert bench.end.status == "finished"
        bench.expect_all_trained()


@pytest.mark.parametrize("name", ["downpour", "synchronous"])
def test_the_evaluator_killed_at_any_event(name: str) -> None:
    for event in events_of(lambda: small(name), step=3):
        bench = small(name).go({event: kill_evaluator})
        assert bench.end.status == "finished"
        bench.expect_all_trained()
        final = bench.noted(WeightsMeasured)[-1]
        assert final.weights.updates == bench.shards[0].version


@pytest.mark.parametrize("name", RECIPES)
def test_a_users_stop_at_any_event(name: str) -> None:
    for event in events_of(lambda: small(name), step=3):
        asked: list[float] = []
        bench = small(name).go({event: lambda b, asked=asked: (asked.append(b.world.now), b.stop())})
        assert bench.end.status in ("interrupted", "finished")
        assert bench.world.now - asked[0] < STOP_WITHIN_S
        assert max(bench.whole().values(), default=1) == 1
        assert bench.published
        bench.expect_nothing_lost()


def test_a_users_stop_does_not_wait_for_a_replica_that_computes_for_long() -> None:
    bench = small("downpour")
    bench.compute_s = lambda node: 30.0 if node.index else COMPUTE_S
    bench.go({60: Bench.stop, 64: Bench.stop})
    assert bench.end.status == "interrupted"
    assert STOP_WITHIN_S <= bench.world.now <= STOP_WITHIN_S + 0.2
    bench.expect_nothing_lost()


def test_a_shard_killed_at_any_event_ends_the_run_with_an_error() -> None:
    """Unless its last words are on their way: that its part of the last snapshot is written."""
    shard = Node("shard", 1)
    for event in events_of(lambda: small("downpour"), step=1):
        done: list[bool] = []

        def kill_it(bench: Bench, done: list[bool] = done) -> None:
            done.append(any(node == shard and isinstance(what, WriteSnapshot) for _, node, what in bench.story))
            bench.kill("shard", 1)

        bench = small("downpour").go({event: kill_it})
        if done == [True] and bench.end.status == "finished":
            bench.expect_all_trained()
            assert bench.published
        else:
            assert (bench.end.status, bench.end.reason) == ("failed", "shard 1 was lost (killed)")


@pytest.mark.parametrize("name", ["downpour", "synchronous", "decoupled diloco", "backup, drop"])
@pytest.mark.parametrize("when", [Started, Compute])
def test_a_replica_that_keeps_dying_is_given_up_and_the_others_go_on(name: str, when: type) -> None:
    bench = Bench(RECIPES[name], network=CLEAN, examples=40, notice_s=0.002, limits=Limits(epochs=3))
    bench.compute_s = lambda node: 1.0  # longer than all tries take
    trace = bench.world.trace

    def doom(now: float, node: Node, what: object) -> None:
        trace(now, node, what)
        if node.role == "replica" and node.index == 1 and isinstance(what, when):
            bench.world.kill(node, "killed by SIGSEGV")

    bench.world.trace = doom
    bench.go()
    said = f"replica 1 was lost {LOST_IN_A_ROW} times in a row, last: killed by SIGSEGV; the others go on without it"
    assert [remark.text for remark in bench.noted(Remark) if remark.kind == "warning"] == [said]
    assert bench.end.status == "finished"
    bench.expect_all_trained(3)


def test_deaths_between_finished_batches_are_not_in_a_row() -> None:
    def act(bench: Bench) -> None:
        bench.kill("replica", 1)

    bench = Bench(RECIPES["downpour"], network=CLEAN, examples=2000, notice_s=0.002)
    bench.go(dict.fromkeys(range(300, 3300, 300), act))
    assert len(bench.noted(MemberDied)) > LOST_IN_A_ROW
    assert bench.end.status == "finished"
    bench.expect_all_trained()


@pytest.mark.parametrize("name", ["warm start", "synchronous"])
def test_what_a_dead_replica_had_trained_is_kept_however_short_its_leases(name: str) -> None:
    """One-batch leases within the time between two reports: far more than fit one report."""
    bench = Bench(RECIPES[name], network=Network(), examples=600, limits=Limits(epochs=1))
    bench.compute_s = lambda node: 0.001
    bench.go({700: kill(0)})
    assert bench.end.status == "finished"
    bench.expect_all_trained(1)
    assert bench.computed <= 150 + 4  # at most what was under way is computed again


@pytest.mark.parametrize("name", RECIPES)
def test_random_kills_on_faulty_networks(name: str) -> None:
    for seed in deep.seeds(3, 24):
        chance = random.Random(seed)
        acts: dict[int, Act] = {}
        for _ in range(chance.randrange(1, 4)):
            victims = kill(*chance.sample(range(2), chance.randrange(1, 3)))
            acts[chance.randrange(250)] = chance.choice([victims, victims, kill_evaluator])
        bench = Bench(
            RECIPES[name], network=FAULTY, seed=seed, notice_s=chance.choice([0.0, 0.01]), snapshot_every_s=0.05
        )
        bench.go(acts)
        assert bench.end.status == "finished"
        bench.expect_all_trained()
        bench.expect_nothing_lost()


# ---------------------------------------------------------------- numbers that are not finite


@pytest.mark.parametrize("name", RECIPES)
def test_a_batch_that_fails_once_is_tried_again(name: str) -> None:
    for bad in (1, 3, 5):
        bench = small(name)
        bench.poison = lambda number, batch, bad=bad: number == bad
        bench.go()
        assert bench.end.status == "finished"
        bench.expect_all_trained()
        (remark,) = bench.noted(Remark)
        assert remark.text.endswith("; not applied, tried again")


@pytest.mark.parametrize("name", RECIPES)
def test_a_batch_that_fails_twice_ends_the_run_and_is_named(name: str) -> None:
    bench = small(name)
    bench.poison = lambda number, batch: batch == (1, 4, 8)
    bench.go()
    assert bench.end.status == "nonfinite"
    assert "examples 4 to 8 of epoch 1" in bench.end.reason
    assert (1, 4, 8) not in bench.whole()
    assert all(place.over for node, place in bench.world.processes.items() if node.role == "replica")
    bench.expect_nothing_lost()


@pytest.mark.parametrize("name", ["downpour", "overlap", "synchronous"])
def test_a_stop_while_a_bad_batch_is_tried_again_lets_the_replica_leave(name: str) -> None:
    for event in events_of(lambda: small(name), step=3):
        bench = small(name)
        bench.poison = lambda number, batch: batch == (0, 4, 8)
        bench.go({event: Bench.stop})
        assert bench.world.now < STOP_WITHIN_S  # else the coordinator went on without one that never left
