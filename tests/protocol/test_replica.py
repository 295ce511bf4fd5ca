"""What a replica asks for, computes, pushes and reports, as its effects show it."""

import pytest

from squall.protocol.effects import Compute, Expect, Send, UseWeights
from squall.protocol.events import BatchOver, BatchSkipped, StopRequested, TimePassed, ValuesLogged
from squall.protocol.messages import (
    Cover,
    Exchange,
    Exchanged,
    Join,
    LeaseRequest,
    Left,
    Logged,
    Progress,
    Skip,
    SkipNoted,
    View,
    Weights,
)
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.reports import REPORT_EVERY_S, REPORT_LEASES
from tests.protocol.desk import BATCH, Desk
from tests.protocol.steps import give, only, sent, tell


def test_it_joins_fetches_and_asks_for_work() -> None:
    desk = Desk()
    assert sent(desk.effects, Join) == [(COORDINATOR, Join(77))]
    desk.welcome(5)
    assert (desk.exchange.clock, desk.exchange.gradient, desk.exchange.weights) == (5, -1, 0)
    assert only(desk.effects, UseWeights) == UseWeights(0)
    assert sent(desk.effects, LeaseRequest) == [(COORDINATOR, LeaseRequest())]


def test_weights_of_shards_that_know_it_at_another_clock_are_fetched_again() -> None:
    desk = Desk().welcome(answered=False)
    tell(desk.replica, Node("shard", 0), Exchanged(3, 7))
    effects = tell(desk.replica, Node("shard", 1), Exchanged(4, 9))
    assert [(e.clock, e.gradient, e.weights) for _, e in sent(effects, Exchange)] == [(4, -1, 0)] * 2
    assert not sent(effects, LeaseRequest)


def test_a_lease_is_announced_and_computed_batch_by_batch() -> None:
    desk = Desk().welcome().grant(3, short=2)
    assert [e for e in desk.effects if isinstance(e, Expect)] == [
        Expect(0, 100, 104), Expect(0, 104, 108), Expect(0, 108, 110),
    ]  # fmt: skip
    assert only(desk.effects, Compute) == Compute(0, 100, 104, 0, accumulate=False, local_step=False)
    assert desk.computed().answer().batch == (104, 108)
    assert not desk.has(LeaseRequest)
    assert desk.computed().answer().batch == (108, 110)
    assert sent(desk.effects, LeaseRequest) == [(COORDINATOR, LeaseRequest())]  # while the last batch is computed


def test_a_push_names_its_basis_examples_and_covers() -> None:
    desk = Desk().welcome().grant(2).computed()
    pushed = sent(desk.effects, Exchange)
    assert [message for _, message in pushed] == [
        Exchange(1, 0, 0, basis, 4, (Cover(1, 104),), 1) for basis in (101, 102)  # each shard's own version
    ]  # fmt: skip


def test_a_batch_that_is_skipped_has_its_turn_when_the_coordinator_knows() -> None:
    desk = Desk(push_every=2, fetch_every=2).welcome().grant(4)
    lease = desk.leases

    def skipped(number: int) -> None:
        desk.effects = give(desk.replica, BatchSkipped())
        start = 100 * lease + BATCH * number
        assert desk.effects == [Send(COORDINATOR, Skip(lease, 0, start, start + BATCH))], "and nothing else"
        desk._take(tell(desk.replica, COORDINATOR, SkipNoted()))

    skipped(0)
    assert not only(desk.effects, Compute).accumulate, "there is nothing to add to"
    desk.computed()
    assert desk.exchange is not None
    assert (desk.exchange.examples, desk.exchange.batches) == (BATCH, 1)
    assert desk.exchange.covers == (Cover(lease, 100 * lease + 2 * BATCH),)
    desk.answer()
    for number in (2, 3):
        skipped(number)
    assert desk.exchange.examples == 0
    assert desk.exchange.covers == (Cover(lease, 100 * lease + 4 * BATCH),), "it covers what is not in it"


def test_push_every_and_fetch_every() -> None:
    """Four batches a push, two a fetch: local steps between the fetches."""
    desk = Desk(push_every=4, fetch_every=2).welcome().grant(8)
    log = []
    for _ in range(8):
        compute = only(desk.effects, Compute)
        exchange = desk.exchange
        desk.computed()
        exchanged = desk.exchange is not exchange
        if exchanged:
            log.append((desk.exchange.gradient >= 0, desk.exchange.weights >= 0, desk.exchange.examples))
        log.append((compute.accumulate, compute.local_step))
        if exchanged:
            desk.answer()
            assert desk.has(UseWeights)
    local, last = (True, True), (True, False)
    fetch, push = (False, True, 0), (True, True, 16)
    assert log == [(False, True), fetch, last, local, push, last] * 2


def test_a_push_without_a_fetch_keeps_the_weights() -> None:
    desk = Desk(push_every=1, fetch_every=2).welcome().grant(4).computed()
    assert (desk.exchange.gradient, desk.exchange.weights) == (0, -1)
    desk.answer()
    assert not desk.has(UseWeights)
    desk.computed()
    assert desk.exchange.weights == 0
    assert desk.exchange.basis == 101  # as old as the weights it began with


def test_overlap_computes_beside_the_exchange_in_the_other_buffers() -> None:
    desk = Desk(overlap=True).welcome().grant(4)
    desk.computed()
    assert (desk.exchange.gradient, desk.exchange.weights, desk.exchange.basis) == (0, 1, 101)
    assert only(desk.effects, Compute).buffer == 1  # and on weights buffer 0: no UseWeights yet
    first = desk.exchange
    desk.computed()
    assert desk.exchange is first  # the next exchange waits for this one
    desk.answer()
    assert only(desk.effects, UseWeights) == UseWeights(1)
    assert (desk.exchange.gradient, desk.exchange.weights) == (1, 0)
    assert desk.exchange.basis == 101  # one update older than without overlap
    assert only(desk.effects, Compute).buffer == 0


def test_a_fetch_into_the_weights_in_use_is_waited_for_also_with_overlap() -> None:
    desk = Desk(overlap=True, push_every=2).welcome().grant(4).computed()
    assert (desk.exchange.gradient, desk.exchange.weights) == (-1, 0)
    assert not desk.has(Compute)
    assert desk.answer().has(Compute)


def test_without_work_it_flushes_what_it_has_and_reports() -> None:
    desk = Desk(push_every=4, fetch_every=4).welcome().grant(1)
    desk.computed()
    assert not desk.pending, "the next grant may be on its way"
    desk.grant(None)
    assert (desk.exchange.gradient, desk.exchange.examples) == (0, 4)
    desk.answer()
    ((_, progress),) = sent(desk.effects, Progress)
    assert progress.covers == (Cover(1, 104),)
    assert desk.grant(1).has(Compute)


def test_reports_are_sums_and_come_every_so_often() -> None:
    desk = Desk().welcome().grant(200)
    desk.now = REPORT_EVERY_S
    desk.computed().answer()
    desk.now += REPORT_EVERY_S / 2
    for staleness in (1, 1, 3):
        desk.computed(loss=2.0).answer(staleness)
        assert not desk.has(Progress)
    desk.now += REPORT_EVERY_S / 2
    desk.computed(loss=1.0).answer()
    ((_, progress),) = sent(desk.effects, Progress)
    stats = progress.stats
    assert progress.covers == (Cover(1, 120),)
    assert (stats.examples, stats.batches, stats.loss_sum) == (16, 4, 28.0)
    assert (stats.exchanges, stats.pushes, stats.fetches, stats.compute_s) == (4, 4, 4, 1.0)
    assert stats.staleness == {1: 4, 3: 2, 0: 2}  # of both shards


def test_each_further_step_on_a_batch_is_a_push_and_its_examples_count_once() -> None:
    desk = Desk().welcome().grant(1)
    desk.now = -1.0  # reports are not due
    for _ in range(3):
        desk.computed(over=False).answer()
    assert not desk.has(Progress)
    ((_, left),) = sent(give(desk.replica, BatchOver()) + desk.stop().effects, Left)
    assert (left.stats.examples, left.stats.batches, left.stats.pushes) == (BATCH, 1, 3)
    assert left.covers == (Cover(1, 104),)


def test_an_answer_that_comes_while_it_computes_is_reported_as_well() -> None:
    desk = Desk(overlap=True).welcome().grant(4).computed()
    desk.now = REPORT_EVERY_S
    assert desk.computing
    desk.answer()
    assert desk.reported == {1: 104}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("batches", [1, 2, 3, 4, 5, 6])
def test_the_last_batch_of_an_epoch_is_reported_with_the_push_that_brings_it(batches: int, overlap: bool) -> None:
    desk = Desk(push_every=2, fetch_every=2, overlap=overlap).welcome().grant(batches).grant(100, epoch=1)
    applied = -(-batches // 2)  # pushes, with the one that brings it
    while desk.exchange is None or desk.exchange.clock < applied or desk.pending:
        desk.step()
    assert desk.reported.get(1) == 100 + batches * BATCH
    for _ in range(20):
        assert not desk.step().has(Progress), "the next ones wait until they are due"


def test_epochs_shorter_than_a_push_are_reported_with_every_push() -> None:
    """With overlap the next push is under way when the answer to the last one comes."""
    desk = Desk(push_every=2, fetch_every=2, overlap=True).welcome()
    for epoch in range(24):
        desk.grant(1, epoch=epoch)
    reports = []
    while len(reports) < 8:
        pending, clock = desk.pending, desk.exchange.clock if desk.exchange is not None else 0
        desk.computed() if desk.computing else desk.answer()
        if desk.has(Progress):
            assert pending
            reports.append(clock)
    assert reports == list(range(reports[0], reports[0] + 8))


def test_many_short_leases_are_reported_before_shards_forget_them() -> None:
    desk = Desk(gather="mean").welcome().grant(1)
    reported = []
    for _ in range(2, 3 * REPORT_LEASES):
        desk.grant(1).computed().answer()
        reported += [message.covers for _, message in sent(desk.effects, Progress)]
    assert [len(covers) for covers in reported] == [1, REPORT_LEASES, REPORT_LEASES]  # the first one at once


def test_a_round_without_a_batch_is_taken_part_in() -> None:
    desk = Desk(gather="mean").welcome().grant(None)
    assert (desk.exchange.clock, desk.exchange.gradient, desk.exchange.examples) == (1, 0, 0)
    assert desk.answer().grant(1).batch == (100, 104)
    assert desk.computed().exchange.clock == 2


def test_rounds_are_asked_for_one_ahead() -> None:
    desk = Desk(gather="mean", push_every=2, fetch_every=2).welcome().grant(2)
    assert not desk.has(LeaseRequest)  # two batches to do
    desk.computed()
    assert sent(desk.effects, LeaseRequest) == [(COORDINATOR, LeaseRequest())]
    desk.grant(2)
    desk.computed()
    assert desk.exchange.covers == (Cover(1, 108),)  # nothing of the next round
    assert desk.answer().batch == (200, 204)


def test_a_newcomer_takes_its_clock_from_the_shards() -> None:
    desk = Desk().welcome(2, answered=False).answer(clock=9)
    assert desk.grant(2).computed().exchange.clock == 10


def test_it_wakes_for_nothing_and_knows_nothing_else() -> None:
    desk = Desk()
    assert desk.replica.wake_at is None
    assert give(desk.replica, TimePassed()) == []
    with pytest.raises(AssertionError, match="does not know"):
        desk.replica.on(StopRequested("no"), 0.0)
    with pytest.raises(AssertionError, match="does not know"):
        tell(desk.replica, COORDINATOR, View(1, ()))


# ---------------------------------------------------------------- a script's own numbers


def test_what_a_script_logs_is_of_the_weights_that_it_has_and_not_of_those_on_their_way() -> None:
    desk = Desk().welcome().grant(3).computed()  # its push, and the fetch with it, are not answered
    desk.applied, desk.now = 500, 7.0
    ((to, logged),) = sent(give(desk.replica, ValuesLogged({"accuracy": 0.5}), 7.0), Logged)
    assert to == COORDINATOR
    assert logged == Logged({"accuracy": 0.5}, Weights(updates=101, examples=399, age_s=7.0))
    desk.answer()
    ((_, logged),) = sent(give(desk.replica, ValuesLogged({}), 9.5), Logged)
    assert logged.weights == Weights(updates=102, examples=499, age_s=2.5)


def test_a_replica_that_moves_its_own_weights_counts_its_batches_since_the_fetch() -> None:
    desk = Desk(local=True, push_every=3, fetch_every=3)
    desk.now = 1.0
    desk.welcome().grant(3).computed().computed()
    ((_, logged),) = sent(give(desk.replica, ValuesLogged({}), 4.0), Logged)
    assert logged.weights == Weights(updates=101, examples=399 + 2 * BATCH, age_s=4.0 - 1.25)  # a batch takes 0.25 s
