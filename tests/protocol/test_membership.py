"""Who is alive: joining and departing wait until every shard has seen the view."""

from itertools import product

import pytest

from squall.protocol.machine import Refusal
from squall.protocol.membership import Applied, Membership, common
from squall.protocol.messages import Departed, Member, View, ViewSeen
from squall.protocol.nodes import Node

R0, R1, R1_AGAIN = Node("replica", 0), Node("replica", 1), Node("replica", 1, 1)


def gone(node: Node, **covers: int) -> Departed:
    return Departed(node.index, node.incarnation, {int(k[1:]): v for k, v in covers.items()})


def joined(shards: int, *nodes: Node) -> Membership:
    members = Membership(shards)
    for node in nodes:
        members.join(node, 0)
    shown(members)
    seen_by_all(members)
    members.take_joined()
    return members


def shown(members: Membership) -> View:
    view = members.next_view()
    assert view is not None
    return view


def seen_by_all(members: Membership) -> None:
    for shard in range(members.shards):
        members.seen(Node("shard", shard), ViewSeen(members.number, ()))


def departed(members: Membership) -> list[tuple[Node, Applied]]:
    """Who is gone, with what all shards have of it."""
    return [(node, common(applied, members.shards)) for node, applied in members.take_departed()]


def test_a_replica_has_joined_when_the_last_shard_has_seen_it() -> None:
    members = Membership(2)
    members.join(R1, 5)
    view = shown(members)
    assert (view.number, view.members) == (1, (Member(1, 0, 5),))
    members.seen(Node("shard", 1), ViewSeen(1, ()))
    assert members.take_joined() == []
    assert not members.settled
    members.seen(Node("shard", 0), ViewSeen(1, ()))
    assert members.settled
    assert members.take_joined() == [(R1, 5)]
    assert members.take_joined() == []


def test_views_list_members_in_slot_order() -> None:
    members = Membership(1)
    members.join(R1, 3)
    members.join(R0, 7)
    assert [member.slot for member in shown(members).members] == [0, 1]


def test_what_changes_while_a_view_is_on_its_way_is_in_the_next_one_together() -> None:
    members = Membership(2)
    members.join(R0, 0)
    assert shown(members).number == 1
    members.join(R1, 0)
    members.depart(R0)
    members.seen(Node("shard", 0), ViewSeen(1, ()))
    assert members.next_view() is None
    assert not members.settled
    members.seen(Node("shard", 1), ViewSeen(1, ()))
    assert shown(members) == View(2, (Member(1, 0, 0),))
    assert members.next_view() is None
    seen_by_all(members)
    assert members.take_joined() == [(R1, 0)]
    assert departed(members) == [(R0, {})]
    assert members.settled


def test_a_slot_is_free_again_when_every_shard_knows() -> None:
    members = joined(2, R0, R1)
    assert not members.slot_free(1)
    assert members.depart(R1)
    assert [member.slot for member in shown(members).members] == [0]
    assert not members.slot_free(1)
    members.seen(Node("shard", 0), ViewSeen(2, (gone(R1),)))
    assert departed(members) == []
    members.seen(Node("shard", 1), ViewSeen(2, (gone(R1),)))
    assert departed(members) == [(R1, {})]
    assert members.slot_free(1)


def test_only_what_every_shard_applied_is_kept() -> None:
    members = joined(2, R0)
    members.depart(R0)
    shown(members)
    members.seen(Node("shard", 0), ViewSeen(2, (gone(R0, _4=32, _5=64, _6=8),)))
    members.seen(Node("shard", 1), ViewSeen(2, (gone(R0, _6=8, _5=48),)))
    assert departed(members) == [(R0, {5: 48, 6: 8})]


def test_departing_before_having_joined() -> None:
    members = Membership(1)
    members.join(R0, 0)
    shown(members)
    members.depart(R0)
    members.seen(Node("shard", 0), ViewSeen(1, ()))
    assert members.take_joined() == []
    assert departed(members) == []
    shown(members)
    members.seen(Node("shard", 0), ViewSeen(2, (gone(R0),)))
    assert departed(members) == [(R0, {})]


def test_who_is_not_a_member_departs_without_a_view() -> None:
    members = joined(1, R0)
    assert not members.depart(R1)
    assert members.next_view() is None
    assert members.settled


def test_a_successor_is_told_from_its_predecessor() -> None:
    members = joined(1, R1)
    members.depart(R1)
    shown(members)
    members.seen(Node("shard", 0), ViewSeen(2, (gone(R1, _1=8),)))
    assert departed(members) == [(R1, {1: 8})]
    members.join(R1_AGAIN, 9)
    assert not members.depart(R1)
    assert list(members.live) == [R1_AGAIN]


def test_a_shard_sees_the_newest_view_and_once_and_nobody_gone_that_is_there() -> None:
    members = joined(2, R0, R1)
    members.depart(R1)
    shown(members)
    members.depart(R0)  # the next view will be without it
    lies = ViewSeen(1, ()), ViewSeen(3, ()), ViewSeen(2, (gone(R0),)), ViewSeen(2, (gone(R1), gone(R1_AGAIN)))
    for shard, lie in product(range(2), lies):
        with pytest.raises(Refusal):
            members.seen(Node("shard", shard), lie)
    assert not members.settled
    for shard in range(2):
        members.seen(Node("shard", shard), ViewSeen(2, (gone(R1, b1=10),)))
        with pytest.raises(Refusal):
            members.seen(Node("shard", shard), ViewSeen(2, (gone(R1, b1=20),)))
    assert departed(members) == [(R1, {1: 10})]
