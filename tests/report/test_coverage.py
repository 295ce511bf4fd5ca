import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.record.rows import LossRow, Row, SkipRow
from squall.report import Audit, Reader, audit
from squall.report.spans import spans_of
from tests.report.conftest import lease, state, work, write

SIZE = 40
positions = st.integers(0, SIZE)


def audited(tmp_path: Path, rows: list[Row], **values: object) -> Audit:
    path = write(tmp_path / "run.sqlite", [*state(**values), *rows])
    with closing(Reader(path)) as reader:
        return audit(reader)


@given(st.lists(st.tuples(positions, positions), max_size=12))
def test_spans_agree_with_counting_every_example(ranges: list[tuple[int, int]]) -> None:
    counted = [sum(start <= example < stop for start, stop in ranges) for example in range(SIZE)]
    spans = spans_of(ranges, SIZE)
    assert [span.times for span in spans for _ in range(len(span))] == counted
    assert [span.start for span in spans] == [0, *(span.stop for span in spans)][:-1], "no gap, no overlap"
    assert all(one.times != next.times for one, next in pairwise(spans)), "as few as can be"


def test_what_a_script_left_out_is_named_where_its_lease_went_on_and_else_dealt_again(tmp_path: Path) -> None:
    left, whole, gone, again = lease(0, 0, 400), lease(0, 400, 900), lease(1, 0, 100, 32), lease(1, 32, 100)
    skips = [
        SkipRow(left.lease, 0, 16, 32, 1), SkipRow(left.lease, 0, 384, 400, 1), SkipRow(left.lease, 0, 0, 16, 1),
        SkipRow(gone.lease, 1, 48, 64, 1),
    ]  # fmt: skip
    rows = [left, whole, *skips, gone, again, lease(0, 900, 1000), lease(1, 100, 1000), lease(2, 0, 1000)]
    found = audited(tmp_path, rows, epochs=3, examples_per_epoch=1000, status="finished", ended="data")
    assert found.complete, "that it was left out is no miss"
    assert str(found).splitlines() == [
        "No example was missed in 3 finished epochs.",
        "Epoch 0: 952 of 1,000 examples trained. Left out by the script: 48, at 0 to 15, 16 to 31, 384 to 399.",
        "Epochs 1 to 2: each of 1,000 examples trained exactly once.",
    ]


def test_an_older_record_names_no_reason_of_what_was_left_out(tmp_path: Path) -> None:
    left = lease(0, 0, 1000)
    rows = [*state(epochs=1, examples_per_epoch=1000), left, SkipRow(left.lease, 0, 16, 32, 1, "nonfinite")]
    path = write(tmp_path / "run.sqlite", rows)

    def said() -> str:
        with closing(Reader(path)) as reader:
            return str(audit(reader)).partition(": 984 of 1,000 examples trained. ")[2]

    assert said() == "Left out as they gave NaN or Inf twice: 16, at 16 to 31."
    with closing(sqlite3.connect(path)) as database:
        database.execute("ALTER TABLE skip DROP COLUMN why")
    assert said() == "Left out by the script: 16, at 16 to 31."


def test_what_a_shard_has_lost_and_is_trained_again_is_named_with_it(tmp_path: Path) -> None:
    losses = [LossRow(1.0, 0, 0, 64, 96), LossRow(1.0, 0, 0, 96, 128), LossRow(2.0, 1, 1, 0, 16)]
    rows = [lease(0, 0, 1000), lease(0, 64, 128), lease(1, 0, 1000), lease(1, 0, 16), *losses]
    found = audited(tmp_path, rows, epochs=2, examples_per_epoch=1000, status="finished", ended="data")
    assert found.complete
    assert str(found).splitlines() == [
        "No example was missed in 2 finished epochs.",
        "Epoch 0: 1,000 of 1,000 examples trained. Trained more than once: 64, at 64 to 127 (2 times).",
        "Epoch 1: 1,000 of 1,000 examples trained. Trained more than once: 16, at 0 to 15 (2 times).",
        "Of epoch 0 a shard that died inside an update had lost 64, dealt again: 64 to 127.",
        "Of epoch 1 a shard that died inside an update had lost 16, dealt again: 0 to 15.",
    ]
    assert found.to_json_dict()["lost"] == [[0, 64, 128], [1, 0, 16]]


def test_a_billion_examples_cost_no_more_than_ten() -> None:
    assert [len(span) for span in spans_of([(0, 10**9), (5, 10**9)], 10**9)] == [5, 10**9 - 5]


def test_epochs_trained_exactly_once_share_a_sentence(tmp_path: Path) -> None:
    rows: list[Row] = [lease(epoch, start, start + 500) for epoch in range(3) for start in (500, 0)]
    found = audited(tmp_path, rows, epochs=3, examples_per_epoch=1000, status="finished", ended="data")
    assert found.complete
    assert str(found) == (
        "No example was missed in 3 finished epochs.\nEpochs 0 to 2: each of 1,000 examples trained exactly once."
    )


def test_a_row_may_run_on_through_a_million_epochs(tmp_path: Path) -> None:
    rows: list[Row] = [lease(0, 4, 10_000_006), lease(0, 0, 4), lease(1_000_001, 0, 5)]
    found = audited(tmp_path, rows, examples_per_epoch=10)
    assert str(found).splitlines()[1:] == [
        "Epochs 0 to 999999: each of 10 examples trained exactly once.",
        "Epoch 1000000, unfinished: 6 of 10 trained so far.",
        "Epoch 1000001, unfinished: 5 of 10 trained so far.",
    ]
    assert [(part.epoch, part.last) for part in found.parts] == [
        (0, 999_999),
        (1_000_000, 1_000_000),
        (1_000_001, 1_000_001),
    ]


def test_a_lease_given_back_and_trained_by_another_covers_its_epoch(tmp_path: Path) -> None:
    rows: list[Row] = [lease(0, 0, 600, trained_stop=64), lease(0, 600, 1000), lease(0, 64, 600)]
    found = audited(tmp_path, rows, epochs=1, examples_per_epoch=1000, status="finished", ended="data")
    assert found.epochs[0].exact


def test_what_was_missed_and_repeated_is_named(tmp_path: Path) -> None:
    rows: list[Row] = [lease(0, 0, 600, trained_stop=599), lease(0, 600, 1000), lease(0, 900, 1000)]
    found = audited(tmp_path, rows, epochs=1, examples_per_epoch=1000, status="finished", ended="data")
    assert not found.complete
    assert str(found) == (
        "1 of 1 finished epoch missed examples.\n"
        "Epoch 0: 999 of 1,000 examples trained. Never trained: 1, at 599."
        " Trained more than once: 100, at 900 to 999 (2 times)."
    )


def test_many_holes_are_summed_up(tmp_path: Path) -> None:
    rows: list[Row] = [lease(0, start, start + 5) for start in range(0, 100, 10)]
    text = str(audited(tmp_path, rows, epochs=1, examples_per_epoch=100, status="finished", ended="data"))
    assert "Never trained: 50, at 5 to 9, 15 to 19, 25 to 29, 35 to 39, 45 to 49, 55 to 59 and 4 more ranges." in text


def test_while_the_run_goes_on_a_hole_is_not_called_missed(tmp_path: Path) -> None:
    rows: list[Row] = [lease(0, 0, 500), lease(1, 0, 100)]
    found = audited(tmp_path, rows, epochs=2, examples_per_epoch=1000, status="running")
    assert found.complete
    assert "No epoch is finished yet." in str(found)
    assert "Epoch 0, unfinished: 500 of 1,000 trained so far." in str(found)


def test_once_the_run_has_ended_a_hole_is_missed(tmp_path: Path) -> None:
    rows: list[Row] = [lease(0, 0, 500), lease(1, 0, 1000)]
    found = audited(tmp_path, rows, epochs=2, examples_per_epoch=1000, status="finished", ended="data")
    assert [(epoch.epoch, epoch.finished) for epoch in found.epochs] == [(0, True), (1, True)]
    assert not found.complete


def test_a_run_that_has_used_its_data_up_must_have_trained_all_its_epochs(tmp_path: Path) -> None:
    found = audited(tmp_path, [lease(1, 0, 10)], epochs=1_000_000, examples_per_epoch=10, ended="data")
    assert not found.complete
    assert str(found) == (
        "999,999 of 1,000,000 finished epochs missed examples.\n"
        "Epoch 1: each of 10 examples trained exactly once.\nOf 999,999 epochs nothing was trained at all."
    )
    assert len(found.epochs) == 1


@pytest.mark.parametrize("ended", ["", "seconds", "reached", "script", "stopped", "failed"])
def test_a_run_that_ended_in_the_middle_has_missed_nothing(tmp_path: Path, ended: str) -> None:
    rows = [lease(0, 0, 10), lease(1, 0, 5), lease(2, 5, 10)]
    found = audited(tmp_path, rows, epochs=1_000_000, examples_per_epoch=10, ended=ended)
    assert [(epoch.epoch, epoch.finished) for epoch in found.epochs] == [(0, True), (1, False), (2, False)]
    assert found.complete
    assert str(found) == (
        "No example was missed in 1 finished epoch.\nEpoch 0: each of 10 examples trained exactly once.\n"
        "Epoch 1, unfinished: 5 of 10 trained so far.\nEpoch 2, unfinished: 5 of 10 trained so far."
    )


def test_a_run_that_ended_at_its_steps_owes_what_it_has_dealt(tmp_path: Path) -> None:
    rows: list[Row] = [lease(0, 0, 10), lease(1, 4, 6), lease(1, 0, 2)]
    found = audited(tmp_path, rows, epochs=9, examples_per_epoch=10, ended="steps")
    assert not found.complete
    assert str(found.epochs[1]) == "Epoch 1, unfinished: 4 of 10 trained so far. Never trained: 2, at 2 to 3."
    assert str(found).startswith("1 of 2 finished epochs missed examples.")
    assert audited(tmp_path, [lease(1, 2, 4)], ended="steps").complete


def test_batches_that_are_looked_at_as_a_whole_have_no_leases(tmp_path: Path) -> None:
    rows = [work(1.0, 0, 300), work(2.0, 1, 500)]
    found = audited(tmp_path, rows, strategy="sandblaster", batch=400, examples_per_epoch=400, ended="method")
    assert found.complete
    assert "its loss and gradient were evaluated 2 times on 400 examples, 800 in all" in str(found)


def test_nothing_is_known_of_an_empty_run(tmp_path: Path) -> None:
    assert str(audited(tmp_path, [])) == "No lease has ended yet, so nothing is known about the examples."
