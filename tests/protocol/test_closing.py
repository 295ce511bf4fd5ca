"""Evaluations, snapshots, and how a run comes to its end."""

from squall.protocol.effects import Cause, End, Forget, PublishSnapshot, Send
from squall.protocol.events import StopRequested, TimePassed
from squall.protocol.leases import Limits
from squall.protocol.messages import Cover, Evaluate, Join, Left, Stats, Stop, TakeSnapshot, Welcome
from squall.protocol.nodes import Node
from squall.protocol.notes import MemberLeft, TargetReached, WeightsMeasured
from squall.protocol.nursery_messages import StartProcess
from tests.protocol.office import Office, start
from tests.protocol.steps import only, sent


def finished(**settings: object) -> Office:
    """Everything is trained and both replicas have left."""
    office = Office(**settings)
    a, b = office.join(0, 1)
    office.work(a)
    office.leave(a, b)
    return office


def end(office: Office) -> End:
    return only(office.effects, End)


# ---------------------------------------------------------------- the order of things


def test_training_leaving_evaluation_snapshot_end() -> None:
    office = Office(examples=20)
    a, b = office.join(0, 1)
    office.work(a)
    assert [office.heard(node, Stop) for node in (a, b)] == [[Stop()]] * 2
    assert not office.heard(office.evaluator, Evaluate)
    office.leave(a)
    assert not office.heard(office.evaluator, Evaluate)
    office.leave(b)
    assert office.heard(office.evaluator, Evaluate) == [Evaluate(0)]
    office.evaluated(loss=0.25)
    assert [office.heard(shard, TakeSnapshot) for shard in office.shards] == [[TakeSnapshot(1)]] * 2
    published = only(office.snapshot(), PublishSnapshot)
    assert (published.number, published.versions, published.ledger["trained"]) == (1, (7, 8), 20)
    assert published.checksums == (70, 71)
    assert end(office) == End("finished", "all data is trained", Cause.DATA)
    assert [to for to, message in sent(office.effects, Stop)] == [*office.shards, office.evaluator]


def test_without_a_validation_set_nobody_evaluates() -> None:
    office = finished(evaluate=False)
    office.snapshot()
    assert end(office).status == "finished"
    assert [to for to, _ in sent(office.effects, Stop)] == list(office.shards)


def test_what_a_leaving_replica_had_not_reported_counts() -> None:
    office = Office(examples=20, replicas=1)
    (a,) = office.join(0)
    lease = office.ask(a)
    office.give(StopRequested("interrupted"))
    office.tell(a, Left((Cover(lease.id, 10),), Stats()))
    assert only(office.snapshot(), PublishSnapshot).ledger["trained"] == 10


def test_a_replica_that_joins_too_late_is_told_to_stop() -> None:
    office = finished()
    late = Node("replica", 1, 1)
    assert (late, Stop()) in sent(office.tell(late, Join(5)), Stop)
    assert office.leave(late)[0] == MemberLeft(late)
    office.evaluated()
    office.snapshot()
    assert end(office).status == "finished"


def test_a_replica_that_was_joining_when_the_end_came_is_not_welcomed() -> None:
    office = Office(limits=Limits())
    office.join(0)
    office.prompt = False
    (b,) = office.join(1)
    office.give(StopRequested("interrupted"))
    office.see()
    assert not office.heard(b, Welcome)
    assert office.heard(b, Stop)


def test_a_replica_that_waits_for_its_slot_is_told_as_well() -> None:
    office = Office(limits=Limits())
    (a,) = office.join(0)
    office.prompt = False
    office.lose(a)
    (replacement,) = office.join(0, incarnation=1)
    assert (replacement, Stop()) in sent(office.give(StopRequested("interrupted")), Stop)


def test_a_replica_lost_while_stopping_is_not_replaced_or_waited_for() -> None:
    office = Office(examples=20)
    a, b = office.join(0, 1)
    office.work(a)
    office.leave(a)
    effects = office.lose(b)
    assert not [effect for effect in effects if isinstance(effect, Send) and isinstance(effect.message, StartProcess)]
    assert sent(effects, Evaluate)


# ---------------------------------------------------------------- limits


def test_the_time_given() -> None:
    office = Office(limits=Limits(), seconds=10.0)
    office.now = 3.0
    (a,) = office.join(0)
    office.now = 13.0
    assert office.machine.wake_at == 13.0
    assert sent(office.give(TimePassed()), Stop) == [(a, Stop())]
    office.leave(a)
    office.evaluated()
    office.snapshot()
    assert end(office) == End("finished", "the time given is over", Cause.SECONDS)


def test_steps_and_epochs() -> None:
    for limits, trained, cause in (
        (Limits(steps=3), 30, Cause.STEPS), (Limits(epochs=2), 80, Cause.DATA),
        (Limits(epochs=2, steps=5), 50, Cause.STEPS), (Limits(epochs=2, steps=8), 80, Cause.DATA),
    ):  # fmt: skip
        office = finished(examples=40, limits=limits)
        assert (office.leases.trained, office.machine.cause) == (trained, cause)


def test_until() -> None:
    office = Office(limits=Limits(), until=("accuracy", 0.9), evaluate_every_s=1.0)
    (a,) = office.join(0)
    for now, accuracy in ((1.0, 0.5), (2.0, 0.95)):
        assert not office.heard(a, Stop)
        office.now = now
        office.give(TimePassed())
        office.evaluated(accuracy=accuracy)
    assert office.heard(a, Stop) == [Stop()]
    assert [note.text for note in office.notes(TargetReached)] == ["accuracy 0.9500 reached 0.9"]


# ---------------------------------------------------------------- evaluations


def test_every_epoch_is_evaluated_one_after_the_other() -> None:
    office = Office(examples=20, replicas=1, limits=Limits(epochs=4))
    (a,) = office.join(0)
    leases = [office.ask(a) for _ in range(4)]
    office.trained(a, leases[0])
    assert office.heard(office.evaluator, Evaluate) == [Evaluate(0)]
    for lease in leases[1:3]:
        office.trained(a, lease)  # two more epochs while it evaluates: one evaluation of what is there then
    assert office.heard(office.evaluator, Evaluate) == [Evaluate(0)]
    office.evaluated(loss=0.5)
    assert office.heard(office.evaluator, Evaluate) == [Evaluate(0), Evaluate(1, best=0.5)]
    assert [note.values for note in office.notes(WeightsMeasured)] == [{"loss": 0.5}]
    office.evaluated(loss=0.4)
    assert len(office.heard(office.evaluator, Evaluate)) == 2


def test_the_first_evaluator_joining_late_is_not_asked_twice_but_a_replacement_is() -> None:
    office = finished()
    assert sent(office.tell(office.evaluator, Join(1)), Evaluate) == []
    replacement = Node("evaluator", 2, 1)
    effects = office.lose(office.evaluator)
    assert start(replacement) in effects
    assert Forget(office.evaluator) in effects
    assert sent(office.tell(replacement, Join(2)), Evaluate) == [(replacement, Evaluate(0))]
    office.evaluated()
    office.snapshot()
    assert end(office).status == "finished"


# ---------------------------------------------------------------- snapshots


def test_snapshots_come_every_so_often_with_the_ledger_of_the_asking() -> None:
    office = Office(snapshot_every_s=10.0, replicas=1)
    (a,) = office.join(0)
    office.now = 10.0
    lease = office.ask(a)
    assert [to for to, _ in sent(office.give(TimePassed()), TakeSnapshot)] == office.shards
    office.trained(a, lease, 20)
    office.now = 12.0
    published = only(office.snapshot(trained=(Cover(lease.id, 20),)), PublishSnapshot)
    assert published.ledger["trained"] == 0
    assert published.progress == {str(lease.id): 20}
    assert office.machine.wake_at == 22.0


def test_a_snapshot_that_fails_is_noted_and_tried_again_later() -> None:
    office = Office(snapshot_every_s=10.0, replicas=1)
    office.join(0)
    for now in (10.0, 20.0):
        office.now = now
        office.give(TimePassed())
        effects = office.snapshot("No space left on device")
        assert not [effect for effect in effects if isinstance(effect, PublishSnapshot | End)]
        assert office.remarks("error")[0].endswith("could not be written: No space left on device")
    assert office.machine.wake_at == 30.0


def test_a_run_whose_last_snapshot_fails_has_failed() -> None:
    office = finished(evaluate=False)
    office.snapshot("No space left on device")
    assert office.remarks("error")
    assert end(office).status == "failed"
    assert "No space left on device" in end(office).reason


def test_the_last_snapshot_is_of_the_end_also_when_one_was_under_way() -> None:
    office = Office(snapshot_every_s=10.0, replicas=1, examples=20, evaluate=False)
    (a,) = office.join(0)
    office.now = 10.0
    office.give(TimePassed())
    office.work(a)
    office.leave(a)
    first = only(office.snapshot(), PublishSnapshot)
    last = only(office.snapshot(), PublishSnapshot)
    assert (first.ledger["trained"], last.ledger["trained"]) == (0, 20)
    assert (first.number, last.number) == (1, 2)
    assert end(office).status == "finished"
