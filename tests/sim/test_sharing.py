"""Transfers on one way of an interface: each gets an equal part of it, and all of it is used."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.sim.cluster.sharing import Lane, Transfer, Way

BANDWIDTH = 1000.0


def test_a_transfer_alone_has_all() -> None:
    way = Way(BANDWIDTH)
    assert way.ends(0.0, way.begin(0.0, 2000.0)) == pytest.approx(2.0)
    assert way.ends(5.0, way.begin(4.0, 2000.0)) == pytest.approx(6.0)


def test_who_comes_later_puts_off_who_is_under_way() -> None:
    """Both have half of it, until the first is over; then the other one has all."""
    way = Way(BANDWIDTH)
    first = way.begin(0.0, 2000.0)
    second = way.begin(1.0, 2000.0)
    assert way.ends(1.0, first) == pytest.approx(3.0)
    assert way.ends(1.0, second) == pytest.approx(4.0)
    assert way.ends(3.5, first) == pytest.approx(3.0)
    assert way.ends(3.5, second) == pytest.approx(4.0)
    assert way.ends(9.0, second) == pytest.approx(4.0)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(1.5, 5000)), min_size=1, max_size=20))
def test_all_of_the_bandwidth_is_used_while_anything_is_under_way(transfers: list[tuple[float, float]]) -> None:
    way, marks, free_at = Way(BANDWIDTH), [], 0.0
    for began, size in sorted(transfers):
        marks.append(way.begin(began, size))
        free_at = max(free_at, began) + size / BANDWIDTH
    last = max(began for began, _ in transfers)
    assert max(way.ends(last, mark) for mark in marks) == pytest.approx(max(free_at, last), abs=1e-6)


def test_numbers_pass_both_interfaces_and_take_the_links_latency() -> None:
    ways = Way(BANDWIDTH), Way(BANDWIDTH / 2)
    transfer = Transfer(0.0, 1000.0, ways, 0.5, None)
    assert transfer.arrives(0.0) == pytest.approx(2.5)
    other = Transfer(1.0, 1000.0, (ways[1],), 0.5, None)
    assert other.arrives(1.0) == pytest.approx(4.5)
    assert transfer.arrives(2.5) == pytest.approx(3.5)
    assert not transfer.arrived
    assert transfer.arrives(3.6) == pytest.approx(3.5)
    assert transfer.arrived
    assert other.arrives(3.6) == pytest.approx(4.5)


def test_a_message_arrives_behind_the_numbers_that_left_before_it() -> None:
    numbers = Transfer(0.0, 1000.0, (Way(BANDWIDTH),), 0.1, None)
    message = Transfer(0.2, 0.0, (), 0.1, numbers)
    at = numbers.arrives(0.2)
    assert message.arrives(at) > at
    assert numbers.arrives(at) == at
    assert message.arrives(at) <= at


def test_who_begins_later_takes_nothing_before() -> None:
    """A shard sends when it has copied the weights: until then the way is as it is for others."""
    way = Way(BANDWIDTH)
    later = Transfer(1.0, 1000.0, (way,), 0.0, None, begun := Mock())
    assert later.arrives(0.0) == 1.0
    first = Transfer(0.0, 1500.0, (way,), 0.0, None)
    between = Transfer(0.5, 250.0, (way,), 0.0, None)
    assert first.arrives(0.0) == pytest.approx(1.5)
    assert between.arrives(0.5) == pytest.approx(1.0)
    assert not begun.called
    assert later.arrives(1.0) == pytest.approx(2.75)
    assert first.arrives(1.5) == pytest.approx(2.5)
    begun.assert_called_once_with(1.0)


def test_what_is_over_was_over_when_it_was() -> None:
    """Another one began meanwhile, and its numbers are still on their way."""
    way = Way(BANDWIDTH)
    first = Transfer(0.0, 1000.0, (way,), 0.5, None)
    assert first.arrives(0.0) == pytest.approx(1.5)
    assert Transfer(1.2, 1000.0, (way,), 0.5, None).arrives(1.2) == pytest.approx(2.7)
    assert first.arrives(1.3) == pytest.approx(1.5)
    assert not first.arrived


def test_in_a_lane_one_goes_after_the_other() -> None:
    way, lane = Way(BANDWIDTH), Lane()
    first, second, third = (Transfer(begins, 1000.0, (way,), 0.5, None, None, lane) for begins in (0.0, 0.2, 0.1))
    for transfer, at in ((first, 0.0), (third, 0.1), (second, 0.2)):  # as they come to it
        transfer.arrives(at)
    assert first.arrives(0.2) == pytest.approx(1.5)
    assert [third.arrives(1.0), second.arrives(1.0)] == pytest.approx([2.5, 2.0])
    assert second.arrives(2.0) == pytest.approx(3.5)
    assert third.arrives(3.0) == pytest.approx(2.5)


def test_a_lane_is_put_off_with_who_is_in_it() -> None:
    """Another machine's transfer shares the way meanwhile."""
    way, lane = Way(BANDWIDTH), Lane()
    first, second = (Transfer(0.0, 1000.0, (way,), 0.0, None, None, lane) for _ in range(2))
    assert first.arrives(0.0) == second.arrives(0.0) == pytest.approx(1.0)
    Transfer(0.5, 250.0, (way,), 0.0, None).arrives(0.5)
    assert second.arrives(1.0) == first.arrives(1.0) == pytest.approx(1.25)
    assert second.arrives(1.25) == pytest.approx(2.25)


def test_who_is_asked_first_does_not_pass_who_came_before() -> None:
    """Where the turns of both have come by then."""
    way, lane = Way(BANDWIDTH), Lane()
    first, second, third = (Transfer(0.0, 1000.0, (way,), 0.0, None, None, lane) for _ in range(3))
    for transfer in (first, second, third):
        transfer.arrives(0.0)
    assert third.arrives(1.0) == pytest.approx(2.0)
    assert second.arrives(1.0) == pytest.approx(2.0)


def test_thousands_may_wait_in_a_lane() -> None:
    way, lane = Way(BANDWIDTH), Lane()
    transfers = [Transfer(0.0, 1.0, (way,), 0.0, None, None, lane) for _ in range(5000)]
    alone = [1 / BANDWIDTH, *(number / BANDWIDTH for number in range(1, 5000))]
    assert [transfer.arrives(0.0) for transfer in transfers] == pytest.approx(alone), "they are not asked before"
    assert transfers[-1].arrives(1 / BANDWIDTH) == pytest.approx(4999 / BANDWIDTH)
