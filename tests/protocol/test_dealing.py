"""How much work a replica is given, and how rounds are dealt."""

from squall.protocol.leases import Limits
from squall.protocol.messages import Grant, Lease, LeaseRequest, Welcome
from squall.protocol.nodes import Node
from tests.protocol.office import BATCH, Office
from tests.protocol.steps import kinds, sent


def test_leases_shrink_towards_the_end_of_an_epoch() -> None:
    office = Office(examples=1000)
    a, b = office.join(0, 1)
    sizes = []
    for turn in range(100):
        lease = office.ask((a, b)[turn % 2])
        sizes.append((lease.stop - lease.start) // BATCH)
        if lease.stop == 1000:
            break
    assert sizes[0] == 16
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


def test_slow_replicas_are_told_to_push_after_fewer_batches() -> None:
    office = Office(examples=1000, push_every=12, matched=True)
    a, b = office.join(0, 1)

    def told(node: Node, step_s: float) -> int:
        ((_, grant),) = sent(office.tell(node, LeaseRequest(step_s)), Grant)
        return grant.steps

    assert told(a, 0.0) == 0, "its speed is not known"
    assert told(a, 0.1) == 12
    assert told(b, 0.3) == 4
    assert told(b, 100.0) == 1
    assert told(b, 0.05) == 12
    assert told(a, 0.0) == 6, "its last measurement counts"


def test_leases_are_whole_pushes() -> None:
    office = Office(examples=1000, push_every=4)
    (a,) = office.join(0)
    sizes = [(lease.stop - lease.start) // BATCH for lease in (office.ask(a) for _ in range(7))]
    assert all(size % 4 == 0 for size in sizes[:-1])


def test_a_replica_hears_that_there_is_no_work_and_where_others_wait_for_it_asks_on() -> None:
    for answered in (False, True):
        office = Office(examples=10, max_delay=5 if answered else None)
        a, b = office.join(0, 1)
        lease = office.ask(a)
        assert lease is not None
        assert office.ask(b) is None
        effects = office.lose(a)  # its lease comes back
        assert sent(effects, Grant) == ([] if answered else [(b, Grant(Lease(1, 0, lease.start, lease.stop)))])


def test_warm_start_is_the_first_replicas_alone() -> None:
    office = Office(examples=400, warm_start=50)
    a, b = office.join(0, 1)
    assert office.ask(b) is None
    lease = office.ask(a)
    assert sent(office.trained(a, lease, 40), Grant) == []
    assert [to for to, _ in sent(office.trained(a, lease, 50), Grant)] == [b]


def test_rounds_begin_with_all_replicas_and_wait_while_a_view_is_pending() -> None:
    office = Office(gather="mean", replicas=2)
    (a,) = office.join(0)
    assert kinds(office.tell(a, LeaseRequest())) == []
    office.prompt = False
    (b,) = office.join(1)
    assert sent(office.effects, Grant) == []
    office.prompt = True
    assert sent(office.see(), Grant) == [(a, Grant(Lease(0, 0, 0, 10)))]
    assert office.ask(b).start == 10
    office.prompt = False
    office.lose(b)
    assert sent(office.tell(a, LeaseRequest()), Grant) == []
    assert [grant.lease.start for _, grant in sent(office.see(), Grant)] == [10]  # it goes on alone


def test_a_round_stays_within_an_epoch() -> None:
    office = Office(gather="mean", replicas=3, examples=20, limits=Limits(epochs=2))
    a, b, c = office.join(0, 1, 2)
    assert [office.ask(node) and True for node in (a, b, c)] == [True, True, None]
    assert [office.ask(node).epoch for node in (a, b)] == [1, 1]
    assert office.ask(c) is None


def test_a_newcomers_clock_comes_after_the_rounds_that_were_dealt() -> None:
    office = Office(gather="mean", replicas=2)
    a, b = office.join(0, 1)
    office.ask(a), office.ask(a)
    office.lose(b)
    (replacement,) = office.join(1, incarnation=1)
    assert office.heard(replacement, Welcome) == [Welcome(2)]


def test_what_was_dealt_to_a_slow_member_waits_for_it_however_far_the_others_have_come() -> None:
    """A replica that lagged while its peer was replaced again and again lost its part of round 1 for good."""
    office = Office(gather="mean", replicas=2, examples=400)
    slow, other = office.join(0, 1)
    for clock in range(1, 12):
        office.ask(other)
        office.trained(other, Lease(2 * clock - 1, 0, 0, 10**6))
    assert office.ask(slow).start == 0
    assert office.ask(slow).start == 20
