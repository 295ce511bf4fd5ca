"""What a shard applies and answers, as its effects show it."""

import pytest

from squall.protocol.effects import Apply, End, Forget, Payload, Send, Term, WriteSnapshot
from squall.protocol.events import MessageArrived, SnapshotWritten, StopRequested
from squall.protocol.machine import Refusal
from squall.protocol.messages import (
    Cover,
    Departed,
    Exchange,
    Exchanged,
    Member,
    SnapshotTaken,
    Stop,
    TakeSnapshot,
    View,
    ViewSeen,
    Welcome,
)
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.shard import LEASES_KEPT
from tests.protocol.steps import R0, R1, R1_AGAIN, R2, answers, give, kinds, only, push, sent, shard_of, tell, view

EVALUATOR = Node("evaluator", 3)


# ---------------------------------------------------------------- each push an update


def test_each_push_is_an_update_and_is_answered_with_the_weights_after_it() -> None:
    shard = shard_of(R0, R1)
    effects = tell(shard, R1, Exchange(1, 1, 1, 0, 8))
    assert effects == [
        Apply((Term(R1, 1, 1.0, 1),), 0.5, 1),
        Send(R1, Exchanged(1, 1, 0, examples=8), Payload("weights", R1, 1, 1, 0, 1)),
    ]


def test_staleness_counts_the_updates_since_the_gradients_weights() -> None:
    shard = shard_of(R0, R1, version=10)
    tell(shard, R0, push(1, basis=10))
    tell(shard, R0, push(2, basis=11))
    assert answers(tell(shard, R1, push(1, basis=10))) == {R1: Exchanged(1, 13, 2, examples=24)}


def test_a_push_without_examples_moves_nothing_but_the_clock() -> None:
    shard = shard_of(R0)
    assert tell(shard, R0, push(1, examples=0)) == [Send(R0, Exchanged(1, 0, -1), Payload("weights", R0, 0, 1, 0, 0))]
    assert answers(tell(shard, R0, push(2))) == {R0: Exchanged(2, 1, 0, examples=8)}


def test_a_fetch_alone_is_answered_at_once_and_a_push_alone_gets_no_weights() -> None:
    shard = shard_of(R0, R1, max_delay=0)
    assert tell(shard, R0, Exchange(0, -1, 0)) == [Send(R0, Exchanged(0, 0, -1), Payload("weights", R0, 0, 0, 0, 0))]
    assert kinds(tell(shard, R0, push(1))) == ["Apply"]  # held: replica 1 has not pushed
    assert tell(shard, R1, push(1, weights=-1))[1] == Send(R1, Exchanged(1, 2, 1, examples=16))


def test_a_clock_that_does_not_advance_is_refused() -> None:
    shard = shard_of(R0)
    tell(shard, R0, push(1))
    with pytest.raises(Refusal, match="pushes for clock 1 on version 0, at clock 1 and version 1"):
        shard.on(MessageArrived(R0, push(1)), 0.0)


def test_a_push_on_weights_that_are_not_there_yet_is_refused() -> None:
    shard = shard_of(R0)
    with pytest.raises(Refusal, match="on version 1, at clock 0 and version 0"):
        shard.on(MessageArrived(R0, Exchange(1, 0, 0, 1, 8)), 0.0)


def test_what_one_push_covers_is_remembered_however_many_leases_it_is() -> None:
    shard = shard_of(R0, push_every=LEASES_KEPT * 2)
    covers = tuple(Cover(lease, 10) for lease in range(LEASES_KEPT * 2))
    tell(shard, R0, Exchange(1, 0, 0, 0, 8, covers))
    ((_, seen),) = sent(view(shard, 2), ViewSeen)
    assert seen.departed[0].applied == {cover.lease: cover.upto for cover in covers}


# ---------------------------------------------------------------- the mean of a round


def test_a_round_is_one_update_weighed_by_examples_in_slot_order() -> None:
    shard = shard_of(R0, R1, R2, gather="mean", max_delay=0)
    assert tell(shard, R2, push(1, examples=8)) == []
    assert tell(shard, R0, push(1, examples=6)) == []
    effects = tell(shard, R1, push(1, examples=2))
    assert effects[0] == Apply((Term(R0, 0, 6 / 16, 1), Term(R1, 0, 2 / 16, 1), Term(R2, 0, 8 / 16, 1)), 1.0, 1)
    assert answers(effects[1:]) == {node: Exchanged(1, 1, 0, examples=16) for node in (R0, R1, R2)}
    assert [effect.to for effect in effects[1:]] == [R0, R1, R2]


def test_who_has_no_batch_takes_part_without_weight_and_an_empty_round_is_no_update() -> None:
    shard = shard_of(R0, R1, gather="mean", max_delay=0)
    tell(shard, R0, push(1, examples=0))
    effects = tell(shard, R1, push(1))
    assert effects[0] == Apply((Term(R1, 0, 1.0, 1),), 1.0, 1)
    assert answers(effects) == {R0: Exchanged(1, 1, -1, examples=8), R1: Exchanged(1, 1, 0, examples=8)}
    tell(shard, R0, push(2, basis=1, examples=0))
    effects = tell(shard, R1, push(2, basis=1, examples=0))
    assert kinds(effects) == ["Exchanged", "Exchanged"]
    assert answers(effects)[R0].version == 1


def test_a_view_without_the_missing_one_closes_a_round_and_leaves_its_push_out() -> None:
    shard = shard_of(R0, R1, R2, gather="mean", max_delay=0)
    tell(shard, R0, push(1))
    tell(shard, R1, push(1))
    effects = view(shard, 2, R0, R2)  # replica 1 had pushed, replica 2 has not
    assert kinds(effects) == ["Forget", "ViewSeen"]
    assert only(tell(shard, R2, push(1)), Apply) == Apply((Term(R0, 0, 0.5, 1), Term(R2, 0, 0.5, 1)), 1.0, 1)
    tell(shard, R0, push(2, basis=1))
    assert only(view(shard, 3, R0), Apply) == Apply((Term(R0, 0, 1.0, 2),), 1.0, 2)


def test_a_newcomer_does_not_belong_to_the_rounds_before_its_entry() -> None:
    shard = shard_of(R0, gather="mean", max_delay=0)
    tell(shard, COORDINATOR, View(2, (Member(0, 0, 0), Member(1, 1, 2))))
    assert kinds(tell(shard, R0, push(1))) == ["Apply", "Exchanged"]
    assert kinds(tell(shard, R0, push(2, basis=1))) == ["Apply", "Exchanged"]
    assert tell(shard, R0, push(3, basis=2)) == []
    assert only(tell(shard, R1_AGAIN, push(3, basis=2)), Apply).terms[1].owner == R1_AGAIN


# ---------------------------------------------------------------- members and snapshots


@pytest.mark.parametrize("gather", ["each", "mean"])
def test_nothing_of_a_departed_replica_is_applied_or_answered(gather: str) -> None:
    shard = shard_of(R0, R1, gather=gather, max_delay=0)
    tell(shard, R1, push(1))
    effects = view(shard, 2, R0)
    assert Forget(R1) in effects
    assert tell(shard, R1, push(2)) == []
    later = view(shard, 3, R0, R1_AGAIN) + tell(shard, R1, push(3))
    assert not [e for e in later if isinstance(e, Apply)]
    assert R1 not in answers(later)


def test_a_view_is_answered_with_what_was_applied_of_those_who_left() -> None:
    shard = shard_of(R0, R1, push_every=2)
    tell(shard, R1, push(1, covers=(Cover(4, 8), Cover(5, 24))))
    tell(shard, R1, push(2, covers=(Cover(5, 32),)))
    tell(shard, R0, push(1, covers=(Cover(6, 8),)))
    assert sent(view(shard, 2, R0), ViewSeen) == [(COORDINATOR, ViewSeen(2, (Departed(1, 0, {4: 8, 5: 32}),)))]


def test_pushes_of_a_round_that_was_not_applied_are_not_called_applied() -> None:
    shard = shard_of(R0, R1, gather="mean", max_delay=0)
    tell(shard, R1, push(1, covers=(Cover(4, 8),)))
    ((_, seen),) = sent(view(shard, 2, R0), ViewSeen)
    assert seen.departed == (Departed(1, 0, {}),)


def test_an_older_view_is_ignored() -> None:
    shard = shard_of(R0, R1)
    view(shard, 5, R0)
    assert view(shard, 4, R0, R1) == []
    assert tell(shard, R1, push(1)) == []


def test_an_evaluator_only_looks_and_hears_how_many_examples_are_in_what_it_gets() -> None:
    shard = shard_of(R0, max_delay=0, version=7, examples=56)
    look = tell(shard, EVALUATOR, Exchange(0, weights=0))
    assert look == [Send(EVALUATOR, Exchanged(0, 7, -1, examples=56), Payload("weights", EVALUATOR, 0, 0, 0, 7))]
    tell(shard, R0, push(1, examples=5))
    assert answers(tell(shard, EVALUATOR, Exchange(0, weights=0)))[EVALUATOR].examples == 61


def test_a_round_that_is_cut_short_is_that_much_less_of_a_step() -> None:
    shard = shard_of(R0, R1, gather="mean", max_delay=0, whole=10)
    rates = []
    for clock, (first, second) in enumerate([(10, 10), (10, 5), (3, 0), (12, 10)], 1):
        tell(shard, R0, Exchange(clock, 0, 0, 0, 8 * first, batches=first))
        effects = tell(shard, R1, Exchange(clock, 0, 0, 0, 8 * second, batches=second))
        rates += [effect.rate for effect in effects if isinstance(effect, Apply)]
    assert rates == [1.0, 0.75, 0.3, 1.0]


def test_an_update_has_the_rates_that_the_loops_behind_it_want() -> None:
    alone = shard_of(R0)
    found = tell(alone, R0, Exchange(1, 0, 0, 0, 8, factors=(0.5, None)))
    assert only(found, Apply).factors == (0.5, None)
    both = shard_of(R0, R1, gather="mean", max_delay=0)
    factors = []
    for clock, (first, second) in enumerate([((0.1, 2.0), (0.1, 2.0)), ((0.5, 1.0), ()), ((), ())], 1):
        tell(both, R0, Exchange(clock, 0, 0, 0, 6, factors=first))
        factors.append(only(tell(both, R1, Exchange(clock, 0, 0, 0, 2, factors=second)), Apply).factors)
    assert factors == [(0.1, 2.0), (0.5 * 6 / 8 + 2 / 8, 1.0), ()]


def test_a_snapshot_tells_what_was_in_it_not_what_came_while_it_was_written() -> None:
    shard = shard_of(R0)
    tell(shard, R0, push(1, covers=(Cover(2, 8),)))
    assert tell(shard, COORDINATOR, TakeSnapshot(3)) == [WriteSnapshot(3, 1)]
    tell(shard, R0, push(2, covers=(Cover(2, 16),)))
    done = give(shard, SnapshotWritten(3, "disk full"))
    assert done == [Send(COORDINATOR, SnapshotTaken(3, 1, (Cover(2, 8),), "disk full", examples=8))]


def test_it_ends_when_told_to_and_knows_nothing_else() -> None:
    shard = shard_of(R0)
    assert tell(shard, COORDINATOR, Stop()) == [Forget(R0), End("finished")]  # it may be gone, and nobody waits for it
    assert shard.wake_at is None
    with pytest.raises(AssertionError, match="does not know"):
        shard.on(StopRequested("no"), 0.0)
    with pytest.raises(AssertionError, match="does not know"):
        tell(shard, COORDINATOR, Welcome(1))


def test_once_a_new_evaluator_has_asked_nothing_is_heard_of_those_before_it() -> None:
    shard, again = shard_of(R0), Node("evaluator", 3, 1)
    assert kinds(tell(shard, EVALUATOR, Exchange(0, weights=0))) == ["Exchanged"]
    assert kinds(tell(shard, again, Exchange(0, weights=0))) == ["Forget", "Exchanged"]
    assert kinds(tell(shard, again, Exchange(0, weights=0))) == ["Exchanged"]


# ---------------------------------------------------------------- newcomers


WITH_R2 = View(2, (Member(0, 0, 0), Member(1, 0, 0), Member(2, 0, 1)))  # which enters at clock 1


def test_a_newcomers_first_weights_wait_for_the_round_before_its_first() -> None:
    shard = shard_of(R0, R1, gather="mean", max_delay=0)
    tell(shard, R0, push(1))
    tell(shard, COORDINATOR, WITH_R2)
    assert tell(shard, R2, Exchange(1, weights=0)) == []
    effects = tell(shard, R1, push(1))
    assert kinds(effects) == ["Apply", "Exchanged", "Exchanged", "Exchanged"]
    assert answers(effects)[R2] == Exchanged(1, 1, examples=16)


def test_a_newcomers_first_weights_come_when_who_is_waited_for_is_gone() -> None:
    shard = shard_of(R0, R1, gather="mean", max_delay=0)
    tell(shard, R0, push(1))
    tell(shard, COORDINATOR, WITH_R2)
    tell(shard, R2, Exchange(1, weights=0))
    assert set(answers(view(shard, 3, R0, R2))) == {R0, R2}


@pytest.mark.parametrize("gather", ["each", "mean"])
def test_a_newcomer_that_another_shard_knows_to_be_further_is_further(gather: str) -> None:
    shard = shard_of(R0, R1, gather=gather)
    effects = tell(shard, R0, push(1))
    effects += tell(shard, R1, Exchange(2, weights=0))
    effects += tell(shard, R0, push(2))
    assert answers(effects)[R1].clock == 2
    assert answers(effects)[R1].version == (1 if gather == "each" else 2)


@pytest.mark.parametrize("gather", ["each", "mean"])
def test_nobody_is_further_than_exchanges_lead(gather: str) -> None:
    """Who leaps ahead would close rounds that others are in, or have newcomers begin where nobody is."""
    shard = shard_of(R0, R1, gather=gather, quorum=1 if gather == "mean" else None)
    tell(shard, R1, Exchange(1 << 40, weights=0))
    for clock in (1, 2, 3):
        assert only(tell(shard, R0, push(clock)), Apply).clock == clock
    with pytest.raises(Refusal, match=r"pushes for clock 4 .* at clock 1"):
        tell(shard, R1, push(4))
    view(shard, 2, R1)
    view(shard, 3, R1, R2)
    assert answers(tell(shard, R2, Exchange(0, weights=0)))[R2].clock == (1 if gather == "each" else 3)


def test_who_has_no_answer_yet_exchanges_nothing_more() -> None:
    shard = shard_of(R0, R1, gather="mean")
    tell(shard, R0, push(1))
    for more in (push(2), Exchange(1, weights=0)):
        with pytest.raises(Refusal, match="no answer to its last exchange"):
            tell(shard, R0, more)
    tell(shard, R1, push(1))
    tell(shard, R0, push(2))


def test_a_push_is_of_no_more_leases_than_batches() -> None:
    shard = shard_of(R0, push_every=3)
    tell(shard, R0, push(1, covers=tuple(Cover(lease, 8) for lease in range(3))))
    with pytest.raises(Refusal, match="batches of 4 leases, and 3 at most"):
        tell(shard, R0, push(2, covers=tuple(Cover(lease, 8) for lease in range(4))))


def test_a_snapshot_tells_of_replicas_that_have_departed() -> None:
    shard = shard_of(R0, R1)
    tell(shard, R1, push(1, covers=(Cover(5, 40),)))
    view(shard, 2, R0)
    tell(shard, COORDINATOR, TakeSnapshot(1))
    (_, taken), *_ = sent(give(shard, SnapshotWritten(1)), SnapshotTaken)
    assert taken == SnapshotTaken(1, 1, (Cover(5, 40),), examples=8)


def test_a_snapshot_tells_of_all_that_departed_with_the_newest_view() -> None:
    """However many they were: the ledger may be of before that was known."""
    shard = shard_of(R0, R1)
    for clock in range(1, LEASES_KEPT + 1):
        for node, lease in ((R0, clock), (R1, 1000 + clock)):
            tell(shard, node, push(clock, covers=(Cover(lease, 8),)))
    view(shard, 2)
    tell(shard, COORDINATOR, TakeSnapshot(1))
    [(_, taken)] = sent(give(shard, SnapshotWritten(1)), SnapshotTaken)
    assert len(taken.progress) == 2 * LEASES_KEPT
    view(shard, 3, R2)
    tell(shard, COORDINATOR, TakeSnapshot(2))
    [(_, taken)] = sent(give(shard, SnapshotWritten(2)), SnapshotTaken)
    assert taken.progress == ()
