"""Mistakes in what makes a run outlive its coordinator's machine are caught from outside, as others are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from squall.protocol import backup, copied
from squall.protocol.deputies import Deputed, Deputies
from squall.protocol.deputy import Deputy
from squall.protocol.deputy_staffing import DeputyStaffing
from squall.protocol.effects import Apply, Effect, Send, StartMember
from squall.protocol.evaluations import Evaluations
from squall.protocol.machine_staffing import MachineStaffing
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.nursery import NurseryMachine, Redirect
from squall.protocol.nursery_messages import Leads, Placed, StartProcess
from squall.protocol.since import Since
from squall.sim.proof.backed import deputed
from squall.sim.proof.soak import verdict
from tests import deep
from tests.sim.test_planted_faults import Planted, catch, wrapped


def forgets_its_vote(original: Any, nursery: NurseryMachine, *given: Any) -> list[Effect]:
    nursery._votes.clear()
    return original(nursery, *given)


def at_half(original: Any, deputy: Deputy, *given: Any) -> list[Effect]:
    effects = original(deputy, *given)
    follow = len(deputy._follow)
    if follow and not deputy._leads and 2 * follow == len(deputy._coordinator.deputies.voters):
        return [*effects, *deputy._lead()]
    return effects


def leads_at_once(original: Any, deputy: Deputy, now: float) -> list[Effect]:
    effects = original(deputy, now)
    asks = any(isinstance(effect, Send) for effect in effects)
    return deputy._lead() if asks and not deputy._leads else effects


def starts_before(original: Any, nursery: NurseryMachine, sender: Node, message: Any, now: float) -> list[Effect]:
    found = original(nursery, sender, message, now)
    if isinstance(message, StartProcess) and sender.role == "deputy":
        nursery._behind.clear()
        return [StartMember(COORDINATOR, None, sender)]
    return found


def redirects_nobody(original: Any, nursery: NurseryMachine, *given: Any) -> list[Effect]:
    return [effect for effect in original(nursery, *given) if not isinstance(effect, Redirect)]


def tells_nobody(original: Any, staffing: DeputyStaffing, now: float, effects: list[Effect]) -> None:
    original(staffing, now, effects)
    effects[:] = [each for each in effects if not (isinstance(each, Send) and isinstance(each.message, Placed))]


def counts_those_that_are_there(original: Any, staffing: DeputyStaffing, now: float, effects: list[Effect]) -> None:
    original(staffing, now, effects)
    leads = [each for each in effects if isinstance(each, Send) and isinstance(each.message, Leads)]
    for each in leads:
        effects[effects.index(each)] = Send(each.to, Leads(len(staffing._placing.rooms)))


def stays_on_one_that_leaves(original: Any, staffing: DeputyStaffing, now: float, effects: list[Effect]) -> None:
    leaving, staffing._placing.leaving = staffing._placing.leaving, {}
    original(staffing, now, effects)
    staffing._placing.leaving.update(leaving)


def loses_no_machine(
    original: Any, staffing: MachineStaffing, machine: int, why: str, *given: Any, **named: Any
) -> None:
    if not why.startswith("the coordinator was there"):
        original(staffing, machine, why, *given, **named)


def without_asking(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Deputies, "parted", property(lambda deputies: bool(deputies.parting)))


def always_leads(original: Any, deputies: Deputies, node: Node, effects: list[Effect]) -> None:
    original(deputies, node, effects)
    if deputies.whole and not any(isinstance(each, Deputed) for each in effects):
        effects.append(Deputed(True))


FAULTS = {
    "of two machines the second is said to go on": Planted(wrapped(Deputies, "kept", always_leads), 60, "I25"),
    "a deputy leads and nobody follows it": Planted(wrapped(Deputy, "_look", leads_at_once), 20, "I25 I12"),
    "a nursery forgets how it has voted": Planted(
        wrapped(NurseryMachine, "_on_message", forgets_its_vote), 60, "I25 I12"),
    "a coordinator parts with its deputy and asks nobody": Planted(without_asking, 40, "I25"),
    "a deputy leads where half of the machines follow it": Planted(wrapped(Deputy, "on", at_half), 40, "I25"),
    "the record does not wait for the deputy": Planted(
        lambda patch: patch.setattr(copied, "RECORDED", ()), 20, "I26 I20 I10"),
    "a deputy keeps no record": Planted(lambda patch: patch.setattr(backup, "REPEATED", (Apply,)), 20, "I26"),
    "a coordinator starts before its deputy has ended": Planted(
        wrapped(NurseryMachine, "_on_message", starts_before), 200, "I24 I26"),
    "processes are not told where the coordinator is": Planted(
        wrapped(NurseryMachine, "on", redirects_nobody), 20, "I5"),
    "nurseries are not told where the coordinator is": Planted(
        wrapped(DeputyStaffing, "_on_moved", tells_nobody), 20, "I5"),
    "a machine that joins gets the number of another": Planted(
        wrapped(DeputyStaffing, "_on_moved", counts_those_that_are_there), 20, "I12"),
    "the machine of the coordinator before is not lost": Planted(
        wrapped(MachineStaffing, "_on_machine_lost", loses_no_machine), 20, "I5 AssertionError KeyError"),
}  # fmt: skip


@pytest.mark.parametrize("name", deep.sweep(list(FAULTS), 1))
def test_a_planted_fault_of_deputies_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    catch(FAULTS[name], monkeypatch, map(deputed, itertools.count()))


FOUND = {  # in soaks, each by the world that broke
    2808096478: Planted(wrapped(DeputyStaffing, "_on_moved", stays_on_one_that_leaves), 1, "I5"),
    2808094591: Planted(wrapped(Since, "filled", lambda original, since, covers, losses: covers), 1, "I4"),
}


@pytest.mark.parametrize("seed", deep.sweep(list(FOUND), 1))
def test_what_a_soak_has_found_is_caught_again(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    catch(FOUND[seed], monkeypatch, [deputed(seed)])


@deep.only
def test_weights_that_were_kept_on_a_lost_machine_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluates: dict[str, Any] = {"keeps": True, "evaluate": True, "evaluate_every_s": 0.05, "epochs": 3, "machines": 3}
    worlds = (replace(deputed(seed), **evaluates) for seed in itertools.count(60))
    catch(Planted(wrapped(Evaluations, "moved", lambda *given: None), 80, "I9"), monkeypatch, worlds)


@pytest.mark.parametrize("seed", deep.sweep(range(50), 3))
def test_a_world_with_a_deputy_holds(seed: int) -> None:
    found = verdict(deputed(seed))
    assert not found.error, str(found)
