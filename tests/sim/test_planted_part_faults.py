"""Mistakes with replicas that lie on several machines are caught; as in `test_planted_faults`."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from squall.protocol import placing
from squall.protocol.apart import Apart
from squall.protocol.collective.replica import CollectiveReplica
from squall.protocol.effects import CutGroup, Effect, MeetParts, Send, UseWeights
from squall.protocol.events import Event, MessageArrived
from squall.protocol.machine_staffing import MachineStaffing
from squall.protocol.messages import Parcel
from squall.protocol.nodes import Node
from squall.protocol.nursery_messages import PartPlace, PartsPlaced, StartProcess
from squall.protocol.parcels import Parcelled, PartMachine
from squall.protocol.staffing import Staffing
from squall.sim.proof.chaos import ALL_REDUCE
from squall.sim.proof.spread import SpreadReplicas
from tests import deep
from tests.sim.test_planted_faults import Planted, catch, worlds, wrapped


def none_are_ended(original: Any, apart: Apart, node: Node, processes: dict[Node, int], now: float) -> list[Effect]:
    return []


def at_once(original: Any, apart: Apart, slot: int) -> bool:
    return False


def not_told(original: Any, apart: Apart, *given: Any) -> list[Effect]:
    return [send for send in original(apart, *given) if not isinstance(send.message, PartsPlaced)]


def told_of_the_machine_beside(original: Any, apart: Apart, node: Node, *given: Any) -> list[Effect]:
    first, *starts = original(apart, node, *given) or [None]
    if first is None:
        return []
    places = tuple(PartPlace(place.node, place.machine + 1) for place in first.message.places)
    return [Send(node, PartsPlaced(places)), *starts]


def to_call_another_machine(original: Any, apart: Apart, *given: Any) -> list[Effect]:
    sends = original(apart, *given)
    for i, send in enumerate(sends):
        if isinstance(send.message, StartProcess):
            first = msgspec.structs.replace(send.message.first, machine=send.message.first.machine + 1)
            sends[i] = Send(send.to, StartProcess(send.message.node, first))
    return list(sends)


def parts_die_unheard(
    original: Any, staffing: Staffing, machine: int, node: Node, why: str, now: float, effects: list[Effect]
) -> None:  # fmt: skip
    if node.role == "part" and not staffing._apart._ending.get(node):
        return
    original(staffing, machine, node, why, now, effects)


def without_meeting(original: Any, replica: CollectiveReplica, event: Event, now: float) -> list[Effect]:
    return [effect for effect in original(replica, event, now) if not isinstance(effect, MeetParts)]


def uncut(original: Any, replica: CollectiveReplica, event: Event, now: float) -> list[Effect]:
    return [effect for effect in original(replica, event, now) if not isinstance(effect, CutGroup)]


def nobody_waits_for_parcels(original: Any, shard: Parcelled, replica: Node, push: Any) -> bool:
    return False


def any_parcel_will_do(patch: pytest.MonkeyPatch) -> None:
    def lacks(original: Any, shard: Parcelled, replica: Node, push: Any) -> bool:
        return original(shard, replica, push) and None in shard._brought[replica].values()

    wrapped(Parcelled, "_lacks", lacks)(patch)
    wrapped(Parcelled, "_pass_on", lambda *given: None)(patch)


def parcels_come_second(original: Any, shard: Parcelled, effects: list[Effect]) -> list[Effect]:
    """The replica has its answer, and may move its weights, before the parts beside it have theirs."""
    found = original(shard, effects)
    return sorted(found, key=lambda effect: isinstance(effect, Send) and isinstance(effect.message, Parcel))


def used_when_the_first_has_come(original: Any, part: PartMachine, event: Event, now: float) -> list[Effect]:
    before = any(part._came.values())
    effects = original(part, event, now)
    if not (isinstance(event, MessageArrived) and isinstance(event.message, Parcel)):
        return list(effects)
    return [] if before else [UseWeights(event.message.buffer)]


def shards_are_not_told_of_parts(original: Any, staffing: Staffing, node: Node, machine: int, effects: Any) -> None:
    told: list[Effect] = []
    original(staffing, node, machine, told)
    effects += [each for each in told if not (isinstance(each, Send) and each.message.node.role == "part")]


def the_first_part_waits_for_no_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SpreadReplicas, "_lags", lambda replicas, part, replica: False)


def parts_take_no_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(placing, "places_taken", lambda node, on, parts: int(node.role == "replica"))


PLANTED = {
    "the other parts of a replica that is gone go on": Planted(wrapped(Apart, "end", none_are_ended), 30, "I16"),
    "the next replica does not wait for the end of the one before": Planted(wrapped(Apart, "ends", at_once), 40, "I16"),
    "a replica does not hear of its parts": Planted(wrapped(Apart, "start", not_told), 10, "I16"),
    "a replica is told of other machines than its parts are on": Planted(
        wrapped(Apart, "start", told_of_the_machine_beside), 10, "I5"),
    "parts are told of another machine than the first is on": Planted(
        wrapped(Apart, "start", to_call_another_machine), 10, "I16"),
    "a part's death is not its replica's": Planted(
        wrapped(MachineStaffing, "_on_process_lost", parts_die_unheard), 30, "I5"),
    "parts take no room": Planted(parts_take_no_room, 30, "I10"),
    "a push is applied before all parts have brought their own of it": Planted(
        wrapped(Parcelled, "_lacks", nobody_waits_for_parcels), 10, "I6"),
    "a parcel of an earlier push is taken for one of this": Planted(any_parcel_will_do, 10, "I6"),
    "a part uses weights that have come from one shard": Planted(
        wrapped(PartMachine, "on", used_when_the_first_has_come), 30, "I16"),
    "a replica goes on before its parts have the weights that it has": Planted(
        the_first_part_waits_for_no_weights, 200, "I16"),
    "shards are not told where a new replica's parts are": Planted(
        wrapped(Staffing, "_let_in", shards_are_not_told_of_parts), 60, "I16"),
    "parts get their weights after the replica": Planted(
        wrapped(Parcelled, "_outgoing", parcels_come_second), 10, "I16"),
    "a member of a group does not meet its parts": Planted(
        wrapped(CollectiveReplica, "on", without_meeting), 10, "I16", ALL_REDUCE),
    "a member waits for another's parts as the coordinator waits for it": Planted(
        wrapped(CollectiveReplica, "on", uncut), 200, "I5", ALL_REDUCE),
}  # fmt: skip


@pytest.mark.parametrize("name", deep.sweep(list(PLANTED), 1))
def test_a_planted_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = PLANTED[name]
    catch(planted, monkeypatch, (world for world in worlds(planted.of, 2) if world.parts > 1))
