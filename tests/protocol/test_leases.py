"""The ledger: every example of every epoch is trained once, whatever happens to those who train it."""

from collections import Counter

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from squall.protocol.check import check
from squall.protocol.effects import Cause
from squall.protocol.leases import Leases, Limits
from squall.protocol.ledger import Range
from squall.protocol.losses import Losses
from squall.protocol.messages import Cover, Lease
from squall.protocol.nodes import Node

A, B, C = HOLDERS = [Node("replica", i) for i in range(3)]


def drain(leases: Leases, batches: int = 3) -> list[Lease]:
    """One holder trains all that is left."""
    taken = []
    while (lease := leases.take(A, batches, 0.0)) is not None:
        taken.append(lease)
        assert leases.done(lease.id, lease.stop, A) is not None
    return taken


class Ledger(RuleBasedStateMachine):
    """Holders take, train, vanish and report late; the run is stopped and resumed from its snapshot."""

    @initialize(
        examples=st.integers(1, 40), batch=st.integers(1, 9), epochs=st.integers(1, 3),
        steps=st.none() | st.integers(1, 30),
    )  # fmt: skip
    def start(self, examples: int, batch: int, epochs: int, steps: int | None) -> None:
        self.batch, self.limits = batch, Limits(epochs, steps)
        self.leases = Leases(examples, batch, self.limits)
        self.trained: Counter[tuple[int, int]] = Counter()
        self.reached: dict[int, int] = {}  # lease -> trained so far, by its holder
        self.over: list[tuple[Lease, Node]] = []

    def train(self, lease: int, upto: int) -> None:
        held = self.leases.held[lease].lease
        before = self.reached.get(lease, held.start)
        self.trained.update((held.epoch, i) for i in range(before, upto))
        self.reached[lease] = upto

    @rule(holder=st.sampled_from(HOLDERS), batches=st.integers(1, 6), stay=st.booleans())
    def take(self, holder: Node, batches: int, stay: bool) -> None:
        epoch = self.leases.epoch
        lease = self.leases.take(holder, batches, 1.0, within_epoch=epoch if stay else None)
        if lease is None:
            assert self.leases.exhausted() or stay
            return
        assert lease.start % self.batch == 0
        assert lease.stop % self.batch == 0 or lease.stop == self.leases.examples
        assert 0 < lease.stop - lease.start <= batches * self.batch
        assert lease.epoch <= epoch or not stay

    @precondition(lambda self: self.leases.held)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.leases.held)))
        held = self.leases.held[lease]
        upto = min(held.lease.stop, held.done + self.batch * data.draw(st.integers(0, 3)))
        self.train(lease, upto)
        ended = self.leases.done(lease, upto, held.holder)
        assert (ended is not None) == (upto == held.lease.stop)
        if ended is not None:
            self.over.append((held.lease, held.holder))

    @rule(holder=st.sampled_from(HOLDERS))
    def give_back(self, holder: Node) -> None:
        ended = self.leases.give_back(holder)
        assert all(e.holder == holder and e.lease.start <= e.done < e.lease.stop for e in ended)
        self.over += [(e.lease, holder) for e in ended]
        assert holder not in [held.holder for held in self.leases.held.values()]

    @precondition(lambda self: self.over)
    @rule(data=st.data(), holder=st.sampled_from(HOLDERS))
    def a_late_report_changes_nothing(self, data: st.DataObject, holder: Node) -> None:
        lease, _ = data.draw(st.sampled_from(self.over))
        before = self.leases.state()
        assert self.leases.done(lease.id, lease.stop, holder) is None
        assert self.leases.state() == before

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """The shards' files may hold more of a lease than the ledger has heard of."""
        progress = []
        for lease, held in self.leases.held.items():
            upto = min(held.lease.stop, held.done + self.batch * data.draw(st.integers(0, 2)))
            self.train(lease, upto)
            progress.append((lease, upto))
        state = msgspec.json.decode(msgspec.json.encode(self.leases.state()))
        self.leases = Leases.restore(state, [*progress, (10**6, 5)], self.batch, self.limits)

    @precondition(lambda self: self.leases.held)
    @rule(data=st.data())
    def come_too_late(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases.held)))
        held = self.leases.held[lease]
        ended = self.leases.drop(lease, held.holder)
        assert ended is not None
        self.over.append((ended.lease, held.holder))

    @invariant()
    def adds_up(self) -> None:
        check(self.leases)
        assert self.leases.trained == sum(self.trained.values())
        assert set(self.trained.values()) <= {1}
        done = self.leases.epochs_done()
        n = self.leases.examples
        assert all(self.trained[epoch, i] for epoch in range(done) for i in range(n))
        assert not all(self.trained[done, i] for i in range(n))

    def teardown(self) -> None:
        for lease in list(self.leases.held):
            self.train(lease, self.leases.held[lease].lease.stop)
            self.leases.done(lease, self.reached[lease], self.leases.held[lease].holder)
        for lease in drain(self.leases):
            self.trained.update((lease.epoch, i) for i in range(lease.start, lease.stop))
        assert self.leases.over() is not None
        n, epochs = self.leases.examples, self.limits.epochs
        everything = [(epoch, i) for epoch in range(epochs) for i in range(n)]
        batches = epochs * -(-n // self.batch)
        if self.limits.steps is None or self.limits.steps >= batches:
            assert self.trained == Counter(everything)
        else:
            assert set(self.trained.values()) == {1}
            per_epoch = [[i // self.batch for e, i in self.trained if e == epoch] for epoch in range(epochs)]
            assert sum(len(set(batch)) for batch in per_epoch) == self.limits.steps


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=30)


def test_what_comes_back_is_dealt_before_anything_new_oldest_first() -> None:
    leases = Leases(100, 10, Limits(epochs=1))
    first, second = leases.take(A, 2, 0.0), leases.take(B, 2, 0.0)
    leases.done(second.id, 30, B)
    leases.give_back(B)
    leases.give_back(A)
    again = [leases.take(C, 3, 0.0) for _ in range(3)]
    assert [(lease.start, lease.stop) for lease in again] == [(0, 20), (30, 40), (40, 70)]
    assert len({lease.id for lease in (first, second, *again)}) == 5


def test_what_a_holder_was_too_slow_for_is_dealt_to_another_and_to_it_only_for_want_of_anything_else() -> None:
    leases = Leases(40, 10, Limits(epochs=1))
    late = leases.take(A, 2, 0.0)
    assert leases.drop(late.id, B) is None, "only its holder can drop a lease"
    assert leases.drop(late.id, A) is not None
    assert [(r.start, r.stop) for r in leases.returned] == [(0, 20)]
    dealt = [leases.take(holder, 1, 0.0) for holder in (A, B, A, A)]
    assert [lease.start for lease in dealt] == [20, 0, 30, 10]
    assert leases.take(B, 1, 0.0) is None


def test_a_returned_range_is_cut_to_what_is_asked_for() -> None:
    leases = Leases(100, 10, Limits(epochs=1))
    leases.take(A, 5, 0.0)
    leases.give_back(A)
    cut = [leases.take(B, 2, 0.0) for _ in range(3)]
    assert [(lease.start, lease.stop) for lease in cut] == [(0, 20), (20, 40), (40, 50)]


def test_the_last_batch_of_an_epoch_may_be_short_and_the_next_epoch_begins_anew() -> None:
    taken = drain(Leases(25, 10, Limits(epochs=2)), batches=2)
    spans = [(lease.epoch, lease.start, lease.stop) for lease in taken]
    assert spans == [(0, 0, 20), (0, 20, 25), (1, 0, 20), (1, 20, 25)]


def test_a_round_does_not_begin_the_next_epoch() -> None:
    leases = Leases(20, 10, Limits(epochs=3))
    assert leases.take(A, 2, 0.0).epoch == 0
    assert leases.take(B, 2, 0.0, within_epoch=0) is None
    assert not leases.exhausted()
    assert leases.take(B, 2, 0.0, within_epoch=1).epoch == 1


def test_steps_count_batches_and_a_repeat_is_not_a_new_step() -> None:
    leases = Leases(25, 10, Limits(steps=4))
    first = leases.take(A, 8, 0.0)
    leases.give_back(A)
    assert (first.start, first.stop) == (0, 25)
    taken = drain(leases, batches=8)
    assert [(lease.epoch, lease.start, lease.stop) for lease in taken] == [(0, 0, 25), (1, 0, 10)]
    assert leases.over() is not None


def test_without_limits_it_never_ends() -> None:
    leases = Leases(20, 10, Limits())
    for epoch in range(5):
        assert leases.take(A, 4, 0.0).epoch == epoch
    assert not leases.exhausted()


def test_what_an_epoch_has_left_decides_on_lease_sizes() -> None:
    leases = Leases(45, 10, Limits(epochs=2))
    left = [leases.left_in_epoch()]
    for _ in range(5):
        leases.take(A, 1, 0.0)
        left.append(leases.left_in_epoch())
    assert left == [5, 4, 3, 2, 1, 5]


def test_a_limit_may_be_raised_when_a_run_is_resumed() -> None:
    leases = Leases(20, 10, Limits(epochs=1))
    drain(leases)
    assert leases.over() is not None
    longer = Leases.restore(leases.state(), [], 10, Limits(epochs=3))
    assert [lease.epoch for lease in drain(longer)] == [1, 2]
    assert longer.trained == 60


def test_a_limit_may_be_lowered_and_what_was_begun_behind_it_is_there_for_another_time() -> None:
    leases = Leases(20, 10, Limits(epochs=3))
    for _ in range(3):
        leases.take(A, 1, 0.0)
    shorter = Leases.restore(leases.state(), [], 10, Limits(epochs=1))
    assert [(lease.epoch, lease.stop) for lease in drain(shorter)] == [(0, 10), (0, 20)]
    assert shorter.over() == (Cause.DATA, "all data is trained")
    again = Leases.restore(shorter.state(), [], 10, Limits(epochs=2))
    assert [(lease.epoch, lease.stop) for lease in drain(again)] == [(1, 10), (1, 20)]
    assert again.over() is not None


# ---------------------------------------------------------------- what happens while a snapshot is taken


def test_what_is_granted_and_trained_while_a_snapshot_is_taken_is_not_dealt_again() -> None:
    leases = Leases(20, 4, Limits(epochs=3))
    first = leases.take(A, 2, 0.0)  # [0, 8)
    assert first is not None
    state = leases.state()
    later = [leases.take(B, 4, 0.0) for _ in range(2)]  # [8, 20), and [0, 16) of the next epoch
    assert [lease.stop for lease in later if lease is not None] == [20, 16]
    extended, progress = leases.extended(state, [{first.id: 8, 1: 20, 2: 4}, {first.id: 4, 1: 16, 2: 8}])
    assert progress == {first.id: 4, 1: 16, 2: 4}
    again = Leases.restore(extended, list(progress.items()), 4, Limits(epochs=3))
    check(again)
    assert again.trained == 4 + 8 + 4
    assert again.returned == [Range(0, 4, 8), Range(0, 16, 20), Range(1, 4, 16)]
    assert (again.epoch, again.cursor) == (1, 16)
    fresh = [again.take(A, 5, 0.0) for _ in range(4)]
    assert fresh[-1] is not None
    assert (fresh[-1].id, fresh[-1].epoch, fresh[-1].start) == (6, 1, 16)


def test_what_came_back_and_was_granted_again_while_a_snapshot_is_taken_counts_once() -> None:
    leases = Leases(16, 4, Limits(epochs=1))
    leases.take(A, 4, 0.0)
    state = leases.state()
    leases.done(0, 4, A)  # what it had trained when it died, as the shards say
    leases.give_back(A)
    leases.take(B, 2, 0.0)  # [4, 12)
    extended, progress = leases.extended(state, [{0: 4, 1: 8}])
    again = Leases.restore(extended, list(progress.items()), 4, Limits(epochs=1))
    check(again)
    assert (again.trained, again.returned) == (8, [Range(0, 8, 16)])


def test_a_ledger_that_no_later_lease_concerns_stays_as_it_was() -> None:
    leases = Leases(16, 4, Limits(epochs=1))
    leases.take(A, 2, 0.0)
    state = leases.state()
    leases.take(B, 2, 0.0)
    assert leases.extended(state, [{0: 4}])[0] is state


@pytest.mark.parametrize("lost", [False, True])
def test_what_shards_have_trained_and_forgotten_while_a_snapshot_is_taken_is_not_dealt_again(lost: bool) -> None:
    """They remember the newest leases of each holder. What one has lost may be in its file, and is dealt again."""
    leases = Leases(24, 4, Limits(epochs=1))
    leases.losses = Losses(2)
    leases.take(A, 1, 0.0)
    state = leases.state()
    for holder in (A, B, A, A, B):
        leases.take(holder, 1, 0.0)
    for lease in (0, 1, 3):
        leases.done(lease, 4 * lease + 4, A)
    if lost:
        leases.lose(0, [Cover(1, 8)])
    extended, progress = leases.extended(state, [{3: 16, 4: 18}, {4: 20}])
    assert progress == {0: 4, **({} if lost else {1: 8}), 3: 16, 4: 18}
    again = Leases.restore(extended, list(progress.items()), 4, Limits(epochs=1))
    check(again)
    assert again.returned == [Range(0, 4 if lost else 8, 12), Range(0, 18, 24)]
