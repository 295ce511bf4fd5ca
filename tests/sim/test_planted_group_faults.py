"""Mistakes in all-reduce's machines are caught from outside, as those of `test_planted_faults`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from squall.protocol.collective import coordinator as coordinators
from squall.protocol.collective import tries
from squall.protocol.collective.coordinator import CollectiveCoordinator
from squall.protocol.collective.messages import ShowWeights
from squall.protocol.collective.replica import CollectiveReplica
from squall.protocol.collective.rounds import Round, Rounds
from squall.protocol.effects import Effect, Expect, Send
from squall.protocol.evaluations import Evaluations
from squall.protocol.events import Event, GroupJoined, StepTaken
from squall.protocol.frames import Message
from squall.protocol.machine import Refusal
from squall.protocol.messages import Lease, Skip, SnapshotPiece, Stats
from squall.protocol.nodes import Node
from squall.protocol.snapshot_rounds import SnapshotRounds
from squall.sim.proof import share_phantoms
from squall.sim.proof.chaos import ALL_REDUCE, DIVIDED
from tests import deep
from tests.sim.test_planted_faults import Planted, catch, worlds, wrapped


def by_the_first(original: Any, rounds: Rounds) -> list[Round]:
    return rounds._count_upto(rounds.newest)


def by_all(original: Any, rounds: Rounds) -> list[Round]:
    return rounds._count_upto(min(rounds._finished.values(), default=rounds.counted))


def nothing(original: Any, rounds: Rounds) -> Sequence[Lease]:
    rounds.open.clear()
    return []


def at_once_theirs(original: Any, coordinator: CollectiveCoordinator, now: float, effects: list[Effect]) -> None:
    """Who is to get weights is taken for one that has them."""
    original(coordinator, now, effects)
    for node in coordinator.members.live:
        coordinator.rounds.finished(node, coordinator.rounds.newest)


def the_first_member(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CollectiveCoordinator, "_source", property(lambda coordinator: min(coordinator.members.live)))


def whatever_is_under_way(patch: pytest.MonkeyPatch) -> None:
    quiet = property(lambda coordinator: coordinator.members.settled and bool(coordinator.members.live))
    patch.setattr(CollectiveCoordinator, "_quiet", quiet)


def to_members_too(original: Any, coordinator: CollectiveCoordinator, effects: list[Effect]) -> None:
    original(coordinator, effects)
    coordinator._released.update(coordinator.members.live)
    coordinator._see_off_released(effects)


def of_before(original: Any, replica: CollectiveReplica, event: Event, effects: list[Effect]) -> None:
    """A newcomer that has got weights goes on counting from its own."""
    examples = replica._examples
    original(replica, event, effects)
    if isinstance(event, GroupJoined):
        replica._examples = examples


def told_all_the_same(original: Any, coordinator: CollectiveCoordinator, effects: list[Effect]) -> None:
    for each in coordinator.rounds.open.values():
        for node, stats in each.told.items():
            coordinator._note_stats(node, stats, effects)
        each.told.clear()
    original(coordinator, effects)


def taken_for_trained(original: Any, rounds: Rounds, node: Node, skip: Skip) -> None:
    """What a script leaves out is told of as trained, should its replica not live to tell itself."""


def asked_in_vain(original: Any, evaluations: Evaluations, source: Node, *given: Any) -> None:
    """The death of who was to show its weights is not noticed."""
    evaluations._source = source


def torn_weights_too(original: Any, replica: CollectiveReplica, message: Message) -> bool:
    return bool(original(replica, message)) or (isinstance(message, ShowWeights) and not replica._waits)


def of_the_step_before(original: Any, replica: CollectiveReplica, event: Event, effects: list[Effect]) -> None:
    """Who has moved a share and not gathered the others' weights yet says that it has not moved."""
    clock = replica.clock
    original(replica, event, effects)
    if isinstance(event, StepTaken) and replica._divided:
        replica.clock = clock


def by_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CollectiveCoordinator, "_writers", property(lambda coordinator: [coordinator._source]))


def once(original: Any, snapshots: SnapshotRounds, writers: Sequence[Node], effects: list[Effect]) -> None:
    """Members that divide the state anew are not asked for their new shares of the snapshot that is under way."""
    if snapshots.under_way:
        snapshots._shards = writers
    else:
        original(snapshots, writers, effects)


def own_share_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(share_phantoms, "held_by", lambda member, bounds: set(range(*bounds[member : member + 2])))


def also_a_newcomers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(share_phantoms, "has", lambda held, clock, wanted, formed: held if clock >= wanted - 1 else set())


def of_who_is_up_to_date(patch: pytest.MonkeyPatch) -> None:
    """Who is one step behind is not given the gradients of it."""
    patch.setattr(share_phantoms, "has", lambda held, clock, wanted, formed: held if clock == wanted else set())


def nobody_tries_again(original: Any, coordinator: CollectiveCoordinator, *given: Any) -> None:
    """A group that breaks is left to the nursery's word of a death."""


def newcomers_first(original: Any, rounds: Rounds, node: Node, clock: int, stats: Stats) -> None:
    if clock != rounds.clock_of(node) + 1:
        raise Refusal("it was to do another round")
    original(rounds, node, clock, stats)


def left_aside(original: Any, evaluations: Evaluations, effects: list[Effect]) -> None:
    """What has come from another machine is not put where the evaluator reads."""
    original(evaluations, effects)
    sent = effects[-1] if effects else None
    if isinstance(sent, Send) and sent.payload is not None:
        effects[-1] = Send(sent.to, sent.message)


def disbelieved(original: Any, coordinator: CollectiveCoordinator, node: Node) -> None:
    original(coordinator, node)
    coordinator._gone = 0


def in_their_own_order(patch: pytest.MonkeyPatch) -> None:
    """The coordinator takes parts of a snapshot in another order than that of the members."""
    patch.setattr(coordinators, "spread", lambda machines: list(range(len(machines))))


def at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tries, "PAUSE_S", 0.0)


def of_the_newest_alone(original: Any, rounds: SnapshotRounds, writer: Node, piece: SnapshotPiece) -> bool:
    if piece.number < rounds.newest:
        raise Refusal("nobody waits for it any more")
    return bool(original(rounds, writer, piece))


def of_the_next_alone(original: Any, replica: CollectiveReplica, event: Event, now: float) -> list[Effect]:
    """Loaders do not hear of rounds that are dealt further ahead."""
    effects = original(replica, event, now)
    return [effect for effect in effects if not (isinstance(effect, Expect) and replica._turns)]


DIVIDED_ONES: dict[str, Planted] = {
    "who sends a piece of a snapshot that was asked for again is refused": Planted(
        wrapped(SnapshotRounds, "wants", of_the_newest_alone), 200, "I12", machines=2),
    "weights are shown that are of two rounds": Planted(
        wrapped(CollectiveReplica, "_can", torn_weights_too), 400, "I6"),
    "a share that has moved is told of as one that has not": Planted(
        wrapped(CollectiveReplica, "_on_answer", of_the_step_before), 50, "I7"),
    "one member writes a snapshot for all": Planted(by_one, 50, "I15"),
    "shares of a snapshot are not asked for again": Planted(wrapped(SnapshotRounds, "ask_again", once), 400, "I5 I8"),
    "parts of a snapshot are in another order than the members": Planted(in_their_own_order, 400, "I6"),
    "who says that a share is lost is not believed": Planted(
        wrapped(CollectiveCoordinator, "_forget", disbelieved), 400, "I5"),
    "nobody has a second copy": Planted(own_share_alone, 50, "I15"),
    "a newcomer's state is taken for that of a member who is one round behind": Planted(
        also_a_newcomers, 400, "I6 I15"),
    "who is one round behind is taken for a newcomer": Planted(of_who_is_up_to_date, 400, "I5"),
}  # fmt: skip


PLANTED: dict[str, Planted] = {
    "a group that breaks without a death is waited for": Planted(
        wrapped(CollectiveCoordinator, "_on_broken", nobody_tries_again), 50, "I5"),
    "members try again at once, where links take a second to come back": Planted(at_once, 50, "I5"),
    "a round counts when the first member has finished it": Planted(wrapped(Rounds, "count", by_the_first), 2000, "I1"),
    "what some survivors have finished is dealt again": Planted(wrapped(Rounds, "settle", by_all), 100, "I7"),
    "what no survivor has finished is not dealt again": Planted(wrapped(Rounds, "give_back", nothing), 50, "I1"),
    "a newcomer is taken for one that has the weights": Planted(
        wrapped(CollectiveCoordinator, "_form", at_once_theirs), 400, "I7"),
    "the first member's weights go on, whatever they are": Planted(the_first_member, 50, "I6"),
    "a snapshot is taken while a round is under way": Planted(whatever_is_under_way, 50, "I1"),
    "members leave before the last snapshot": Planted(
        wrapped(CollectiveCoordinator, "_dismiss", to_members_too), 50, "I5", first=32000),
    "a newcomer labels the weights that it has got with its own examples": Planted(
        wrapped(CollectiveReplica, "_on_answer", of_before), 200, "I7"),
    "what was done in a round that comes to nothing is told": Planted(
        wrapped(CollectiveCoordinator, "_settle", told_all_the_same), 200, "I4"),
    "what a script has left out is told of as trained": Planted(
        wrapped(Rounds, "leaves_out", taken_for_trained), 300, "I4"),
    "a newcomer's first round is taken for a lie": Planted(wrapped(Rounds, "told", newcomers_first), 100, "I12"),
    "what another machine shows stays where it has come": Planted(
        wrapped(Evaluations, "_send", left_aside), 400, "I7"),
    "batches of rounds that are dealt ahead are not announced": Planted(
        wrapped(CollectiveReplica, "on", of_the_next_alone), 50, "I17"),
    "an evaluation waits for a replica that is gone": Planted(wrapped(Evaluations, "ask_of", asked_in_vain), 50, "I5"),
}  # fmt: skip


@pytest.mark.parametrize("name", deep.sweep([*PLANTED, *DIVIDED_ONES], 1))
def test_a_planted_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = (PLANTED | DIVIDED_ONES)[name]
    catch(
        planted,
        monkeypatch,
        worlds(DIVIDED if name in DIVIDED_ONES else ALL_REDUCE, planted.machines, first=planted.first),
    )
