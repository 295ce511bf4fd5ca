"""All-reduce's coordinator: rounds, deaths between them and within one, newcomers, snapshots, and the end."""

import pytest

from squall.protocol.closing import STOP_WITHIN_S
from squall.protocol.collective.coordinator import LOST, SHARE_LOST
from squall.protocol.collective.messages import Broken, Finished, Form, Shown, ShowWeights, Turn
from squall.protocol.collective.order import spread
from squall.protocol.collective.rounds import AHEAD, LOADED
from squall.protocol.collective.tries import BROKEN_IN_A_ROW, PAUSE_S
from squall.protocol.effects import Cause, End, Payload, PublishSnapshot, Send, WritePiece
from squall.protocol.events import StopRequested, TimePassed
from squall.protocol.machine import Refusal
from squall.protocol.messages import (
    Evaluate,
    Join,
    Left,
    SnapshotPiece,
    Stats,
    Stop,
    TakeSnapshot,
    View,
    ViewSeen,
    Weights,
)
from squall.protocol.nodes import Node, replica_node
from squall.protocol.notes import LeaseEnded
from squall.protocol.nursery_messages import Leaving, ProcessLost
from squall.protocol.policy import MachineRoom
from tests.protocol.collective.group import BATCH, Circle

NEWCOMER = replica_node(1, 1)


def test_the_first_view_has_everybody() -> None:
    circle = Circle(replicas=2)
    circle.join(replica_node(0, 0))
    assert not circle.heard(replica_node(0, 0), View)
    circle.join(replica_node(1, 0))
    circle.see()
    assert [form.behind for form in circle.forms(replica_node(0, 0))] == [()]


def test_rounds_are_dealt_ahead_and_count_when_all_have_finished_them() -> None:
    circle = Circle()
    a, b = circle.begun()
    assert circle.turns(a) == circle.turns(b) == [*range(1, AHEAD + 1)]
    circle.finish(1, a)
    assert circle.leases.trained == 0
    circle.finish(1, b)
    assert circle.leases.trained == 2 * BATCH
    assert circle.turns(a)[-1] == AHEAD + 1


def test_as_many_rounds_are_dealt_as_keep_the_loaders_of_a_replica_busy() -> None:
    circle = Circle(examples=1000, loaders=4)
    a, _ = circle.begun()
    assert circle.turns(a) == [*range(1, LOADED + 5)]


def test_a_round_of_less_than_a_batch_each_has_members_without_one() -> None:
    circle = Circle(examples=3 * BATCH)
    a, b = circle.begun()
    last = [circle.heard(node, Turn)[-1] for node in (a, b)]
    assert [turn.examples for turn in last if isinstance(turn, Turn)] == [BATCH, BATCH]
    assert [turn.lease is None for turn in last if isinstance(turn, Turn)] == [False, True]


def test_of_a_torn_round_counts_what_a_survivor_has_and_he_gives_it_to_the_others() -> None:
    circle = Circle(replicas=3)
    a, b, c = circle.begun()
    circle.finish(1, b)
    circle.lose(c)
    circle.see(r0=0, r1=1)
    form = circle.forms(a)[-1]
    assert (form.clock, form.source, form.behind, form.examples) == (1, b, (a,), 3 * BATCH)
    assert circle.leases.trained == 3 * BATCH
    assert circle.turns(a)[-AHEAD:] == [2, 3]  # without the lost one


def test_of_a_torn_round_that_nobody_has_every_batch_is_dealt_again() -> None:
    circle = Circle(replicas=3, examples=6 * BATCH)
    a, b, c = circle.begun()
    circle.finish(1, c)  # who does not live to give it to anybody
    circle.lose(c)
    circle.see()
    assert circle.leases.trained == 0
    for clock in (1, 2, 3):
        circle.finish(clock, a, b)
    ended = [effect for effect in circle.effects if isinstance(effect, LeaseEnded) and effect.done > effect.lease.start]
    assert sorted((e.lease.start, e.done) for e in ended) == [(i * BATCH, (i + 1) * BATCH) for i in range(6)]


def test_a_newcomer_waits_for_the_end_of_the_rounds_under_way() -> None:
    circle = Circle()
    a, b = circle.begun()
    circle.lose(b)
    circle.see()
    circle.join(NEWCOMER)
    assert not circle.heard(NEWCOMER, View)
    circle.finish(1, a)
    circle.finish(2, a)
    circle.see(r0=2)
    form = circle.forms(NEWCOMER)[-1]
    assert (form.clock, form.source, form.behind) == (2, a, (NEWCOMER,))


def test_without_a_survivor_the_weights_are_lost() -> None:
    circle = Circle()
    a, b = circle.begun()
    circle.finish(1, a, b)
    circle.lose(a)
    assert circle.lose(b)[-1] == End("failed", LOST, Cause.FAILED)


def test_before_anything_is_trained_nothing_is_lost() -> None:
    circle = Circle()
    a, b = circle.begun()
    circle.lose(a)
    circle.lose(b)
    newcomers = [replica_node(0, 1), NEWCOMER]
    circle.join(*newcomers)
    circle.see()
    assert circle.forms(newcomers[0])[-1].clock == 0
    assert circle.turns(newcomers[0])[:1] == [1]


def test_a_group_that_breaks_without_a_death_is_formed_again_after_longer_pauses_but_not_for_ever() -> None:
    circle = Circle()
    a, b = circle.begun()
    for tried in range(BROKEN_IN_A_ROW - 1):
        number = circle.machine.members.number
        for node in (a, b):  # who has the error second tells it, too
            circle.tell(node, Broken(number, "no route to host"))
        assert circle.machine.wake_at == circle.now + PAUSE_S * 2**tried
        circle.now = circle.machine.wake_at
        circle.give(TimePassed())
        assert circle.machine.members.number == number + 1
        circle.see()
    ended = circle.tell(a, Broken(circle.machine.members.number, "no route to host"))[-1]
    assert isinstance(ended, End)
    assert "no route to host" in ended.reason


def test_a_death_is_the_reason_of_a_broken_group_and_ends_the_pause() -> None:
    circle = Circle(replicas=3)
    a, b, c = circle.begun()
    circle.tell(a, Broken(1, "connection reset"))
    circle.lose(c)
    assert circle.machine.wake_at is None
    circle.see()
    assert circle.forms(b)[-1].number == 2


def test_in_the_pause_nothing_is_dealt() -> None:
    circle = Circle()
    a, b = circle.begun()
    circle.tell(a, Broken(1, "connection reset"))
    circle.finish(1, a, b)
    assert circle.turns(a) == [*range(1, AHEAD + 1)]


def test_a_snapshot_is_taken_between_two_rounds_and_holds_what_counts() -> None:
    circle = Circle(snapshot_every_s=1.0)
    a, b = circle.begun()
    circle.now = 1.0
    circle.give(TimePassed())
    circle.finish(1, a, b)
    assert not circle.heard(a, TakeSnapshot)
    circle.finish(2, a, b)
    assert circle.turns(a) == [1, 2]  # nothing is dealt meanwhile
    circle.save(2, 4 * BATCH)
    published = next(effect for effect in circle.effects if isinstance(effect, PublishSnapshot))
    assert (published.ledger["trained"], published.ledger["held"]) == (4 * BATCH, {})
    assert circle.turns(a)[-2:] == [3, 4]


def test_another_replica_writes_the_snapshot_over_which_one_was_lost() -> None:
    circle = Circle(snapshot_every_s=1.0)
    a, b = circle.begun()
    circle.now = 1.0
    circle.give(TimePassed())
    circle.finish(1, a, b)
    circle.finish(2, a, b)
    circle.lose(a)
    circle.see(r1=2)
    assert len(circle.heard(b, TakeSnapshot)) == 1


def test_an_evaluation_is_of_what_a_replica_shows_and_of_another_one_where_that_is_lost() -> None:
    circle = Circle(evaluate=True, evaluate_every_s=1.0)
    a, b = circle.begun()
    circle.now = 1.0
    circle.give(TimePassed())
    circle.lose(a)
    circle.see()
    assert [len(circle.heard(node, ShowWeights)) for node in (a, b)] == [1, 1]
    late = Shown(0, Weights(0, 0, 0.0))
    circle.tell(a, late)  # what was on its way
    circle.tell(b, Shown(0, Weights(2, 4 * BATCH, 0.0)))
    asked = circle.heard(Node("evaluator", 2), Evaluate)
    assert [message.weights for message in asked if isinstance(message, Evaluate)] == [Weights(2, 4 * BATCH, 0.0)]


def test_at_the_end_replicas_stay_until_their_weights_are_saved() -> None:
    circle = Circle(examples=2 * BATCH)
    a, b = circle.begun()
    circle.finish(1, a, b)
    assert not circle.heard(a, Stop)
    circle.save(1, 2 * BATCH)
    assert len(circle.heard(a, Stop)) == len(circle.heard(b, Stop)) == 1
    assert circle.effects[-1] == End("finished", "all data is trained", Cause.DATA)


def test_a_users_stop_tears_the_rounds_under_way() -> None:
    circle = Circle()
    a, b = circle.begun()
    circle.finish(1, a, b)
    circle.give(StopRequested("interrupted"))
    circle.see(r0=2, r1=1)
    circle.save(2, 4 * BATCH)
    assert circle.heard(a, TakeSnapshot)
    assert circle.leases.trained == 4 * BATCH
    assert circle.effects[-1] == End("interrupted", "interrupted", Cause.STOPPED)


def test_what_nobody_can_mean_is_refused() -> None:
    circle = Circle()
    a, b = circle.begun()
    for clock in (0, 2, AHEAD + 1):
        with pytest.raises(Refusal, match="was to do 1"):
            circle.tell(a, Finished(clock, Stats()))
    circle.finish(1, a)
    with pytest.raises(Refusal, match="was not asked for them"):
        circle.tell(a, Shown(0, Weights(1, BATCH, 0.0)))
    circle.lose(b)
    for clock in (0, AHEAD + 1):
        with pytest.raises(Refusal, match=f"finished round {clock}, behind 1, and 2 is the newest"):
            circle.tell(a, ViewSeen(2, clock=clock))
    circle.join(NEWCOMER)
    circle.tell(a, ViewSeen(2, clock=1))
    with pytest.raises(Refusal, match="is in no group"):
        circle.tell(NEWCOMER, Finished(1, Stats()))


def test_weights_are_shown_once_by_who_was_asked() -> None:
    circle = Circle(evaluate=True, evaluate_every_s=1.0)
    a, b = circle.begun()
    circle.now = 1.0
    circle.give(TimePassed())
    shown = Shown(0, Weights(0, 0, 0.0))
    with pytest.raises(Refusal, match="was not asked"):
        circle.tell(b, shown)
    sent = [effect for effect in circle.tell(a, shown) if isinstance(effect, Send)]
    assert [effect.payload for effect in sent] == [Payload("weights", a, 0, 0, 0)]
    with pytest.raises(Refusal, match="was not asked"):
        circle.tell(a, shown)


def test_who_says_that_it_is_two_rounds_ahead_of_another_gives_its_weights_to_nobody() -> None:
    circle = Circle(replicas=3)
    a, b, c = circle.begun()
    circle.finish(1, a, b, c)  # so that three are dealt
    circle.tell(a, Broken(1, "reset"))
    circle.now = circle.machine.wake_at or 0.0
    circle.give(TimePassed())
    circle.see(r0=3, r1=1, r2=1)
    form = circle.forms(b)[-1]
    assert (form.clock, form.behind, form.source == a) == (1, (a,), False)
    assert circle.turns(b)[-AHEAD:] == [2, 3]
    circle.tell(b, Broken(2, "reset"))  # before it has got theirs: should it be honest, it is not refused
    circle.now = circle.machine.wake_at or 0.0
    circle.give(TimePassed())
    circle.see(r0=3, r1=1, r2=1)
    form = circle.forms(b)[-1]
    assert (form.clock, form.behind) == (1, (a,))
    circle.finish(2, a, b, c)
    circle.lose(c)
    circle.see(r0=3, r1=2)
    assert circle.forms(b)[-1].source == a


def test_another_member_gives_its_state_where_that_of_the_first_has_broken_the_group() -> None:
    circle = Circle(replicas=3)
    a, b, c = circle.begun()
    circle.finish(1, a, b, c)
    sources = [circle.forms(a)[-1].source]
    for _ in range(3):
        circle.tell(a, Broken(circle.machine.members.number, "what replica-0.0 gives is no state"))
        circle.now = circle.machine.wake_at or 0.0
        circle.give(TimePassed())
        circle.see(r0=1, r1=1, r2=1)
        sources.append(circle.forms(a)[-1].source)
    assert sources == [a, b, c, a]


def test_one_death_takes_no_share_with_it_whatever_is_said() -> None:
    circle = Circle(replicas=3, divided=True)
    a, b, c = circle.begun()
    circle.finish(1, a, b, c)
    circle.lose(c)
    circle.see(r0=1, r1=1)
    assert circle.tell(a, Broken(2, "lost", lost=True)) == []
    circle.lose(b)
    circle.see(r0=1)
    assert circle.tell(a, Broken(3, "lost", lost=True))[-1] == End("failed", SHARE_LOST, Cause.FAILED)


@pytest.mark.parametrize(
    "address", ["node7:7700", "10.0.0.1", "10.0.0.1:0", "10.0.0.1:70000", "10.0.0.1:\N{SUPERSCRIPT TWO}", ":7700x"]
)
def test_who_wants_to_be_called_by_a_name_is_refused(address: str) -> None:
    circle = Circle()
    with pytest.raises(Refusal, match="no number and port"):
        circle.tell(replica_node(0, 0), Join(1, address))


def test_the_coordinators_machine_alone_needs_no_number() -> None:
    near, far = replica_node(0, 0), replica_node(1, 0)
    circle = Circle(rooms=(MachineRoom(0, 1, (near,)), MachineRoom(1, 1, (far,))))
    for nowhere in (":7700", ""):
        with pytest.raises(Refusal, match="no number and port"):
            circle.tell(far, Join(1, nowhere))
    circle.tell(far, Join(1, "fe80::1%eth0:7700"))
    circle.tell(near, Join(1, ":7700"))
    circle.see()
    assert [place.address for place in circle.forms(near)[-1].places] == [":7700", "fe80::1%eth0:7700"]


def test_who_answers_another_view_has_finished_nothing() -> None:
    circle = Circle()
    a, b = circle.begun()
    circle.finish(1, a, b)
    circle.lose(b)
    before = circle.machine.rounds.clock_of(a)
    with pytest.raises(Refusal, match="another view"):
        circle.tell(a, ViewSeen(99, clock=2))
    assert circle.machine.rounds.clock_of(a) == before


def test_who_comes_when_all_is_over_is_not_wanted() -> None:
    circle = Circle(examples=2 * BATCH)
    a, b = circle.begun()
    circle.finish(1, a, b)
    circle.tell(NEWCOMER, Join(1))
    assert circle.heard(NEWCOMER, Stop)
    assert not circle.heard(NEWCOMER, Form)


def test_neighbours_that_leave_do_so_one_after_the_other_when_others_have_their_shares() -> None:
    a, b, c, d = (replica_node(slot, 0) for slot in range(4))
    rooms = (MachineRoom(0, 1, (a,)), MachineRoom(1, 3, (b, c, d)))
    circle = Circle(replicas=4, examples=400, divided=True, rooms=rooms)
    circle.begun()
    circle.finish(1, a, b, c, d)
    circle.tell(Node("nursery", 1), Leaving("its user wants it back"))
    for clock in (2, 3):
        assert not circle.heard(b, Stop)
        circle.finish(clock, a, b, c, d)
    assert [len(circle.heard(node, Stop)) for node in (a, b, c, d)] == [0, 1, 1, 0]
    for node in (b, c):
        circle.tell(node, Left((), Stats()))
    circle.see(r0=3, r3=3)
    assert circle.forms(d)[-1].clock == 3
    for clock in (4, 5):
        assert not circle.heard(d, Stop)
        circle.finish(clock, a, d)
    assert circle.heard(d, Stop)
    assert circle.turns(a)[-1] == 5


def saving(near: int, far: int) -> tuple[Circle, list[Node]]:
    """Members of two machines that each have a share of the optimizer's state, as they are to write a snapshot."""
    nodes = [replica_node(slot, 0) for slot in range(near + far)]
    rooms = (MachineRoom(0, near, tuple(nodes[:near])), MachineRoom(1, far, tuple(nodes[near:])))
    circle = Circle(replicas=near + far, divided=True, snapshot_every_s=1.0, rooms=rooms)
    circle.begun()
    circle.now = 1.0
    circle.give(TimePassed())
    for clock in (1, 2):
        circle.finish(clock, *nodes)
    return circle, nodes


def test_parts_of_a_snapshot_are_in_the_members_order() -> None:
    circle, nodes = saving(near=2, far=2)
    piece = SnapshotPiece(1, 0, 10, 10)
    order = spread([0, 0, 1, 1])
    for node in nodes[2:]:
        assert circle.tell(node, piece) == [WritePiece(node.index, piece, order.index(node.index), 4)]


def test_a_piece_of_a_snapshot_that_was_asked_for_again_is_dropped_and_nobody_refused() -> None:
    """A group may form over one whose pieces are on their way."""
    circle, nodes = saving(near=1, far=2)
    far = nodes[1]
    assert circle.tell(far, SnapshotPiece(1, 0, 10, 20))
    circle.tell(Node("nursery", 1), ProcessLost(nodes[2], "killed"))
    circle.see(r0=2, r1=2)
    assert circle.heard(far, TakeSnapshot) == [TakeSnapshot(1), TakeSnapshot(2)]
    assert circle.tell(far, SnapshotPiece(1, 10, 10, 20)) == []
    assert circle.tell(far, SnapshotPiece(2, 0, 10, 20))


def test_a_newcomer_that_says_that_it_has_finished_rounds_is_refused() -> None:
    circle = Circle(replicas=2)
    a, b = circle.begun()
    circle.finish(1, a, b)
    circle.lose(b)
    circle.tell(a, ViewSeen(circle.machine.members.number, clock=1))
    circle.join(NEWCOMER)
    for clock in circle.turns(a)[-AHEAD:]:
        circle.finish(clock, a)
    with pytest.raises(Refusal, match="0 is the newest"):
        circle.tell(NEWCOMER, ViewSeen(circle.machine.members.number, clock=2))


def test_who_is_late_at_a_stop_is_not_waited_for_and_not_refused() -> None:
    circle = Circle()
    a, b = circle.begun()
    circle.finish(1, a, b)
    circle.give(StopRequested("interrupted"))
    number = circle.machine.members.number
    circle.tell(a, ViewSeen(number, clock=1))
    assert not circle.heard(a, TakeSnapshot)
    circle.now = STOP_WITHIN_S
    circle.give(TimePassed())
    circle.finish(2, b)
    circle.tell(b, ViewSeen(number, clock=2))
    assert len(circle.heard(a, TakeSnapshot)) == 1
    circle.save(1, 2 * BATCH)
    assert circle.effects[-1] == End("interrupted", "interrupted", Cause.STOPPED)
    assert circle.leases.trained == 2 * BATCH


def test_who_leaves_is_dealt_no_round() -> None:
    a, b = replica_node(0, 0), replica_node(1, 0)
    circle = Circle(rooms=(MachineRoom(0, 1, (a,)), MachineRoom(1, 1, (b,))))
    circle.begun()
    circle.finish(1, a, b)
    circle.tell(Node("nursery", 1), Leaving("its user wants it back"))
    circle.finish(2, a, b)
    circle.finish(3, a, b)
    assert circle.heard(b, Stop)
    assert circle.turns(b) == circle.turns(a) == [1, 2, 3]
    circle.tell(b, Left((), Stats()))
    circle.see(r0=3)
    assert circle.turns(a)[3:] == [4, 5]
    assert circle.turns(b) == [1, 2, 3]
