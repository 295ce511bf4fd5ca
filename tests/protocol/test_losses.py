"""What a shard has lost of leases is dealt again: once, whatever became of them, and nothing else is."""

from __future__ import annotations

import pytest

from squall.protocol.check import check
from squall.protocol.leases import Leases, Limits
from squall.protocol.ledger import Range
from squall.protocol.losses import Losses
from squall.protocol.messages import Cover, Lease
from squall.protocol.nodes import Node

ONE = Node("replica", 0)


class Ledger:
    """One epoch of 100 examples in batches of 10, on two shards."""

    def __init__(self) -> None:
        self.leases = Leases(100, 10, Limits(epochs=1))
        self.leases.losses = Losses(2)

    def take(self, batches: int) -> Lease:
        lease = self.leases.take(ONE, batches, 0.0)
        assert lease is not None
        return lease

    def told(self, lease: Lease, upto: int) -> None:
        self.leases.done(lease.id, upto, ONE)
        check(self.leases)

    def kept(self, lease: Lease, upto: int, *shards: int) -> None:
        for shard in shards:
            self.leases.kept(shard, [Cover(lease.id, upto)])

    def lose(self, lease: Lease, upto: int, shard: int = 0) -> list[tuple[int, int]]:
        found = self.leases.lose(shard, [Cover(lease.id, upto)])
        check(self.leases)
        return [(span.start, span.stop) for span in found]

    @property
    def dealt_again(self) -> list[tuple[int, int]]:
        return [(span.start, span.stop) for span in self.leases.returned]


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def test_what_was_told_as_trained_is_dealt_again_at_once(ledger: Ledger) -> None:
    lease = ledger.take(5)
    ledger.kept(lease, 20, 0)
    ledger.told(lease, 50)
    assert ledger.lose(lease, 50) == [(20, 50)]
    assert ledger.dealt_again == [(20, 50)]
    assert ledger.leases.trained == 20


def test_what_is_told_later_is_dealt_again_then(ledger: Ledger) -> None:
    lease = ledger.take(5)
    ledger.told(lease, 10)
    assert ledger.lose(lease, 30) == [(0, 10), (10, 30)]
    assert ledger.dealt_again == [(0, 10)]
    ledger.told(lease, 20)
    ledger.told(lease, 50)
    assert ledger.dealt_again == [(0, 10), (10, 20), (20, 30)]
    assert ledger.leases.trained == 20


def test_what_came_back_with_its_lease_is_not_dealt_a_third_time(ledger: Ledger) -> None:
    lease = ledger.take(5)
    ledger.told(lease, 20)
    ledger.leases.give_back(ONE)
    assert ledger.lose(lease, 40) == [(0, 20)]
    assert ledger.dealt_again == [(0, 20), (20, 50)]


def test_what_two_shards_have_lost_is_dealt_again_once(ledger: Ledger) -> None:
    lease = ledger.take(5)
    ledger.kept(lease, 20, 0)
    ledger.kept(lease, 10, 1)
    ledger.told(lease, 50)
    assert ledger.lose(lease, 30) == [(20, 30)]
    assert ledger.lose(lease, 50, shard=1) == [(10, 20), (30, 50)]
    assert ledger.leases.trained == 10


def test_what_all_copies_have_is_remembered_no_more(ledger: Ledger) -> None:
    lease, held = ledger.take(3), ledger.take(2)
    ledger.told(lease, 30)
    ledger.kept(lease, 30, 0)
    assert ledger.lose(lease, 30, shard=1) == [(0, 30)]
    ledger.kept(lease, 30, 1)
    assert ledger.lose(lease, 30, shard=1) == []
    ledger.kept(held, 50, 0, 1)
    ledger.told(held, 50)
    losses = ledger.leases.losses
    assert [losses._ended, losses._kept, losses._lost] == [{}, {}, {}]


def test_where_no_shard_goes_back_nothing_is_remembered() -> None:
    leases = Leases(100, 10, Limits(epochs=1))
    lease = leases.take(ONE, 3, 0.0)
    assert lease is not None
    leases.done(lease.id, 30, ONE)
    assert leases.lose(0, [Cover(lease.id, 30)]) == []


@pytest.mark.parametrize("upto", [25, 50])
def test_a_run_that_goes_on_from_a_snapshot_deals_what_was_lost_and_not_told(ledger: Ledger, upto: int) -> None:
    lease = ledger.take(5)
    ledger.told(lease, 10)
    ledger.lose(lease, 20)
    again = Leases.restore(ledger.leases.state(), [(lease.id, upto)], 10, Limits(epochs=1))
    check(again)
    left = [Range(0, 0, 10), Range(0, 10, 20), *([Range(0, upto, 50)] if upto < 50 else [])]
    assert again.returned == left
    assert again.trained == upto - 20
