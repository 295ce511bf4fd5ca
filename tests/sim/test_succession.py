"""Shards that die in worlds, also between two steps of an event, and mistakes in what follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from squall.protocol import succession
from squall.protocol.effects import Apply, Effect, WriteSnapshot
from squall.protocol.events import Event, FrameArrived, Started
from squall.protocol.messages import Exchange
from squall.protocol.notes import MemberReplaced
from squall.protocol.shard_duties import ShardDuties
from squall.protocol.staffing import Staffing
from squall.protocol.succession import Journaled
from squall.runtime.journal import Journal
from squall.sim.proof.chaos import chaos
from squall.sim.proof.faults import Kill
from squall.sim.proof.trial import Seen, Trial
from tests import deep
from tests.sim.test_planted_faults import Patch, Planted, catch, wrapped


def test_shards_are_succeeded_in_many_worlds_and_the_run_goes_on() -> None:
    """All invariants hold in these worlds; without successors each of these deaths would end a life."""
    succeeded = Counter[bool]()
    for seed in range(80):
        world = chaos(seed)
        seen: list[Seen] = []
        Trial(world, seen.append).go()
        within = any(isinstance(fault, Kill) and fault.steps is not None for fault in world.faults)
        replaced = [what.node for _, _, what in seen if isinstance(what, MemberReplaced)]
        succeeded[within] += sum(node.role == "shard" for node in replaced)
        if succeeded[True] >= 5 and succeeded[False] >= 1:
            return
    pytest.fail(f"shards have successors too seldom: {succeeded}")


def unless_it_is_a_push(original: Any, journal: Journal, event: Event, now: float) -> None:
    if not (isinstance(event, FrameArrived) and isinstance(event.frame.message, Exchange)):
        original(journal, event, now)


def replaced(name: str, by: Any) -> Patch:
    return lambda patch: patch.setattr(succession, name, by)


def once_more(effects: Sequence[Effect], done: int) -> list[Effect]:
    return [effect for effect in effects if not isinstance(effect, WriteSnapshot)]


def answers_alone(effects: Sequence[Effect], done: int) -> list[Effect]:
    return [effect for effect in LEFT(effects, done) if not isinstance(effect, Apply)]


def as_if_new(effects: Sequence[Effect], done: int) -> list[Effect]:
    """Numbers that were put in their place are put there again."""
    for number, effect in enumerate(effects):
        if done < succession.steps(effect):
            return once_more(effects[number:], 0)
        done -= succession.steps(effect)
    return []


def with_new_links(original: Any, linked: Journaled, *given: Any) -> list[Effect]:
    carried_out: list[Effect] = original(linked, *given)
    linked._links = {}
    return carried_out


def as_if_nothing_was_lost(original: Any, duties: ShardDuties, event: Event, *given: Any) -> None:
    """Nobody is told that a snapshot lacks a file."""
    if not isinstance(event, Started):
        original(duties, event, *given)


def at_the_first_death(original: Any, staffing: Staffing, shard: Any, why: str, now: float, effects: Any) -> None:
    staffing._fail(f"{shard} was lost", effects, [shard])


def nobody_there(original: Any, staffing: Staffing, shard: Any, why: str, now: float, effects: Any) -> None:
    """No successor is started."""


LEFT = succession.left

PLANTED: dict[str, Planted] = {
    "pushes are not in the journal": Planted(wrapped(Journal, "add", unless_it_is_a_push), 60, "I5"),
    "what was left is not carried out": Planted(replaced("left", lambda effects, done: []), 60, "I6"),
    "an update that was left is not made": Planted(replaced("left", answers_alone), 60, "I6"),
    "effects are carried out again": Planted(replaced("left", once_more), 60, "I1 AssertionError"),
    "an update that was made and not told is made again": Planted(
        replaced("without", lambda effects, updates, machine: list(effects)), 600, "I2"),
    "numbers are put again where a replica computes on them": Planted(
        replaced("left", as_if_new), 200, "I1 AssertionError"),
    "links begin anew": Planted(wrapped(Journaled, "take_again", with_new_links), 60, "I5"),
    "a snapshot is not begun anew": Planted(
        wrapped(ShardDuties, "_on_duty", as_if_nothing_was_lost), 200, "I5 KeyError"),
    "pieces of a file that is gone travel": Planted(
        wrapped(Journaled, "_lose_files", lambda *given: None), 600, "I1 KeyError"),
    "the first death ends the run": Planted(wrapped(Staffing, "_on_shard_lost", at_the_first_death), 20, "I5"),
    "nobody succeeds a shard": Planted(wrapped(Staffing, "_on_shard_lost", nobody_there), 20, "I5"),
}  # fmt: skip


@pytest.mark.parametrize("name", deep.sweep(list(PLANTED), 1))
def test_a_planted_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    catch(PLANTED[name], monkeypatch)
