"""What a nursery says and does, on the coordinator's machine and on another one."""

import pytest

from squall.protocol.effects import Effect, End, KillMembers, Send, StartMember
from squall.protocol.events import (
    ActivitySeen,
    LauncherLost,
    LeaveRequested,
    ProcessEnded,
    Started,
    StopRequested,
    TimePassed,
)
from squall.protocol.heartbeats import PATIENCE, Pulse
from squall.protocol.messages import Stop
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.nursery import LEAVE_WITHIN_S, NurseryMachine
from squall.protocol.nursery_messages import (
    Activity,
    Alive,
    Leaving,
    Placed,
    ProcessLost,
    Replaced,
    Spent,
    StartProcess,
    StopAsked,
)
from squall.protocol.replacing import LOST_IN_A_ROW
from tests.protocol.steps import give, tell

REPLICA = Node("replica", 1, 2)
PULSE = Pulse(every_s=1.0, lost_after_s=5.0)


def far() -> NurseryMachine:
    """On a machine of its own, and answered once, at 0."""
    nursery = NurseryMachine(Node("nursery", 2), PULSE)
    assert give(nursery, Started()) == say(Alive())
    assert tell(nursery, COORDINATOR, Alive()) == []
    return nursery


def say(message: object) -> list[Effect]:
    return [Send(COORDINATOR, message)]  # type: ignore[arg-type]


def test_what_processes_do_is_told_the_coordinator() -> None:
    spent = (Spent(Node("replica", 1), 0.25, compute_s=0.2),)
    assert give(NurseryMachine(), ActivitySeen(spent)) == say(Activity(spent))


def test_it_starts_what_it_is_asked_for_and_tells_what_has_ended() -> None:
    nursery = NurseryMachine()
    assert give(nursery, Started()) == []
    assert tell(nursery, COORDINATOR, StartProcess(REPLICA)) == [StartMember(REPLICA)]
    assert give(nursery, ProcessEnded(REPLICA, "killed by SIGKILL")) == say(ProcessLost(REPLICA, "killed by SIGKILL"))
    assert give(nursery, StopRequested("interrupted", wanted=True)) == say(StopAsked("interrupted", False, True))
    assert nursery.wake_at is None, "on the coordinator's machine the kernel tells who is there"
    assert tell(nursery, COORDINATOR, Stop()) == [End("finished")]


def test_a_coordinator_that_dies_is_succeeded_unless_they_die_one_after_the_other() -> None:
    nursery = NurseryMachine()
    lost = ProcessEnded(COORDINATOR, "killed by SIGKILL")
    for second in range(1, 10):  # each has lived for long enough
        started, *told = nursery.on(lost, 2.0 * second)
        assert started == StartMember(COORDINATOR)
        assert told == say(ProcessLost(COORDINATOR, "killed by SIGKILL"))
    for _ in range(LOST_IN_A_ROW - 2):
        assert StartMember(COORDINATOR) in nursery.on(lost, 18.1)
    killed, ended = nursery.on(lost, 18.1)
    assert isinstance(killed, KillMembers)
    assert ended == End("failed", "the coordinator was lost 5 times in a row, last: killed by SIGKILL")


def test_elsewhere_it_tells_that_it_is_alive_whether_it_is_answered_or_not() -> None:
    """On a slow link the answer waits behind numbers for longer than a machine may be silent."""
    nursery = far()
    for now in (1.0, 2.0, 3.0):
        assert nursery.wake_at == now
        assert give(nursery, TimePassed(), now) == say(Alive())
    assert tell(nursery, COORDINATOR, Alive(), 3.5) == []


def test_a_nursery_that_hears_nothing_of_the_coordinator_ends_all_that_runs_there() -> None:
    nursery, now = far(), 0.0
    while now < PATIENCE * PULSE.lost_after_s - 1:
        now = nursery.wake_at or now
        assert not [effect for effect in give(nursery, TimePassed(), now) if not isinstance(effect, Send)]
    why = f"nothing was heard of the coordinator for {PATIENCE * PULSE.lost_after_s:g} s"
    assert give(nursery, TimePassed(), nursery.wake_at or now) == [KillMembers(why), End("failed", why)]


def test_without_the_launching_process_as_well_it_waits_no_longer_than_the_coordinator_would() -> None:
    nursery = far()
    assert not give(nursery, LauncherLost(), 1.0)
    tell(nursery, COORDINATOR, Alive(), 1.0)  # it ends the run in order
    now, effects = 1.0, list[Effect]()
    while End not in map(type, effects):
        assert nursery.wake_at is not None
        now = nursery.wake_at
        effects = give(nursery, TimePassed(), now)
    why = f"nothing was heard of the coordinator for {PULSE.lost_after_s:g} s"
    assert effects == [KillMembers(why), End("failed", why)]
    assert now == 1.0 + PULSE.lost_after_s


def test_the_time_in_which_it_stood_still_itself_does_not_count() -> None:
    nursery = far()
    assert give(nursery, TimePassed(), 1000.0) == say(Alive())


def test_who_is_heard_as_soon_as_it_goes_on_is_not_waited_for_any_longer_than_else() -> None:
    nursery, woken = far(), 1000.0
    assert tell(nursery, COORDINATOR, Alive(), woken) == []
    assert give(nursery, TimePassed(), woken) == say(Alive())
    late = woken + PATIENCE * PULSE.lost_after_s
    while (now := nursery.wake_at or late) < late:
        assert not [effect for effect in give(nursery, TimePassed(), now) if not isinstance(effect, Send)]
    assert isinstance(give(nursery, TimePassed(), late)[0], KillMembers)


def test_a_machine_that_was_replaced_does_not_go_on() -> None:
    effects = tell(far(), COORDINATOR, Replaced("silent for 5 s"))
    assert effects == [KillMembers("replaced: silent for 5 s"), End("failed", "silent for 5 s")]


def test_a_machine_that_leaves_starts_only_successors_of_shards_and_waits_a_while_for_replicas_that_know() -> None:
    nursery = far()
    assert give(nursery, LeaveRequested("interrupted"), 0.5) == say(Leaving("interrupted"))
    assert give(nursery, LeaveRequested("interrupted"), 0.6) == []
    assert tell(nursery, COORDINATOR, StartProcess(REPLICA), 0.7) == []
    assert tell(nursery, COORDINATOR, StartProcess(Node("shard", 0)), 0.7) == [StartMember(Node("shard", 0))]
    late = 1.0 + LEAVE_WITHIN_S  # a network may keep the coordinator from hearing it for so long
    assert KillMembers not in [type(e) for e in give(nursery, TimePassed(), late)]
    tell(nursery, COORDINATOR, Leaving("interrupted"), late)
    late += LEAVE_WITHIN_S
    tell(nursery, COORDINATOR, Alive(), late)
    assert [type(e) for e in give(nursery, TimePassed(), late)] == [Send, KillMembers]
    assert give(nursery, ProcessEnded(REPLICA, "killed by SIGKILL"))
    assert tell(nursery, COORDINATOR, Stop()) == [End("left")]


def test_what_is_not_for_nurseries_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"nursery-2\.0 does not know"):
        tell(far(), COORDINATOR, StopAsked("x", False, False))


def test_a_nursery_that_has_started_the_coordinator_itself_is_as_patient_as_that_of_the_first_machine() -> None:
    """It sees whether that process is there; who holds it in a debugger does not end the run."""
    nursery, deputy = far(), Node("deputy")
    tell(nursery, COORDINATOR, Placed(deputy, 2, "10.0.0.1:7"))
    tell(nursery, deputy, StartProcess(COORDINATOR, ends=deputy), 6.0)
    assert give(nursery, ProcessEnded(deputy, "it has ended"), 6.0) == [StartMember(COORDINATOR, None, deputy)]
    tell(nursery, COORDINATOR, Alive(), 7.0)
    effects = [effect for now in range(8, 400) for effect in give(nursery, TimePassed(), float(now))]
    assert not any(isinstance(effect, End) for effect in effects)
