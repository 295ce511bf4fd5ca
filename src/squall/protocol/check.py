"""What must hold of a machine between two events. Tests check it after every event; an error shows the node's state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from squall.protocol.answering.replica import Answerer
from squall.protocol.closing import Phase
from squall.protocol.collective.coordinator import CollectiveCoordinator
from squall.protocol.collective.replica import CollectiveReplica
from squall.protocol.coordinator import Coordinator
from squall.protocol.evaluator import Evaluator
from squall.protocol.leases import Leases
from squall.protocol.link import Linked
from squall.protocol.loop_coordinator import LoopCoordinator
from squall.protocol.machine import Machine
from squall.protocol.messages import Stop, View
from squall.protocol.parcels import Parcelled
from squall.protocol.replica import Replica
from squall.protocol.sandblaster.coordinator import BatchCoordinator
from squall.protocol.sandblaster.portions import Portions
from squall.protocol.sandblaster.replica import BatchReplica
from squall.protocol.sandblaster.shard import BatchShard
from squall.protocol.shard import Shard

Claim = tuple[bool, str]  # holds, what was to hold


def check(machine: Linked | Machine | Leases) -> None:
    """Raise `AssertionError` with what is broken and the machine's whole state."""
    if isinstance(machine, Linked):
        _raise_for(machine, _link(machine))
        machine = machine.machine
    if isinstance(machine, Parcelled):
        _raise_for(machine, _parcelled(machine))
        machine = machine.machine
    match machine:
        case Leases():
            _raise_for(machine, _leases(machine))
        case Coordinator():
            _raise_for(machine, _coordinator(machine))
            if isinstance(machine, LoopCoordinator):
                check(machine.leases)
                _raise_for(machine, _lease_coordinator(machine))
            elif isinstance(machine, CollectiveCoordinator):
                check(machine.leases)
                _raise_for(machine, _collective_coordinator(machine))
            elif isinstance(machine, BatchCoordinator) and machine.dealer.portions is not None:
                _raise_for(machine.dealer.portions, _portions(machine.dealer.portions))
        case Replica():
            _raise_for(machine, _replica(machine), machine._exchanges)
        case Answerer():
            _raise_for(machine, _answerer(machine))
        case CollectiveReplica():
            _raise_for(machine, _collective_replica(machine))
        case Shard():
            _raise_for(machine, _shard(machine))
        case Evaluator():
            _raise_for(machine, _evaluator(machine))
        case BatchShard():
            _raise_for(machine, _batch_shard(machine))
        case BatchReplica():
            _raise_for(machine, _batch_replica(machine))


def _raise_for(subject: object, claims: Iterator[Claim], *parts: object) -> None:
    broken = [text for holds, text in claims if not holds]
    if broken:
        state = ""
        for each in (subject, *parts):
            names = getattr(type(each), "__slots__", None) or vars(each)
            state += "".join(f"\n    {name} = {getattr(each, name)!r}" for name in names)
        raise AssertionError(f"{getattr(subject, 'node', type(subject).__name__)}: {'; '.join(broken)}{state}")


def _leases(leases: Leases) -> Iterator[Claim]:
    held = [(h.lease.epoch, h.done, h.lease.stop) for h in leases.held.values()]
    to_do = sorted([*held, *leases.returned])
    yield all(start < stop <= leases.examples for _, start, stop in to_do), "held and returned ranges are not empty"
    overlaps = [(a, b) for a, b in pairwise(to_do) if a[0] == b[0] and b[1] < a[2]]
    yield not overlaps, f"held and returned ranges are disjoint: {overlaps}"
    fresh = (leases.epoch, leases.cursor)
    yield all((epoch, stop) <= fresh for epoch, _, stop in to_do), "what is held or returned was dealt before"
    dealt = leases.epoch * leases.examples + leases.cursor
    left = sum(stop - start for _, start, stop in to_do)
    yield leases.trained + left == dealt, f"trained, held and returned ({left}) are what was dealt ({dealt})"
    yield leases.returned == sorted(leases.returned), "the oldest comes back first"
    yield all(h.lease.start <= h.done for h in leases.held.values()), "a lease is trained from its start"


def _coordinator(coordinator: Coordinator) -> Iterator[Claim]:
    members, phase = coordinator.members, coordinator.phase
    live, departing = list(members.live), list(members._departing)
    slots = [node.index for node in live]
    yield len(set(slots)) == len(slots), "one live replica a slot"
    yield not set(live) & set(departing), "nobody is live and departing"
    yield not set(slots) & {node.index for node in departing}, "a slot is free before it is used again"
    yield all(node in members.live for node in members._joining), "who joins is live"
    yield phase is not Phase.ENDED or coordinator.wake_at is None, "the end sets no timers"
    yield phase is Phase.RUNNING or bool(coordinator.reason or coordinator.error), "a run ends for a reason"
    awaited = [*members._joining.values(), *members._departing.values()]
    over = phase is Phase.ENDED
    yield over or all(number > members.reached for number in awaited), "who waits for a view waits for one not seen yet"
    shown = max(awaited, default=0) <= members.number or coordinator.view_waits
    yield over or shown or members.reached < members.number, "a view that is due is shown"
    placing = coordinator._placing
    yield not placing.on.keys() & placing.waiting.keys(), "who waits for room has no place"
    yield all(machine in placing.rooms for machine in placing.on.values()), "everybody is on a machine that is there"
    yield all(placing.free(machine) >= 0 for machine in placing.rooms), "no machine has more replicas than room"
    parts = [node for node in placing.on if node.role == "part"]
    yield all(placing.whole(part) in placing.on for part in parts), "a part is a replica's that has a place"
    others = [len(placing.apart(placing.whole(part))) for part in parts]
    yield all(count == coordinator.policy.parts - 1 for count in others), "a replica has places for all its parts"


def _lease_coordinator(coordinator: LoopCoordinator) -> Iterator[Claim]:
    members = coordinator.members
    yield all(node in members.live for node in coordinator._requests), "requests come from live replicas"
    holders = [held.holder for held in coordinator.leases.held.values()]
    yield all(node in members.live or node in members._departing for node in holders), "leases are held by members"


def _collective_coordinator(coordinator: CollectiveCoordinator) -> Iterator[Claim]:
    rounds, members = coordinator.rounds, coordinator.members
    dealt = [lease.id for each in rounds.open.values() for lease in each.dealt.values() if lease is not None]
    yield sorted(dealt) == sorted(coordinator.leases.held), "what is held was dealt in a round that does not count yet"
    yield len(rounds.open) <= coordinator._ahead, f"{coordinator._ahead} rounds are dealt ahead at most"
    yield (
        all(node in coordinator._group for each in rounds.open.values() for node in each.dealt),
        "rounds are the group's",
    )
    yield not rounds.doubted, "nobody says more than can be"
    yield all(rounds.clock_of(node) <= rounds.dealt for node in members.live), "nobody is ahead of what was dealt"
    yield not (coordinator._snapshots.under_way and rounds.open), "a snapshot is taken between two rounds"
    waits = coordinator.phase is not Phase.RUNNING or members.settled or rounds.open or coordinator.view_waits
    yield bool(waits) or members.reached < members.number, "who comes is shown between two rounds"


def _collective_replica(replica: CollectiveReplica) -> Iterator[Claim]:
    yield replica._grouped or not replica._turn, "it steps in a group alone"
    busy = replica._turn is not None or replica._form is not None
    yield replica._waits == busy, "it waits for the answer to what it does in a group"
    yield busy or not any(isinstance(message, View | Stop) for message in replica._later), "views wait for that alone"
    yield replica._whole or replica._divided, "without shares its weights are of one round"
    yield not (replica._grouped and replica._form is not None), "it forms one group at a time"
    clocks = [turn.clock for turn in replica._turns]
    yield clocks == sorted(set(clocks)), "turns come in their order"
    yield not replica._grouped or replica._turn is not None or not clocks, "it does what it was given"


def _replica(replica: Replica) -> Iterator[Claim]:
    exchanges = replica._exchanges
    exchanging = exchanges.missing > 0
    yield exchanges._answers.count(None) == exchanges.missing, "missing answers are counted"
    yield exchanges.clock >= 0 or (not exchanging and replica._batch is None), "nothing happens before Welcome"
    yield exchanging or (exchanges._fetching < 0 and not exchanges.pushed.covers), "an exchange under way is awaited"
    alone = not replica.cadence.overlap and not replica._retried and not replica._stepped
    yield not (exchanging and replica._batch is not None and alone), "without overlap it computes or exchanges"
    computing = replica._batch is not None and not replica._retried and not replica._stepped
    yield not computing or exchanges._fetching != exchanges._active, "weights that are computed on are not written"
    yield exchanges.since_push > 0 or exchanges.gathered.examples == 0, "examples are behind a gradient"
    for covers in (exchanges.gathered.covers, exchanges.pushed.covers, replica._reports.covers):
        yield len({cover.lease for cover in covers}) == len(covers), "of each lease the newest cover counts"
    buffers = 2 if replica.cadence.overlap else 1
    yield {exchanges._gradient, exchanges._active} <= set(range(buffers)), f"it has {buffers} buffers of each kind"
    yield not replica._ended or (replica._batch is None and not exchanging), "it leaves with nothing under way"


def _answerer(replica: Answerer) -> Iterator[Claim]:
    yield not (replica._keeping and replica._batch is not None), "it answers, or keeps answers"
    yield replica._answered is not None or not replica._keeping, "it keeps what there is"
    yield not replica._ended or (replica._batch is None and not replica._keeping), "it leaves with nothing under way"
    yield replica._member or replica._batch is None, "nothing happens before Welcome"


def _parcelled(shard: Parcelled) -> Iterator[Claim]:
    for replica, push in shard._held.items():
        yield replica in shard._brought, f"{replica} waits for its parts"
        yield shard._lacks(replica, push), f"the push of {replica} that is held lacks a parcel"


def _shard(shard: Shard) -> Iterator[Claim]:
    live = list(shard._replicas)
    yield live == sorted(live), "replicas are in slot order"
    yield [(n.index, n.incarnation) for n in live] == [(m.slot, m.incarnation) for m in shard.view.members], "as viewed"
    waiting = [node for fetches in shard._waiting.values() for node in fetches]
    yield all(node in shard._replicas for node in waiting), "only live replicas wait"
    clocks = [replica.clock for replica in shard._replicas.values()]
    yield all(clock >= member.entry for clock, member in zip(clocks, shard.view.members)), "clocks count from the entry"
    slowest = min(clocks, default=0)
    bound = shard.rules.max_delay
    yield bound is not None or shard.rules.gather == "mean" or not waiting, "nobody waits without a bound"
    ahead = 0 if shard.rules.gather == "mean" else bound or 0
    reached = max(slowest + ahead, shard._closed)
    yield all(clock > reached for clock in shard._waiting), "who waits is too far ahead"
    yield shard._clocks._at == Counter(clocks), "clocks are counted"
    pushers = [node for pushes in shard._rounds.values() for node in pushes]
    yield all(node in shard._replicas for node in pushers), "rounds hold pushes of live replicas"
    yield all(clock > slowest for clock in shard._rounds), "a round that is complete was applied"


def _evaluator(evaluator: Evaluator) -> Iterator[Claim]:
    yield evaluator._number is not None or not evaluator._awaited, "weights are awaited for an evaluation"


def _portions(portions: Portions) -> Iterator[Claim]:
    places = [*portions._fresh, *portions._out, *portions._kept, *portions._applied]
    yield sorted(places) == list(range(len(portions.ranges))), "each portion is fresh, out, kept or applied"
    yield all(out.holders for out in portions._out.values()), "what is out has a holder"
    counted = {*portions._kept, *portions._applied}
    yield set(portions._counted) == counted, "a loss counts with its gradient"


def _batch_shard(shard: BatchShard) -> Iterator[Claim]:
    live = [(node.index, node.incarnation) for node in shard._taken]
    yield live == [(member.slot, member.incarnation) for member in shard.view.members], "replicas are as viewed"
    taken = [portion for of in shard._taken.values() for portion in of]
    yield len(set(taken)) == len(taken), "no portion is in the sum twice"


def _batch_replica(replica: BatchReplica) -> Iterator[Claim]:
    yield not (replica._computing and replica._fetching), "it computes on weights that are there"
    yield not (replica._ended and (replica._computing or replica._pushing)), "it leaves with nothing under way"


def _link(linked: Linked) -> Iterator[Claim]:
    """Links are looked at far more often than anything else, so of those that hold no text is made."""
    wakes = linked._check_at if linked._check_at is not None else float("inf")
    for node, link in linked._links.items():
        lacks = link.unacked
        if lacks and (lacks[-1][0] != link.sent or lacks[0][0] != link.sent - len(lacks) + 1):
            yield False, f"what {node} has not acknowledged is the newest"
        if link.early and min(link.early) <= link.seen + 1:
            yield False, f"early messages of {node} wait for a gap"
        if bool(lacks) != (link.resend_due is not None):
            yield False, f"what {node} lacks will be sent again"
        for due in (link.resend_due, link.ack_due):
            if due is not None and due < wakes:
                yield False, f"the link to {node} wakes the node"
