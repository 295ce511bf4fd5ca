"""Machines that are lost, leave and join: what becomes of who was there."""

from squall.protocol.closing import STOP_WITHIN_S
from squall.protocol.copy_messages import CopyJoined, CopyKept
from squall.protocol.effects import Admit, Effect, End, Forget, Send
from squall.protocol.events import Started, StopRequested, TimePassed
from squall.protocol.heartbeats import BEGIN_WITHIN_S, PATIENCE, Pulse
from squall.protocol.leases import Limits
from squall.protocol.messages import Grant, Join, LeaseRequest, Left, Stats, Stop
from squall.protocol.nodes import COORDINATOR, NURSERY, Node, replica_node
from squall.protocol.notes import ActivityTold, MachineDied, MachineLeft, MemberDied, MemberReplaced
from squall.protocol.nursery import LEAVE_WITHIN_S
from squall.protocol.nursery_messages import (
    Activity,
    Alive,
    Heard,
    Joined,
    KillProcess,
    Leaving,
    Placed,
    ProcessLost,
    Refused,
    Replaced,
    Spent,
    StartProcess,
)
from squall.protocol.policy import MachineRoom
from squall.protocol.replacing import LOST_IN_A_ROW
from tests.protocol.office import Office, start
from tests.protocol.steps import only, sent

SHARD = Node("shard", 0)
R0, R1, R2 = (replica_node(slot, 0) for slot in range(3))
EVALUATOR = Node("evaluator", 3)
N1, N2 = Node("nursery", 1), Node("nursery", 2)
AGAIN = replica_node(1, 1)


def office(room: int = 0, **settings: object) -> Office:
    """Replica 0 and the shard on machine 0, which has `room` besides; replicas 1 and 2 on the machines 1 and 2."""
    rooms = (MachineRoom(0, 1 + room, (SHARD, R0, EVALUATOR)), MachineRoom(1, 1, (R1,)), MachineRoom(2, 1, (R2,)))
    made = Office(
        replicas=3, shards=1, limits=Limits(epochs=9), rooms=rooms, pulse=Pulse(1.0, 5.0),
        **settings,
    )  # fmt: skip
    made.give(Started())
    for nursery in (N1, N2):
        made.tell(nursery, Alive())
    made.join(0, 1, 2)
    return made


def silent(of: Office, *others: Node) -> list[Effect]:
    """Time passes in which nothing is heard of any machine but `others`, until somebody is missed."""
    while not (died := of.notes(MachineDied)):
        assert of.machine.wake_at is not None
        of.now = of.machine.wake_at
        for other in others:
            of.tell(other, Alive())
        of.give(TimePassed())
    assert len(died) == 1
    return of.effects


def lost(of: Office, machine: int) -> list[Effect]:
    """The coordinator is told at once, before the machine's silence tells it."""
    return of.tell(COORDINATOR, Refused(Node("nursery", machine), "it lies"))


def test_a_machine_that_is_heard_is_answered() -> None:
    assert sent(office().tell(N1, Alive()), Alive) == [(N1, Alive())]


def test_a_machine_tells_what_its_own_processes_do_and_nothing_of_others() -> None:
    of = office()
    mine, other, gone = (Spent(node, 0.25, wait_s=0.1, awaited=SHARD) for node in (R1, R2, AGAIN))
    of.tell(N1, Activity((mine, other, gone)))
    assert of.notes(ActivityTold) == [ActivityTold(1, (mine,))]


def test_a_machine_that_is_silent_is_lost_and_its_replica_goes_where_room_is() -> None:
    of = office(room=1)
    lease = of.ask(R1)
    effects = silent(of, N2)
    assert of.now == 5.0
    assert only(effects, MachineDied) == MachineDied(1, (R1,), "nothing was heard of it for 5 s")
    assert [note.node for note in of.notes(MemberDied)] == [R1]
    assert start(AGAIN, 0) in effects
    assert only(effects, MemberReplaced).where == "machine 0, which had room for 1"
    assert of.ask(R0) is not None
    assert lease is not None
    assert not [held for held in of.leases.held.values() if held.holder == R1], "its lease went back"


def test_a_machine_that_has_to_start_is_waited_for() -> None:
    of = office()
    of.tell(NURSERY, Joined(3, 0))
    silent(of, N1, N2)
    assert of.now == BEGIN_WITHIN_S + 5.0


def test_deaths_of_machines_are_not_held_against_a_place() -> None:
    of, node = office(), R1
    for machine in range(3, 13):
        of.tell(NURSERY, Joined(machine, 1))
        effects = lost(of, machine - 1 if machine > 3 else 1)
        node = replica_node(1, node.incarnation + 1)
        assert start(node, machine) in effects
        of.tell(node, Join(1))
    assert of.machine._replacing.given_up == {}


def test_where_nobody_has_room_it_waits_and_goes_to_the_first_that_joins() -> None:
    of = office()
    lost(of, 1)
    assert of.remarks("warning") == ["replica 1 waits: no machine has room for it"]
    effects = of.tell(NURSERY, Joined(7, 4))
    assert start(AGAIN, 7) in effects
    assert only(effects, MemberReplaced).where == "machine 7, which had room for 4"


def test_a_process_that_dies_starts_again_on_its_machine() -> None:
    of = office(room=3)
    assert start(AGAIN, 1) in of.tell(N1, ProcessLost(R1, "killed by SIGKILL"))


def test_lock_step_does_not_wait_for_a_replica_without_room() -> None:
    rooms = (MachineRoom(0, 1, (SHARD, R0, EVALUATOR)),)
    of = Office(replicas=3, shards=1, gather="mean", rooms=rooms)
    of.give(Started())
    of.join(0)
    assert sent(of.tell(R0, LeaseRequest()), Grant)


def test_a_replica_that_is_lost_before_it_joined_and_finds_no_room_holds_nobody() -> None:
    rooms = (MachineRoom(0, 1, (SHARD, R0, EVALUATOR)), MachineRoom(1, 1, (R1,)))
    of = Office(replicas=2, shards=1, gather="mean", rooms=rooms)
    of.give(Started())
    of.join(0)
    assert not sent(of.tell(R0, LeaseRequest()), Grant)
    assert sent(lost(of, 1), Grant)


def test_with_a_shard_on_it_the_run_ends_and_the_reason_names_the_machine() -> None:
    rooms = (MachineRoom(0, 1, (R0, EVALUATOR)), MachineRoom(1, 0, (SHARD,)))
    of = Office(replicas=1, shards=1, rooms=rooms, pulse=Pulse(100.0, 500.0))
    of.give(Started())
    end = only(lost(of, 1), End)
    assert end == End("failed", "machine 1 was lost: nursery-1.0 was refused: it lies; it had shard 0")
    assert of.machine.wake_at is None


def test_with_a_shard_on_it_the_run_goes_back_to_its_snapshot_where_it_may_unless_its_user_stops_it() -> None:
    rooms = (MachineRoom(0, 1, (R0, EVALUATOR)), MachineRoom(1, 0, (SHARD,)))
    ends = []
    for stopped in (False, True):
        of = Office(replicas=1, shards=1, rooms=rooms, pulse=Pulse(100.0, 500.0), goes_back=True)
        of.give(Started())
        of.join(0)
        if stopped:
            of.give(StopRequested("interrupted"))
        ends.append(only(lost(of, 1), End))
    assert [end.status for end in ends] == ["moved", "failed"]
    assert {end.reason for end in ends} == {"machine 1 was lost: nursery-1.0 was refused: it lies; it had shard 0"}


def test_a_machine_that_comes_back_is_told_that_it_was_replaced_and_changes_nothing() -> None:
    of = office(room=1)
    silent(of, N2)
    of.join(1, incarnation=1)
    for late in (Alive(), ProcessLost(R1, "killed"), Leaving("interrupted")):
        effects = of.tell(N1, late)
        assert sent(effects, Replaced) == [(N1, Replaced("nothing was heard of it for 5 s"))]
        assert len(effects) == 1
    assert AGAIN in of.machine.members.live


def test_who_is_refused_is_lost_with_its_machine() -> None:
    of = office(room=1)
    effects = of.tell(SHARD, Refused(R1, "it answers, and nothing was asked"))
    why = "replica-1.0 was refused: it answers, and nothing was asked"
    assert only(effects, MachineDied) == MachineDied(1, (R1,), why)
    assert start(AGAIN, 0) in effects
    assert sent(of.tell(N1, Alive()), Replaced) == [(N1, Replaced(why))]
    assert of.tell(SHARD, Refused(R1, "it is late")) == [], "another one is in its place"
    assert only(of.tell(SHARD, Refused(R0, "it lies")), End) == End("failed", "replica-0.0 was refused: it lies")


def test_who_refuses_what_is_on_the_coordinators_machine_is_lost_with_its_own() -> None:
    """Else a member could end any run."""
    of = office(room=1)
    effects = of.tell(R1, Refused(SHARD, "it lies"))
    assert only(effects, MachineDied) == MachineDied(1, (R1,), "replica-1.0 refused shard-0.0: it lies")
    assert start(AGAIN, 0) in effects
    assert of.tell(R1, Refused(SHARD, "it lies")) == [], "its word counts no more"


def test_of_whom_something_is_heard_the_machine_is_there() -> None:
    of = office()
    for now in range(1, 20):
        of.now = float(now)
        of.tell(SHARD, Heard((R1,)))
        of.tell(COORDINATOR, Heard((N2,)))
        of.give(TimePassed())
    assert not of.notes(MachineDied)
    silent(of, N2)
    assert of.now == 24.0


def test_others_keep_no_machine_in_the_run_that_says_nothing_itself() -> None:
    of = office()
    while not of.notes(MachineDied):
        of.now += 1.0
        of.tell(SHARD, Heard((R1, R2)))
        of.tell(N2, Alive())
        of.give(TimePassed())
    assert PATIENCE * 5.0 <= of.now <= (PATIENCE + 1) * 5.0
    assert [died.machine for died in of.notes(MachineDied)] == [1]


def test_shards_know_where_a_process_starts_before_it_does() -> None:
    of = office(room=1)
    effects = lost(of, 1)
    told = [Admit(AGAIN, 0), Send(SHARD, Placed(AGAIN, 0)), start(AGAIN, 0)]
    assert [effect for effect in effects if effect in told] == told


def test_a_coordinator_that_stood_still_takes_nobody_for_lost() -> None:
    of = office()
    of.now = 1000.0
    assert not of.give(TimePassed())


# ---------------------------------------------------------------- machines that leave


def test_a_machine_leaves_when_its_replica_has_given_back_what_it_had() -> None:
    of = office(room=1)
    of.ask(R1)
    effects = of.tell(N1, Leaving("interrupted"))
    assert sent(effects, Stop) == [(R1, Stop())]
    assert sent(effects, Leaving) == [(N1, Leaving("interrupted"))]
    effects = of.tell(R1, Left((), Stats()))
    assert start(AGAIN, 0) in effects
    assert sent(effects, Stop) == [(N1, Stop())]
    assert of.notes(MachineLeft) == [MachineLeft(1)]
    assert not [held for held in of.leases.held.values() if held.holder == R1]


def test_a_machine_may_leave_before_it_is_known_to_have_joined() -> None:
    """The launcher tells of it, on another way than its nursery."""
    of = office()
    lost(of, 1)
    leaver = Node("nursery", 7)
    assert sent(of.tell(leaver, Leaving("interrupted there")), Stop) == [(leaver, Stop())]
    assert not sent(of.tell(NURSERY, Joined(7, 4)), StartProcess), "nobody is awaited from there"
    assert start(AGAIN, 8) in of.tell(NURSERY, Joined(8, 4))


def test_who_has_not_joined_yet_is_not_waited_for() -> None:
    of = office()
    of.tell(NURSERY, Joined(3, 1))
    lost(of, 1)
    effects = of.tell(Node("nursery", 3), Leaving("interrupted"))
    assert Forget(AGAIN) in effects
    assert of.notes(MachineLeft) == [MachineLeft(3)]


def test_a_replica_that_dies_as_its_machine_leaves_starts_elsewhere() -> None:
    of = office(room=1)
    of.tell(N1, Leaving("interrupted"))
    effects = of.tell(N1, ProcessLost(R1, "killed"))
    assert start(AGAIN, 0) in effects
    assert of.notes(MachineLeft) == [MachineLeft(1)]


def with_a_shard_elsewhere() -> Office:
    rooms = (MachineRoom(0, 1, (R0, EVALUATOR)), MachineRoom(1, 0, (SHARD,)))
    of = Office(replicas=1, shards=1, rooms=rooms, pulse=Pulse(100.0, 500.0))
    of.give(Started())
    of.join(0)
    return of


def test_with_a_shard_on_it_the_run_moves_when_all_is_saved() -> None:
    of = with_a_shard_elsewhere()
    effects = of.tell(N1, Leaving("interrupted"))
    assert sent(effects, Stop) == [(R0, Stop())]
    assert not sent(effects, Leaving), "the shard is given the time that its snapshot takes"
    of.leave(R0)
    of.snapshot()
    end = only(of.effects, End)
    assert (end.status, end.reason) == ("moved", "machine 1 leaves (interrupted) with shard 0")
    assert [to for to, _ in sent(of.effects, Stop)] == [SHARD, Node("evaluator", 1), N1]


def test_with_a_shard_on_it_that_has_a_backup_elsewhere_training_goes_on() -> None:
    backup = Node("backup", 0)
    rooms = (MachineRoom(0, 1, (R0, EVALUATOR, backup)), MachineRoom(1, 0, (SHARD,)))
    of = Office(replicas=1, shards=1, rooms=rooms, pulse=Pulse(100.0, 500.0), copies=2)
    of.give(Started())
    of.join(0)
    of.tell(backup, CopyJoined(7, "127.0.0.1:7"))
    of.tell(backup, CopyKept())
    effects = of.tell(N1, Leaving("interrupted"))
    assert sent(effects, StartProcess)[0] == (NURSERY, StartProcess(SHARD, ends=backup))
    assert (N1, KillProcess(SHARD)) in sent(effects, KillProcess)
    assert (R0, Stop()) not in sent(effects, Stop)
    assert of.notes(MachineLeft) == [MachineLeft(1)]


def test_a_run_that_moves_waits_for_exchanges_as_long_as_a_machine_that_leaves() -> None:
    of = with_a_shard_elsewhere()
    of.tell(N1, Leaving("interrupted"))
    assert of.machine.wake_at == of.now + LEAVE_WITHIN_S


def test_who_stops_a_run_that_moves_has_it_end_soon() -> None:
    of = with_a_shard_elsewhere()
    of.tell(N1, Leaving("interrupted"))
    of.give(StopRequested("interrupted here"))
    assert of.machine.wake_at == of.now + STOP_WITHIN_S
    of.leave(R0)
    of.snapshot()
    assert only(of.effects, End).status == "interrupted"


def test_a_run_that_moves_ends_well_when_it_has_come_to_what_was_wanted() -> None:
    of = with_a_shard_elsewhere()
    of.tell(N1, Leaving("interrupted"))
    of.give(StopRequested("the script took no more batches", wanted=True))
    of.leave(R0)
    of.snapshot()
    assert only(of.effects, End).status == "finished"


def test_a_loop_that_is_left_when_all_is_trained_already_interrupts_nothing() -> None:
    of = Office(replicas=1, shards=1, evaluate=False)
    of.give(Started())
    of.join(0)
    of.work(R0)
    of.give(StopRequested("a loop takes no more batches", wanted=True))
    of.leave(R0)
    of.snapshot()
    end = only(of.effects, End)
    assert (end.status, end.reason) == ("finished", "all data is trained")


def test_a_run_whose_last_snapshot_fails_does_not_move() -> None:
    """It would go on from an earlier one, and what was trained since would be lost."""
    of = with_a_shard_elsewhere()
    of.tell(N1, Leaving("interrupted"))
    of.leave(R0)
    of.snapshot("no space left")
    assert only(of.effects, End).status == "failed"
    of = with_a_shard_elsewhere()
    of.tell(N1, Leaving("interrupted"))
    of.leave(R0)
    assert of.machine.wake_at is not None
    of.now = of.machine.wake_at
    of.give(TimePassed())
    assert only(of.effects, End).status == "interrupted"


def test_a_run_that_is_over_does_not_move() -> None:
    """Its final snapshot is under way: it ends as it would have."""
    of = with_a_shard_elsewhere()
    of.give(StopRequested("enough", wanted=True))
    of.leave(R0)
    of.tell(N1, Leaving("interrupted"))
    of.snapshot()
    assert only(of.effects, End).status == "finished"


def test_two_machines_with_shards_leave_at_once() -> None:
    other = Node("shard", 1)
    rooms = (MachineRoom(0, 1, (R0, EVALUATOR)), MachineRoom(1, 0, (SHARD,)), MachineRoom(2, 0, (other,)))
    of = Office(replicas=1, shards=2, rooms=rooms)
    of.give(Started())
    of.join(0)
    of.tell(N1, Leaving("interrupted"))
    of.tell(N2, Leaving("interrupted, too"))
    of.leave(R0)
    of.snapshot()
    assert only(of.effects, End).status == "moved"


def test_a_machine_that_has_just_begun_is_said_to_have_been_silent_for_as_long_as_it_was() -> None:
    of = office()
    of.tell(NURSERY, Joined(3, 1))
    effects = silent(of, N1, N2)
    assert only(effects, MachineDied).why == f"nothing was heard of it for {BEGIN_WITHIN_S + 5:g} s"


BACKUP = Node("backup", 0)


def backed(shard_on: int) -> Office:
    """A shard and its backup, which is whole, the replica on machine 0."""
    there: dict[int, tuple[Node, ...]] = {shard_on: (SHARD,), 1 - shard_on: (BACKUP,)}
    rooms = (MachineRoom(0, 1, (R0, Node("evaluator", 1), *there[0])), MachineRoom(1, 1, there[1]))
    made = Office(replicas=1, shards=1, rooms=rooms, pulse=Pulse(100.0, 500.0), copies=2, succeeds=True)
    made.give(Started())
    made.join(0)
    made.tell(BACKUP, CopyJoined(1, "10.0.0.2:7"))
    made.tell(BACKUP, CopyKept())
    return made


def test_a_shard_that_cannot_be_started_where_it_was_goes_on_in_its_backups_place() -> None:
    of = backed(shard_on=1)
    for _ in range(LOST_IN_A_ROW):
        assert not of.notes(End)
        of.tell(N1, ProcessLost(SHARD, "could not be started: Cannot allocate memory"))
    assert StartProcess(SHARD, ends=BACKUP) in of.heard(NURSERY, StartProcess)
    assert not of.notes(End)


def test_a_backup_that_is_to_start_after_a_pause_is_one_also_where_a_machine_comes_meanwhile() -> None:
    rooms = (MachineRoom(0, 1, (SHARD, R0, Node("evaluator", 1), BACKUP)),)
    of = Office(replicas=1, shards=1, rooms=rooms, pulse=Pulse(100.0, 500.0), copies=2, succeeds=True)
    of.give(Started())
    of.join(0)
    for incarnation in range(2):
        of.tell(Node("backup", 0, incarnation), CopyJoined(1, ":7"))
        of.tell(NURSERY, ProcessLost(Node("backup", 0, incarnation), "killed"))
    of.tell(NURSERY, Joined(1, 1))
    of.now = 60.0
    of.give(TimePassed())
    assert of.heard(N1, StartProcess) == [StartProcess(Node("backup", 0, 2))]
    started = [message.node for message in of.heard(NURSERY, StartProcess)]  # type: ignore[attr-defined]
    assert started == [Node("backup", 0, 1)]
