"""A coordinator that deals examples to be answered, and replicas that answer them, over a fake wire."""

from __future__ import annotations

import math

import pytest

from squall.protocol.answering.coordinator import AnswerCoordinator
from squall.protocol.answering.effects import Answer, KeepAnswers, WriteAnswers
from squall.protocol.answering.messages import AnswersPiece, NotKept
from squall.protocol.answering.replica import KEPT_BYTES, KEPT_S, Answerer
from squall.protocol.closing import Phase
from squall.protocol.effects import Effect, End, Expect, Send
from squall.protocol.events import Answered, AnswersKept, AnswersTaken, Started
from squall.protocol.frames import Message
from squall.protocol.leases import Leases
from squall.protocol.machine import Refusal
from squall.protocol.messages import (
    PIECE_BYTES,
    Cover,
    Grant,
    Join,
    Lease,
    LeaseRequest,
    Left,
    PieceKept,
    Progress,
    Stats,
    Stop,
    Welcome,
)
from squall.protocol.nodes import COORDINATOR, NURSERY, Node
from squall.protocol.notes import AnswersFound, LeaseEnded
from squall.protocol.nursery_messages import ProcessLost
from squall.protocol.policy import MachineRoom, Policy
from tests.protocol.steps import give, sent, tell

FIRST, SECOND = Node("replica", 0), Node("replica", 1)
TEN = Stats(10, 1, math.nan)


# ---------------------------------------------------------------- the replica


def with_lease(start: int = 0, stop: int = 40) -> tuple[Answerer, list[Effect]]:
    replica = Answerer(FIRST, 10)
    assert sent(give(replica, Started()), Join)
    assert sent(tell(replica, COORDINATOR, Welcome(0)), LeaseRequest)
    return replica, tell(replica, COORDINATOR, Grant(Lease(7, 0, start, stop)), now=2.0)


def said(effects: list[Effect]) -> list[object]:
    return [each.message if isinstance(each, Send) else each for each in effects if not isinstance(each, Expect)]


def test_a_lease_is_answered_kept_and_told_of_in_this_order() -> None:
    replica, effects = with_lease(0, 20)
    assert [each for each in effects if isinstance(each, Expect)] == [Expect(0, 0, 10), Expect(0, 10, 20)]
    assert said(effects) == [Answer(0, 10)]
    assert said(give(replica, Answered(0.5, 100))) == [LeaseRequest(), Answer(10, 20)]
    assert said(give(replica, Answered(0.25, 100))) == [KeepAnswers(0, 20)]
    (told,) = said(give(replica, AnswersKept()))
    assert isinstance(told, Progress)
    assert told.covers == (Cover(7, 20),)
    assert (told.stats.examples, told.stats.batches, told.stats.compute_s, told.stats.wait_s) == (20, 2, 0.75, 2.0)
    assert math.isnan(told.stats.loss_sum)


@pytest.mark.parametrize("much", [Answered(0.0, KEPT_BYTES), Answered(KEPT_S, 0)])
def test_what_is_large_or_takes_long_is_kept_before_the_lease_ends(much: Answered) -> None:
    replica, _ = with_lease()
    assert said(give(replica, much)) == [KeepAnswers(0, 10)]
    told, after = said(give(replica, AnswersKept()))
    assert isinstance(told, Progress)
    assert told.covers == (Cover(7, 10),)
    assert after == Answer(10, 20)


def test_who_is_to_stop_keeps_what_it_has_and_leaves() -> None:
    replica, _ = with_lease()
    give(replica, Answered(0.1, 1))
    assert said(tell(replica, COORDINATOR, Stop())) == []  # the model runs
    assert said(give(replica, Answered(0.1, 1))) == [KeepAnswers(0, 20)]
    told, left, end = said(give(replica, AnswersKept()))
    assert isinstance(told, Progress)
    assert told.covers == (Cover(7, 20),)
    assert isinstance(left, Left)
    assert left.covers == ()
    assert end == End("finished")


def test_answers_on_another_machine_travel_piece_by_piece_before_they_are_told_of() -> None:
    replica, _ = with_lease(0, 10)
    assert said(give(replica, Answered(0.1, 1)))[-1] == KeepAnswers(0, 10)
    total = PIECE_BYTES + 5
    assert said(give(replica, AnswersKept(total))) == [AnswersPiece(7, 0, 10, 0, 0, PIECE_BYTES, total)]
    assert said(tell(replica, COORDINATOR, PieceKept(7))) == [AnswersPiece(7, 0, 10, 1, PIECE_BYTES, 5, total)]
    (told,) = said(tell(replica, COORDINATOR, PieceKept(7)))
    assert isinstance(told, Progress)


# ---------------------------------------------------------------- the coordinator


class Counter:
    """A coordinator of two replicas that have joined; `found` is on the disk already."""

    def __init__(
        self, found: tuple[tuple[int, int], ...] = (), examples: int = 100, rooms: tuple[MachineRoom, ...] = ()
    ) -> None:
        policy = Policy(2, 0, evaluate=False, snapshot_every_s=None, rooms=rooms)
        self.machine = AnswerCoordinator(policy, Leases.besides(found, examples, 10), found)
        self.begun = give(self.machine, Started())

    def tell(self, sender: Node, message: Message) -> list[Effect]:
        return tell(self.machine, sender, message, 1.0)

    def lease(self, node: Node) -> Lease:
        (grant,) = [message for to, message in sent(self.tell(node, LeaseRequest()), Grant) if to == node]
        assert grant.lease is not None
        return grant.lease


def test_a_replica_is_welcome_at_once_whoever_else_stands_still() -> None:
    counter = Counter()
    assert sent(counter.tell(FIRST, Join(1)), Welcome) == [(FIRST, Welcome(0))]
    assert sent(counter.tell(SECOND, Join(2)), Welcome) == [(SECOND, Welcome(0))]


def test_what_a_lost_replica_had_not_told_of_goes_to_others_at_once() -> None:
    counter = Counter(examples=20)
    counter.tell(FIRST, Join(1))
    counter.tell(SECOND, Join(2))
    lost, other = counter.lease(FIRST), counter.lease(SECOND)
    assert (lost.start, lost.stop, other.start, other.stop) == (0, 10, 10, 20)
    assert sent(counter.tell(SECOND, LeaseRequest()), Grant) == [(SECOND, Grant(None))]
    effects = counter.tell(NURSERY, ProcessLost(FIRST, "killed"))
    ((_, grant),) = sent(effects, Grant)
    assert grant.lease is not None
    assert (grant.lease.start, grant.lease.stop) == (0, 10)
    late = Progress((Cover(lost.id, lost.stop),), TEN)
    assert not [each for each in counter.tell(FIRST, late) if isinstance(each, LeaseEnded)]


def test_it_goes_on_with_what_no_file_has() -> None:
    counter = Counter(found=((0, 30), (20, 50), (70, 80)))
    assert AnswersFound(((0, 30), (20, 50), (70, 80)), 60) in counter.begun
    counter.tell(FIRST, Join(1))
    assert [(lease.id, lease.start, lease.stop) for lease in (counter.lease(FIRST), counter.lease(FIRST))] == [
        (3, 50, 70), (4, 80, 100),
    ]  # fmt: skip


def test_it_ends_when_all_is_told_without_a_snapshot() -> None:
    counter = Counter(examples=10)
    counter.tell(FIRST, Join(1))
    lease = counter.lease(FIRST)
    effects = counter.tell(FIRST, Progress((Cover(lease.id, 10),), TEN))
    assert sent(effects, Stop) == [(FIRST, Stop())]
    (end,) = [each for each in counter.tell(FIRST, Left((), TEN)) if isinstance(each, End)]
    assert (end.status, end.cause) == ("finished", "data")
    assert counter.machine.phase is Phase.ENDED


def test_pieces_are_of_the_lease_that_was_dealt_one_after_the_other() -> None:
    counter = Counter()
    counter.tell(FIRST, Join(1))
    lease = counter.lease(FIRST)
    whole = AnswersPiece(lease.id, 0, 10, 0, 0, 6, 10)
    assert counter.tell(FIRST, whole) == [WriteAnswers(FIRST, whole)]
    assert sent(give(counter.machine, AnswersTaken(FIRST, lease.id)), PieceKept) == [(FIRST, PieceKept(lease.id))]
    for wrong in (
        whole,  # again
        AnswersPiece(lease.id, 0, 10, 1, 6, 5, 11),  # of another file
        AnswersPiece(lease.id, 0, 20, 1, 6, 4, 10),  # of other examples
    ):
        with pytest.raises(Refusal, match="of which"):
            tell(counter.machine, FIRST, wrong)
    last = AnswersPiece(lease.id, 0, 10, 1, 6, 4, 10)
    assert counter.tell(FIRST, last) == [WriteAnswers(FIRST, last)]
    with pytest.raises(Refusal, match="of which"):  # beyond its lease
        tell(counter.machine, FIRST, AnswersPiece(lease.id, 10, 90, 2, 0, 4, 10))
    assert counter.tell(FIRST, AnswersPiece(99, 0, 10, 0, 0, 4, 10)) == []  # dealt to others, for all it knows


def test_where_a_replica_cannot_keep_its_answers_the_run_ends_with_the_reason() -> None:
    replica, _ = with_lease(0, 10)
    give(replica, Answered(0.1, 1))
    assert said(give(replica, AnswersKept(error="free some space"))) == [NotKept("free some space")]
    counter = Counter()
    counter.tell(FIRST, Join(1))
    (end,) = [each for each in counter.tell(FIRST, NotKept("free some space")) if isinstance(each, End)]
    assert (end.status, end.reason) == ("failed", "free some space")


def test_a_replica_of_another_machine_is_not_believed_that() -> None:
    counter = Counter(rooms=(MachineRoom(0, 1, (FIRST,)), MachineRoom(1, 1, (SECOND,))))
    counter.tell(SECOND, Join(2))
    with pytest.raises(Refusal, match="it writes no files"):
        tell(counter.machine, SECOND, NotKept("free some space"))


def test_where_other_machines_answers_cannot_be_written_the_run_ends() -> None:
    counter = Counter()
    counter.tell(FIRST, Join(1))
    effects = give(counter.machine, AnswersTaken(FIRST, 0, "free some space on its disk"))
    (end,) = [each for each in effects if isinstance(each, End)]
    assert (end.status, end.reason) == ("failed", "free some space on its disk")
