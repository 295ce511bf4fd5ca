"""Who gets which data, and what becomes of the data of those who are lost."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.protocol.effects import Cause, End, Forget, WritePiece
from squall.protocol.events import PieceWritten, Started, StopRequested, TimePassed
from squall.protocol.leases import Limits
from squall.protocol.machine import Refusal
from squall.protocol.messages import (
    Cover,
    Grant,
    Join,
    Lease,
    LeaseRequest,
    Progress,
    Skip,
    SnapshotPiece,
    Stats,
    Stop,
    TakeSnapshot,
    View,
    ViewSeen,
    Welcome,
)
from squall.protocol.nodes import NURSERY, Node
from squall.protocol.notes import LeaseEnded, TrainingBegan
from squall.protocol.nursery_messages import ProcessLost, ProcessStuck
from squall.protocol.replacing import LOST_IN_A_ROW, SOON_S
from tests.protocol.office import BATCH, Office, start
from tests.protocol.steps import kinds, only, sent
from tests.protocol.test_closing import finished


def again(node: Node) -> Node:
    return Node(node.role, node.index, node.incarnation + 1)


# ---------------------------------------------------------------- joining


def test_a_replica_is_welcome_when_all_shards_have_seen_it() -> None:
    office = Office()
    office.prompt = False
    (node,) = office.join(0)
    assert [to for to, _ in office.said if isinstance(_, View)] == office.shards
    office.see(office.shards[1])
    assert not office.welcomed(node)
    office.tell(office.shards[0], ViewSeen(1, ()))
    assert office.welcomed(node)


def test_training_begins_with_the_first_replica() -> None:
    office = Office(seconds=60.0)
    assert office.machine.wake_at is None
    office.now = 5.0
    office.join(0)
    assert office.notes(TrainingBegan)
    office.join(1)
    assert not office.notes(TrainingBegan)
    assert office.machine.wake_at == 65.0


def test_a_replacement_waits_for_its_slot() -> None:
    office = Office()
    node, _ = office.join(0, 1)
    office.prompt = False
    office.lose(node)
    (replacement,) = office.join(0, incarnation=1)
    assert len([view for _, view in office.said if isinstance(view, View) and view.number == 3]) == 2
    assert not office.heard(replacement, Welcome)
    office.prompt = True
    office.see()
    assert office.welcomed(replacement)
    views = [view for _, view in office.said if isinstance(view, View)]
    assert [(m.slot, m.incarnation) for m in views[-1].members] == [(0, 1), (1, 0)]


def test_a_join_that_comes_after_its_sender_was_lost_is_never_heard() -> None:
    """The launcher's news may overtake frames; a dead member would hold the end of the run for ever."""
    office = Office()
    node = Node("replica", 0)
    effects = office.lose(node)
    assert Forget(node) in effects  # its link is dropped, and with it the Join
    assert start(again(node)) in effects


def test_a_request_that_comes_after_its_sender_was_lost_gets_nothing() -> None:
    office = Office()
    node, _ = office.join(0, 1)
    office.prompt = False
    office.lose(node)
    assert kinds(office.tell(node, LeaseRequest())) == []
    assert office.leases.held == {}


# ---------------------------------------------------------------- data


def test_a_lost_replicas_lease_comes_back_when_all_shards_have_seen_it_gone() -> None:
    office = Office(examples=40, shards=2, replicas=2)
    a, b = office.join(0, 1)
    lease = office.ask(a)
    assert (lease.start, lease.stop) == (0, 20)
    office.ask(b), office.ask(b)
    office.prompt = False
    office.applied = {a: (Cover(lease.id, 10),)}
    office.lose(a)
    assert office.ask(b) is None
    effects = office.see()
    assert sent(effects, Grant) == [(b, Grant(Lease(3, 0, 10, 20)))]  # what the shards applied is kept
    assert Forget(a) in effects


def test_a_lease_is_recorded_with_what_was_trained_of_it() -> None:
    office = Office(examples=40, replicas=2)
    a, _ = office.join(0, 1)
    lease = office.ask(a)
    office.now = 3.0
    assert office.trained(a, lease, 10) == []
    office.applied = {a: (Cover(lease.id, 10),)}
    office.lose(a)
    (note,) = office.notes(LeaseEnded)
    assert (note.holder, note.lease.start, note.lease.stop, note.done) == (a, 0, 20, 10)


def test_what_a_loop_leaves_out_is_the_next_batch_of_a_lease_that_it_has() -> None:
    office = Office(examples=40, replicas=2)
    a, b = office.join(0, 1)
    lease, other = office.ask(a), office.ask(b)
    assert (lease.start, lease.stop, other.start) == (0, 20, 20)

    def skip(start: int, stop: int, of: int = lease.id, epoch: int = 0) -> list[str]:
        return kinds(office.tell(a, Skip(of, epoch, start, stop)))

    assert skip(0, 10) == ["BatchLeftOut", "SkipNoted"]
    for first, stop, epoch in ((0, 10, 0), (10, 30, 0), (15, 15, 0), (10, 20, 1), (20, 30, 0)):
        with pytest.raises(Refusal, match="it leaves out"):
            skip(first, stop, epoch=epoch)
    assert skip(20, 30, other.id) == skip(0, 10, 1 << 40) == ["SkipNoted"], "it goes to others, or there is none"
    assert skip(10, 20) == ["BatchLeftOut", "SkipNoted"]
    assert office.machine._skips == {lease.id: [(0, 10), (10, 20)]}


# ---------------------------------------------------------------- losses


def doom(office: Office, node: Node, times: int) -> list[float]:
    """Processes of a slot die as soon as they have joined; the pauses until the next is started."""
    pauses = []
    for _ in range(times):
        effects = office.lose(node, "killed by SIGSEGV")
        node, before = again(node), office.now
        if start(node) not in effects and office.machine.wake_at is not None:
            office.now = office.machine.wake_at
            effects = office.give(TimePassed())
        if start(node) not in effects:
            break
        pauses.append(office.now - before)
        office.tell(node, Join(1))
    return pauses


def test_a_slot_whose_processes_keep_dying_is_given_up_after_longer_and_longer_pauses() -> None:
    office = Office(gather="mean")
    (other,) = office.join(1)
    assert office.tell(other, LeaseRequest()) == []
    assert doom(office, Node("replica", 0), 9) == [0, 1, 2, 4]
    said = f"replica 0 was lost {LOST_IN_A_ROW} times in a row, last: killed by SIGSEGV"
    assert office.remarks("warning") == [f"{said}; the others go on without it"]
    assert office.heard(other, Grant), "rounds begin without it"
    assert doom(office, other, 9) == [0, 1, 2, 4]
    assert only(office.snapshot(), End) == End("failed", said.replace("replica 0", "replica 1"), Cause.FAILED)


def test_an_evaluator_never_ends_a_run() -> None:
    office = Office(limits=Limits())
    (a,) = office.join(0)
    assert doom(office, office.evaluator, 2000) == [0, 1, 2, 4, 8, 16, *[32] * 1994], "a day of deaths"
    assert not office.heard(a, Stop)


def test_an_evaluator_that_is_to_start_later_starts_when_the_final_weights_are_there() -> None:
    office = Office()
    a, b = office.join(0, 1)
    assert doom(office, office.evaluator, 9)[-1] == 32
    assert office.lose(Node("evaluator", 2, 9)) != []
    assert office.machine.wake_at == office.now + 32
    office.work(a)
    office.leave(a, b)
    assert office.machine.wake_at == office.now
    assert start(Node("evaluator", 2, 10)) in office.give(TimePassed())


def test_an_evaluator_of_a_run_that_ends_with_an_error_is_not_started_again() -> None:
    """Its metric would be computed, and fail, once more."""
    office = Office()
    office.join(0, 1)
    office.give(StopRequested("evaluator 2 raised an exception", failed=True))
    assert start(again(office.evaluator)) not in office.lose(office.evaluator)
    office.now += 100.0
    assert start(again(office.evaluator)) not in office.give(TimePassed())


def test_the_final_weights_are_not_evaluated_for_ever() -> None:
    office = finished()
    node = office.evaluator
    for _ in range(LOST_IN_A_ROW):
        office.tell(node, Join(1))
        office.now += 2 * SOON_S  # none of them dies soon
        effects = office.lose(node)
        node = again(node)
        if sent(effects, TakeSnapshot):
            break
        if start(node) not in effects:
            office.now = office.machine.wake_at or math.inf
            assert start(node) in office.give(TimePassed())
    assert "the final weights are not evaluated" in office.remarks("warning")[0]
    office.snapshot()
    assert only(office.effects, End).status == "finished"


def test_who_lives_for_a_while_is_replaced_at_once_for_ever() -> None:
    office = Office()
    node = Node("replica", 0)
    for _ in range(3 * LOST_IN_A_ROW):
        office.tell(node, Join(1))
        office.now += SOON_S
        assert start(again(node)) in office.lose(node)
        node = again(node)


def test_who_hangs_has_not_lived_meanwhile() -> None:
    office = Office()
    office.join(1)
    node = Node("replica", 0)
    for number in range(1, 1 + LOST_IN_A_ROW):
        office.tell(node, Join(1))
        office.now += 10 * SOON_S
        office.tell(NURSERY, ProcessLost(node, "it hung", 9.5 * SOON_S))
        assert bool(office.remarks("warning")) == (number == LOST_IN_A_ROW)
        office.now = office.machine.wake_at or office.now
        office.give(TimePassed())
        node = again(node)


def test_who_waits_for_a_disk_is_told_of_by_its_own_machine() -> None:
    office = Office()
    office.tell(NURSERY, ProcessStuck(office.shards[0], "has waited for a disk for 30 s"))
    assert office.remarks("warning") == ["shard 0 has waited for a disk for 30 s"]
    office.tell(Node("nursery", 1), ProcessStuck(office.shards[0], "has been eaten"))
    assert office.remarks("warning") == []


def test_who_dies_before_it_could_tell_of_its_work_is_replaced_at_once_for_ever() -> None:
    office = Office(examples=10_000)
    node = Node("replica", 0)
    for _ in range(2 * LOST_IN_A_ROW):
        office.tell(node, Join(1))
        lease = office.ask(node)
        office.applied = {node: (Cover(lease.id, lease.start + BATCH),)}
        assert start(again(node)) in office.lose(node)
        node = again(node)


def test_a_finished_batch_ends_the_row() -> None:
    office = Office(examples=10_000)
    node = Node("replica", 0)
    for _ in range(2 * LOST_IN_A_ROW):
        office.tell(node, Join(1))
        lease = office.ask(node)
        office.trained(node, lease, lease.start + BATCH)
        assert start(again(node)) in office.lose(node)
        node = again(node)


def test_a_lost_shard_ends_the_run_with_an_error() -> None:
    office = Office()
    office.join(0)
    effects = office.lose(office.shards[1], "killed by SIGKILL")
    assert only(effects, End) == End("failed", "shard 1 was lost (killed by SIGKILL)")
    assert [to for to, _ in sent(effects, Stop)] == [*office.shards, office.evaluator]
    assert Forget(office.shards[1]) in effects  # else its end would wait for the dead one to acknowledge that
    assert Forget(Node("replica", 0)) in effects
    assert office.lose(Node("replica", 0)) == []  # what follows from the end is no news


@given(st.lists(st.tuples(st.sampled_from(["ask", "train", "lose", "late"]), st.integers(0, 2)), max_size=60))
def test_whatever_replicas_do_the_ledger_adds_up(plan: list[tuple[str, int]]) -> None:
    """`steps.give` checks the coordinator after each event; here the run is brought to its end as well."""
    office = Office(replicas=3, examples=70, limits=Limits(epochs=2))
    office.give(Started())
    nodes = dict(enumerate(office.join(0, 1, 2)))
    dead: list[Node] = []
    losses = dict.fromkeys(range(3), 0)
    for what, slot in plan:
        node = nodes[slot]
        held = [h.lease for h in office.leases.held.values() if h.holder == node]
        if what == "ask":
            office.tell(node, LeaseRequest())
        elif what == "train" and held:
            office.trained(node, held[0], min(held[0].stop, office.leases.held[held[0].id].done + BATCH))
        elif what == "lose" and losses[slot] < LOST_IN_A_ROW - 1:
            losses[slot] += 1
            dead.append(node)
            office.lose(node)
            nodes[slot] = again(node)
            office.tell(nodes[slot], Join(1))
        elif what == "late" and dead:
            office.tell(dead[-1], Progress((Cover(0, 10), Cover(1, 70)), Stats()))
    for slot in (*range(3), *range(3)):
        for held in [h.lease for h in office.leases.held.values() if h.holder == nodes[slot]]:
            office.trained(nodes[slot], held)
        office.work(nodes[slot])
    assert office.leases.trained == 140
    assert office.heard(nodes[0], Stop)


# ---------------------------------------------------------------- what shards say


PIECES = (SnapshotPiece(1, 0, 10, 25), SnapshotPiece(1, 10, 10, 25), SnapshotPiece(1, 20, 5, 25))


def test_a_file_comes_piece_by_piece() -> None:
    office = Office(shards=1, snapshot_every_s=1.0)
    (shard,) = office.shards
    office.join(0)
    office.now = 1.0
    assert sent(office.give(TimePassed()), TakeSnapshot)
    for number, piece in enumerate(PIECES):
        for wrong in (
            *PIECES[:number],
            *PIECES[number + 1 :],
            SnapshotPiece(2, 0, 10, 25),
            SnapshotPiece(1, 20, 6, 25),
        ):
            with pytest.raises(Refusal):
                office.tell(shard, wrong)
        assert office.tell(shard, piece) == [WritePiece(shard.index, piece, 0, 1)]


def test_the_first_snapshots_of_a_run_that_has_begun_before_come_sooner() -> None:
    office = Office(shards=1, snapshot_every_s=10.0, snapshot_first_s=2.0)
    office.join(0)
    for pause_s in (2.0, 4.0, 8.0, 10.0, 10.0):
        office.now += pause_s - 0.1
        assert not sent(office.give(TimePassed()), TakeSnapshot)
        office.now += 0.1
        assert sent(office.give(TimePassed()), TakeSnapshot)
        office.snapshot()


def test_who_goes_on_in_its_place_has_a_piece_written_of_which_nothing_was_heard() -> None:
    office = Office(shards=1, snapshot_every_s=1.0)
    (shard,) = office.shards
    office.give(Started())
    office.join(0)
    office.now = 1.0
    office.give(TimePassed())
    written = office.tell(shard, PIECES[0])
    assert office.give(Started()) == written == [WritePiece(shard.index, PIECES[0], 0, 1)]
    office.give(PieceWritten(0, 1))
    assert office.give(Started()) == []


def test_nobody_sees_a_view_before_it_is_shown() -> None:
    office = Office(shards=1)
    with pytest.raises(Refusal, match="it has seen another view 1 than the newest, which is 0"):
        office.tell(office.shards[0], ViewSeen(1, ()))
