"""The order of a group's members: neighbours on different machines, and who may leave together."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from squall.protocol.collective.order import spread, strangers
from squall.protocol.nodes import replica_node
from squall.runtime.collective.shares import bounds_of, held_by


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_a_machine_with_half_of_the_members_takes_no_share_with_it(machines: list[int]) -> None:
    order = spread(machines)
    assert sorted(order) == list(range(len(machines)))
    bounds = bounds_of([1] * len(machines), len(machines))
    for machine, members in Counter(machines).items():
        if 2 * members <= len(machines):
            stay = [place for place, member in enumerate(order) if machines[member] != machine]
            assert set().union(*(held_by(place, bounds) for place in stay)) == set(range(len(machines)))


@given(st.integers(1, 9).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1)))))
def test_who_leaves_together_takes_no_share_and_some_always_can(sizes: tuple[int, set[int]]) -> None:
    members, leaving = sizes
    order = [replica_node(slot, 0) for slot in range(members)]
    found = strangers(order, [order[slot] for slot in leaving])
    assert bool(found) == bool(leaving)
    stay = [place for place, node in enumerate(order) if node not in found]
    bounds = bounds_of([1] * members, members)
    assert members == 1 or set().union(*(held_by(place, bounds) for place in stay)) == set(range(members))
