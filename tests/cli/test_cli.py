"""The command line: flags, one JSON object, and errors that say what to do, once."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from squall.cli import main
from squall.strategies import STRATEGIES
from tests import deep
from tests.warm import squall as squall_process

FILE = """
import os
from functools import partial
import torch, squall
from squall.report import Reader
from tests.tasks import mean_square, numbers, plain

epochs = 2
strategy = squall.Synchronous(replicas=3, optimizer=partial(torch.optim.Adagrad, lr=0.02))

def task(loss=mean_square, train=numbers(90)):
    print("building the task")
    return squall.Task(
        model=plain(), loss=loss, train=train, validate=numbers(20), batch_size=8,
        metrics={"close": lambda model, batch: ((model(batch[0]) - batch[1]).abs() < 9.0).float().squeeze(1)},
    )

def runtime_error():
    raise RuntimeError("my own mistake")

def value_error():
    raise ValueError("my own value")

def noisy():
    def loss(model, batch):
        print("computing a loss")
        return mean_square(model, batch)
    return task(loss)

os.environ["SQUALL_TEST_FILES_OWN"] = "set by the file"

def environment():
    assert os.environ["SQUALL_TEST_FILES_OWN"] == "set by the file"
    return task()

class Damaged(torch.utils.data.Dataset):
    def __len__(self): return 160
    def __getitem__(self, index):
        if index == 100:
            raise ValueError("item 100 is damaged")
        return numbers(160)[index]

def damaged():
    return task(train=Damaged())

number = 7
"""
KEYS = {
    "strategy", "metrics", "first_step_s", "training_s", "examples", "examples_per_second", "staleness_mean",
    "staleness_max", "updates", "run_directory",
}  # fmt: skip
Squall = Callable[..., int]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my_task.py"
    path.write_text(FILE)
    return str(path)


@pytest.fixture
def squall_(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, without_report: None) -> Squall:
    """`squall ...` in this process."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: main([str(a) for a in arguments])


def inline(*arguments: object) -> list[object]:
    return ["train", *arguments, "--launcher", "inline", "--threads", 1, "--quiet"]


def plan(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "run.json").read_text())["plan"]


@deep.only
def test_the_runs_processes_see_the_environment_that_the_file_has_set(file: str, tmp_path: Path) -> None:
    """A library may read it when it is imported, as Keras does."""
    done = squall_process("train", f"{file}:environment", "--quiet", "--run-dir", tmp_path / "r")
    assert done.returncode == 0, done.stderr


def test_json_is_one_object_and_all_of_the_output(file: str, tmp_path: Path) -> None:
    done = squall_process("train", f"{file}:noisy", "--json", "--strategy", "downpour", "--run-dir", tmp_path / "r")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert set(document) >= KEYS
    assert document["strategy"] == "downpour"
    assert set(document["metrics"]) == {"loss", "close"}
    assert document["examples"] == 180
    assert document["updates"] == 24
    assert document["staleness_max"] >= document["staleness_mean"] >= 0
    assert 0 < document["first_step_s"] < 60
    assert document["run_directory"] == str(tmp_path / "r")
    assert "computing a loss" in done.stderr


def test_without_flags_the_file_decides(squall_: Squall, file: str, tmp_path: Path, capsys: Any) -> None:
    assert squall_(*inline(file), "--run-dir", "r") == 0
    found = plan(tmp_path / "r")
    assert (found["strategy"], found["replicas"], found["epochs"], found["seed"]) == ("synchronous", 3, 2, 0)
    assert found["strategy_fields"]["optimizer"] == "Adagrad(lr=0.02)"
    output = capsys.readouterr().out
    assert "synchronous" in output
    assert "r/report.html" in output


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--replicas", 2], {"strategy": "synchronous", "replicas": 2, "optimizer": "Adagrad(lr=0.02)"}),
        (["--strategy", "downpour", "--shards", 3, "--overlap", "--max-delay", 2, "--push-every=2"],
         {"strategy": "downpour", "replicas": 2, "shards": 3, "overlap": True, "max_delay": 2, "push_every": 2,
          "optimizer": "Adagrad(lr=0.02)"}),
        (["--strategy=downpour", "--no-overlap", "--optimizer", "AdamW", "--lr", 0.01, "--weight-decay", 0.1],
         {"overlap": False, "optimizer": "AdamW(lr=0.01, weight_decay=0.1)"}),
        (["--lr", 0.5], {"optimizer": "Adagrad(lr=0.5)"}),
        (["--strategy", "single_process", "--optimizer", "sgd", "--momentum", 0.9],
         {"strategy": "single_process", "optimizer": "SGD(momentum=0.9)"}),
        (["--steps", 5, "--seed", 3], {"steps": 5, "epochs": None, "seed": 3}),
        (["--epochs", 1], {"epochs": 1}),
    ],
)  # fmt: skip
def test_flags_change_what_the_file_decided(
    squall_: Squall, file: str, tmp_path: Path, flags: list[object], expected: dict[str, Any]
) -> None:
    assert squall_(*inline(file), "--run-dir", "r", *flags) == 0
    found = plan(tmp_path / "r")
    found |= found["strategy_fields"]
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_field_of_a_strategy_is_a_flag_with_a_help_text(name: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--strategy", name, "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(STRATEGIES[name]):
        assert "--" + field.name.replace("_", "-") in text
    for other in ("--epochs", "--steps", "--until", "--seed", "--run-dir", "--json", "--device", "--launcher"):
        assert other in text
    assert text.count("(default: ") > len(dataclasses.fields(STRATEGIES[name]))


def test_help_is_short_and_shows_the_flags_of_a_named_strategy_alone(capsys: Any) -> None:
    def text(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            main(["train", *arguments, "--help"])
        return capsys.readouterr().out  # type: ignore[no-any-return]

    plain, diloco = text(), text("--strategy", "diloco")
    assert len(plain.splitlines()) < 60
    assert all(flag in plain for flag in ("--strategy NAME --help", "--replicas", "--lr", "--epochs", "--run-dir"))
    assert not any(flag in plain for flag in ("--inner-steps", "--push-every"))
    assert "--inner-steps" in diloco
    assert "--push-every" not in diloco


def test_until_ends_the_run(squall_: Squall, file: str, tmp_path: Path, capsys: Any) -> None:
    assert squall_(*inline(file), "--until", "close=0.5", "--run-dir", "r", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["metrics"]["close"] >= 0.5
    assert document["examples"] < 20 * 90


def test_report_audit_and_resume(squall_: Squall, file: str, tmp_path: Path, capsys: Any) -> None:
    assert squall_(*inline(file), "--run-dir", "r", "--epochs", 1) == 0
    capsys.readouterr()
    assert squall_("resume", "r", "--epochs", 3, "--shards", 2, "--replicas", 1, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["examples"] == 3 * 90
    assert plan(tmp_path / "r")["shards"] == 2
    assert squall_("report", "r", "--audit") == 0
    assert "Epochs 0 to 2: each of 90 examples trained exactly once." in capsys.readouterr().out
    (tmp_path / "r" / "report.html").unlink(missing_ok=True)
    assert squall_("report", "r") == 0
    assert (tmp_path / capsys.readouterr().out.strip()).read_text().startswith("<!")


WRONG = {
    "no file": (["train", "nothing.py"], "nothing.py is no file"),
    "no function": (["train", "FILE:nothing"], "has no function 'nothing': name one with"),
    "a number": (["train", "FILE:number"], "is not a function"),
    "no replicas": (["train", "FILE", "--replicas", "0"], "replicas is 0: it must be at least 1"),
    "no epochs": (["train", "FILE", "--epochs", "0"], "epochs is 0: it must be at least 1"),
    "many shards": (["train", "FILE", "--shards", "100"], "use at most 73 shards"),
    "unknown metric": (["train", "FILE", "--until", "beauty=1"], "the task has loss, close"),
    "unknown optimizer": (["train", "FILE", "--optimizer", "magic"], "is not in torch.optim: use one of"),
    "not elementwise": (["train", "FILE", "--optimizer", "lbfgs"], "not elementwise"),
    "no such setting": (["train", "FILE", "--optimizer", "adagrad", "--momentum", "0.9"], "takes no momentum"),
    "wrong rate": (["train", "FILE", "--lr", "-1"], "Invalid learning rate"),
    "another's flag": (["train", "FILE", "--push-every", "2"], "Synchronous has no --push-every: leave it out"),
    "named without it": (
        ["train", "FILE", "--strategy", "averaging", "--inner-steps", "5"],
        "Averaging has no --inner-steps: leave it out, it is for --strategy diloco",
    ),
    "momentum without SGD": (
        ["train", "FILE", "--strategy", "diloco", "--optimizer", "adamw", "--momentum", "0.9"],
        "AdamW takes no momentum: leave --momentum out, or name one that does",
    ),
    "no GPU": (["train", "FILE", "--device", "tpu"], "device 'tpu'"),
    "no run to resume": (["resume", "nowhere"], "holds no run that can be resumed"),
    "no run to report": (["report", "nowhere"], "holds no run"),
    "a script's best": (["run", "--keep-best", "loss", "FILE"], "for `squall train`: a script saves its model itself"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_line_and_status_1(
    squall_: Squall, file: str, tmp_path: Path, capsys: Any, name: str
) -> None:
    arguments, words = WRONG[name]
    assert squall_(*[argument.replace("FILE", file) for argument in arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("squall: error: ")
    assert error.count("\n") == 1
    assert words in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["train"],
        ["train", "f", "--strategy", "x"],
        ["train", "f", "--replicas", "two"],
        ["train", "f", "--keep-schedule", "some"],
        ["report", "r", "--fast"],
    ],
)
def test_what_cannot_be_read_is_status_2_with_the_commands_usage(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    command = f" {arguments[0]}" if len(arguments) > 1 or arguments == ["train"] else ""
    assert f"usage: squall{command} " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "words"),
    [("runtime_error", "RuntimeError: my own mistake"), ("value_error", "ValueError: my own value")],
)
def test_what_the_task_raises_is_shown_with_its_own_traceback_once(
    file: str, tmp_path: Path, function: str, words: str
) -> None:
    done = squall_process("train", f"{file}:{function}", "--run-dir", tmp_path / "r")
    assert_shown_once(done, f"in {function}", words)
    assert not (tmp_path / "r").exists()


def test_what_the_data_raises_in_a_replica_is_shown_with_its_own_traceback_once(file: str, tmp_path: Path) -> None:
    done = squall_process("train", f"{file}:damaged", "--quiet", "--run-dir", tmp_path / "r")
    assert_shown_once(done, "in __getitem__", "ValueError: item 100 is damaged")


def test_what_stands_behind_the_scripts_name_is_the_scripts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:])")
    own = ["-h", "64", "--json", "--strategy", "averaging", "train", "--replicas", "9"]
    done = squall_process("run", "--push-every", 2, "--run-dir", tmp_path / "r", script, *own)
    assert done.stdout == f"{own}\n", done.stderr
    assert f"{script} ended without calling squall.join" in done.stderr


def assert_shown_once(done: subprocess.CompletedProcess[str], place: str, words: str) -> None:
    assert done.returncode == 1
    assert done.stderr.count(words) == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert place in done.stderr
    assert words not in done.stdout


def test_a_flag_of_a_script_may_begin_as_ours_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "none.py", "--out", "x", "--weight", "2"]) == 1
    assert "none.py is no file: give the Python script that calls squall.join" in capsys.readouterr().err
