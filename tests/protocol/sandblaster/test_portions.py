"""Each portion of a batch is counted once, whoever computes it, and however many die over it."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from squall.protocol.ledger import Range
from squall.protocol.nodes import Node
from squall.protocol.sandblaster.portions import PATIENCE, Balance, Portions

A, B, C = (Node("replica", i) for i in range(3))


def ledger(examples: int = 90, size: int = 10, took: tuple[float, ...] = (1.0,), **balance: object) -> Portions:
    return Portions(Range(2, 100, 100 + examples), Balance(size, **balance), deque(took, maxlen=32))


def test_portions_partition_the_batch() -> None:
    portions = ledger(95)
    ranges = [portions.ranges[p] for p in iter(lambda: portions.give(A, 0.0), None)]
    assert ranges[0] == Range(2, 100, 110)
    assert ranges[-1] == Range(2, 190, 195)
    assert [r.stop for r in ranges[:-1]] == [r.start for r in ranges[1:]]
    assert sum(portions.share(p) for p in range(len(ranges))) == 1.0


def test_a_late_portion_is_backed_up_once_and_the_first_answer_counts() -> None:
    portions = ledger(20)
    slow, fast = portions.give(A, 0.0), portions.give(B, 0.0)
    assert portions.done(B, fast, 0.5, 1.0)
    assert portions.give(B, 1.0) is None, "nobody is late yet"
    assert portions.late_at(B) == PATIENCE
    assert portions.give(B, PATIENCE) == slow
    assert portions.give(C, PATIENCE) is None, "two are enough"
    assert portions.done(B, slow, 0.25, 2.0)
    assert not portions.done(A, slow, 0.25, 9.0), "too late"
    portions.applied((fast,))
    assert not portions.complete
    portions.applied((slow,))
    assert portions.complete
    assert portions.loss == 0.375


def test_without_backup_nobody_helps() -> None:
    portions = ledger(20, backup=False)
    portions.give(A, 0.0), portions.give(B, 0.0)
    assert portions.give(C, 100.0) is None
    assert portions.late_at(C) == float("inf")


def test_a_replica_that_dies_costs_what_it_had_not_pushed() -> None:
    portions = ledger(40)
    pushed, kept, computing = (portions.give(A, 0.0) for _ in range(3))
    portions.done(A, pushed, 1.0, 0.1), portions.done(A, kept, 1.0, 0.2)
    portions.applied((pushed,))
    portions.lose(A)
    left = list(iter(lambda: portions.give(B, 1.0), None))
    assert left == [kept, computing, 3]


def test_who_is_slow_pushes_before_it_begins_what_may_be_its_last() -> None:
    portions = ledger(100)
    slow, fast = portions.give(A, 0.0), portions.give(B, 0.0)
    portions.done(B, fast, 1.0, 1.0), portions.done(A, slow, 1.0, 4.0)
    portions.give(A, 4.0), portions.give(B, 4.0)
    assert portions.may_be_last(A)
    assert not portions.may_be_last(B)


@given(st.data())
def test_whatever_happens_the_loss_is_the_batchs(data: st.DataObject) -> None:
    losses = [1.0, 2.0, 4.0, 8.0, 16.0]
    portions, now = ledger(45), 0.0
    computing: dict[Node, int] = {}
    kept: dict[Node, list[int]] = {A: [], B: [], C: []}
    for _ in range(400):
        if portions.complete:
            break
        now += 1.0
        node = data.draw(st.sampled_from((A, B, C)))
        what = data.draw(st.sampled_from(("work", "work", "push", "die")))
        if what == "die" and now < 40:
            portions.lose(node)
            computing.pop(node, None)
            kept[node].clear()
        elif what == "push" and kept[node]:
            portions.applied(tuple(kept[node]))
            kept[node].clear()
        elif node in computing:
            portion = computing.pop(node)
            if portions.done(node, portion, losses[portion], now):
                kept[node].append(portion)
        else:
            given_ = portions.give(node, now)
            if given_ is not None:
                computing[node] = given_
    if portions.complete:
        assert portions.loss == sum(portions.share(p) * loss for p, loss in enumerate(losses))
    else:
        assert portions.loss < 16.0
