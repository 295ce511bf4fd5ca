"""Who hangs, as a nursery sees its processes: a row of looks, four a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from squall.protocol.effects import KillMember, Send
from squall.protocol.events import ProcessEnded, ProcessesSeen
from squall.protocol.hangs import FIRST_STEPS, FORGIVEN, TIMES, Hangs, Hung, Sight, State, Stuck, Work
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.nursery import NurseryMachine
from squall.protocol.nursery_messages import ProcessLost, ProcessStuck

REPLICA, OTHER, SHARD = Node("replica", 0), Node("replica", 1), Node("shard", 0)
AFTER_S, LOOK_S = 8.0, 0.25
FIRST_S = TIMES * AFTER_S


class Looks:
    """Looks at processes, whose steps and state a test says."""

    def __init__(self) -> None:
        self.hangs = Hangs()
        self.now = 100.0
        self.found: list[Hung | Stuck] = []

    def pass_time(self, seconds: float, *sights: Callable[[float], Sight]) -> list[Hung | Stuck]:
        """What is found meanwhile; of each sight the time since the begin is given."""
        found: list[Hung | Stuck] = []
        for look in range(1, 1 + round(seconds / LOOK_S)):
            found += self.look([sight(look * LOOK_S) for sight in sights])
        return found

    def look(self, sights: Sequence[Sight], after_s: float = LOOK_S) -> list[Hung | Stuck]:
        self.now += after_s
        return self.hangs.look(sights, AFTER_S, self.now)


def steady(node: Node, every_s: float, begun: int = 10) -> Callable[[float], Sight]:
    """A step every so often."""
    return lambda at: Sight(node, begun + at // every_s, "step", begun + at // every_s)


def still(node: Node, work: Work = "step", state: State = "runs", moved: float = 1000.0) -> Callable[[float], Sight]:
    return lambda at: Sight(node, moved, work, moved, state)


def behind_steps(*nodes: Node) -> Looks:
    """They have shown how long they take."""
    looks = Looks()
    assert not looks.pass_time(1, *(steady(node, 0.1) for node in nodes))
    return looks


def test_a_step_in_which_the_machine_slept_has_not_taken_so_long() -> None:
    """It may be over before the nursery looks again."""
    looks = Looks()
    assert not looks.pass_time(5, steady(REPLICA, 0.1))
    assert not looks.look([still(REPLICA)(0)], after_s=60.0)
    (found,) = looks.pass_time(AFTER_S + 1, still(REPLICA))
    assert isinstance(found, Hung)


def test_who_makes_no_step_for_long_is_to_be_killed_once_and_others_are_not() -> None:
    looks = Looks()
    assert not looks.pass_time(5, steady(REPLICA, 0.1), steady(OTHER, 0.1))
    assert not looks.pass_time(AFTER_S, still(REPLICA), steady(OTHER, 0.1, 1000))
    (found,) = looks.pass_time(AFTER_S, still(REPLICA), steady(OTHER, 0.1, 2000))
    assert isinstance(found, Hung)
    assert found.node == REPLICA
    assert found.stood_s == pytest.approx(AFTER_S, abs=2 * LOOK_S)
    assert found.why.startswith("it hung: it made no step for 8 s, and usually takes 0.25 s at most")


def test_who_is_slow_and_steady_is_left_alone_and_noticed_by_what_it_usually_takes() -> None:
    looks, usual_s = Looks(), 3 * AFTER_S
    assert not looks.pass_time(10 * usual_s, steady(REPLICA, usual_s, begun=0))
    assert not looks.pass_time((TIMES - 1) * usual_s, still(REPLICA))
    assert looks.pass_time(2 * usual_s, still(REPLICA))


@pytest.mark.parametrize("begun", [0, FIRST_STEPS])
def test_the_first_steps_may_take_long(begun: int) -> None:
    first = still(REPLICA, moved=begun)
    looks = Looks()
    assert not looks.pass_time(FIRST_S, first)
    assert looks.pass_time(1, first)


def test_what_is_no_step_may_take_as_long() -> None:
    looks = Looks()
    assert not looks.pass_time(5, steady(SHARD, 0.1))
    assert not looks.pass_time(FIRST_S, still(SHARD, "other"))
    assert looks.pass_time(1, still(SHARD, "other"))


def test_who_waits_for_others_never_hangs() -> None:
    assert not Looks().pass_time(10 * FIRST_S, still(REPLICA, "none"))


@pytest.mark.parametrize("work", ["none", "step", "other"])
def test_who_is_stopped_is_killed_whatever_it_does(work: Work) -> None:
    looks = Looks()
    assert not looks.pass_time(AFTER_S, still(REPLICA, work, "stopped"))
    (found,) = looks.pass_time(1, still(REPLICA, work, "stopped"))
    assert isinstance(found, Hung)
    assert found.why == "it hung: it was stopped for 8 s, and was killed"


def test_a_step_over_which_the_nursery_stood_still_tells_nothing_of_others() -> None:
    looks, step = Looks(), still(REPLICA, moved=FIRST_STEPS)
    for after_s in (LOOK_S, 10 * AFTER_S, LOOK_S):
        assert not looks.look([step(0)], after_s)
    following = still(REPLICA, moved=FIRST_STEPS + 1)
    assert not looks.pass_time(FIRST_S, following)
    assert looks.pass_time(1, following)


def test_who_is_stopped_for_a_while_has_his_time_afterwards() -> None:
    looks = behind_steps(REPLICA)
    for _ in range(5):
        assert not looks.pass_time(AFTER_S - 1, still(REPLICA, state="stopped"))
        assert not looks.pass_time(1, still(REPLICA))
    assert looks.pass_time(AFTER_S, still(REPLICA))


def test_a_debugger_may_hold_it_for_ever() -> None:
    looks = behind_steps(REPLICA)
    assert not looks.pass_time(FIRST_S, still(REPLICA, state="traced"))
    assert not looks.pass_time(AFTER_S - LOOK_S, still(REPLICA))


def test_who_waits_for_a_disk_is_told_of_once_and_lives() -> None:
    looks = Looks()
    (found,) = looks.pass_time(FIRST_S, still(SHARD, state="disk"))
    assert found == Stuck(SHARD, "has waited for a disk for 8 s, and cannot be killed")
    assert not looks.pass_time(1, still(SHARD))


def test_who_stood_still_itself_does_not_hold_that_time_against_others() -> None:
    looks = behind_steps(REPLICA, OTHER)
    here = [still(REPLICA)(0), still(OTHER, state="stopped")(0)]
    for _ in range(3):
        assert not looks.look(here)
        assert not looks.look(here, after_s=10 * AFTER_S)
    assert not looks.pass_time(AFTER_S - 1, still(REPLICA), still(OTHER, state="stopped"))
    assert len(looks.pass_time(1, still(REPLICA), still(OTHER, state="stopped"))) == 2


def test_the_next_in_its_place_is_given_twice_the_time() -> None:
    looks = Looks()
    for times in (1, 2, 4):
        assert not looks.pass_time(1, steady(REPLICA, 0.1))
        assert not looks.pass_time(times * AFTER_S - LOOK_S, still(REPLICA, moved=20))
        assert looks.pass_time(1, still(REPLICA, moved=20))
        looks.hangs.ended(REPLICA)


def test_who_has_made_many_steps_has_no_more_patience_than_others() -> None:
    looks = Looks()
    for _ in range(3):
        looks.pass_time(5, steady(REPLICA, 0.1, FORGIVEN))
        assert looks.pass_time(AFTER_S + 1, still(REPLICA, moved=2 * FORGIVEN))
        looks.hangs.ended(REPLICA)


def test_one_long_step_is_forgotten_in_time() -> None:
    looks = Looks()
    assert not looks.pass_time(40, steady(REPLICA, AFTER_S - 1))
    assert not looks.pass_time(AFTER_S + 1, still(REPLICA))
    assert not looks.pass_time(60, steady(REPLICA, 0.1, 2000))
    assert looks.pass_time(AFTER_S + 1, still(REPLICA))


def test_a_nursery_kills_who_hangs_and_tells_why() -> None:
    nursery, held = NurseryMachine(), (Sight(REPLICA, 1, state="stopped"), Sight(COORDINATOR, 1, state="stopped"))
    stopped, stuck = ProcessesSeen(held, AFTER_S), ProcessesSeen((Sight(SHARD, 1, state="disk"),), AFTER_S)
    effects = [effect for look in range(40) for effect in nursery.on(stopped, look * LOOK_S)]
    why = "it hung: it was stopped for 8 s, and was killed"
    assert effects == [KillMember(REPLICA, why), KillMember(COORDINATOR, why)]
    assert nursery.on(ProcessEnded(REPLICA, "killed by SIGKILL"), 11.0) == [
        Send(COORDINATOR, ProcessLost(REPLICA, why, AFTER_S))
    ]
    assert nursery.on(ProcessEnded(REPLICA, "killed by SIGKILL"), 12.0) == [
        Send(COORDINATOR, ProcessLost(REPLICA, "killed by SIGKILL"))
    ]
    told = [effect for look in range(80) for effect in nursery.on(stuck, 20 + look * LOOK_S)]
    assert told == [Send(COORDINATOR, ProcessStuck(SHARD, "has waited for a disk for 8 s, and cannot be killed"))]
