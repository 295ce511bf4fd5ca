"""What a script logs behind its loop: the nursery writes it, and the script hears when it is there."""

import math
from contextlib import closing
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from squall.launchers.control_pipe import ControlPipe
from squall.launchers.late_rows import add_end
from squall.launchers.script_forks import Script
from squall.launchers.script_nursery import ScriptNursery
from squall.launchers.script_replica import ReplicaBackend
from squall.record.rows import EventRow, MetricRow, ProgressRow, RecordError, SkipRow, StateRow
from squall.record.writer import Record
from squall.report import Reader


@pytest.fixture
def job(tmp_path: Path) -> Any:
    with closing(Record(tmp_path / "run.sqlite")) as record:
        for key, value in (("training_s", "7.5"), ("updates", "12"), ("status", "finished"), ("ended", "data")):
            record.add(StateRow(key, value))
        record.add(ProgressRow(7.0, 0, 230, 23, 1.0, 1.0, 0.0, 0, 0))
        record.add(SkipRow(0, 0, 10, 20, 0))
    return SimpleNamespace(
        directory=tmp_path, task=SimpleNamespace(examples=100), site=None, recipe=SimpleNamespace(replicas=1)
    )


def logged(job: Any, values: dict[str, float], ended: bool = True) -> list[MetricRow]:
    """Both sides in one process, so the nursery says what it finds before the replica waits for it."""
    mine, theirs = Pipe()
    nursery = ScriptNursery(ControlPipe(Pipe()[0]), job, job.directory)
    nursery._scripts[mine] = Script(0, ControlPipe(mine))
    nursery._end = {"status": "finished", "reason": "all data was trained"} if ended else None
    replica = ReplicaBackend.__new__(ReplicaBackend)
    replica._pipe, replica.began, replica._left = ControlPipe(theirs), True, True
    hear = replica._pipe.hear

    def attended() -> Any:
        nursery._attend(mine)
        return hear()

    replica._pipe.hear = attended  # type: ignore[method-assign]
    replica.log(values)
    with closing(Reader(job.directory / "run.sqlite")) as reader:
        return reader.rows(MetricRow)


def test_values_of_the_final_weights_are_in_the_record_when_the_script_goes_on(job: Any) -> None:
    first, second, third = logged(job, {"accuracy": 0.1 + 0.2, "loss": math.nan, "perplexity": math.inf})
    assert first == MetricRow(7.5, 2, 230, 12, "accuracy", 0.1 + 0.2)
    assert math.isnan(second.value)
    assert third.value == math.inf


def test_a_record_that_cannot_be_written_is_the_scripts_error(job: Any) -> None:
    (job.directory / "run.sqlite").unlink()
    with pytest.raises(RecordError, match="no record at"):
        logged(job, {"accuracy": 0.5})


def test_while_others_train_the_record_has_one_writer(job: Any) -> None:
    """Which a script is told that goes on behind its loop as its machine leaves."""
    before = (job.directory / "run.sqlite").read_bytes()
    with pytest.raises(RecordError, match="the training goes on without this replica"):
        logged(job, {"accuracy": 0.5}, ended=False)
    assert (job.directory / "run.sqlite").read_bytes() == before


def test_a_script_that_comes_to_no_good_end_leaves_what_ended_the_training(job: Any) -> None:
    add_end(job, "failed", "the script of replica 0 did not come to its end")
    with closing(Reader(job.directory / "run.sqlite")) as reader:
        state = reader.state()
        assert (state["status"], state["ended"]) == ("failed", "data")
        assert [(event.time_s, event.kind) for event in reader.rows(EventRow)] == [(7.5, "error")]


def test_an_end_that_the_record_does_not_take_is_a_warning(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's end is the script's, not the nursery's."""
    nursery = ScriptNursery(ControlPipe(Pipe()[0]), job, job.directory)
    nursery._end = {"status": "finished", "reason": ""}
    (job.directory / "run.sqlite").unlink()
    nursery._amend("failed", "replica 0 raised an exception")
    assert nursery._end["status"] == "failed"
    assert "the record does not say that the script was failed: no record at" in capsys.readouterr().err
