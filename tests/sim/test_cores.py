"""Cores that computations share, against a pencil."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.protocol.nodes import COORDINATOR, Node
from squall.sim.cluster.cores import Cores
from squall.sim.cluster.parts import MachineKind, Overhead

NOTHING = Overhead()
A, B, C = (Node("replica", index) for index in range(3))


def shared(cores: int = 2, slowdown: tuple[float, ...] = (), overhead: Overhead = NOTHING) -> Cores:
    found = Cores(MachineKind(name="box", cores=cores, slowdown=slowdown, overhead=overhead))
    found.alone = False
    return found


class Ends(dict[Node, float]):
    """When each node is told that it will be done."""

    def take(self, cores: Cores, node: Node, begins: float, seconds: float, stretch: float = 1.0) -> None:
        self[node] = begins + cores.take(node, begins, seconds, self.__setitem__, stretch)


def test_what_begins_later_puts_off_what_runs_until_one_of_them_is_over() -> None:
    ends, cores = Ends(), shared(cores=1)
    ends.take(cores, A, 0.0, 10.0)
    assert ends == {A: 10.0}
    ends.take(cores, B, 5.0, 10.0)
    assert ends == {A: 15.0, B: 20.0}
    ends.take(cores, C, 18.0, 0.5)
    assert ends == {A: 15.0, B: 20.5, C: 19.0}


def test_the_measured_slowdown_counts_up_to_the_cores_and_the_rest_is_shared() -> None:
    ends, cores = Ends(), shared(cores=2, slowdown=(1.0, 1.5))
    for node in (A, B, C):
        ends.take(cores, node, 0.0, 2.0)
    assert all(end == pytest.approx(2.0 * 1.5 * 3 / 2) for end in ends.values())


def test_one_effect_behind_another_goes_on_as_one_computation() -> None:
    ends, cores = Ends(), shared(cores=1)
    ends.take(cores, A, 0.0, 1.0)
    ends.take(cores, A, 1.0, 1.0)
    assert ends == {A: 2.0}
    ends.take(cores, B, 1.0, 3.0)
    assert ends == {A: 3.0, B: 5.0}


def test_the_dead_leave_their_core_to_the_others() -> None:
    ends, cores = Ends(), shared(cores=1)
    ends.take(cores, A, 0.0, 100.0)
    cores.forget(A)
    ends.take(cores, B, 1.0, 1.0)
    assert ends[B] == 2.0
    cores.clear()
    ends.take(cores, B, 1.5, 3.0)
    assert ends[B] == 4.5


def test_who_sleeps_afterwards_sleeps_in_proportion_and_leaves_the_core() -> None:
    ends, cores = Ends(), shared(cores=1)
    ends.take(cores, A, 0.0, 1.0, stretch=4.0)
    assert ends == {A: 4.0}
    ends.take(cores, B, 0.5, 1.0)
    assert ends == {A: 1.5 * 4.0, B: 2.0}


def test_who_looks_out_keeps_its_core_for_a_while_and_then_sleeps() -> None:
    ends, cores = Ends(), shared(cores=1)
    cores.take(A, 0.0, 1.0, ends.__setitem__, spin_s=2.0)
    ends.take(cores, B, 1.0, 4.0)
    assert ends[B] == 6.0  # until 3 s A has half of the core
    ends.take(cores, A, 2.5, 0.5)  # what it looked out for came: it computes instead, and does not look out any more
    assert ends == {A: 3.5, B: 6.25}


def test_who_sleeps_is_woken_and_who_works_or_looks_out_is_not() -> None:
    cores = shared(cores=2, overhead=Overhead(wake_s=0.25, cold_s=0.5))

    def take(node: Node, begins: float) -> float:
        return cores.take(node, begins, 1.0, Ends().__setitem__, spin_s=2.0)

    shard = Node("shard", 0)
    assert take(shard, 0.0) == 1.25
    assert take(shard, 1.25) == 1.0, "it goes on with what has come meanwhile"
    assert take(shard, 4.0) == 1.0, "it looks out until 4.25"
    assert take(shard, 7.0) == 1.25, "it has just fallen asleep"
    assert take(shard, 11.0) == 1.75, "others have taken the caches"
    assert [take(COORDINATOR, begins) for begins in (12.0, 16.0)] == [1.0, 1.5], "what a lease takes has its wake in it"
    assert [take(A, begins) for begins in (20.0, 24.0)] == [1.0, 1.0], "of a replica nothing is known"


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 5)), min_size=1, max_size=12),
    st.integers(1, 4), st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4),
)  # fmt: skip
def test_no_work_is_lost_and_none_is_done_twice(
    jobs: list[tuple[float, float]], cores: int, steps: list[float]
) -> None:
    """Wherever all begin, a single core is never idle while there is work, and nothing ends before it could."""
    slowdown = tuple(1 + sum(steps[:k]) for k in range(cores))
    ends, box = Ends(), shared(cores, slowdown)
    jobs = sorted(jobs)
    for index, (begins, seconds) in enumerate(jobs):
        ends.take(box, Node("replica", index), begins, seconds)
    for index, (begins, seconds) in enumerate(jobs):
        assert ends[Node("replica", index)] >= begins + seconds - 1e-9
    if cores == 1:
        free = 0.0
        for begins, seconds in jobs:
            free = max(free, begins) + seconds
        assert max(ends.values()) == pytest.approx(free)
