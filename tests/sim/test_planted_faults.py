"""It bites: each of these mistakes, put into a machine, is caught within so many worlds by the invariant it breaks.

The machines' own checks (`protocol.check`) are off here: the auditor has to see it from outside, and a machine that
merely knows no further does not count.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

from squall.protocol.closing import Closing, Phase
from squall.protocol.coordinator import Coordinator
from squall.protocol.effects import Apply, Effect, Payload, PublishSnapshot, Send, Term, Transmit
from squall.protocol.evaluations import Evaluations
from squall.protocol.events import Event, FrameArrived, LauncherLost, LoopLeft, MessageArrived, SnapshotWritten
from squall.protocol.frames import Frame
from squall.protocol.heartbeats import Heartbeats
from squall.protocol.leases import Leases, Limits
from squall.protocol.link import Linked
from squall.protocol.loop_coordinator import LoopCoordinator
from squall.protocol.machine_staffing import MachineStaffing
from squall.protocol.membership import Membership
from squall.protocol.messages import Cover, Evaluated, Exchange, Exchanged, ViewSeen
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.notes import EvaluationAsked, LeaseEnded
from squall.protocol.nursery import NurseryMachine
from squall.protocol.nursery_messages import Heard, Refused, Replaced, StartProcess
from squall.protocol.placing import Placing
from squall.protocol.pushed_work import PushedWork, covered
from squall.protocol.replacing import LOST_IN_A_ROW
from squall.protocol.replica import Replica
from squall.protocol.replica_exchanges import ReplicaExchanges
from squall.protocol.sandblaster.coordinator import BatchCoordinator
from squall.protocol.sandblaster.messages import Calculation
from squall.protocol.sandblaster.portions import Portions
from squall.protocol.sandblaster.shard import BatchShard
from squall.protocol.shard import Shard
from squall.protocol.shard_duties import ShardDuties, Travelling
from squall.protocol.snapshot_rounds import SILENT_S, SnapshotRounds
from squall.protocol.staffing import Staffing
from squall.sim.proof import hung, mortal
from squall.sim.proof.chaos import Chaos, chaos
from squall.sim.proof.faults import Kill, Role, Weather
from squall.sim.proof.machines import WorldMachines
from squall.sim.proof.memory import Memory, Written
from squall.sim.proof.phantoms import ShardPhantom
from squall.sim.proof.positions import restored
from squall.sim.proof.runs import SavedSnapshot
from squall.sim.proof.soak import rebuilt, verdict
from tests import deep

Patch = Callable[[pytest.MonkeyPatch], None]


class Planted(NamedTuple):
    plant: Patch
    within: int  # worlds
    caught_by: str  # the invariant; where chance decides which of several is seen first: "I1 I4"
    of: str = ""  # worlds of the strategies whose names begin so; others are not concerned
    machines: int = 1  # worlds that begin on so many, or more
    first: int = 0  # seed from which worlds are looked at: of what is seldom caught


def both(*patches: Patch) -> Patch:
    def plant(patch: pytest.MonkeyPatch) -> None:
        for each in patches:
            each(patch)

    return plant


def wrapped(owner: type, name: str, around: Callable[..., Any]) -> Patch:
    """`around(original, self, *arguments)` in the place of a method."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda self, *given, **named: around(original, self, *given, **named))

    return plant


# ---------------------------------------------------------------- links


def every_copy(original: Any, link: Linked, sender: Node, frame: Frame, now: float, effects: list[Effect]) -> None:
    if type(frame.message) is Exchange and frame.number <= link._link(sender).seen:
        link._hand_over(MessageArrived(sender, frame.message), now, effects)
    original(link, sender, frame, now, effects)


def as_they_come(original: Any, link: Linked, sender: Node, frame: Frame, now: float, effects: list[Effect]) -> None:
    """Once each, but in the order of arrival."""
    original(link, sender, Frame(0, frame.seen), now, effects)
    if frame.message is None or sender in link._forgotten:
        return
    given = link.__dict__.setdefault("given", {})
    state = link._link(sender)
    link._owe_ack(state, now)
    if (sender, frame.number) in given:
        return
    given[sender, frame.number] = None
    while (sender, state.seen + 1) in given:
        state.seen += 1
    link._hand_over(MessageArrived(sender, frame.message), now, effects)


def acknowledgements_alone(original: Any, link: Linked, now: float, effects: list[Effect]) -> None:
    for each in link._links.values():
        each.resend_due = None
    original(link, now, effects)


def never_forgotten(original: Any, link: Linked, node: Node, effects: list[Effect]) -> None:
    """By shards: the link itself drops what a process of an older view still has on its way."""
    if not isinstance(link.machine, Shard):
        original(link, node, effects)
        return
    link._link(node).unacked.clear()
    link._link(node).resend_due = None


# ---------------------------------------------------------------- payloads


def message_alone(original: Any, link: Linked, now: float, effects: list[Effect]) -> None:
    """A resend leaves its payload out, of an exchange: where hosts share memory, it is there already."""
    first = len(effects)
    original(link, now, effects)
    effects[first:] = [
        msgspec.structs.replace(each, payload=None)
        if type(each) is Transmit and each.again and of_exchange(each.payload)
        else each
        for each in effects[first:]
    ]


def of_exchange(payload: Payload | None) -> bool:
    """What is wrong with a piece of a file is seen when the file is put together, by another invariant."""
    return payload is not None and payload.kind != "piece"


def whatever_comes(original: Any, memory: Memory, payload: Payload, numbers: object) -> None:
    """A late copy is put over what is newer."""
    if of_exchange(payload):
        memory.write(payload, numbers)
    else:
        original(memory, payload, numbers)


def weights_of_now(original: Any, phantom: ShardPhantom, payload: Payload, to: Node) -> object | None:
    """What goes out again is newer than its message says."""
    if payload.kind == "weights":
        phantom.memory.write(payload, Written(phantom.version, phantom.fold))
    return original(phantom, payload, to)


# ---------------------------------------------------------------- shards


def acknowledged_before_applied(original: Any, shard: Shard, event: Event, now: float) -> list[Effect]:
    """An update is carried out with the next event."""
    effects = original(shard, event, now)
    put_off = shard.__dict__.setdefault("put_off", [])
    now_due, put_off[:] = list(put_off), [effect for effect in effects if isinstance(effect, Apply)]
    return [*now_due, *(effect for effect in effects if not isinstance(effect, Apply))]


def weights_before_apply(original: Any, shard: Shard, event: Event, now: float) -> list[Effect]:
    return sorted(original(shard, event, now), key=lambda effect: isinstance(effect, Apply))


def clocks_not_compared(original: Any, shard: Shard, sender: Node, exchange: Exchange, *given: Any) -> None:
    """Else the shard refuses what others are to notice."""
    replica = shard._replicas.get(sender)
    if replica is not None and exchange.gradient >= 0 and exchange.clock != replica.clock + 1:
        shard._move(replica, exchange.clock - 1)
    original(shard, sender, exchange, *given)


def one_more(original: Any, shard: Shard, index: int, exchanges: Any, *rest: Any, **named: Any) -> None:
    bound = exchanges.rules.max_delay
    rules = msgspec.structs.replace(exchanges.rules, max_delay=None if bound is None else bound + 1)
    original(shard, index, msgspec.structs.replace(exchanges, rules=rules), *rest, **named)


def strangers_welcome(
    original: Any, shard: Shard, sender: Node, exchange: Exchange, now: float, effects: list[Effect]
) -> None:
    if sender in shard._replicas or sender.role != "replica" or exchange.gradient < 0 or not exchange.examples:
        original(shard, sender, exchange, now, effects)
        return
    effects.append(
        Apply((Term(sender, exchange.gradient, 1.0, exchange.clock),), 1.0, exchange.clock, factors=exchange.factors)
    )
    shard.version += 1
    shard.examples += exchange.examples


def nothing_known_of_the_departed(original: Any, shard: Shard, view: Any, now: float, effects: list[Effect]) -> None:
    original(shard, view, now, effects)
    for i, effect in enumerate(effects):
        if isinstance(effect, Send) and isinstance(effect.message, ViewSeen):
            gone = tuple(msgspec.structs.replace(departed, applied={}) for departed in effect.message.departed)
            effects[i] = msgspec.structs.replace(effect, message=ViewSeen(effect.message.number, gone))


def one_early(original: Any, shard: Shard, clock: int, now: float) -> bool:
    return len(shard._rounds[clock]) >= max(1, len(shard._replicas) - 1) or original(shard, clock, now)


def at_once(original: Any, shard: Shard, replica: Any, exchange: Exchange, now: float, effects: list[Effect]) -> None:
    if exchange.clock > replica.clock:
        shard._move(replica, exchange.clock)
    shard._answer(replica, exchange, effects)
    shard._settle(now, effects)


def rates_forgotten(original: Any, shard: Shard, event: Event, now: float) -> list[Effect]:
    effects: list[Effect] = original(shard, event, now)
    return [msgspec.structs.replace(e, factors=()) if isinstance(e, Apply) else e for e in effects]


def first_steps_alone(original: Any, shard: Shard, replica: Any, exchange: Exchange, effects: list[Effect]) -> None:
    batches = exchange.batches if exchange.examples else 0
    original(shard, replica, msgspec.structs.replace(exchange, batches=batches), effects)


# ---------------------------------------------------------------- the coordinator


def leases_forgotten(original: Any, leases: Leases, ended: Any) -> None:
    pass


def leases_back_at_once(
    original: Any, coordinator: LoopCoordinator, node: Node, now: float, effects: list[Effect]
) -> Any:
    if node in coordinator.members.live:
        for ended in coordinator.leases.give_back(node):
            coordinator._close(ended, effects)
    return original(coordinator, node, now, effects)


def welcome_at_once(original: Any, members: Membership) -> list[tuple[Node, int]]:
    """Whether or not every shard knows that the one before is gone."""
    seen, members._seen = members._seen, dict.fromkeys(members._seen, members.number)
    ready: list[tuple[Node, int]] = original(members)
    members._seen = seen
    return ready


def rows_behind_the_snapshot(original: Any, coordinator: LoopCoordinator, event: Event, now: float) -> list[Effect]:
    """What ended is told when the next snapshot is there."""
    effects: list[Effect] = original(coordinator, event, now)
    put_off = coordinator.__dict__.setdefault("put_off", [])
    put_off += [effect for effect in effects if isinstance(effect, LeaseEnded)]
    effects = [effect for effect in effects if effect not in put_off]
    if any(isinstance(effect, PublishSnapshot) for effect in effects):
        effects += put_off
        put_off.clear()
    return effects


def ledger_of_the_end(original: Any, coordinator: Coordinator, *given: Any) -> None:
    coordinator._snapshots._ledger = coordinator._ledger()
    original(coordinator, *given)


def leases_since_unknown(original: Any, leases: Leases, state: dict[str, object], covers: Any) -> tuple[Any, Any]:
    _, progress = original(leases, state, covers)
    return state, progress


def departed_unknown(original: Any, shard: Shard, *given: Any) -> None:
    original(shard, *given)
    shard._gone.clear()


def patient_with_shards(original: Any, coordinator: Coordinator, now: float) -> None:
    if coordinator.phase is not Phase.SNAPSHOT:
        original(coordinator, now)


def patient_with_replicas(original: Any, coordinator: Coordinator, now: float) -> None:
    if coordinator.phase is Phase.SNAPSHOT:
        original(coordinator, now)


def arrivals_ignored(original: Any, closing: Closing, *given: Any) -> None:
    pass


def any_arrival_will_do(original: Any, rounds: SnapshotRounds, until: float) -> float:
    return max([until, *(heard + SILENT_S for heard in rounds._heard.values())])


def last_of_all(original: Any, coordinator: Coordinator, node: Node, text: str, *given: Any) -> None:
    others = {slot: None for slot in range(coordinator.policy.replicas) if slot != node.index}
    coordinator._replacing.given_up |= others
    original(coordinator, node, text, *given)


def all_awaited(original: Any, coordinator: LoopCoordinator) -> bool:
    given_up, coordinator._replacing.given_up = coordinator._replacing.given_up, {}
    may: bool = original(coordinator)
    coordinator._replacing.given_up = given_up
    return may


def evaluators_are_needed(original: Any, coordinator: Coordinator, node: Node, *given: Any) -> None:
    replacing = coordinator._replacing
    original(coordinator, node, *given)
    if node.role == "evaluator" and replacing._in_a_row.get((node.role, node.index), 0) >= LOST_IN_A_ROW:
        coordinator._fail("the evaluator is gone", given[2])


def twice_told(original: Any, leases: Leases, lease: int, upto: int, holder: Node) -> Any:
    return original(leases, lease, upto + leases.batch_size, holder)


def one_checksum_for_all(original: Any, snapshots: SnapshotRounds, shard: Node, message: Any, *given: Any) -> bool:
    first = next(iter((snapshots._answers or {}).values()), message)
    told: bool = original(snapshots, shard, msgspec.structs.replace(message, checksum=first.checksum), *given)
    return told


# ---------------------------------------------------------------- replicas


def one_buffer(original: Any, replica: Replica, *given: Any, **named: Any) -> None:
    original(replica, *given, **named)
    replica._exchanges._gradient = 0


def rhythm_lost(original: Any, replica: Replica, *given: Any, fetch: bool, **named: Any) -> None:
    original(replica, *given, fetch=fetch, **named)
    if fetch:
        replica._exchanges.since_fetch = 0


def older_weights_will_do(original: Any, replica: Replica, *given: Any) -> None:
    exchanges = replica._exchanges
    newest = max(answer.clock for answer in exchanges._answers if answer is not None)
    exchanges._answers = [answer and msgspec.structs.replace(answer, clock=newest) for answer in exchanges._answers]
    original(replica, *given)


def rates_of_the_first_batch(original: Any, work: PushedWork, *batch: Any) -> PushedWork:
    more: PushedWork = original(work, *batch)
    return msgspec.structs.replace(more, factors=work.factors) if work.batches else more


def given_up_as_done(original: Any, replica: Replica, event: Event, now: float) -> list[Effect]:
    if isinstance(event, LoopLeft) and replica._batch is not None:
        exchanges, cover = replica._exchanges, Cover(replica._batch.lease, replica._batch.stop)
        exchanges.gather(exchanges.gathered.and_none_of(cover))
    effects: list[Effect] = original(replica, event, now)
    return effects


def skips_kept_secret(original: Any, replica: Replica, effects: list[Effect]) -> None:
    replica._on_skipped(0.0, effects)


def added_to_what_was_pushed(original: Any, exchanges: ReplicaExchanges, batch: Any) -> Any:
    return msgspec.structs.replace(original(exchanges, batch), accumulate=exchanges.since_push > 0)


def told_after_one_shard(original: Any, replica: Replica, event: Event, now: float) -> list[Effect]:
    told: list[Effect] = []
    pushed = replica._exchanges.pushed.covers
    if (
        isinstance(event, MessageArrived)
        and isinstance(event.message, Exchanged)
        and not event.message.dropped
        and pushed
    ):
        replica._reports.covers = covered(replica._reports.covers, pushed)
        replica._report(now, told, at_once=True)
    return [*told, *original(replica, event, now)]


# ---------------------------------------------------------------- labels of what is measured


def labelled_by_the_ledger(original: Any, coordinator: Coordinator, message: Evaluated, *given: Any) -> None:
    """With the examples that are known when the answer comes: those of another moment."""
    weights = msgspec.structs.replace(message.weights, examples=coordinator.trained)
    original(coordinator, msgspec.structs.replace(message, weights=weights), *given)


def asked_in_secret(original: Any, evaluations: Evaluations, effects: list[Effect]) -> None:
    original(evaluations, effects)
    effects[:] = [effect for effect in effects if not isinstance(effect, EvaluationAsked)]


def every_batch_counted(original: Any, replica: Replica, *given: Any) -> None:
    """Also one that moves the shards' weights only."""
    original(replica, *given)
    replica._exchanges.examples += replica._hand.batch_size


def every_evaluation_counted(original: Any, shard: BatchShard, message: Calculation, effects: list[Effect]) -> None:
    """Also those of steps that are not accepted."""
    original(shard, message, effects)
    shard.examples = message.examples


def what_was_left_out_counted(original: Any, snapshots: SnapshotRounds, shard: Node, message: Any, *given: Any) -> bool:
    """With what the ledger calls trained."""
    examples = snapshots._ledger["trained"]
    told: bool = original(snapshots, shard, msgspec.structs.replace(message, examples=examples), *given)
    return told


def on_from_the_ledger(patch: pytest.MonkeyPatch) -> None:
    """A resumed run's shards count on from what its data position calls trained."""
    derived = property(lambda saved: restored(saved.manifest, 1, Limits()).trained)
    patch.setattr(SavedSnapshot, "examples", derived)


def counted_when_written(original: Any, shard: BatchShard, event: Event, now: float) -> list[Effect]:
    if isinstance(event, SnapshotWritten):
        taken = shard._snapshots[event.number]
        shard._snapshots[event.number] = msgspec.structs.replace(taken, examples=shard.examples)
    effects: list[Effect] = original(shard, event, now)
    return effects


# ---------------------------------------------------------------- machines


def nobody_in_their_place(
    original: Any, staffing: Staffing, node: Node, why: str, now: float, effects: list[Effect], blameless: bool
) -> None:
    """A process that is lost with its machine is not started elsewhere."""
    if blameless:
        staffing._placing.on.pop(node, None)
    else:
        original(staffing, node, why, now, effects, blameless)


def members_for_too_long(original: Any, staffing: Staffing, machine: int, *given: Any, **named: Any) -> None:
    """The leases of a lost machine's replicas are dealt again before shards know that these are gone."""
    assert isinstance(staffing, LoopCoordinator)
    nodes = [node for node in staffing._placing.there(machine) if node in staffing.members.live]
    for node in nodes:
        for ended in staffing.leases.give_back(node):
            staffing._close(ended, given[-1])
    original(staffing, machine, *given, **named)


def handed_over(original: Any, machines: WorldMachines, linked: Linked, to: Node, parcel: Any) -> None:
    """The frame of half a payload is handed over."""
    original(machines, linked, to, parcel)
    sender, (frame, payload, _) = parcel
    if of_exchange(payload):
        machines._world.post(to, FrameArrived(sender, frame))


def news_ignored(original: Any, nursery: NurseryMachine, sender: Node, message: Any, now: float) -> list[Effect]:
    effects: list[Effect] = [] if isinstance(message, Replaced) else original(nursery, sender, message, now)
    return effects


def silence_ignored(original: Any, nursery: NurseryMachine, now: float) -> list[Effect]:
    nursery._heartbeats.heard(COORDINATOR, now)
    effects: list[Effect] = original(nursery, now)
    return effects


def nothing_waited_for(original: Any, closing: Closing, now: float, effects: list[Effect]) -> None:
    if closing._moves:
        closing._end(effects)
    else:
        original(closing, now, effects)


def launcher_ignored(original: Any, nursery: NurseryMachine, event: Event, now: float) -> list[Effect]:
    effects: list[Effect] = [] if isinstance(event, LauncherLost) else original(nursery, event, now)
    return effects


def one_more_replica(original: Any, placing: Placing, machine: int) -> int:
    room: int = original(placing, machine)
    return room + 1


def own_sleep_counts(original: Any, heartbeats: Heartbeats, now: float) -> dict[Node, float]:
    if heartbeats.wake_at is not None and now >= heartbeats.wake_at:
        heartbeats.wake_at = now
    silent: dict[Node, float] = original(heartbeats, now)
    return silent


def first_piece_is_all(original: Any, travelling: Travelling) -> Any:
    return original(travelling) if travelling._start == 0 else None


def two_at_a_time(original: Any, exchanges: ReplicaExchanges, *given: Any, push: bool, **named: Any) -> None:
    exchanges.clock += push
    original(exchanges, *given, push=push, **named)


def of_a_nursery(original: Any, link: Linked, message: Any, *given: Any) -> None:
    """Whom only the coordinator hears."""
    original(link, Heard((Node("nursery", 1),)) if isinstance(message, Heard) else message, *given)


def believed_of_all(original: Any, staffing: Staffing, speaker: Node, node: Node, *given: Any) -> None:
    """Also of the coordinator's own machine."""
    accuser = speaker if staffing._machine_of(node) else COORDINATOR
    original(staffing, accuser, node, *given)


def refused_in_secret(original: Any, link: Linked, message: Any, *given: Any) -> None:
    if not isinstance(message, Refused):
        original(link, message, *given)


def heard_all_the_same(original: Any, link: Linked, node: Node, why: str, now: float, effects: list[Effect]) -> None:
    pass


# ---------------------------------------------------------------- Sandblaster


def every_answer_counts(original: Any, portions: Portions, *given: Any) -> bool:
    original(portions, *given)
    return True


def last_is_best(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("squall.protocol.evaluator.better", lambda metric, value, than: True)


def leaving_starts_nothing(original: Any, nursery: NurseryMachine, sender: Node, message: Any, now: float) -> Any:
    return [] if isinstance(message, StartProcess) and nursery._leaving else original(nursery, sender, message, now)


def spoilt_sums_used(original: Any, coordinator: BatchCoordinator, node: Node, applied: Any, effects: Any) -> None:
    if coordinator.dealer.portions is not None:
        coordinator.dealer.portions.lose(node)


PLANTED: dict[str, Planted] = {
    "duplicates are delivered": Planted(
        both(wrapped(Linked, "_receive", every_copy), wrapped(Shard, "_on_exchange", clocks_not_compared)), 20, "I2",
        of="compensated"),
    "frames are delivered as they come": Planted(
        wrapped(Linked, "_receive", as_they_come), 100, "I4", of="synchronous"),
    "a payload is not sent again": Planted(wrapped(Linked, "_check", message_alone), 100, "I6"),
    "a late payload is put over a newer one": Planted(wrapped(Memory, "receive", whatever_comes), 1000, "I6"),
    "weights are sent again as they are by then": Planted(wrapped(ShardPhantom, "outgoing", weights_of_now), 100, "I6"),
    "nothing is sent again": Planted(wrapped(Linked, "_check", acknowledgements_alone), 20, "I5"),
    "a push is acknowledged before it is applied": Planted(
        wrapped(Shard, "on", acknowledged_before_applied), 5, "I6"),
    "weights are sent before the update that they count": Planted(
        wrapped(Shard, "on", weights_before_apply), 5, "I6"),
    "the delay bound is one too wide": Planted(wrapped(Shard, "__init__", one_more), 100, "I3"),
    "a push of a replica that is not in the view is applied": Planted(
        both(wrapped(Shard, "_on_exchange", strangers_welcome), wrapped(Linked, "_forget", never_forgotten)),
        300, "I4"),
    "covers are forgotten on departure": Planted(
        wrapped(Shard, "_on_view", nothing_known_of_the_departed), 20, "I4"),
    "a round closes one replica early": Planted(wrapped(Shard, "_complete", one_early), 50, "I1 I19"),
    "a newcomer's first weights do not wait for its round": Planted(
        wrapped(Shard, "_fetch", at_once), 200, "I3", of="synchronous"),
    "a newcomer makes do with what shards sent for different rounds": Planted(
        both(
            wrapped(Replica, "_on_answered", older_weights_will_do),
            wrapped(Shard, "_on_exchange", clocks_not_compared),
        ), 300, "I3", of="averaging"),
    "a lease is forgotten on death": Planted(wrapped(Leases, "_return", leases_forgotten), 20, "I1", of="downpour"),
    "leases are dealt again before the shards' view": Planted(
        wrapped(LoopCoordinator, "_depart", leases_back_at_once), 20, "I4"),
    "a slot is used again before the shards' view": Planted(
        wrapped(Membership, "take_joined", welcome_at_once), 400, "I5 I12"),
    "a snapshot's ledger is taken after the shards": Planted(
        wrapped(Coordinator, "_on_snapshot_taken", ledger_of_the_end), 50, "I1"),
    "a snapshot does not know of leases granted while it is taken": Planted(
        wrapped(Leases, "extended", leases_since_unknown), 1000, "I4"),
    "a snapshot does not know of what the departed had trained": Planted(
        wrapped(Shard, "_on_view", departed_unknown), 100, "I4"),
    "a snapshot is there before the rows of what it holds": Planted(
        wrapped(LoopCoordinator, "on", rows_behind_the_snapshot), 20, "I4"),
    "a manifest names another file's checksum": Planted(
        wrapped(SnapshotRounds, "answered", one_checksum_for_all), 20, "I1", of="downpour"),
    "a stop waits for shards for as long as they take": Planted(
        wrapped(Coordinator, "_set_deadline", patient_with_shards), 100, "I8"),
    "a stop waits for replicas for as long as they take": Planted(
        wrapped(Coordinator, "_set_deadline", patient_with_replicas), 100, "I8"),
    "a stop does not wait for files that arrive": Planted(
        wrapped(Coordinator, "_on_arriving", arrivals_ignored), 60, "I8", machines=2, first=1200),
    "a stop waits for a silent shard while another's file arrives": Planted(
        wrapped(SnapshotRounds, "waited_for", any_arrival_will_do), 1000, "I8", machines=2),
    "a slot that is given up is the end of the run": Planted(
        wrapped(Coordinator, "_give_slot_up", last_of_all), 600, "I5"),
    "the first round waits for a slot that is given up": Planted(
        wrapped(LoopCoordinator, "_may_grant", all_awaited), 200, "I5", of="synchronous"),
    "an evaluator that keeps dying is the end of the run": Planted(
        wrapped(Coordinator, "_replace", evaluators_are_needed), 100, "I5"),
    "a batch more than reported counts as trained": Planted(wrapped(Leases, "done", twice_told), 20, "I1"),
    "a gradient buffer is used again too early": Planted(wrapped(Replica, "_exchange", one_buffer), 20, "I6"),
    "a batch that is tried again shifts the fetches": Planted(
        wrapped(Replica, "_exchange", rhythm_lost), 200, "I3", of="stale"),
    "a push counts when one shard has it": Planted(
        wrapped(Replica, "on", told_after_one_shard), 20, "I1"),
    "a shard forgets the learning rates that loops set": Planted(wrapped(Shard, "on", rates_forgotten), 40, "I6"),
    "a push has the learning rates of its first batch": Planted(
        wrapped(PushedWork, "and_batch", rates_of_the_first_batch), 40, "I6", of="downpour, push 4"),
    "an evaluation is labelled with the examples of another moment": Planted(
        wrapped(Coordinator, "_on_evaluated", labelled_by_the_ledger), 20, "I7"),
    "the record does not say which evaluation is under way": Planted(
        wrapped(Evaluations, "ask", asked_in_secret), 20, "I7"),
    "a script's values are labelled with batches that are not in its weights": Planted(
        wrapped(Replica, "_on_gradient", every_batch_counted), 50, "I7"),
    "L-BFGS weights are labelled with what was evaluated after them": Planted(
        wrapped(BatchShard, "_on_calculation", every_evaluation_counted), 30, "I7", of="sandblaster"),
    "a snapshot is labelled with what the ledger calls trained": Planted(
        wrapped(SnapshotRounds, "answered", what_was_left_out_counted), 20, "I7"),
    "a resumed run counts what was left out as trained": Planted(on_from_the_ledger, 50, "I7", of="downpour"),
    "an L-BFGS snapshot is labelled with what was accepted while it was written": Planted(
        wrapped(BatchShard, "on", counted_when_written), 200, "I7", of="sandblaster"),
    "nobody is told of a batch that a loop leaves out": Planted(wrapped(Replica, "_skip", skips_kept_secret), 40, "I1"),
    "the batch that a loop gives up counts as trained": Planted(wrapped(Replica, "on", given_up_as_done), 100, "I1"),
    "what follows a batch that is left out is added to the last push": Planted(
        wrapped(ReplicaExchanges, "computation", added_to_what_was_pushed), 40, "I2 I7", of="downpour, push 4"),
    "a further step on a batch is acknowledged and not applied": Planted(
        wrapped(Shard, "_apply_each", first_steps_alone), 40, "I1", of="downpour"),
    "a lost machine's late push is applied": Planted(
        wrapped(MachineStaffing, "_on_machine_lost", members_for_too_long), 100, "I4", of="downpour", machines=2),
    "the loss of a machine's shards is not noticed": Planted(
        wrapped(Closing, "_go_back", lambda *given: None), 200, "I5", of="downpour", machines=2),
    "a machine's replicas are not replaced": Planted(
        wrapped(Staffing, "_replace", nobody_in_their_place), 100, "I10", of="downpour",
        machines=2),
    "more replicas start on a machine than it has room for": Planted(
        wrapped(Placing, "free", one_more_replica), 100, "I10", machines=2),
    "half a payload is taken for whole": Planted(
        wrapped(WorldMachines, "tear", handed_over), 300, "I6", machines=2),
    "a replaced machine goes on": Planted(wrapped(NurseryMachine, "_on_message", news_ignored), 500, "I11", machines=2),
    "a machine that hears nothing of the coordinator goes on": Planted(
        wrapped(NurseryMachine, "_on_time", silence_ignored), 300, "I11", machines=2),
    "a run moves before its last snapshot is there": Planted(
        wrapped(Closing, "_close_with_snapshot", nothing_waited_for), 300, "I13", machines=2),
    "a machine waits for a first machine that is gone whole": Planted(
        wrapped(NurseryMachine, "on", launcher_ignored), 300, "I14", machines=2),
    "a coordinator that stood still takes machines for lost": Planted(
        wrapped(Heartbeats, "silent", own_sleep_counts), 300, "I5", machines=2),
    "a shard's file is taken for whole when its first piece is there": Planted(
        wrapped(Travelling, "next_piece", first_piece_is_all), 20, "I1", machines=2),
    "nobody is told of a process that was refused": Planted(
        wrapped(Linked, "_tell_coordinator", refused_in_secret), 300, "I5", machines=2),
    "who was refused is heard all the same": Planted(
        wrapped(Linked, "_refuse", heard_all_the_same), 100, "I12", of="downpour", machines=2),
    "a clock counts more than there is an answer for": Planted(
        wrapped(ReplicaExchanges, "begin", two_at_a_time), 20, "I12", of="downpour"),
    "a shard says that it hears a nursery": Planted(
        wrapped(Linked, "_tell_coordinator", of_a_nursery), 300, "I12", machines=2),
    "a member is believed of the coordinator's machine": Planted(
        wrapped(MachineStaffing, "_on_refused", believed_of_all), 600, "I12", machines=2),
    "shards do not know where a process was started": Planted(
        wrapped(Staffing, "_let_in", lambda *given: None), 100, "I12", machines=2),
    "a portion counts as often as it is computed": Planted(
        wrapped(Portions, "done", every_answer_counts), 30, "I2", of="sandblaster"),
    "a sum that a dead replica has spoilt is used": Planted(
        wrapped(BatchCoordinator, "_take_back", spoilt_sums_used), 30, "I2", of="sandblaster", first=860),
    "the evaluator keeps the weights that it has measured last": Planted(last_is_best, 20, "I9"),
}  # fmt: skip


def without_hangs(seed: int, coordinators_die: bool = False) -> Chaos:
    """Both come on top, and may let another invariant fail first (`test_hangs`, `test_coordinators`)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hung, "WATCHED", 0.0)
        if not coordinators_die:
            patch.setattr(mortal, "deaths_of_coordinators", lambda *given: ())
        return chaos(seed)


def worlds(of: str, machines: int = 1, coordinators_die: bool = False, first: int = 0) -> Iterator[Chaos]:
    all_of_them = (without_hangs(seed, coordinators_die) for seed in itertools.count(first))
    return (world for world in all_of_them if world.strategy.startswith(of) and world.machines >= machines)


SOON = [name for name, planted in PLANTED.items() if deep.wanted or planted.within <= 100]  # is caught in no time


def catch(planted: Planted, patch: pytest.MonkeyPatch, among: Iterable[Chaos] | None = None) -> None:
    """Fails if the mistake is not caught in these worlds, or in those that it is `of`."""
    planted.plant(patch)
    for world in itertools.islice(among or worlds(planted.of, planted.machines, first=planted.first), planted.within):
        found = verdict(world, self_checks=False)
        if found.error:
            assert found.invariant in planted.caught_by.split(), found.error
            return
    pytest.fail(f"{planted.within} worlds, and nobody has noticed")


@pytest.mark.parametrize("name", deep.sweep(SOON, 2))
def test_a_planted_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    catch(PLANTED[name], monkeypatch)


# ---------------------------------------------------------------- what these worlds have found


def dead_evaluators_served(original: Any, shard: ShardDuties, evaluator: Node, *given: Any) -> None:
    shard._send_weights("weights", evaluator, *given)


def left_out_though_lost(original: Any, coordinator: LoopCoordinator, lease: int, upto: int) -> int:
    held = coordinator.leases.held.get(lease)
    told = upto if held is None else held.done
    return sum(stop - start for start, stop in coordinator._skips.get(lease, ()) if told <= start < upto)


STORM = Weather(0, 100.0, loss=0.0, duplication=0.0, jitter_s=0.02)

# Mistakes that were in the protocol: a small world that shows each, the patch that makes it again, the invariant.
FOUND: dict[str, tuple[Chaos, Patch, str]] = {
    "a shard that was killed on a machine that leaves was not started again, and the last snapshot waited for it": (
        rebuilt(2611261688, faults=[4, 11], parts=1),
        wrapped(NurseryMachine, "_on_message", leaving_starts_nothing),
        "I5",
    ),
    "a batch that was left out of what a shard had lost was taken for one that a dead replica had told": (
        rebuilt(2611281827, faults=[1, 3, 4, 5, 7, 8, 9], examples=28, epochs=1, keeps=False, evaluate=False),
        wrapped(LoopCoordinator, "_left_out", left_out_though_lost),
        "I4",
    ),
    "a batch that was tried again shifted the fetches, and pushes went beyond the delay bound": (
        rebuilt(1435, faults=[0], shards=1, epochs=2, keeps=False),
        PLANTED["a batch that is tried again shifts the fetches"].plant, "I3"),
    "a newcomer's first weights were older than the rounds before its first": (
        rebuilt(439, faults=[2], replicas=2, examples=14, epochs=2),
        PLANTED["a newcomer's first weights do not wait for its round"].plant, "I3"),
    "shards that let a newcomer in at different rounds gave it weights of different rounds": (
        rebuilt(3067, faults=[0, 3, 4, 5], epochs=2),
        PLANTED["a newcomer makes do with what shards sent for different rounds"].plant, "I3"),
    "a resumed run trained again what was granted and trained while its snapshot was taken": (
        rebuilt(447, faults=[2, 4, 6, 8, 10, 11, 12], machines=1),
        PLANTED["a snapshot does not know of leases granted while it is taken"].plant, "I4"),
    "a resumed run trained again what a replica had trained that died while its snapshot was taken": (
        rebuilt(8, faults=[2, 4, 7]),
        PLANTED["a snapshot does not know of what the departed had trained"].plant, "I4"),
    "what a dead evaluator had asked for was written over its successor's weights": (
        dataclasses.replace(
            chaos(2235), faults=(STORM, Kill(36, Role("evaluator")), Kill(82, Role("evaluator"))), epochs=1, examples=8,
            evaluate=True, evaluate_every_s=0.01, notice_s=0.0, scripted=False, keeps=False),
        wrapped(ShardDuties, "_show", dead_evaluators_served), "I6"),
}  # fmt: skip


@pytest.mark.parametrize("what", FOUND)
def test_what_was_wrong_once(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, again, broken = FOUND[what]
    assert verdict(world).error == ""
    again(monkeypatch)
    found = verdict(world, self_checks=False)
    assert found.invariant == broken, found.error
