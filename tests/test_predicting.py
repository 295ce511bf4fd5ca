"""`squall.predict` and `squall predict`: what they answer, keep, go on with and refuse."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import squall
from squall.cli import main
from squall.errors import SquallError, TaskError
from squall.export.exporting import export
from squall.launchers.building import build_task
from squall.launchers.orders import Facts
from squall.plan import make_plan
from squall.predicting import SAME_PATHS, build
from squall.prediction import Prediction
from squall.record.rows import MemberRow
from squall.record.writer import Record
from squall.report import Reader, audit
from squall.runtime.answers import Answers
from squall.runtime.lock import hold
from squall.usercode.sources import Sources
from tests.launchers import answered
from tests.launchers.answered import BATCH, EXAMPLES
from tests.launchers.processes import START_S, Started, wait_for
from tests.tasks import INLINE, LOCAL, numbers, plain, regression

FILE = Path(answered.__file__)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> squall.Run:
    """Of `regression`: 6 numbers in, one out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(squall.Run, "report", lambda run: run.directory / "report.html")
        directory = tmp_path_factory.mktemp("trained") / "run"
        return squall.fit(regression(), squall.Downpour(), run_dir=directory, settings=INLINE, keep_best=None)


@pytest.fixture(autouse=True)
def quick(without_report: None) -> None:
    """No report is drawn."""


def right(run: squall.Run, examples: int = 90) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        outputs: np.ndarray[Any, Any] = run.model(numbers(examples).tensors[0]).numpy()
    return outputs


# ---------------------------------------------------------------- what comes out


@pytest.mark.parametrize(("form", "name"), [("numpy", "predictions.npy"), ("arrow", "predictions.arrow")])
def test_outputs_are_those_of_the_model_in_the_data_s_order(
    trained: squall.Run, form: str, name: str, run_dir: Path
) -> None:
    found = squall.predict(
        trained.directory, lambda: numbers(90), out=run_dir, batch_size=7, format=form, settings=INLINE
    )
    assert [path.name for path in found.files] == [name]
    assert np.allclose(found.load(), right(trained), atol=1e-6)  # type: ignore[arg-type]
    assert f"answered                 {90} examples" in str(found)
    assert found.to_json_dict()["shares"].keys() == {"0", "1"}
    with closing(Reader(run_dir / "run.sqlite")) as reader:
        assert audit(reader).complete


class Named(Dataset[dict[str, Tensor]]):
    """Items that are collated to a dict."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((6,), float(index))}


def both(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return model(batch["x"]), batch["x"][:, 0].bfloat16()


def test_a_function_beside_the_data_says_what_to_call_and_to_keep(trained: squall.Run, run_dir: Path) -> None:
    found = squall.predict(trained.directory, lambda: (Named(), both), out=run_dir, batch_size=8, settings=INLINE)
    assert [path.name for path in found.files] == ["predictions.0.npy", "predictions.1.npy"]
    outputs = found.load()
    assert isinstance(outputs, dict)
    assert outputs["1"].dtype == np.float32  # NumPy has no bfloat16
    assert outputs["1"].tolist() == list(range(20))
    assert outputs["0"].shape == (20, 1)


def test_of_a_task_the_validation_set_is_answered(trained: squall.Run, run_dir: Path) -> None:
    task = regression(validate=numbers(30))
    found = squall.predict(trained.directory, task, out=run_dir, settings=INLINE)
    assert np.allclose(found.load(), right(trained, 30), atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:torch[.]")  # is going to do it otherwise
def test_a_quantised_model_answers_in_processes(trained: squall.Run, run_dir: Path) -> None:
    small = torch.ao.quantization.quantize_dynamic(plain(), {nn.Linear}, dtype=torch.qint8)
    found = squall.predict(
        trained.directory, lambda: (numbers(90), lambda model, batch: small(batch[0])), out=run_dir, settings=LOCAL
    )
    with torch.no_grad():
        assert np.allclose(found.load(), small(numbers(90).tensors[0]), atol=1e-5)  # type: ignore[arg-type]


# ---------------------------------------------------------------- deaths and stops, for real


def start(trained_here: Path, out: Path, *flags: str) -> Started:
    return Started(
        out, "predict", str(trained_here), str(FILE), "--out", str(out), "--batch-size", str(BATCH), "--threads", "1",
        *flags, env={**os.environ, "HOLDS": str(out.parent)},
    )  # fmt: skip


def test_a_worker_that_is_killed_costs_its_lease_and_a_stop_nothing_that_was_kept(tmp_path: Path) -> None:
    run = squall.fit(answered.task, squall.Downpour(), run_dir=tmp_path / "run", settings=INLINE)
    out = tmp_path / f"answers-{uuid4().hex[:8]}"
    first = start(run.directory, out)
    held = wait_for_one(tmp_path)
    wait_for(lambda: [*out.glob("answers/*.npz")], START_S, "the other replica to keep something")
    first.process.send_signal(signal.SIGINT)
    status, _, err = first.finish()
    assert status == 130
    assert "what is answered is kept; go on with the rest: squall predict " in err
    assert f" --out {out} --batch-size {BATCH} " in err
    kept = {path.name: path.stat().st_mtime_ns for path in (out / "answers").iterdir()}
    assert kept
    held.unlink()
    second = start(run.directory, out)
    held = wait_for_one(tmp_path)
    (tmp_path / "go").touch()
    os.kill(int(held.name.removeprefix("here-")), signal.SIGKILL)
    status, told, err = second.finish()
    assert status == 0, err
    assert "of them before" in told
    assert "deaths                   1" in told
    lost = [row.node for row in second.rows(MemberRow) if isinstance(row, MemberRow) and row.change == "lost"]
    assert len(lost) == 1
    with closing(Reader(out / "run.sqlite")) as reader:
        assert audit(reader).complete
    found = squall.Predictions(out).load()
    assert isinstance(found, dict)
    assert found["number"].tolist() == list(range(EXAMPLES))
    with torch.no_grad():
        assert np.allclose(found["output"], run.model(answered.rows()), atol=1e-4)
    assert not (out / "answers").exists()


def wait_for_one(folder: Path) -> Path:
    """Whoever has come to example 57."""
    wait_for(lambda: list(folder.glob("here-*")), START_S, "a replica at example 57")
    return next(iter(folder.glob("here-*")))


# ---------------------------------------------------------------- what is refused


def boom() -> Any:
    raise KeyError("in the data")


WIDE = "the model does not take a batch of these data, \\[float32\\[4, 9\\]\\].*give data of the shape"
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "other shape": (lambda: TensorDataset(torch.zeros(4, 9)), {}, WIDE),
    "no rows": (lambda: (numbers(8), lambda m, b: m(b[0]).sum()), {}, "'predictions' is shape \\[\\] for a batch of 8"),
    "no tensor": (lambda: (numbers(8), lambda m, b: {"text": "no"}), {}, "'text' is str for a batch of 8 examples"),
    "name": (lambda: (numbers(8), lambda m, b: {"a/b": b[0]}), {}, "no file can be named by the model's output 'a/b'"),
    "own name": (lambda: (numbers(8), lambda m, b: {"file": b[0]}), {}, "by the model's output 'file'"),
    "nothing": (lambda: (numbers(8), lambda m, b: {}), {}, "the model has no outputs"),
    "none": (lambda: None, {}, "returned None: return a dataset"),
    "no dataset": (lambda: 3, {}, "what is to be predicted must be map-style"),
    "format": (lambda: numbers(8), {"format": "csv"}, "format is 'csv': use one of numpy, arrow"),
    "best": (lambda: numbers(8), {"best": True}, "keeps no best weights: leave best out"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_before_anything_is_launched(what: str, trained: squall.Run, run_dir: Path) -> None:
    data, given, message = REFUSED[what]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        squall.predict(trained.directory, data, out=run_dir, settings=INLINE, **given)
    assert not run_dir.exists()


def test_what_the_disk_has_no_room_for_is_refused(
    trained: squall.Run, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2 * 90 * 4 - 1))
    with pytest.raises(ValueError, match=r"need 7\.2e-07 GB of disk, and where .* 7\.19e-07 GB are free"):
        squall.predict(trained.directory, lambda: numbers(90), out=run_dir, settings=INLINE)
    assert not run_dir.exists()


def test_without_arrow_the_remedy_is_named(trained: squall.Run, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("squall.predicting.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'squall-train\[arrow\]'"):
        squall.predict(trained.directory, lambda: numbers(8), out=run_dir, format="arrow", settings=INLINE)


def test_a_run_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no run that has trained a model"):
        squall.predict(tmp_path, lambda: numbers(8))
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="has no snapshot: nothing was trained yet"):
        squall.predict(tmp_path, lambda: numbers(8))


def test_predictions_have_no_model_and_name_who_has(trained: squall.Run, run_dir: Path) -> None:
    squall.predict(trained.directory, lambda: numbers(8), out=run_dir, settings=INLINE)
    with pytest.raises(ValueError, match=f"holds predictions, and no model: .* {trained.directory}"):
        squall.predict(run_dir, lambda: numbers(8))
    with pytest.raises(SquallError, match=f"holds predictions, and no model: .* {trained.directory}"):
        squall.load(run_dir)


def test_a_directory_is_gone_on_with_where_the_same_was_begun_there_alone(trained: squall.Run, run_dir: Path) -> None:
    def predict(data: Any = eight, **given: Any) -> squall.Predictions:
        return squall.predict(trained.directory, data, out=run_dir, settings=INLINE, **given)

    run_dir.mkdir()
    (run_dir / "own.txt").touch()
    with pytest.raises(ValueError, match="exists already, and holds no predictions"):
        predict()
    (run_dir / "own.txt").unlink()
    found = predict()
    with pytest.raises(ValueError, match=r"holds these predictions already, in predictions\.npy"):
        predict()
    with pytest.raises(ValueError, match=r"holds other predictions: data was .*eight, and is .*nine"):
        predict(nine)
    found.files[0].unlink()
    with pytest.raises(ValueError, match=r"holds predictions: the same call of squall\.predict goes on"):
        squall.resume(run_dir)
    assert predict().load().shape == (8, 1)  # type: ignore[union-attr]


def test_a_prediction_that_died_before_anything_was_recorded_is_gone_on_with(
    trained: squall.Run, run_dir: Path
) -> None:
    found = squall.predict(trained.directory, eight, out=run_dir, settings=INLINE)
    for file in [*found.files, run_dir / "run.sqlite"]:
        file.unlink()
    Record(run_dir / "run.sqlite").close()
    with pytest.raises(ValueError, match="has not all predictions yet"):
        found.load()
    assert squall.predict(trained.directory, eight, out=run_dir, settings=INLINE).examples == 8


def test_what_is_put_together_by_another_process_is_left_to_it(
    trained: squall.Run, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held(answers: Answers, examples: int) -> list[Path]:
        with pytest.raises(ValueError, match="is being trained by another process"), hold(answers.directory):
            pass
        return put_together(answers, examples)

    put_together = Answers.put_together
    monkeypatch.setattr(Answers, "put_together", held)
    assert squall.predict(trained.directory, eight, out=run_dir, settings=INLINE).files


def eight() -> TensorDataset:
    return numbers(8)


def nine() -> TensorDataset:
    return numbers(9)


def test_data_of_another_length_are_not_gone_on_with(trained: squall.Run, run_dir: Path) -> None:
    lengths = [8, 9]

    def changing() -> TensorDataset:
        return numbers(lengths.pop(0))

    squall.predict(trained.directory, changing, out=run_dir, settings=INLINE).files[0].unlink()
    with pytest.raises(ValueError, match="the data have 9 examples, and had 8 before"):
        squall.predict(trained.directory, changing, out=run_dir, settings=INLINE)


def test_the_command_prints_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "data.py"
    file.write_text(
        "from tests.tasks import numbers, regression\n\ndef data():\n    return numbers(30)\n\ntask = regression()\n"
    )
    run = squall.fit(regression(), squall.SingleProcess(), run_dir=tmp_path / "run", settings=INLINE)
    assert main(["predict", str(run.directory), str(file), "--launcher", "inline", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == [str(run.directory / "predictions" / "predictions.npy")]
    assert (told["examples"], told["data"]) == (30, f"{file}:data")


# ---------------------------------------------------------------- on several machines


def test_a_machine_without_the_run_is_told_what_it_needs(tmp_path: Path) -> None:
    away = partial(build, str(tmp_path / "run"), False, eight, None, 4, "numpy")
    plan = make_plan(Prediction(), squall.Settings())
    with pytest.raises(TaskError) as raised:
        build_task({"sources": Sources.now(""), "plan": plan, "task": away})
    told = str(TaskError.told(str(raised.value)))
    assert told == f"{tmp_path}/run is not on this machine: {SAME_PATHS}"


def test_machines_that_have_other_weights_differ(trained: squall.Run, tmp_path: Path) -> None:
    other = squall.fit(regression(), squall.Downpour(), run_dir=tmp_path / "run", seed=1, settings=INLINE)
    here, there = (build(str(run.directory), False, eight, None, 4, "numpy") for run in (trained, other))
    again = build(str(trained.directory), False, eight, None, 4, "numpy")
    assert not Facts.of(here).differences(Facts.of(again))
    assert Facts.of(here).differences(Facts.of(there)) == "other weights in the model that answers"


def test_machines_that_have_another_file_differ(trained: squall.Run, tmp_path: Path) -> None:
    export(trained.directory, tmp_path / "model.pt2")
    task = build(str(tmp_path / "model.pt2"), False, eight, None, 4, "numpy")
    before = Facts.of(task)
    with (tmp_path / "model.pt2").open("ab") as file:
        file.write(b"more")
    assert before.differences(Facts.of(task)) == "other weights in the model that answers"
