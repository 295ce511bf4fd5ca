"""The files of a prediction: which ranges there are, and what they come to together."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from squall.errors import SquallError
from squall.predicting import Predictions
from squall.runtime.answers import ONE, Answers, Columns


def rows(start: int, stop: int, name: str = ONE) -> Columns:
    """Two numbers an example, which tell its position."""
    return {name: np.arange(2 * start, 2 * stop, dtype=np.float32).reshape(-1, 2)}


def put(answers: Answers, start: int, stop: int, columns: Columns) -> None:
    answers.write(start, stop, answers.encoded(columns))


@pytest.mark.parametrize("form", ["numpy", "arrow"])
def test_ranges_come_together_in_order_each_example_once(form: str, tmp_path: Path) -> None:
    answers = Answers(tmp_path, form)
    for start, stop in ((40, 50), (0, 30), (10, 20), (20, 40), (48, 50)):  # what a dead replica had written overlaps
        put(answers, start, stop, rows(start, stop))
    assert answers.found() == [(0, 30), (10, 20), (20, 40), (40, 50), (48, 50)]
    assert Predictions(tmp_path).files == []
    whole = answers.put_together(50)
    assert Predictions(tmp_path).files == whole
    assert np.array_equal(Predictions(tmp_path).load(), rows(0, 50)[ONE])  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == [whole[0].name]


@pytest.mark.parametrize("form", ["numpy", "arrow"])
def test_several_outputs_are_columns(form: str, tmp_path: Path) -> None:
    answers = Answers(tmp_path, form)
    for start, stop in ((0, 5), (5, 8)):
        put(answers, start, stop, {"label": np.arange(start, stop), "image": np.full((stop - start, 3, 4), start)})
    answers.put_together(8)
    found = Predictions(tmp_path).load()
    assert isinstance(found, dict)
    assert set(found) == {"label", "image"}
    assert found["label"].tolist() == list(range(8))
    assert found["image"].shape == (8, 3, 4)


def test_nothing_is_put_together_that_lacks_something(tmp_path: Path) -> None:
    answers = Answers(tmp_path, "numpy")
    put(answers, 0, 10, rows(0, 10))
    put(answers, 12, 20, rows(12, 20))
    with pytest.raises(SquallError, match="no answers for examples 10 to 12"):
        answers.put_together(20)
    assert answers.found() == [(0, 10), (12, 20)]


def test_outputs_of_other_shapes_are_told_with_their_examples(tmp_path: Path) -> None:
    answers = Answers(tmp_path, "numpy")
    put(answers, 0, 10, rows(0, 10))
    put(answers, 10, 20, {ONE: np.zeros((10, 7), dtype=np.float32)})
    with pytest.raises(SquallError, match=r"float32\[7\].* for examples 10 to 20, and .*float32\[2\]"):
        answers.put_together(20)
    assert answers.found() == [(0, 10), (10, 20)]


def test_a_file_that_was_not_written_whole_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(tmp_path, "numpy")
    put(answers, 0, 10, rows(0, 10))
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ValueError, match="free some space on its disk"):
        put(answers, 10, 20, rows(10, 20))
    assert [path.name for path in (tmp_path / "answers").iterdir()] == ["000000000000-000000000010.npz"]


def test_a_disk_that_is_full_for_the_whole_is_told_and_kills_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the file is reserved before a page of it is touched; the answers stay."""
    answers = Answers(tmp_path, "numpy")
    put(answers, 0, 10, rows(0, 10))

    def refuse(handle: int, start: int, size: int) -> None:
        assert size == os.fstat(handle).st_size >= rows(0, 10)[ONE].nbytes
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ValueError, match="free some space on its disk"):
        answers.put_together(10)
    assert answers.found() == [(0, 10)]
    assert [path.name for path in tmp_path.iterdir()] == ["answers"]


def full(path: Path, data: memoryview) -> None:
    path.touch()
    raise OSError(28, "No space left on device")
