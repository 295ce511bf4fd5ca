"""Batches that are not finite, and Stop at every stage."""

import pytest

from squall.protocol.effects import Compute, End, Expect, UseWeights
from squall.protocol.messages import Left, NonFinite
from squall.protocol.nodes import COORDINATOR
from tests.protocol.desk import BATCH, Desk
from tests.protocol.steps import kinds, only, sent


def test_a_bad_batch_is_tried_again_on_fresh_weights() -> None:
    desk = Desk().welcome().grant(2).computed(finite=False)
    assert sent(desk.effects, NonFinite) == [(COORDINATOR, NonFinite(0, 100, 104, 1, final=False))]
    assert (desk.exchange.gradient, desk.exchange.weights) == (-1, 0)
    desk.answer()
    assert desk.has(UseWeights)
    assert desk.batch == (100, 104)
    assert desk.computed().exchange.examples == 4


def test_with_overlap_a_retry_waits_for_an_exchange_that_fetches() -> None:
    desk = Desk(overlap=True, push_every=1, fetch_every=2).welcome().grant(4).computed()
    assert desk.exchange.weights == -1
    desk.computed(finite=False)
    assert desk.answer().exchange.weights >= 0
    assert not desk.has(Compute)
    assert desk.answer().batch == (104, 108)


def test_a_batch_that_fails_twice_is_final_and_only_stop_is_waited_for() -> None:
    desk = Desk().welcome().grant(4).computed().answer().computed(finite=False).answer().computed(finite=False)
    assert sent(desk.effects, NonFinite) == [(COORDINATOR, NonFinite(0, 104, 108, 1, final=True))]
    assert kinds(desk.effects) == ["NonFinite"]
    assert desk.grant(2).effects == [Expect(0, 200, 204), Expect(0, 204, 208)]
    assert kinds(desk.stop().effects) == ["Left", "End"]


def test_a_batch_that_fails_again_after_stop_lets_the_replica_leave() -> None:
    desk = Desk().welcome().grant(4).computed(finite=False).answer().stop()
    assert desk.effects == []
    assert kinds(desk.computed(finite=False).effects) == ["NonFinite", "Left", "End"]


CADENCES = [
    {},
    {"overlap": True},
    {"gather": "mean"},
    {"gather": "mean", "push_every": 3, "fetch_every": 3},
    {"push_every": 2},
    {"push_every": 3, "fetch_every": 2},
    {"push_every": 2, "fetch_every": 3, "overlap": True},
]


@pytest.mark.parametrize("cadence", CADENCES, ids=str)
def test_a_loop_that_leaves_gives_its_batch_up_and_all_before_it_is_told(cadence: dict[str, object]) -> None:
    desk = Desk(**cadence).welcome().grant(3)
    computed = 0
    while computed < 7 or not desk.computing:
        computed += desk.computing and not desk.pending
        if desk.pending or desk.computing:
            desk.step()
        else:
            desk.grant(3)
    desk.left()
    while desk.pending:
        desk.answer()
    assert kinds(desk.effects)[-2:] == ["Left", "End"]
    trained = sum(upto - 100 * lease for lease, upto in desk.reported.items()) // BATCH
    dropped = computed % cadence.get("push_every", 1) if cadence.get("gather") else 0  # a part of a round's push
    assert trained == computed - dropped


@pytest.mark.parametrize("cadence", CADENCES, ids=str)
@pytest.mark.parametrize("bad", [None, 1, 2])
def test_stop_at_every_stage_ends_with_left(cadence: dict[str, object], bad: int | None) -> None:
    """What was computed before has been pushed and is reported. `bad`: the batch with this number is tried again."""
    most = 0
    for stage in range(24):
        desk = Desk(**cadence)
        computed = 0
        for step in range(60):
            if step == stage:
                desk.stop()
            elif step == 0:
                desk.welcome(answered=False)
            elif desk.pending:
                desk.answer()
            elif desk.computing:
                computed += 1
                desk.computed(finite=computed != bad)
            elif step < stage:
                desk.grant(3)
            if desk.has(Left):
                break
        assert kinds(desk.effects)[-2:] == ["Left", "End"], f"stopped at {stage}"
        assert only(desk.effects, End).status == "finished"
        assert desk.stop().effects == []
        good = computed - (bad is not None and computed >= bad)
        trained = sum(upto - 100 * lease for lease, upto in desk.reported.items()) // BATCH
        dropped = good % cadence.get("push_every", 1) if cadence.get("gather") else 0  # a part of a round's push
        assert trained == good - dropped
        most = max(most, trained)
    assert most >= 7


def test_what_a_batch_is_tried_again_on_is_beside_the_rhythm_of_pushes_and_fetches() -> None:
    desk = Desk(push_every=2, fetch_every=2).welcome().grant(4).computed()
    desk.computed(finite=False).answer().computed()
    assert desk.exchange is not None
    assert (desk.exchange.gradient, desk.exchange.weights, desk.exchange.batches) == (0, 0, 2)
