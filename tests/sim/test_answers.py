"""Worlds that only answer: what they hold, and that mistakes in their machines are caught from outside."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest

from squall.protocol.answering import coordinator as coordinators
from squall.protocol.answering.coordinator import AnswerCoordinator
from squall.protocol.answering.effects import KeepAnswers
from squall.protocol.answering.replica import Answerer
from squall.protocol.effects import Effect, End, Send
from squall.protocol.events import Answered, AnswersKept, AnswersTaken, Event
from squall.protocol.leases import Leases
from squall.protocol.membership import Membership
from squall.protocol.messages import PIECE_BYTES, Cover, Progress, Stats
from squall.protocol.nodes import COORDINATOR
from squall.runtime.wire import Network
from squall.sim.proof.answers import answering
from squall.sim.proof.faults import Kill, Role, UserStop
from squall.sim.proof.soak import verdict
from squall.sim.proof.trial import Seen, Trial
from tests import deep
from tests.sim.test_planted_faults import Planted, catch, wrapped

WORLDS = 30  # `make deep` runs 500 more, of the day
QUIET = dataclasses.replace(
    answering(0), faults=(), machines=1, replicas=2, examples=80, paces=(0.01, 0.01), network=Network(latency_s=0.001)
)


def test_each_example_is_answered_once_in_many_worlds() -> None:
    happened = Counter[str]()
    for seed in range(WORLDS):
        found = verdict(answering(seed))
        assert not found.error, str(found)
        happened.update(found.faults)
    assert {"Kill", "Cut", "Pause", "Weather", "UserStop", "Partition", "MachineGone", "FullDisk"} <= set(happened)


def test_a_death_costs_its_lease_alone() -> None:
    seen: list[Seen] = []
    Trial(dataclasses.replace(QUIET, faults=(Kill(25, Role("replica", 1)),)), seen.append).go()
    answered = sum(isinstance(what, Answered) for _, _, what in seen)
    assert 0 < answered - QUIET.examples // QUIET.batch_size < 16


def test_a_run_that_was_stopped_goes_on_with_what_no_file_has() -> None:
    seen: list[Seen] = []
    trial = Trial(dataclasses.replace(QUIET, faults=(UserStop(30),)), seen.append).go()
    assert trial.lives == 2
    kept = [(what.start, what.stop) for _, _, what in seen if isinstance(what, KeepAnswers)]
    assert sum(stop - start for start, stop in kept) == QUIET.examples
    ends = [what.status for _, node, what in seen if isinstance(what, End) and node == COORDINATOR]
    assert ends == ["interrupted", "finished"]


# ---------------------------------------------------------------- planted


def told_at_once(original: Any, replica: Answerer, event: Event, effects: list[Effect]) -> None:
    """What is computed is told before it is on the disk."""
    original(replica, event, effects)
    if effects and (done := replica._answered) is not None:
        effects.insert(0, Send(COORDINATOR, Progress((Cover(done.lease, done.stop),), Stats())))


def first_piece_is_all(original: Any, replica: Answerer, event: Event, now: float) -> Any:
    if isinstance(event, AnswersKept):
        event = AnswersKept(min(event.size, PIECE_BYTES))
    return original(replica, event, now)


def never_dealt_again(original: Any, coordinator: AnswerCoordinator, *given: Any) -> None:
    """What a lost replica had not told of."""


def observed(patch: pytest.MonkeyPatch) -> None:
    """Who works alone is to see who else does."""
    patch.setattr(coordinators, "Membership", lambda shards, observed: Membership(shards))


def from_the_beginning(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AnswerCoordinator, "__init__", forgetful(AnswerCoordinator.__init__))


def forgetful(original: Any) -> Any:
    def begin(self: Any, policy: Any, leases: Leases, found: Any = ()) -> None:
        original(self, policy, Leases.besides([], leases.examples, leases.batch_size), found)

    return begin


def told_twice(original: Any, replica: Answerer) -> Any:
    done, batches = replica._answered, replica._batches
    covers, stats = original(replica)
    if covers and replica._stopping:
        replica._answered, replica._batches = done, batches
    return covers, stats


def full_disk_unnoticed(original: Any, coordinator: AnswerCoordinator, event: Event, now: float) -> Any:
    if isinstance(event, AnswersTaken):
        event = AnswersTaken(event.node, event.lease)
    return original(coordinator, event, now)


PLANTED: dict[str, Planted] = {
    "answers are told of before they are on the disk": Planted(
        wrapped(Answerer, "_on_answered", told_at_once), 5, "I18"),
    "a file is taken for whole when its first piece is there": Planted(
        wrapped(Answerer, "on", first_piece_is_all), 20, "I18"),
    "what a lost replica had not told of is dealt to nobody": Planted(
        wrapped(AnswerCoordinator, "_take_back", never_dealt_again), 20, "I5"),
    "replicas that work alone have to see views": Planted(observed, 5, "I5"),
    "a run goes on from the beginning": Planted(from_the_beginning, 60, "I18"),
    "a replica that leaves tells of the same answers twice": Planted(wrapped(Answerer, "_told", told_twice), 60, "I18"),
    "a full disk is not noticed": Planted(wrapped(AnswerCoordinator, "on", full_disk_unnoticed), 200, "I18"),
}  # fmt: skip


@pytest.mark.parametrize("name", deep.sweep(list(PLANTED), 1))
def test_a_planted_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    catch(PLANTED[name], monkeypatch, map(answering, itertools.count()))
