"""Members of a group whose batches a script's loop computes: it leaves some out, and has numbers for the record."""

import pytest

from squall.protocol.closing import STOP_WITHIN_S
from squall.protocol.collective.messages import Finished, Form
from squall.protocol.effects import PublishSnapshot, Send, Step
from squall.protocol.events import BatchSkipped, GroupJoined, StopRequested, TimePassed, ValuesLogged
from squall.protocol.machine import Refusal
from squall.protocol.messages import Lease, Logged, Skip, SkipNoted, Stats, ViewSeen, Weights
from squall.protocol.nodes import Node
from squall.protocol.notes import BatchLeftOut, WorkReported
from squall.protocol.reports import REPORT_EVERY_S
from tests.protocol.collective.group import BATCH, Circle
from tests.protocol.collective.test_replica import A, grouped, heard, said, taken, turn, view


def lease_of(circle: Circle, node: Node) -> Lease:
    """Of the oldest round that is dealt."""
    return next(held.lease for held in circle.machine.leases.held.values() if held.holder == node)


def left_out(lease: Lease) -> Skip:
    return Skip(lease.id, lease.epoch, lease.start, lease.stop)


def reported(circle: Circle) -> dict[Node, int]:
    """Node -> examples that it is said to have trained."""
    notes = [effect for effect in circle.effects if isinstance(effect, WorkReported)]
    return {node: sum(note.stats.examples for note in notes if note.node == node) for node in {n.node for n in notes}}


def test_a_batch_that_is_left_out_is_told_before_the_step_is_taken_without_it() -> None:
    replica = grouped()
    heard(replica, turn(1))
    assert said(replica.on(BatchSkipped(), 0.0)) == [Skip(1, 0, 0, 10)]
    assert heard(replica, SkipNoted()) == [Step(1, 0, 0, 0, 20)]
    (finished,) = said(replica.on(taken(1), 0.0))
    assert isinstance(finished, Finished)
    assert (finished.stats.examples, finished.stats.batches) == (0, 0)


def test_a_batch_that_is_left_out_is_not_tried_again_beside_one_that_is() -> None:
    replica = grouped()
    heard(replica, turn(1))
    replica.on(BatchSkipped(), 0.0)
    heard(replica, SkipNoted())
    assert replica.on(taken(1, finite=False, guilty=True), 0.0) == [Step(1, 0, 0, 0, 20)], "it was nobody's batch"


def test_what_a_script_has_measured_is_of_the_weights_that_it_had() -> None:
    replica = grouped()
    heard(replica, turn(1), turn(2, 20, 30))
    assert said(replica.on(ValuesLogged({"x": 1.0}), 0.0)) == [Logged({"x": 1.0}, Weights(0, 0, 0.0))]
    replica.on(taken(1), 0.0)
    assert said(replica.on(ValuesLogged({"x": 1.0}), 0.0)) == [Logged({"x": 1.0}, Weights(1, 20, 0.0))]
    heard(replica, view(2))
    replica.on(taken(1), 0.0)
    heard(replica, Form(2, 7, 140, A, (A,)))
    replica.on(GroupJoined(2), 0.0)
    assert said(replica.on(ValuesLogged({"x": 1.0}), 0.0)) == [Logged({"x": 1.0}, Weights(7, 140, 0.0))]


def test_what_is_left_out_is_in_the_record_though_its_script_dies_before_the_round_counts() -> None:
    circle = Circle()
    a, b = circle.begun()
    skip = left_out(lease_of(circle, b))
    assert circle.tell(b, skip) == [BatchLeftOut(b, skip), Send(b, SkipNoted())]
    circle.finish(1, a)
    circle.lose(b)
    circle.see(r0=1)
    circle.give(StopRequested("interrupted"))
    circle.see(r0=1)
    assert circle.leases.trained == 2 * BATCH, "it has had its turn"
    assert sum(reported(circle).values()) == BATCH


def test_what_is_left_out_of_a_lease_that_others_have_by_now_counts_for_nothing() -> None:
    circle = Circle()
    a, b = circle.begun()
    skip = left_out(lease_of(circle, a))
    circle.lose(b)
    circle.see()
    assert circle.tell(a, skip) == [Send(a, SkipNoted())]


def test_what_was_not_dealt_is_not_left_out() -> None:
    circle = Circle()
    a, _ = circle.begun()
    lease = lease_of(circle, a)
    with pytest.raises(Refusal, match="which it was not dealt"):
        circle.tell(a, Skip(lease.id, lease.epoch, lease.start, lease.stop + BATCH))
    circle.tell(a, left_out(lease))
    with pytest.raises(Refusal, match="which it was not dealt"):
        circle.tell(a, left_out(lease))


def test_a_round_that_one_alone_has_told_of_as_a_stop_ends_is_reported_with_the_snapshot() -> None:
    """The other one's loop is somewhere else, and its process hears nothing."""
    circle = Circle()
    a, b = circle.begun()
    circle.finish(1, a, b)
    circle.finish(2, a)
    circle.give(StopRequested("interrupted"))
    circle.tell(a, ViewSeen(circle.machine.members.number, clock=2))
    circle.now = STOP_WITHIN_S
    circle.give(TimePassed())
    circle.save(2, 4 * BATCH)
    (published,) = [effect for effect in circle.effects if isinstance(effect, PublishSnapshot)]
    assert published.ledger["trained"] == sum(reported(circle).values()) == 4 * BATCH


def test_a_round_is_told_with_what_its_member_has_done() -> None:
    circle = Circle()
    a, b = circle.begun()
    circle.tell(b, left_out(lease_of(circle, b)))
    circle.finish(1, a)
    circle.now = REPORT_EVERY_S
    circle.tell(b, Finished(1, Stats()))
    assert reported(circle) == {a: BATCH}
