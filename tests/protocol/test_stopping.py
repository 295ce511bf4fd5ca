"""A user's stop, and batches that stay bad."""

import pytest

from squall.protocol.closing import STOP_WITHIN_S
from squall.protocol.effects import Cause, Effect, End, PublishSnapshot
from squall.protocol.events import StopRequested, TimePassed
from squall.protocol.leases import Limits
from squall.protocol.loss_messages import SnapshotLost
from squall.protocol.messages import (
    Cover,
    Evaluate,
    NonFinite,
    SnapshotPiece,
    SnapshotTaken,
    Stop,
    TakeSnapshot,
)
from squall.protocol.nodes import Node
from squall.protocol.notes import Saving, WorkReported
from squall.protocol.nursery_messages import Heard
from squall.protocol.policy import SAVE_WITHIN_S
from squall.protocol.snapshot_rounds import SILENT_S
from tests.protocol.office import Office
from tests.protocol.steps import kinds, sent
from tests.protocol.test_closing import end, finished


def test_a_users_stop_skips_the_evaluation() -> None:
    office = Office(limits=Limits())
    a, b = office.join(0, 1)
    assert sent(office.give(StopRequested("interrupted")), Stop) == [(a, Stop()), (b, Stop())]
    office.leave(a, b)
    assert not office.heard(office.evaluator, Evaluate)
    office.snapshot()
    assert end(office) == End("interrupted", "interrupted", Cause.STOPPED)


@pytest.mark.parametrize("evaluating", [False, True])
def test_a_users_stop_waits_for_nobody_beyond_its_time(evaluating: bool) -> None:
    office = finished() if evaluating else Office(limits=Limits())
    office.join(0)
    office.now = 5.0
    office.give(StopRequested("interrupted"))
    office.now = 5.5
    office.give(StopRequested("interrupted"))  # again
    assert office.machine.wake_at == 5.0 + STOP_WITHIN_S
    office.now = 5.0 + STOP_WITHIN_S
    assert [to for to, _ in sent(office.give(TimePassed()), TakeSnapshot)] == office.shards
    office.snapshot()
    ended = end(office)
    assert ended.status == "interrupted"
    where = " before the final weights were evaluated (all data is trained)" if evaluating else ""
    assert ended.reason == f"interrupted{where}"


def test_a_stop_before_anybody_has_joined() -> None:
    office = Office()
    effects = office.give(StopRequested("interrupted"))
    assert kinds(effects) == ["TrainingOver", "SnapshotAsked", "TakeSnapshot", "TakeSnapshot"]
    office.snapshot()
    assert end(office).status == "interrupted"


def test_a_batch_that_stays_bad_ends_the_run_and_is_named() -> None:
    office = Office()
    a, b = office.join(0, 1)
    office.tell(a, NonFinite(2, 40, 50, 17, final=False))
    assert not office.heard(b, Stop)
    assert office.remarks("nonfinite")[0].endswith("not applied, tried again")
    office.tell(a, NonFinite(2, 40, 50, 17, final=True))
    assert office.heard(b, Stop)
    office.leave(a, b)
    office.snapshot()
    assert end(office).status == "nonfinite"
    assert "replica 0: NaN or Inf in the loss or gradient of examples 40 to 50 of epoch 2" in end(office).reason


def test_a_stop_during_the_last_snapshot_comes_too_late() -> None:
    office = finished(evaluate=False)
    assert office.give(StopRequested("interrupted")) == []
    office.snapshot()
    assert end(office) == End("finished", "all data is trained", Cause.DATA)


# ---------------------------------------------------------------- shards that do not answer

SILENT = "shard 0, shard 1 did not answer in time, so that nothing was saved"


@pytest.mark.parametrize("under_way", [False, True])
def test_a_users_stop_does_not_wait_for_a_snapshot_that_is_never_written(under_way: bool) -> None:
    office = Office(limits=Limits(), snapshot_every_s=1.0)
    a, b = office.join(0, 1)
    office.now = 1.0 if under_way else 0.5
    office.give(TimePassed())
    office.give(StopRequested("interrupted"))
    office.leave(a, b)
    assert office.machine.wake_at == pytest.approx(office.now + STOP_WITHIN_S + SAVE_WITHIN_S)
    office.now += 2.3
    office.give(TimePassed())
    assert end(office) == End("interrupted", f"interrupted; {SILENT}", Cause.STOPPED)


def test_a_finished_run_whose_last_snapshot_a_user_does_not_wait_for_has_not_finished() -> None:
    office = finished(evaluate=False)
    assert office.machine.wake_at is None  # else it takes the time that it needs
    office.now = 100.0
    office.give(StopRequested("interrupted"))
    assert office.machine.wake_at == pytest.approx(office.now + STOP_WITHIN_S + SAVE_WITHIN_S)
    office.now = office.machine.wake_at
    office.give(TimePassed())
    assert end(office) == End("interrupted", f"all data is trained; {SILENT}", Cause.STOPPED)


def heard(office: Office, *shards: Node) -> list[Effect]:
    """As the coordinator's own connections tell it."""
    return office.tell(office.machine.node, Heard(shards))


def slow() -> Office:
    """A stop: all have left, and the shards' files are to come."""
    office = Office(limits=Limits())
    a, b = office.join(0, 1)
    office.give(StopRequested("interrupted"))
    office.leave(a, b)
    return office


def test_a_users_stop_waits_while_something_of_every_file_arrives() -> None:
    office = slow()
    one, other = office.shards
    for now in (0.5, 2.0, 4.5, 7.0, 9.5):
        office.now = now
        assert heard(office, one, other) == [Saving(0, 0)]
        assert office.machine.wake_at == max(now + SILENT_S, STOP_WITHIN_S + SAVE_WITHIN_S)
    assert Saving(40, 100) in office.tell(one, SnapshotPiece(1, 0, 40, 100)), "which are more bytes than whole pieces"
    office.snapshot()
    assert end(office) == End("interrupted", "interrupted", Cause.STOPPED)


def test_who_is_silent_is_not_waited_for_because_others_are_heard() -> None:
    office = slow()
    one, other = office.shards
    office.now = 2.0
    heard(office, one)
    assert office.machine.wake_at == STOP_WITHIN_S + SAVE_WITHIN_S
    office.tell(other, SnapshotTaken(1, 7, ()))
    assert office.machine.wake_at == 2.0 + SILENT_S, "the other file is there"
    office.tell(office.evaluator, Heard((one,)))
    office.now = 2.0 + SILENT_S
    office.give(TimePassed())
    assert end(office).reason == "interrupted; shard 0 did not answer in time, so that nothing was saved"


@pytest.mark.parametrize("came_at", [1.0 + STOP_WITHIN_S + SAVE_WITHIN_S - 0.01, 5.0])
def test_behind_a_snapshot_that_was_under_way_and_came_slowly_the_last_one_has_its_time(came_at: float) -> None:
    office = Office(limits=Limits(), snapshot_every_s=1.0)
    a, b = office.join(0, 1)
    office.now = 1.0
    office.give(TimePassed())
    office.give(StopRequested("interrupted"))
    office.leave(a, b)
    office.now = 3.0
    heard(office, *office.shards)
    office.now = came_at
    assert not [effect for effect in office.snapshot() if isinstance(effect, End)]
    assert office.machine.wake_at == came_at + SAVE_WITHIN_S
    office.snapshot()
    assert end(office).status == "interrupted"


def test_a_snapshot_that_is_begun_anew_has_its_time_and_not_that_of_what_came_of_the_one_before() -> None:
    office = slow()
    one, other = office.shards
    office.now = 2.0
    heard(office, one, other)
    assert office.machine.wake_at == 2.0 + SILENT_S
    office.tell(one, SnapshotLost(1))
    assert office.machine.wake_at == 2.0 + SAVE_WITHIN_S
    office.snapshot()
    assert end(office) == End("interrupted", "interrupted", Cause.STOPPED)


def test_a_run_that_nobody_stops_tells_nobody_what_arrives() -> None:
    office = finished(evaluate=False)
    assert heard(office, *office.shards) == []
    assert office.machine.wake_at is None


def test_the_snapshot_behind_a_scripts_own_end_takes_the_time_that_it_needs() -> None:
    office = Office(limits=Limits())
    a, b = office.join(0, 1)
    office.give(StopRequested("it took no more batches", wanted=True))
    office.leave(a, b)
    assert office.machine.wake_at is None
    office.snapshot()
    assert end(office).status == "finished"


def test_work_that_a_closing_snapshot_tells_of_is_not_reported_once_more() -> None:
    """A replica that did not answer in time dies while shards write: its work is in their files, and in the ledger."""
    office = Office(limits=Limits())
    (a,) = office.join(0)
    lease = office.ask(a)
    assert lease is not None
    office.give(StopRequested("interrupted"))
    office.now = STOP_WITHIN_S
    assert sent(office.give(TimePassed()), TakeSnapshot)
    office.applied[a] = (Cover(lease.id, lease.start + 10),)
    office.lose(a)
    assert not office.notes(WorkReported)
    (published,) = [e for e in office.snapshot(trained=office.applied[a]) if isinstance(e, PublishSnapshot)]
    assert published.progress == {str(lease.id): lease.start + 10}
