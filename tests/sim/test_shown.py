"""What people are shown of a world's processes is true, and mistakes in it are caught from outside (I19)."""

from __future__ import annotations

from typing import Any

import pytest

from squall.protocol.effects import Effect, Send
from squall.protocol.events import ActivitySeen, Event
from squall.protocol.machine_staffing import MachineStaffing
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.notes import ActivityTold
from squall.protocol.nursery import NurseryMachine
from squall.protocol.nursery_messages import Activity
from squall.protocol.parcels import Parcelled
from squall.protocol.replica import Replica
from squall.protocol.replica_exchanges import ReplicaExchanges
from squall.protocol.shard import Shard
from squall.sim.proof.chaos import chaos
from squall.sim.proof.trial import Seen, Trial
from tests import deep
from tests.sim.test_planted_faults import Planted, catch, worlds, wrapped


def test_worlds_have_machines_that_tell_of_all_roles() -> None:
    missing: set[object] = {"replica", "shard", "coordinator", "evaluator", 0, 1, 2}  # roles, and machines
    for seed in range(16):
        seen: list[Seen] = []
        Trial(chaos(seed), seen.append).go()
        told = [what for _, _, what in seen if isinstance(what, ActivityTold)]
        missing -= {each.machine for each in told} | {spent.node.role for each in told for spent in each.spent}
        if not missing:
            return
    pytest.fail(f"nobody tells of {missing}")


def the_fastest(original: Any, shard: Shard) -> Node:
    return max(shard._replicas.values(), key=lambda replica: replica.clock).node


def the_slowest(original: Any, shard: Shard) -> Node:
    return min(shard._replicas.values(), key=lambda replica: replica.clock).node


def a_shard_while_it_may_compute(original: Any, replica: Replica) -> Node:
    return replica._exchanges.awaits() if replica._exchanges.missing else COORDINATOR


def no_shard_for_a_batch_that_is_tried_again(original: Any, replica: Replica) -> Node:
    exchanges = replica._exchanges
    answers = exchanges.must_wait or (exchanges.missing and not replica._hand.empty)
    return exchanges.awaits() if answers else COORDINATOR


def a_part_before_all_others(original: Any, shard: Parcelled) -> Node | None:
    named: Node | None = next(iter(shard._held), None)
    return named or original(shard)


def whatever_it_says(original: Any, staffing: MachineStaffing, nursery: Node, message: Any, *given: Any) -> None:
    if isinstance(message, Activity):
        given[-1].append(ActivityTold(nursery.index, message.spent))
    else:
        original(staffing, nursery, message, *given)


def twice(original: Any, nursery: NurseryMachine, event: Event, now: float) -> list[Effect]:
    effects: list[Effect] = original(nursery, event, now)
    return 2 * effects if isinstance(event, ActivitySeen) and isinstance(effects[0], Send) else effects


PLANTED: dict[str, Planted] = {
    "a shard names the fastest replica": Planted(wrapped(Shard, "awaits", the_fastest), 60, "I19"),
    "a shard names one of several that are behind, of which some are spare": Planted(
        wrapped(Shard, "awaits", the_slowest), 60, "I19", of="backup"),
    "a replica names a shard that has answered": Planted(
        wrapped(ReplicaExchanges, "awaits", lambda original, exchanges: exchanges._shards[0]), 60, "I19"),
    "a replica names a shard while it lacks a lease": Planted(
        wrapped(Replica, "awaits", a_shard_while_it_may_compute), 60, "I19", of="downpour, overlap"),
    "a replica that lacks weights for a batch that it tries again names the coordinator": Planted(
        wrapped(Replica, "awaits", no_shard_for_a_batch_that_is_tried_again), 200, "I19", of="downpour, overlap"),
    "a shard names a replica that lacks a part, while others hold it up": Planted(
        wrapped(Parcelled, "awaits", a_part_before_all_others), 400, "I19", machines=2),
    "a machine is believed about others' processes": Planted(
        wrapped(MachineStaffing, "_on_nursery", whatever_it_says), 60, "I19", machines=2),
    "a nursery tells of the same seconds twice": Planted(wrapped(NurseryMachine, "on", twice), 60, "I19"),
}  # fmt: skip


@pytest.mark.parametrize("name", deep.sweep(list(PLANTED), 1))
def test_a_planted_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = PLANTED[name]
    all_worlds = worlds(planted.of, planted.machines)
    parted = (world for world in all_worlds if world.parts > 1)
    catch(planted, monkeypatch, parted if "part" in name else all_worlds)
