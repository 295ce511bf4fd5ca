"""Chaotic worlds of several machines: what becomes of who was on one, and that connections break as real ones do."""

from __future__ import annotations

import dataclasses

import pytest

from squall.protocol.coordinator import Coordinator
from squall.protocol.effects import End, KillMembers, Payload, Transmit
from squall.protocol.nodes import Node
from squall.protocol.notes import MachineDied, MachineLeft
from squall.protocol.nursery_messages import Replaced
from squall.protocol.policy import MachineRoom
from squall.sim.proof.chaos import Chaos, chaos
from squall.sim.proof.chaotic_machines import PULSE
from squall.sim.proof.faults import Fault, Jam, Lie, MachineComes, MachineGone, MachineLeaves, Partition, Role
from squall.sim.proof.memory import Memory
from squall.sim.proof.phantoms import Phantom
from squall.sim.proof.trial import Seen, Trial

SHARDS, EVALUATOR = (Node("shard", 0), Node("shard", 1)), Node("evaluator", 2)
R0, R1 = Node("replica", 0), Node("replica", 1)
ROOMS = (MachineRoom(0, 2, (*SHARDS, EVALUATOR, R0)), MachineRoom(1, 1, (R1,)))
AGAIN = Node("replica", 1, 1)


@dataclasses.dataclass(frozen=True)
class Placed(Chaos):
    """With machines of the test's own."""

    rooms: tuple[MachineRoom, ...] = ROOMS  # type: ignore[assignment]


QUIET = {
    **{field.name: getattr(chaos(0), field.name) for field in dataclasses.fields(Chaos)},
    "strategy": "downpour", "replicas": 2, "shards": 2, "paces": (0.01, 0.01), "epochs": 3, "machines": 2,
    "snapshot_every_s": None, "scripted": False, "breaks_at": None,
}  # fmt: skip


def seen(*faults: Fault, rooms: tuple[MachineRoom, ...] = ROOMS, **changes: object) -> tuple[Trial, list[Seen]]:
    """A world is run to its end, in which all invariants hold."""
    story: list[Seen] = []
    world = Placed(**{**QUIET, **changes, "faults": faults}, rooms=rooms)  # type: ignore[arg-type]
    return Trial(world, story.append).go(), story


def of(story: list[Seen], kind: type) -> list[tuple[float, Node | None, object]]:
    return [step for step in story if isinstance(step[2], kind)]


def test_payloads_travel_between_machines_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    travelled = set()
    incoming = Phantom.incoming

    def noted(phantom: Phantom, payload: Payload, numbers: object) -> None:
        travelled.add((payload.owner, phantom.node))
        incoming(phantom, payload, numbers)

    monkeypatch.setattr(Phantom, "incoming", noted)
    seen()
    assert travelled == {(R1, SHARDS[0]), (R1, SHARDS[1]), (R1, R1)}


def test_a_replica_whose_machine_is_gone_trains_elsewhere() -> None:
    trial, story = seen(MachineGone(60, 1))
    ((_, _, died),) = of(story, MachineDied)
    assert died == MachineDied(1, (R1,), f"nothing was heard of it for {PULSE.lost_after_s:g} s")
    assert trial.world.processes[AGAIN].home == Node("nursery", 0)
    assert trial.lives == 1


def test_without_room_a_replica_waits_for_a_machine_that_joins() -> None:
    rooms = (MachineRoom(0, 1, ROOMS[0].nodes), ROOMS[1])
    trial, _ = seen(MachineGone(60, 1), MachineComes(61, 2, 1), rooms=rooms)
    assert trial.world.processes[AGAIN].home == Node("nursery", 2)


def test_a_machine_that_was_cut_off_learns_that_it_was_replaced() -> None:
    slow = (2.0, 2.0)  # so that the run still goes on when it is back
    _, story = seen(Partition(60, 2 * PULSE.lost_after_s, 1, None), paces=slow)
    told = [now for now, _, what in of(story, Transmit) if isinstance(what.frame.message, Replaced)]  # type: ignore[attr-defined]
    ((died_at, _, _),) = of(story, MachineDied)
    ((killed_at, nursery, _),) = of(story, KillMembers)
    assert died_at < told[0] < killed_at
    assert nursery == Node("nursery", 1)


def test_a_machine_that_stays_cut_off_ends_by_itself() -> None:
    _, story = seen(Partition(60, 1000.0, 1, None))
    ((_, nursery, _),) = of(story, KillMembers)
    assert nursery == Node("nursery", 1)
    assert of(story, End)[-1][1] == nursery, "nobody else goes on by then"


def test_a_short_cut_is_repaired_as_soon_as_it_is_over() -> None:
    """By what a link sends when its peer is reached again: otherwise it would take a second."""
    trial, story = seen(Partition(60, 0.1, 1, None))
    assert not of(story, MachineDied)
    assert trial.world.now < 1.0


def test_a_machine_with_a_process_that_lies_is_lost_and_the_run_goes_on() -> None:
    trial, story = seen(Lie(60, Role("replica", 1)))
    ((_, _, died),) = of(story, MachineDied)
    assert died == MachineDied(1, (R1,), "replica-1.0 was refused: it lies")
    assert trial.lives == 1


def test_a_machine_whose_numbers_alone_come_through_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    full, slow = Jam(60, 2 * PULSE.lost_after_s, 1), (1.0, 1.0)
    assert not of(seen(full, paces=slow)[1], MachineDied)
    monkeypatch.setattr(Coordinator, "_on_heard", lambda *given: None)
    assert of(seen(full, paces=slow)[1], MachineDied)


def test_a_machine_leaves_in_order() -> None:
    trial, story = seen(MachineLeaves(60, 1))
    assert of(story, MachineLeft)
    assert not of(story, KillMembers)
    assert trial.world.processes[AGAIN].home == Node("nursery", 0)
    assert not of(story, MachineDied)


def test_half_a_payload_is_sent_again_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torn = 0
    tear = Memory.tear

    def counted(memory: Memory, *given: object) -> bool:
        nonlocal torn
        torn += tear(memory, *given)  # type: ignore[arg-type]
        return True

    monkeypatch.setattr(Memory, "tear", counted)
    for at in range(60, 100, 2):
        seen(Partition(at, 0.05, 1, None))
    assert torn
