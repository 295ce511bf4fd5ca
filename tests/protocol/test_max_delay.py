"""A max delay: which fetches a shard holds back, and what that bounds."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from squall.protocol.messages import Exchange, Exchanged
from squall.protocol.nodes import Node
from tests.protocol.steps import R0, R1, R1_AGAIN, R2, answers, push, shard_of, tell, view


def test_a_fetch_waits_until_the_slowest_is_near_enough() -> None:
    shard = shard_of(R0, R1, max_delay=1)
    assert R0 in answers(tell(shard, R0, push(1)))
    assert answers(tell(shard, R0, push(2))) == {}
    assert sorted(answers(tell(shard, R1, push(1)))) == [R0, R1]


def test_answers_that_are_released_together_go_out_in_slot_order() -> None:
    shard = shard_of(R0, R1, R2, max_delay=0)
    for node in (R2, R1):
        assert answers(tell(shard, node, push(1))) == {}
    assert list(answers(tell(shard, R0, push(1)))) == [R0, R1, R2]


def test_who_waits_for_a_replica_that_is_gone_waits_no_longer() -> None:
    shard = shard_of(R0, R1, max_delay=0)
    tell(shard, R0, push(1))
    assert answers(view(shard, 2, R0)) == {R0: Exchanged(1, 1, 0, examples=8)}


def test_a_newcomer_begins_where_the_slowest_is_and_holds_nobody() -> None:
    shard = shard_of(R0, R1, max_delay=0)
    for clock in (1, 2, 3):
        tell(shard, R0, push(clock, basis=shard.version))
        tell(shard, R1, push(clock, basis=shard.version))
    tell(shard, R0, push(4))
    effects = view(shard, 2, R0, R1_AGAIN)
    assert list(answers(effects)) == [R0]  # the newcomer is at 4 as well
    assert answers(tell(shard, R1_AGAIN, Exchange(0, -1, 0))) == {R1_AGAIN: Exchanged(4, 7, -1, examples=56)}


def test_a_newcomer_that_another_shard_has_let_in_further_waits_for_the_slowest() -> None:
    """At once it would have weights that lack two pushes of R2 when it pushes, where a max delay of 0 allows one."""
    shard = shard_of(R0, R1, R2, max_delay=0)
    tell(shard, R0, push(1))
    assert answers(tell(shard, R1, Exchange(1, weights=0))) == {}
    assert answers(tell(shard, R2, push(1)))[R1] == Exchanged(1, 2, -1, examples=16)


@dataclass
class Worker:
    """What a replica does, without a machine."""

    clock: int = 0
    basis: int = 0  # version of the weights that it computes on
    fetched: int = 0  # version that the last answer brought
    waiting: bool = False


@given(
    st.integers(2, 4), st.integers(0, 3), st.booleans(), st.lists(st.integers(0, 3), min_size=10, max_size=120)
)  # fmt: skip
def test_the_staleness_bound_is_never_exceeded(replicas: int, delay: int, overlap: bool, schedule: list[int]) -> None:
    nodes = [Node("replica", i) for i in range(replicas)]
    shard = shard_of(*nodes, max_delay=delay)
    workers = {node: Worker() for node in nodes}
    others = replicas - 1
    bound = others * 2 * (delay + 1) + 1 if overlap else others * (2 * delay + 1)

    for pick in schedule:
        node = nodes[pick % replicas]
        worker = workers[node]
        if worker.waiting:
            continue
        worker.clock += 1
        worker.waiting = True
        effects = tell(shard, node, push(worker.clock, basis=worker.basis))
        if overlap:
            worker.basis = worker.fetched  # it computes on while this exchange is under way
        for other, answer in answers(effects).items():
            released = workers[other]
            assert answer.clock == released.clock
            assert answer.staleness <= bound
            released.waiting, released.fetched = False, answer.version
            if not overlap:
                released.basis = answer.version
        slowest = min(w.clock for w in workers.values())
        assert all(w.waiting == (w.clock - delay > slowest) for w in workers.values())
