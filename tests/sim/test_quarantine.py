"""Batches that give NaN twice are left out, at most so many of an epoch; mistakes in that are caught from outside."""

from __future__ import annotations

import itertools
import re
from typing import Any

import msgspec
import pytest

from squall.protocol.effects import Effect
from squall.protocol.events import GradientComputed
from squall.protocol.held_work import Batch
from squall.protocol.leases import Leases
from squall.protocol.loop_coordinator import LoopCoordinator
from squall.protocol.messages import Cover, NonFinite
from squall.protocol.nodes import Node
from squall.protocol.notes import BatchLeftOut, Remark, WorkReported
from squall.protocol.replica import Replica
from squall.sim.proof.chaos import Chaos, chaos
from squall.sim.proof.faults import Rot
from squall.sim.proof.rotten import allowed
from tests import deep
from tests.sim.sim_bench import Bench
from tests.sim.test_kills import RECIPES, events_of, kill, small
from tests.sim.test_planted_faults import Planted, catch, wrapped

BAD = (1, 4, 8)  # epoch, start, stop


def rotten(name: str, *bad: tuple[int, int, int], at_most: int = 1) -> Bench:
    bench = small(name, quarantine=at_most)
    bench.poison = lambda number, batch: batch in bad
    return bench


def expect_left_out(bench: Bench, *bad: tuple[int, int, int]) -> None:
    """These and no others, once; everything else was trained once."""
    assert bench.end.status == "finished", bench.end.reason
    left_out = [(note.batch.epoch, note.batch.start, note.batch.stop) for note in bench.noted(BatchLeftOut)]
    assert set(left_out) == set(bad)
    wanted = {(e, start, min(start + 4, 10)): 1 for e in range(2) for start in range(0, 10, 4)}
    assert bench.whole() == {batch: count for batch, count in wanted.items() if batch not in bad}
    trained = sum(stop - start for _, start, stop in wanted.keys() - set(bad))
    assert sum(report.stats.examples for report in bench.noted(WorkReported)) == trained


@pytest.mark.parametrize("name", RECIPES)
def test_a_batch_that_fails_twice_is_left_out_and_all_others_are_trained(name: str) -> None:
    bench = rotten(name, BAD).go()
    expect_left_out(bench, BAD)
    assert [remark.text.rpartition(", ")[2] for remark in bench.noted(Remark)] == [
        "tried again", "number 1 of at most 1 an epoch",
    ]  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_one_more_than_may_be_ends_the_run_and_all_are_named(name: str) -> None:
    bench = rotten(name, (0, 0, 4), BAD, (1, 8, 10)).go()
    assert bench.end.status == "nonfinite"
    assert set(re.findall(r"\d+ to \d+", bench.end.reason)) == {"4 to 8", "8 to 10"}
    epochs = [note.batch.epoch for note in bench.noted(BatchLeftOut)]
    assert epochs == [0, 1], "one of each"


@pytest.mark.parametrize("name", ["downpour", "push 4, fetch 2", "synchronous", "averaging"])
def test_who_dies_with_a_bad_batch_leaves_it_to_others_who_leave_it_out_too(name: str) -> None:
    for event in events_of(lambda: rotten(name, BAD), step=3):
        bench = rotten(name, BAD)
        bench.go({event: kill(0)})
        assert bench.end.status == "finished", bench.end.reason
        bench.auditor.finished(1, bench.coordinator.trained)
        assert BAD not in bench.whole()


@pytest.mark.parametrize("name", ["downpour", "overlap", "synchronous", "averaging"])
def test_a_stop_while_a_batch_is_left_out_lets_the_replica_leave(name: str) -> None:
    for event in events_of(lambda: rotten(name, (0, 4, 8)), step=3):
        bench = rotten(name, (0, 4, 8))
        bench.go({event: Bench.stop})
        assert bench.end.status in ("interrupted", "finished")
        bench.expect_nothing_lost() if not bench.noted(BatchLeftOut) else None


def test_the_count_goes_on_where_a_run_is_resumed_in_the_epoch() -> None:
    bench = rotten("downpour", (0, 0, 4), (0, 4, 8)).go()
    assert bench.end.status == "nonfinite"
    left = Leases.restore(dict(bench.published[-1].ledger), [], bench.batch_size, bench.limits)
    assert [batch.start for batch in left.quarantined] == [note.batch.start for note in bench.noted(BatchLeftOut)] != []


# ---------------------------------------------------------------- mistakes


def at_the_first(original: Any, coordinator: LoopCoordinator, node: Node, message: NonFinite, *given: Any) -> None:
    original(coordinator, node, msgspec.structs.replace(message, final=True), *given)


def as_many_as_there_are(original: Any, coordinator: LoopCoordinator, *given: Any) -> bool:
    coordinator.policy = msgspec.structs.replace(coordinator.policy, quarantine=1000)
    found: bool = original(coordinator, *given)
    return found


def with_a_step_on_it(original: Any, replica: Replica, batch: Batch, spoilt: bool, *given: Any) -> None:
    stepped, replica._stepped = replica._stepped, False
    original(replica, batch, spoilt, *given)
    replica._stepped = stepped


def never_tried_again(original: Any, replica: Replica, *given: Any) -> None:
    replica._retried = True
    original(replica, *given)


def counted_as_trained(original: Any, replica: Replica, now: float, effects: list[Effect]) -> None:
    batch, exchanges = replica._batch, replica._exchanges
    if replica._poisoned and batch is not None:
        cover = Cover(batch.lease, batch.start)
        exchanges.gathered = exchanges.gathered.and_batch(cover, batch.stop - batch.start, 0.0, ())
    original(replica, now, effects)


def in_secret(original: Any, coordinator: LoopCoordinator, *given: Any) -> bool:
    found: bool = original(coordinator, *given)
    effects = given[-1]
    effects[:] = [effect for effect in effects if not isinstance(effect, BatchLeftOut)]
    return found


def before_it_is_noted(original: Any, replica: Replica, event: GradientComputed, now: float, effects: Any) -> None:
    original(replica, event, now, effects)
    if replica._poisoned and replica._batch is not None:
        replica._on_skipped(now, effects)


PLANTED = {
    "a batch is left out that gave NaN once": Planted(
        wrapped(LoopCoordinator, "_on_non_finite", at_the_first), 100, "I21"),
    "more are left out than may be": Planted(
        wrapped(LoopCoordinator, "_quarantined", as_many_as_there_are), 200, "I21"),
    "none is left out": Planted(wrapped(LoopCoordinator, "_quarantined", lambda *given: False), 100, "I21"),
    "a batch is left out that weights have come through a step on": Planted(
        wrapped(Replica, "_on_non_finite", with_a_step_on_it), 200, "I21", of="bounded"),
    "a replica does not try again": Planted(wrapped(Replica, "_on_non_finite", never_tried_again), 100, "I21"),
    "what is left out counts as trained": Planted(wrapped(Replica, "_on_skipped", counted_as_trained), 200, "I7"),
    "the record is not told of what is left out": Planted(
        wrapped(LoopCoordinator, "_quarantined", in_secret), 200, "I1"),
    "a replica goes on before it is noted": Planted(wrapped(Replica, "_on_gradient", before_it_is_noted), 400, "I1 I7"),
}  # fmt: skip


def worlds(of: str) -> Any:
    """With batches that are never finite."""
    every: Any = map(chaos, itertools.count())
    return (world for world in every if world.strategy.startswith(of) and _concerned(world))


def _concerned(world: Chaos) -> bool:
    return any(isinstance(fault, Rot) for fault in world.faults) and allowed(world.seed, world.recipe) > 0


@pytest.mark.parametrize("name", deep.sweep(list(PLANTED), 1))
def test_a_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = PLANTED[name]
    catch(planted, monkeypatch, worlds(planted.of))
