"""Replicas that lie on several machines: where their parts are, how those start, and what becomes of them together."""

from __future__ import annotations

import pytest

from squall.protocol.apart import ENDS_WITHIN_S
from squall.protocol.effects import Effect, KillMember, MeetParts, Send, StartMember
from squall.protocol.events import LeaveRequested, ProcessEnded, Started, StopRequested, TimePassed
from squall.protocol.heartbeats import Pulse
from squall.protocol.leases import Limits
from squall.protocol.machine import Refusal
from squall.protocol.messages import Join, Stop, Welcome
from squall.protocol.nodes import COORDINATOR, NURSERY, Node, part_nodes, replica_node, whole
from squall.protocol.notes import MachineLeft, MemberDied
from squall.protocol.nursery import NurseryMachine
from squall.protocol.nursery_messages import (
    Alive,
    Joined,
    KillProcess,
    Leaving,
    PartPlace,
    PartsPlaced,
    ProcessLost,
    Refused,
    StartProcess,
)
from squall.protocol.placing import Placing, machines_of
from squall.protocol.policy import MachineRoom, Policy
from squall.protocol.replica import Replica
from squall.protocol.sandblaster.replica import BatchReplica
from tests.protocol.office import Office
from tests.protocol.steps import exchanges_of, give, only, sent, tell

SHARD, EVALUATOR = Node("shard", 0), Node("evaluator", 1)
R0, R1 = replica_node(0, 0), replica_node(0, 1)
P0, P1 = part_nodes(R0, 2) + part_nodes(R1, 2)
N0, N1, N2 = (Node("nursery", machine) for machine in range(3))


def office(room: int = 0, spare: int = 0) -> Office:
    """One replica, whose first part is on machine 1 and its second on machine 2, which have `spare` places besides.

    Machine 0 has the shard, and `room`.
    """
    rooms = (
        MachineRoom(0, room, (SHARD, EVALUATOR)), MachineRoom(1, 1 + spare, (R0,)), MachineRoom(2, 1 + spare, (P0,)),
    )  # fmt: skip
    made = Office(
        replicas=1, shards=1, limits=Limits(epochs=9), rooms=rooms, parts=2, spread_parts=True, pulse=Pulse(1.0, 5.0)
    )  # fmt: skip
    made.give(Started())
    for nursery in (N1, N2):
        made.tell(nursery, Alive())
    return made


def joined(**given: int) -> Office:
    made = office(**given)
    made.tell(R0, Join(1, "10.0.0.1:70"))
    return made


def started(effects: list[Effect]) -> list[tuple[Node, Node]]:
    return [(to, message.node) for to, message in sent(effects, StartProcess)]


def killed(effects: list[Effect]) -> list[tuple[Node, Node]]:
    return [(to, message.node) for to, message in sent(effects, KillProcess)]


# ---------------------------------------------------------------- where they are


@pytest.mark.parametrize(("free", "parts", "spread", "machines"), [
    ({0: 1, 1: 2}, 2, False, [1]),  # together where there is room for all
    ({0: 2, 1: 2}, 2, False, [0]),
    ({0: 2, 1: 2}, 2, True, [0, 1]),
    ({0: 4, 1: 1}, 3, True, [0, 1, 0]),
    ({0: 3}, 3, True, [0]),
    ({0: 1, 1: 2, 2: 1}, 3, False, [1, 1, 0]),  # on as few as possible, those with most room first
    ({0: 1, 1: 2, 2: 1}, 3, None, []),  # together or not at all
    ({0: 1, 1: 2, 2: 1}, 2, None, [1]),
    ({0: 1, 1: 0, 2: -3}, 2, False, []),
    ({}, 1, False, []),
])  # fmt: skip
def test_the_machines_of_a_replica(free: dict[int, int], parts: int, spread: bool | None, machines: list[int]) -> None:
    assert machines_of(free, parts, spread) == machines


def test_a_part_belongs_to_its_replica() -> None:
    replica = replica_node(3, 7)
    assert [str(part) for part in part_nodes(replica, 3)] == ["part-10.7", "part-11.7"]
    assert [whole(part, 3) for part in (replica, *part_nodes(replica, 3))] == [replica] * 3
    assert part_nodes(SHARD, 3) == ()


def test_each_part_takes_a_place() -> None:
    placing = Placing(Policy(3, 0, parts=2, rooms=(MachineRoom(0, 5), MachineRoom(1, 1))))
    assert placing.place(replica_node(0, 0))[0] == 0
    assert placing.place(replica_node(1, 0))[0] == 0
    assert [placing.free(machine) for machine in (0, 1)] == [1, 1]
    assert placing.place(replica_node(2, 0)) == (0, "machines 0 and 1, which had room for 1 and 1")
    assert placing.apart(replica_node(2, 0)) == {Node("part", 5): 1}
    assert [placing.free(machine) for machine in (0, 1)] == [0, 0]
    again = replica_node(2, 1)
    placing.succeed(replica_node(2, 0), again)
    assert placing.place(again)[0] == 0
    assert placing.apart(again) == {Node("part", 5, 1): 1}, "where it was"


# ---------------------------------------------------------------- how they start


def test_the_other_parts_start_when_the_first_is_ready() -> None:
    of = office()
    first = PartPlace(R0, 1, "10.0.0.1:70")
    effects = of.tell(R0, Join(1, first.address))
    assert [(to, message) for to, message in sent(effects, StartProcess)] == [(N2, StartProcess(P0, first))]
    told = [message for to, message in sent(effects, object) if to == R0]
    assert [type(message) for message in told] == [PartsPlaced, Welcome]
    assert told[0] == PartsPlaced((PartPlace(P0, 2),))


def test_a_replica_hears_of_its_parts_before_all_else() -> None:
    places = (PartPlace(P0, 2),)
    for replica in (Replica(R0, 1, 10, exchanges_of({}), 1, "10.0.0.1:71"), BatchReplica(R0, 1, 1, "10.0.0.1:71")):
        assert give(replica, Started()) == [Send(COORDINATOR, Join(1, "10.0.0.1:71"))]
        assert tell(replica, COORDINATOR, PartsPlaced(places)) == [MeetParts(places)]


def test_a_nursery_starts_and_kills_what_it_is_told_to() -> None:
    nursery, first = NurseryMachine(N2, Pulse(1.0, 5.0)), PartPlace(R0, 1, "10.0.0.1:71")
    assert tell(nursery, COORDINATOR, StartProcess(P0, first)) == [StartMember(P0, first)]
    assert tell(nursery, COORDINATOR, KillProcess(P0)) == [KillMember(P0)]
    assert give(nursery, ProcessEnded(P0, "killed")) == [Send(COORDINATOR, ProcessLost(P0, "killed"))]


def test_a_part_that_a_leaving_machine_does_not_start_is_lost() -> None:
    nursery = NurseryMachine(N2, Pulse(1.0, 5.0))
    give(nursery, LeaveRequested("its user"))
    answer = tell(nursery, COORDINATOR, StartProcess(P0, PartPlace(R0, 1)))
    assert [message.node for _, message in sent(answer, ProcessLost)] == [P0]


# ---------------------------------------------------------------- what becomes of them


def test_a_parts_death_is_its_replicas() -> None:
    of = joined()
    effects = of.tell(N2, ProcessLost(P0, "killed by SIGKILL"))
    assert only(effects, MemberDied) == MemberDied(R0, "its part on machine 2 was lost: killed by SIGKILL")
    assert (N1, R0) in killed(effects)
    assert not started(effects), "the first part may still write where the next one does"
    effects = of.tell(N1, ProcessLost(R0, "killed by SIGKILL"))
    assert started(effects) == [(N1, R1)]
    assert not of.notes(MemberDied), "it had died before"
    assert started(of.tell(R1, Join(1, "10.0.0.1:72"))) == [(N2, P1)]


def test_only_the_machine_that_has_a_process_tells_that_it_has_ended() -> None:
    of = joined()
    of.tell(N2, ProcessLost(P0, "killed by SIGKILL"))
    assert not started(of.tell(N2, ProcessLost(R0, "it had ended")))
    assert started(of.tell(N1, ProcessLost(R0, "killed by SIGKILL"))) == [(N1, R1)]


def test_a_replica_joins_once() -> None:
    of = joined()
    with pytest.raises(Refusal, match="it joins again"):
        of.tell(R0, Join(1, "10.0.0.1:70"))


def test_the_first_parts_death_ends_the_others() -> None:
    of = joined()
    effects = of.tell(N1, ProcessLost(R0, "killed by SIGKILL"))
    assert (killed(effects), started(effects)) == ([(N2, P0)], [])
    assert started(of.tell(N2, ProcessLost(P0, "killed by SIGKILL"))) == [(N1, R1)]


def test_the_user_is_told_once_of_a_process_that_does_not_end() -> None:
    of = joined()
    of.tell(N2, ProcessLost(P0, "killed by SIGKILL"))
    told = []
    for second in range(1, 25):
        of.now = float(second)
        for nursery in (N1, N2):
            of.tell(nursery, Alive())  # else it is lost
        of.give(TimePassed())
        told += [(second, text) for text in of.remarks("warning")]
    ((second, text),) = told
    assert second == ENDS_WITHIN_S
    assert text.startswith("replica 0 waits: replica-0.0 on machine 1 was killed 10 s ago")
    assert started(of.tell(N1, ProcessLost(R0, "killed by SIGKILL"))) == [(N1, R1)]


def test_a_lost_machine_takes_the_replica_whole_and_it_waits_for_room_for_all_parts() -> None:
    of = joined()
    effects = of.tell(COORDINATOR, Refused(N2, "it lies"))
    assert killed(effects) == [(N1, R0)]
    assert not started(of.tell(N1, ProcessLost(R0, "killed by SIGKILL")))
    assert of.remarks("warning") == ["replica 0 waits: machines have no room for all its parts"]
    assert started(of.tell(NURSERY, Joined(3, 1))) == [(N1, R1)]
    assert started(of.tell(R1, Join(1, "10.0.0.1:72"))) == [(Node("nursery", 3), P1)]


def test_who_has_to_tell_that_a_process_has_ended_is_lost_itself() -> None:
    of = joined(room=2)
    assert killed(of.tell(N2, ProcessLost(P0, "killed"))) == [(N1, R0), (N2, P0)]
    of.tell(N2, ProcessLost(P0, "it had ended"))
    assert started(of.tell(COORDINATOR, Refused(N1, "it lies"))) == [(N0, R1)]


def test_the_replica_leaves_a_machine_that_leaves_with_a_part_and_starts_elsewhere() -> None:
    of = joined(room=2)
    effects = of.tell(N2, Leaving("its user"))
    assert [to for to, _ in sent(effects, Stop)] == [R0]
    effects = of.leave(R0)
    assert (killed(effects), started(effects)) == ([(N2, P0)], [])
    assert not of.notes(MachineLeft), "a process of the run is there"
    effects = of.tell(N2, ProcessLost(P0, "killed by SIGKILL"))
    assert started(effects)[0][1] == R1
    assert only(effects, MachineLeft) == MachineLeft(2)


def test_a_machine_that_leaves_before_its_replica_has_joined_lets_it_start_elsewhere() -> None:
    of = office(room=2)
    effects = of.tell(N2, Leaving("its user"))
    assert {(N1, R0), (N2, P0)} == set(killed(effects))
    of.tell(N1, ProcessLost(R0, "killed by SIGKILL"))
    assert started(of.tell(N2, ProcessLost(P0, "it had ended")))[0][1] == R1


def test_a_run_that_is_over_starts_no_parts() -> None:
    of = office()
    of.tell(N1, Alive())
    of.give(StopRequested("interrupted"))
    effects = of.tell(R0, Join(1, "10.0.0.1:71"))
    assert not started(effects)
    assert [to for to, _ in sent(effects, Stop)] == [R0]
