"""What a batch takes the parts of a replica, against a pencil and a formula."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.sim.cluster.split_step import ParallelStep, PipelineStep, orders_of, stages_each
from squall.splits import ScheduleName

STEP_S = 12.0


def free(source: int, target: int, elements: float) -> float:
    return 0.0


def pipeline(parts: int, microbatches: int, schedule: ScheduleName = "1f1b", passed: int = 0) -> PipelineStep:
    stages = parts * stages_each(schedule)
    return PipelineStep(
        shares=(1 / stages,) * stages, passed=(passed,) * (stages - 1), microbatches=microbatches, schedule=schedule
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
@pytest.mark.parametrize(("parts", "microbatches"), [(2, 2), (2, 8), (3, 6), (4, 8), (4, 4)])
def test_where_links_cost_nothing_the_bubble_is_that_of_the_formula(
    schedule: ScheduleName, parts: int, microbatches: int
) -> None:
    turns = microbatches * stages_each(schedule)  # with two stages a part a turn is half as long
    seconds, cores = pipeline(parts, microbatches, schedule).lasts(STEP_S, 1.0, free)
    assert 1 - cores / parts == pytest.approx((parts - 1) / (turns + parts - 1))
    assert seconds == pytest.approx(STEP_S / parts * (turns + parts - 1) / turns)


@pytest.mark.parametrize("parts", [2, 4])
def test_halves_of_the_backward_pass_fill_most_of_the_bubble(parts: int) -> None:
    usual = pipeline(parts, 8, "interleaved").lasts(STEP_S, 1.0, free)
    filled = pipeline(parts, 8, "zero-bubble").lasts(STEP_S, 1.0, free)
    assert filled.seconds < usual.seconds
    assert filled.cores * filled.seconds == pytest.approx(STEP_S), "the same work"


def test_unequal_stages_wait_for_the_slowest() -> None:
    """Five microbatches of 2 s and of 1 s: the first stage works all the time, and ends with the second's last."""
    step = PipelineStep(shares=(10 / STEP_S, 5 / STEP_S), passed=(0,), microbatches=5, schedule="gpipe")
    assert step.lasts(STEP_S, 1.0, free).seconds == pytest.approx(11.0)


def hop(source: int, target: int, elements: float) -> float:
    return 0.1 + elements / 100


def test_a_pipeline_that_holds_few_microbatches_waits_for_every_way_there_and_back() -> None:
    """1F1B has two microbatches on their way, so each waits for half of both ways; GPipe only in the beginning."""
    held, all_on_their_way = (pipeline(2, 40, s, 400).lasts(STEP_S, 1.0, hop).seconds for s in ("1f1b", "gpipe"))
    turn_s, way_s = STEP_S / 2 / 40, 0.1 + 10 / 100
    assert held == pytest.approx(41 * (turn_s + way_s), rel=0.03)
    assert all_on_their_way == pytest.approx(41 * turn_s + 2 * way_s)


def test_a_part_of_a_batch_has_fewer_microbatches_and_several_batches_come_one_after_another() -> None:
    step = pipeline(2, 8)
    assert step.lasts(STEP_S, 0.5, free).seconds == pytest.approx(STEP_S / 2 / 8 * (4 + 1))
    assert step.lasts(STEP_S, 3.0, free).seconds == pytest.approx(3 * step.lasts(STEP_S, 1.0, free).seconds)
    assert pipeline(2, 8, "interleaved").lasts(STEP_S, 3 / 8, free).seconds > 0, "a number that this schedule refuses"


def test_slices_wait_at_every_sum() -> None:
    step = ParallelStep(shares=(0.5, 0.6), waits=((10.0, 2), (30.0, 1)))
    seconds, cores = step.lasts(STEP_S, 1.0, hop)
    assert seconds == pytest.approx(0.6 * STEP_S + 2 * (0.1 + 5 / 100) + 0.1 + 30 / 100)
    assert cores == pytest.approx(1.1 * STEP_S / seconds)
    assert step.lasts(STEP_S, 2.0, hop).seconds == pytest.approx(2 * seconds)


@given(
    st.sampled_from(get_args(ScheduleName)), st.integers(2, 4), st.integers(1, 3),
    st.lists(st.floats(0.01, 1.0), min_size=8, max_size=8), st.floats(0.0, 1.0),
)  # fmt: skip
def test_nothing_is_quicker_than_its_busiest_part_and_nothing_slower_than_one_after_another(
    schedule: ScheduleName, parts: int, rounds: int, shares: list[float], way_s: float
) -> None:
    stages, microbatches = parts * stages_each(schedule), rounds * parts
    step = PipelineStep(
        shares=tuple(shares[:stages]), passed=(0,) * (stages - 1), microbatches=microbatches, schedule=schedule
    )
    seconds, cores = step.lasts(1.0, 1.0, lambda source, target, elements: way_s)
    busiest = max(sum(shares[part:stages:parts]) for part in range(parts))
    assert busiest - 1e-9 <= seconds <= sum(shares[:stages]) + 2 * stages * microbatches * way_s + 1e-9
    assert cores * seconds == pytest.approx(sum(shares[:stages]))


@pytest.mark.parametrize("schedule", get_args(ScheduleName))
def test_each_part_does_every_pass_of_its_stages_once(schedule: str) -> None:
    parts, microbatches = 2, 4
    stages = parts * stages_each(schedule)
    for part, order in enumerate(orders_of(schedule, stages, parts, microbatches)):
        passes = "FIW" if schedule == "zero-bubble" else "FB"
        own = [(what, stage, m) for what in passes for stage in range(part, stages, parts) for m in range(microbatches)]
        assert sorted(order) == sorted(own)
