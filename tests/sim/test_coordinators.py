"""Coordinators that die in worlds, also between two steps of an event, and mistakes in what follows."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from squall.protocol.effects import Effect, StartMember
from squall.protocol.events import Event, FrameArrived
from squall.protocol.messages import LeaseRequest, Progress
from squall.protocol.nodes import COORDINATOR
from squall.protocol.notes import LeaseEnded, Note
from squall.protocol.nursery import NurseryMachine
from squall.protocol.nursery_messages import ProcessLost
from squall.protocol.sandblaster.method import Minimization
from squall.protocol.succession import Journaled
from squall.runtime.journal import Journal
from squall.sim.proof.chaos import Chaos
from squall.sim.proof.coordinator_phantom import CoordinatorPhantom
from squall.sim.proof.faults import Fault, Kill
from squall.sim.proof.trial import Seen, Trial
from tests import deep
from tests.sim.test_planted_faults import Planted, catch, worlds, wrapped


def mortal(of: str, machines: int = 1) -> Iterator[Chaos]:
    all_of_them = worlds(of, machines, coordinators_die=True)
    return (world for world in all_of_them if any(map(kills_a_coordinator, world.faults)))


def kills_a_coordinator(fault: Fault) -> bool:
    return isinstance(fault, Kill) and fault.part.role == "coordinator"


def test_coordinators_are_succeeded_in_many_worlds_and_the_run_goes_on() -> None:
    """All invariants hold in these worlds; without successors each of these deaths would end a life."""
    succeeded = Counter[str]()
    for world in itertools.islice(mortal(""), 60):
        seen: list[Seen] = []
        Trial(world, seen.append).go()
        started = sum(isinstance(what, StartMember) and what.node == COORDINATOR for _, _, what in seen)
        succeeded[type(world.recipe.work).__name__] += started
        if min(succeeded[kind] for kind in ("Loop", "BatchMethod", "Collective")) >= 1 and succeeded.total() >= 10:
            return
    pytest.fail(f"coordinators have successors too seldom: {succeeded}")


def unless(*kinds: type) -> Any:
    def add(original: Any, journal: Journal, event: Event, now: float) -> None:
        if not (isinstance(event, FrameArrived) and isinstance(event.frame.message, kinds)):
            original(journal, event, now)

    return add


def as_new(
    original: Any, host: CoordinatorPhantom, kept: dict[str, Any], since: Sequence[tuple[Effect, float]]
) -> None:
    original(host, {"told": (0, [])}, since)


def nothing_since(original: Any, host: CoordinatorPhantom, kept: dict[str, Any], since: Any) -> None:
    original(host, kept, [])


def written_again(original: Any, host: CoordinatorPhantom, effect: Effect, now: float) -> Event | None:
    """The record does not know what it has."""
    event: Event | None = original(host, effect, now)
    if isinstance(effect, Note) and host.told <= len(host.hosts.notes) - 1:
        host.hosts.notes.append(effect)
    return event


def with_new_links(original: Any, linked: Journaled, *given: Any) -> Any:
    carried_out = original(linked, *given)
    if linked.machine.node == COORDINATOR:
        linked._links = {}
    return carried_out


def without_ends(original: Any, linked: Journaled, *given: Any) -> Any:
    """What the coordinator knew of ended leases is lost with it."""
    carried_out = original(linked, *given)
    linked._left = [effect for effect in linked._left if not isinstance(effect, LeaseEnded)]
    return carried_out


def of_the_iteration_nothing(original: Any, method: Minimization, kept: Any) -> None:
    before, _, rules = kept
    original(method, (before, [None], rules))


def forgotten_with_no_event(original: Any, linked: Journaled, events: Any, *given: Any) -> Any:
    """What a successor that died as its journal was cut was to carry out."""
    seen = list(events)
    carried_out = original(linked, seen, *given)
    if not seen:
        linked._left = []
    return carried_out


def nobody(original: Any, machine: NurseryMachine, why: str, now: float) -> list[Effect]:
    return []


def forgets_who_ended(original: Any, journal: Journal, event: Event, now: float) -> None:
    if not (isinstance(event, FrameArrived) and isinstance(event.frame.message, ProcessLost)):
        original(journal, event, now)


PLANTED: dict[str, Planted] = {
    "requests and reports are not in its journal": Planted(
        wrapped(Journal, "add", unless(LeaseRequest, Progress)), 60, "I1 I4 I5 I20"),
    "its successor counts its notes anew": Planted(wrapped(CoordinatorPhantom, "take_again", as_new), 60, "I20"),
    "what was told since the cut is lost": Planted(wrapped(CoordinatorPhantom, "take_again", nothing_since), 60, "I20"),
    "rows are written again": Planted(wrapped(CoordinatorPhantom, "perform", written_again), 200, "I4"),
    "its links begin anew": Planted(wrapped(Journaled, "take_again", with_new_links), 60, "I5 I20"),
    "leases that have ended are not told": Planted(wrapped(Journaled, "take_again", without_ends), 400, "I1 I4 I20"),
    "an iteration of L-BFGS begins anew": Planted(
        wrapped(Minimization, "__setstate__", of_the_iteration_nothing), 60, "TypeError", of="sandblaster"),
    "what was left is lost with a successor that dies at once": Planted(
        wrapped(Journaled, "take_again", forgotten_with_no_event), 400, "I3 I5 I6 I20"),
    "nobody succeeds it": Planted(wrapped(NurseryMachine, "_on_coordinator_lost", nobody), 20, "I5"),
    "deaths are not in its journal": Planted(wrapped(Journal, "add", forgets_who_ended), 100, "I5 I20"),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in PLANTED if deep.wanted or PLANTED[name].within <= 100])
def test_a_planted_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = PLANTED[name]
    catch(planted, monkeypatch, mortal(planted.of, planted.machines))
