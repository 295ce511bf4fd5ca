"""What replicas and shards say of portions is held against what they were given."""

import pytest

from squall.protocol.effects import AddPortions, Effect
from squall.protocol.ledger import Range
from squall.protocol.machine import Refusal
from squall.protocol.messages import Member, View
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.sandblaster.dealing import PortionDealer
from squall.protocol.sandblaster.messages import Calculation, Portion, PortionRequest, PortionsTaken, PushPortions
from squall.protocol.sandblaster.portions import Balance
from squall.protocol.sandblaster.shard import BatchShard
from tests.protocol.steps import R0, R1, kinds, only, sent, shard_nodes, tell

SHARDS = shard_nodes(2)


def dealer() -> PortionDealer:
    """Evaluation 1 of four portions, of which each replica has one."""
    made = PortionDealer(Balance(10), len(SHARDS))
    made.begin()
    made.open(Range(0, 0, 40))
    assert [given(made, node) for node in (R0, R1)] == [0, 1]
    return made


def given(dealer: PortionDealer, node: Node) -> int:
    effects: list[Effect] = []
    dealer.deal(node, False, 0.0, effects)
    ((_, portion),) = sent(effects, Portion)
    return portion.number


def test_a_replica_has_computed_the_portion_that_it_was_given() -> None:
    made = dealer()
    for said in (PortionRequest(1, 1), PortionRequest(1, 1 << 30), PortionRequest(2, 0), PortionRequest()):
        with pytest.raises(Refusal, match="was not given to it"):
            made.check(R0, said)
    made.check(R0, PortionRequest(1, 0))
    with pytest.raises(Refusal):
        made.check(R0, PortionRequest(1, 0))  # once


def test_a_portion_counts_when_every_shard_has_said_once_that_it_is_in_its_sum() -> None:
    made = dealer()
    assert made.portions is not None
    for portion, node in enumerate((R0, R1)):
        made.check(node, asked := PortionRequest(1, portion, 0.5))
        assert made.done(node, asked, 1.0)
    for _ in range(2):
        made.taken(SHARDS[0], (0, 1, 2, 1 << 40))
    assert not made.portions._applied
    made.taken(SHARDS[1], (1,))
    assert list(made.portions._applied) == [1]
    assert len(made._taken) == 2, "what nobody has computed is not kept"


def test_a_push_is_of_portions_that_there_are_and_of_each_once() -> None:
    shard = BatchShard(0)
    tell(shard, COORDINATOR, View(1, (Member(0, 0, 0), Member(1, 0, 0))))
    tell(shard, COORDINATOR, Calculation(1, opens=1, portions=4))
    assert kinds(tell(shard, R0, PushPortions(1, 0, (0, 3), 1))) == ["AddPortions", "PortionsTaken", "PortionsTaken"]
    for portions in ((4,), (1, 1 << 40), (3,), tuple(range(1 << 10))):
        with pytest.raises(Refusal, match="it pushes portion"):
            tell(shard, R0, PushPortions(1, 0, portions, 2))
    assert only(tell(shard, R1, PushPortions(1, 0, (1, 2), 1)), AddPortions).owner == R1
    assert len(sent(tell(shard, R0, PushPortions(0, 0, (0,), 2)), PortionsTaken)) == 1, "of one that is over"
