"""Mistakes in what makes shards outlive their machines are caught from outside, as those of `test_planted_faults`."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from squall.protocol.apart import Apart
from squall.protocol.backup import Backup
from squall.protocol.closing import Closing
from squall.protocol.copied import Attach, Copied
from squall.protocol.copies import Copies
from squall.protocol.copy_messages import CopyKept
from squall.protocol.deputy_staffing import DeputyStaffing
from squall.protocol.effects import AddPortions, Apply, CalculateVectors, Effect, Payload, Send, StartMember, Transmit
from squall.protocol.events import CopyKnown, Event
from squall.protocol.link import Linked
from squall.protocol.machine_staffing import MachineStaffing
from squall.protocol.messages import Parcel
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.nursery import NurseryMachine
from squall.protocol.nursery_messages import StartProcess
from squall.protocol.parcels import Parcelled
from squall.protocol.snapshot_rounds import SnapshotRounds
from squall.protocol.staffing import Staffing
from squall.protocol.succession import Journaled
from squall.sim.proof.backed import backed, deputed
from squall.sim.proof.faults import Lie, Partition, Role
from squall.sim.proof.phantoms import ShardPhantom
from squall.sim.proof.soak import rebuilt, verdict
from squall.strategies.work import BatchMethod
from tests import deep
from tests.sim.test_planted_faults import Planted, catch, wrapped


def not_waited_for(original: Any, copied: Copied, effects: list[Effect]) -> list[Effect]:
    if copied._backup is not None and copied._queued is None:
        copied._has = copied._number
    return original(copied, effects)


def left_out(*kinds: type[Effect]) -> Any:
    def without(original: Any, backup: Backup, now: float) -> list[Effect]:
        return [effect for effect in original(backup, now) if not isinstance(effect, kinds)]

    return wrapped(Backup, "_enter", without)


def taken_twice(original: Any, backup: Backup, now: float) -> list[Effect]:
    if backup.copied is not None and backup._entries:
        return [effect for effect in original(backup, now) for _ in range(1 + isinstance(effect, Apply))]
    return original(backup, now)


def numbers_brought_late(original: Any, copied: Copied, effects: list[Effect]) -> list[Effect]:
    """When the message leaves, and not when it was to leave."""
    found = original(copied, effects)
    return [
        msgspec.structs.replace(each, again=False) if isinstance(each, Transmit) and each.payload is not None else each
        for each in found if not isinstance(each, Attach)
    ]  # fmt: skip


def before_it_has_ended(original: Any, nursery: NurseryMachine, sender: Node, message: Any, now: float) -> list[Effect]:
    if isinstance(message, StartProcess) and message.ends is not None:
        return [StartMember(message.node, message.first, message.ends)]
    return original(nursery, sender, message, now)


def what_lies_there(original: Any, copied: Copied, event: Event, effects: list[Effect]) -> list[Effect]:
    copied._unheard.clear()
    return effects


def everybody_believed(original: Any, staffing: MachineStaffing, *given: Any) -> None:
    original(staffing, *given[:4])


def whole_at_once(original: Any, backup: Backup, whole: bool, now: float) -> list[Effect]:
    said, *_ = original(backup, True, now)
    return [said, Send(COORDINATOR, CopyKept())]


def without_fetched(original: Any, phantom: ShardPhantom, *given: Any) -> Any:
    *numbers, _ = original(phantom, *given)
    return *numbers, {}


def all_or_nothing(original: Any, copied: Copied, event: CopyKnown, now: float) -> list[Effect]:
    return original(copied, event, now) if event.size else []


def if_it_died(original: Any, staffing: Staffing, shard: Node, why: str, now: float, effects: list[Effect]) -> None:
    if why:
        original(staffing, shard, why, now, effects)


FAULTS = {
    "what a shard says does not wait for its backup": Planted(wrapped(Copied, "_keep_back", not_waited_for), 60, "I23"),
    "a backup makes no updates": Planted(left_out(Apply), 60, "I23 I6"),
    "a backup makes updates twice": Planted(wrapped(Backup, "_enter", taken_twice), 100, "I2 I6"),
    "a backup takes over that has the first part of a copy": Planted(
        wrapped(Backup, "_taken", whole_at_once), 160, "I6 I5"),
    "numbers do not travel to backups": Planted(wrapped(Copied, "_brought", lambda *given: None), 100, "I6"),
    "numbers are brought to their place as the message leaves": Planted(
        wrapped(Copied, "_keep_back", numbers_brought_late), 100, "I6 AssertionError I28"),
    "a shard starts before its backup has ended": Planted(
        wrapped(NurseryMachine, "_on_message", before_it_has_ended), 60, "I24"),
    "what was sent from another machine is sent again from this one": Planted(
        wrapped(Copied, "_settle_answers", what_lies_there), 100, "I6 I3 I7"),
    "a snapshot waits for a file that is gone with its machine": Planted(
        wrapped(SnapshotRounds, "begin_anew", lambda *given: None), 160, "I5 I1"),
    "a shard waits for a backup that has died": Planted(
        wrapped(Copies, "lost", lambda *given: None), 100, "I5 KeyError"),
    "a shard waits for a backup that could not be given all": Planted(
        wrapped(Copied, "_on_known", all_or_nothing), 200, "I5"),
    "a machine that leaves takes its shards with it": Planted(wrapped(Staffing, "_take_over", if_it_died), 60, "I5"),
    "nobody is told where a shard goes on": Planted(wrapped(Copies, "told", lambda *given: []), 100, "I5"),
}  # fmt: skip


@pytest.mark.parametrize("name", deep.sweep(list(FAULTS), 1))
def test_a_planted_fault_of_copies_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    catch(FAULTS[name], monkeypatch, map(backed, itertools.count()))


OF_VECTORS = {
    "a backup combines no vectors": Planted(left_out(CalculateVectors), 30, "I23 I6"),
    "a backup adds no gradients": Planted(left_out(AddPortions), 30, "I23 I6 I4"),
    "numbers do not travel to backups": Planted(wrapped(Copied, "_brought", lambda *given: None), 30, "I6"),
    "what a shard says does not wait for its backup": Planted(wrapped(Copied, "_keep_back", not_waited_for), 30, "I23"),
}


@pytest.mark.parametrize("name", deep.sweep(list(OF_VECTORS), 1))
def test_a_planted_fault_of_copies_of_vectors_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = map(backed, itertools.count())
    catch(OF_VECTORS[name], monkeypatch, (world for world in worlds if isinstance(world.recipe.work, BatchMethod)))


OF_CORRECTIONS = {
    "a backup does not keep what replicas fetch": Planted(left_out(Attach), 60, "I27"),
    "a backup is not given what replicas have fetched": Planted(
        wrapped(ShardPhantom, "whole", without_fetched), 60, "I27"),
}  # fmt: skip


@pytest.mark.parametrize("name", deep.sweep(list(OF_CORRECTIONS), 1))
def test_a_planted_fault_of_copies_that_correct_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = (replace(backed(seed), strategy="compensated") for seed in itertools.count())
    catch(OF_CORRECTIONS[name], monkeypatch, (world for world in worlds if world.machines > 1))


def of_no_part(original: Any, shard: Parcelled, sender: Node, message: Any) -> Payload | None:
    return None if isinstance(message, Parcel) else original(shard, sender, message)


def as_of_the_first(original: Any, copied: Copied, payload: Payload) -> bool:
    return payload.owner in copied._beside


def where_they_were(original: Any, apart: Apart, node: Node, address: str, shards: Any) -> list[Effect]:
    return list(original(apart, node, address, ()))


OF_PARTS = {
    "what parts bring does not travel to backups": Planted(wrapped(Parcelled, "brings", of_no_part), 60, "I6"),
    "what a part has brought lies on its machine": Planted(wrapped(Copied, "_lies_beside", as_of_the_first), 60, "I6"),
    "parts that start call a shard where it was": Planted(wrapped(Apart, "start", where_they_were), 60, "I5"),
    "parts that are there call a shard where it was": Planted(
        wrapped(Staffing, "_renew_apart", lambda *given: None), 60, "I5"),
}  # fmt: skip


@pytest.mark.parametrize("name", deep.sweep(list(OF_PARTS), 1))
def test_a_planted_fault_of_copies_with_parts_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    catch(OF_PARTS[name], monkeypatch, (world for world in map(backed, itertools.count()) if world.parts > 1))


def waited_for_no_more(original: Any, copied: Copied) -> list[Effect]:
    released = [effect for _, effect in copied._held]
    copied._alone()
    return released


def what_the_coordinator_hears(original: Any, copied: Copied, effects: list[Effect]) -> list[Effect]:
    """Leaves, of a shard that has refused its backup, whatever that has."""
    found: list[Effect] = original(copied, effects)
    if not copied._refused:
        return found
    leave = [each for _, each in copied._held if isinstance(each, Transmit) and each.to == COORDINATOR]
    copied._held = deque(each for each in copied._held if each[1] not in leave)
    return found + leave


def told_by_number(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Copied, "_tell_coordinator", Linked._tell_coordinator)
    wrapped(Copied, "_keep_back", what_the_coordinator_hears)(patch)


def by_the_old_deadline(patch: pytest.MonkeyPatch) -> None:
    anew = lambda closing, now, effects: closing._snapshots.begin_anew(closing._ledger(), effects)  # noqa: E731
    patch.setattr(Closing, "_snapshot_anew", anew)


def held_once_more(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Copied, "_first", property(lambda copied: 0, lambda copied, count: None), raising=False)


FOUND = {
    "a deputy that was refused could go on without what the coordinator had let others hear since": (
        replace(deputed(25), faults=(Lie(141, Role("deputy")), Partition(146, 3.33, 0, None))),
        wrapped(Copied, "_refuse_backup", waited_for_no_more), "I26"),
    "a shard that had refused a process was believed on another machine": (
        rebuilt(668, kind="copies", faults=[8], replicas=2, examples=7, epochs=1, machines=2),
        wrapped(MachineStaffing, "_on_machine_lost", everybody_believed), "I5"),
    "a shard said of its refused backup, under a number that this gave to its next message as it went on": (
        rebuilt(
            2614104126, kind="copies", faults=[1, 4, 5, 7, 10, 12, 15], examples=13, epochs=1, parts=1, keeps=False),
        told_by_number, "I5"),
    "a snapshot that was begun anew was waited for as long as the one before had time": (
        rebuilt(2700001367, kind="copies", faults=[2, 5, 6, 11, 12], examples=13, epochs=1),
        by_the_old_deadline, "I8"),
    "what a coordinator had let go and not sent was held once more, behind what came later": (
        deputed(2710000574), held_once_more, "I28"),
    "answers that were held did not know what was lost": (
        rebuilt(759, kind="copies", faults=[1, 6, 7], examples=13, epochs=1, machines=1, parts=1),
        lambda patch: patch.setattr(Copied, "_reduce", Journaled._reduce), "I7"),
    "a coordinator whose deputy died forgot the machine that it was parting with that one for": (
        rebuilt(2612102306, kind="deputies", faults=[3, 5, 9], examples=31, epochs=2),
        wrapped(DeputyStaffing, "_lose", lambda *given: None), "I5"),
}  # fmt: skip


@pytest.mark.parametrize("what", deep.sweep(list(FOUND), 2))
def test_what_was_wrong_with_copies_once(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, again, broken = FOUND[what]
    assert verdict(world).error == ""
    again(monkeypatch)
    assert verdict(world, self_checks=False).invariant == broken


@pytest.mark.parametrize("seed", deep.sweep(range(40), 4))
def test_a_world_with_copies_holds(seed: int) -> None:
    found = verdict(backed(seed))
    assert not found.error, str(found)
