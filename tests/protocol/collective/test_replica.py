"""All-reduce's replica: it steps in a group, leaves it with every view, and says how far it has come."""

from squall.protocol.collective.messages import Broken, Finished, Form, Place, Shown, ShowWeights, Turn
from squall.protocol.collective.replica import CollectiveReplica
from squall.protocol.effects import (
    CutGroup,
    Effect,
    End,
    Expect,
    Gather,
    JoinGroup,
    LeaveGroup,
    MeetParts,
    Payload,
    Send,
    Step,
    WriteSnapshot,
)
from squall.protocol.events import (
    Gathered,
    GroupBroken,
    GroupJoined,
    MessageArrived,
    SnapshotWritten,
    Started,
    StepTaken,
)
from squall.protocol.frames import Message
from squall.protocol.messages import (
    PIECE_BYTES,
    Join,
    Lease,
    Member,
    NonFinite,
    PieceKept,
    SnapshotPiece,
    SnapshotTaken,
    Stop,
    TakeSnapshot,
    View,
    ViewSeen,
)
from squall.protocol.nodes import COORDINATOR, Node, replica_node
from squall.protocol.nursery_messages import PartPlace, PartsPlaced

A, B = replica_node(0, 0), replica_node(1, 0)


def heard(replica: CollectiveReplica, *messages: Message) -> list[Effect]:
    return [effect for message in messages for effect in replica.on(MessageArrived(COORDINATOR, message), 0.0)]


def said(effects: list[Effect]) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, Send)]


def view(number: int) -> View:
    return View(number, (Member(0, 0, 0), Member(1, 0, 0)))


def turn(clock: int, start: int = 0, stop: int = 10) -> Turn:
    return Turn(clock, Lease(clock, 0, start, stop), 20)


def taken(number: int, finite: bool = True, guilty: bool = False) -> StepTaken:
    return StepTaken(number, 0.5, finite, 0.1, 0.0, guilty=guilty)


def grouped() -> CollectiveReplica:
    replica = CollectiveReplica(A, 2)
    assert said(replica.on(Started(), 0.0)) == [Join(0)]
    heard(replica, view(1), Form(1, 0, 0, A))
    replica.on(GroupJoined(1), 0.0)
    return replica


def test_it_forms_the_group_that_it_is_told_and_steps_turn_by_turn() -> None:
    replica = CollectiveReplica(A, 2)
    assert said(heard(replica, view(1))) == [ViewSeen(1)]
    assert heard(replica, Form(1, 0, 0, A)) == [JoinGroup(1, (A, B), A, transfer=False, clock=0)]
    assert heard(replica, turn(1), turn(2, 20, 30), Turn(3, None, 20)) == [Expect(0, 0, 10), Expect(0, 20, 30)]
    assert replica.on(GroupJoined(1), 0.0) == [Step(1, 0, 0, 10, 20)]
    first, second = replica.on(taken(1), 0.0)
    assert isinstance(first, Send)
    assert isinstance(first.message, Finished)
    assert (first.message.clock, first.message.stats.loss_sum) == (1, 5.0)
    assert second == Step(2, 0, 20, 30, 20)


def test_a_view_cuts_what_is_under_way_and_waits_for_what_comes_of_it() -> None:
    """The step may be over already, so that the weights have moved; then it counts."""
    for outcome, clock in ((taken(1), 2), (GroupBroken(1, "cut"), 1)):
        replica = grouped()
        heard(replica, turn(1), turn(2), turn(3))
        replica.on(taken(1), 0.0)
        assert heard(replica, view(2)) == [CutGroup()]
        assert (
            replica.on(outcome, 0.0)[-2:] == [LeaveGroup(), Send(COORDINATOR, ViewSeen(2, clock=clock))] or clock == 1
        )
        assert replica.clock == clock
        assert heard(replica, Form(2, clock, 0, A)) == [JoinGroup(2, (A, B), A, transfer=False, clock=clock)]
        assert replica.on(taken(1), 0.0) == replica.on(GroupBroken(1, "late"), 0.0) == []


def test_what_needs_the_weights_waits_for_the_end_of_a_step() -> None:
    replica = grouped()
    heard(replica, turn(1), turn(2))
    assert heard(replica, ShowWeights(0)) == []
    finished, shown, step = replica.on(taken(1), 0.0)
    assert isinstance(finished, Send)
    assert isinstance(finished.message, Finished)
    assert isinstance(shown, Send)
    assert isinstance(shown.message, Shown)
    assert shown.message.weights.updates == 1
    assert step == Step(2, 0, 0, 10, 20)


def test_a_view_ends_a_forming_that_waits_for_somebody_who_is_gone() -> None:
    replica = CollectiveReplica(A, 2)
    heard(replica, view(1), Form(1, 0, 0, A))
    assert heard(replica, view(2)) == [CutGroup()]
    effects = replica.on(GroupBroken(1, "cut"), 0.0)
    assert effects == [LeaveGroup(), Send(COORDINATOR, Broken(1, "cut")), Send(COORDINATOR, ViewSeen(2))]


def test_neighbours_in_the_group_are_on_different_machines() -> None:
    nodes = [replica_node(slot, 0) for slot in range(4)]
    replica = CollectiveReplica(A, 4)
    heard(replica, View(1, tuple(Member(slot, 0, 0) for slot in range(4))))
    places = tuple(Place(machine, f"10.0.0.{machine}:{slot}") for slot, machine in enumerate((0, 0, 1, 1)))
    (join,) = heard(replica, Form(1, 0, 0, A, (), places))
    assert isinstance(join, JoinGroup)
    assert join.members == (nodes[0], nodes[2], nodes[1], nodes[3])
    assert join.places == (places[0], places[2], places[1], places[3])


def test_a_snapshot_travels_where_its_file_is_on_another_machine() -> None:
    replica = grouped()
    heard(replica, TakeSnapshot(3))
    (first,) = replica.on(SnapshotWritten(3, checksum=9, size=PIECE_BYTES + 7), 0.0)
    payload = Payload("piece", A, PIECE_BYTES, 0, 0, 3)
    assert first == Send(COORDINATOR, SnapshotPiece(3, 0, PIECE_BYTES, PIECE_BYTES + 7), payload)
    (second,) = heard(replica, PieceKept(3))
    payload = Payload("piece", A, 7, 1, 0, 3)
    assert second == Send(COORDINATOR, SnapshotPiece(3, PIECE_BYTES, 7, PIECE_BYTES + 7), payload)
    assert said(heard(replica, PieceKept(3))) == [SnapshotTaken(3, 0, (), "", 9, 0)]


def test_a_view_between_two_steps_is_answered_at_once() -> None:
    replica = grouped()
    assert heard(replica, view(2)) == [LeaveGroup(), Send(COORDINATOR, ViewSeen(2))]


def divided() -> CollectiveReplica:
    """In a group whose members have a share of the optimizer's state each."""
    replica = CollectiveReplica(A, 2, divided=True)
    heard(replica, view(1), Form(1, 0, 0, A))
    assert replica.on(GroupJoined(1, 0), 0.0) == [Gather(0)]
    assert replica.on(Gathered(1), 0.0) == []
    return replica


def test_who_has_moved_a_share_has_finished_when_it_has_the_others_weights() -> None:
    replica = divided()
    heard(replica, turn(1))
    assert replica.on(taken(1), 0.0) == [Gather(1)]
    assert heard(replica, ShowWeights(4)) == []  # they are of two rounds
    finished, shown = said(replica.on(Gathered(1), 0.0))
    assert isinstance(finished, Finished)
    assert isinstance(shown, Shown)
    assert (finished.clock, shown.weights.updates) == (1, 1)


def test_who_has_moved_a_share_tells_so_though_the_group_breaks_before_it_has_the_others_weights() -> None:
    replica = divided()
    heard(replica, turn(1))
    replica.on(taken(1), 0.0)
    assert said(replica.on(GroupBroken(1, "reset"), 0.0)) == [Broken(1, "reset")]
    assert said(heard(replica, view(2))) == [ViewSeen(2, clock=1)]
    heard(replica, Form(2, 1, 20, B, (A,)))
    assert replica.on(GroupJoined(2, 1), 0.0) == [Gather(1)]


def test_who_makes_a_step_that_others_have_made_tells_so_though_the_group_breaks_then() -> None:
    replica = divided()
    heard(replica, view(2), Form(2, 1, 20, B, (A,)))
    replica.on(GroupJoined(2, 1), 0.0)
    replica.on(GroupBroken(2, "reset"), 0.0)
    assert said(heard(replica, view(3))) == [ViewSeen(3, clock=1)]


def test_a_share_is_saved_when_it_is_known_which_it_is() -> None:
    replica = divided()
    heard(replica, view(2), Form(2, 1, 20, B, (A,)), TakeSnapshot(3))
    assert replica.on(GroupJoined(2, 1), 0.0) == [Gather(1)]
    assert replica.on(Gathered(2), 0.0) == [WriteSnapshot(3, 1)]


def test_a_broken_group_is_told_and_left() -> None:
    replica = grouped()
    heard(replica, turn(1))
    assert replica.on(GroupBroken(1, "reset"), 0.0) == [LeaveGroup(), Send(COORDINATOR, Broken(1, "reset"))]


def test_who_gets_weights_counts_on_from_them() -> None:
    replica = CollectiveReplica(A, 2)
    heard(replica, view(3), Form(3, 7, 140, B, (A,)))
    replica.on(GroupJoined(3), 0.0)
    shown = said(heard(replica, ShowWeights(4)))[0]
    assert isinstance(shown, Shown)
    assert (shown.weights.updates, shown.weights.examples) == (7, 140)
    assert heard(replica, TakeSnapshot(2)) == [WriteSnapshot(2, 7)]
    assert said(replica.on(SnapshotWritten(2, checksum=9), 0.0)) == [SnapshotTaken(2, 7, (), "", 9, 140)]


def test_a_step_that_is_not_finite_is_tried_again_and_the_guilty_tell() -> None:
    innocent, guilty = grouped(), grouped()
    for replica in (innocent, guilty):
        heard(replica, turn(1))
    assert innocent.on(taken(1, finite=False), 0.0) == [Step(1, 0, 0, 10, 20)]
    first = guilty.on(taken(1, finite=False, guilty=True), 0.0)
    assert first == [Send(COORDINATOR, NonFinite(0, 0, 10, 1, final=False)), Step(1, 0, 0, 10, 20)]
    again = guilty.on(taken(1, finite=False, guilty=True), 0.0)
    assert again == [Send(COORDINATOR, NonFinite(0, 0, 10, 1, final=True))]
    assert innocent.on(taken(1, finite=False), 0.0) == []


def test_a_stop_ends_it_in_its_group_or_without_one() -> None:
    for replica in (grouped(), CollectiveReplica(A, 2)):
        assert heard(replica, Stop())[-1] == End("finished")


def test_a_replica_that_lies_on_several_machines_meets_its_parts() -> None:
    places = (PartPlace(Node("part", 1), 1),)
    assert heard(CollectiveReplica(A, 2), PartsPlaced(places)) == [MeetParts(places)]
