"""Whose line raised, and what was under way: for people and for programs."""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import squall
from squall.cli import main
from squall.usercode.blame import Failure, decode, encode, failure, note
from tests.warm import squall as squall_process

FILE = """
import os, torch, squall
from tests.tasks import mean_square, numbers, plain
where = os.environ["FAILS"]

class Data(torch.utils.data.Dataset):
    def __len__(self): return 160
    def __getitem__(self, index):
        if where in ("dataset", "worker") and index == 100: raise KeyError("here")  # in the dataset
        return numbers(160)[index]

calls = 0
def loss(model, batch):
    global calls
    calls += torch.is_grad_enabled()
    if where == "loss" and calls == 5: torch.zeros(2) @ torch.zeros(3)  # in the loss
    return mean_square(model, batch)

def metric(model, batch):
    if where == "metric" and len(batch[0]) > 8: raise KeyError("here")  # in the metric
    return model(batch[0]).squeeze(1)

def rate(step):
    if where == "schedule" and step == 3: raise KeyError("here")  # in the schedule
    return 1.0

def task():
    if where == "task": raise KeyError("here")  # in the task
    return squall.Task(
        model=plain(), loss=loss, train=Data(), validate=numbers(40), batch_size=8, shuffle=False,
        metrics={"close": metric}, schedule=lambda o: torch.optim.lr_scheduler.LambdaLR(o, rate),
        loader={"num_workers": 1} if where == "worker" else {},
    )
"""
PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "dataset": ("KeyError: 'here'", {"role": "replica", "epoch": 0, "start": 96, "stop": 104}),
    "worker": ("KeyError: ", {"role": "replica", "epoch": 0, "start": 96, "stop": 104}),
    "loss": ("RuntimeError: inconsistent tensor size", {"role": "replica", "epoch": 0, "start": 24, "stop": 32}),
    "metric": ("KeyError: 'here'", {"role": "evaluator", "evaluating": "metric 'close'", "start": 0}),
    "schedule": ("KeyError: 'here'", {"role": "shard", "index": 0, "step": 3}),
    "task": ("KeyError: 'here'", {}),
}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_report: None) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "my_task.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("where", PLACES)
def test_an_error_names_the_users_line_and_what_was_under_way(
    where: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("FAILS", where)
    flags = ("--launcher", "inline", "--threads", "1", "--replicas", "1", "--run-dir", str(tmp_path / "r"), "--json")
    assert main(["train", str(file), *flags]) == 1
    shown = capsys.readouterr()
    message, place = PLACES[where]
    error = json.loads(shown.out)["error"]
    assert (error["file"], f"# in the {where.replace('worker', 'dataset')}" in error["text"]) == (str(file), True)
    assert error["message"].startswith(message)
    assert error | place == error
    lines = shown.err.splitlines()
    assert lines[0].endswith("squall: error: in the user's own code:"), shown.err
    assert lines[1] == f'File "{file}", line {error["line"]}, in {error["function"]}'
    assert lines[2].strip() == error["text"]


def test_an_error_in_a_process_of_the_run_is_told_as_one_here(file: Path, tmp_path: Path) -> None:
    flags = ("--quiet", "--json", "--run-dir", tmp_path / "r")
    done = squall_process("train", file, *flags, env={**os.environ, "FAILS": "loss"})
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert "# in the loss" in error["text"]
    assert (error["role"], error["epoch"], error["stop"] - error["start"]) == ("replica", 0, 8)
    examples = f"on examples {error['start']} to {error['stop']} of epoch 0\nin replica {error['index']}"
    assert examples in done.stderr
    assert done.stderr.index("# in the loss") < done.stderr.index("Traceback (most recent call last)")
    assert f"squall resume {tmp_path / 'r'} (which reads {file} again)" in done.stderr


def test_what_is_told_travels_as_text() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2) @ torch.zeros(3)
    note(caught.value, "in replica 1", role="replica", index=1)
    told = failure(caught.value)
    assert decode(encode(caught.value)) == told
    assert (told.file, told.function, told.place) == (__file__, "test_what_is_told_travels_as_text", {
        "role": "replica", "index": 1,
    })  # fmt: skip
    assert str(told).count("inconsistent tensor size") == 1
    assert isinstance(decode(encode(ValueError("no frame"))), Failure)
    assert decode("a plain text") is None
    assert str(squall.TaskError.told("a plain text")) == "a plain text"


def out_of_cuda_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize(
    ("raises", "told"),
    [
        (lambda: torch.empty(1 << 50), True), (lambda: bytearray(1 << 60), True),
        (lambda: mmap.mmap(-1, 1 << 60), True), (out_of_cuda_memory, True),
        (lambda: torch.zeros(2) @ torch.zeros(3), False),
    ],
    ids=["torch", "python", "kernel", "cuda", "another"],
)  # fmt: skip
def test_who_finds_no_memory_is_told_what_takes_less(raises: Callable[[], object], told: bool) -> None:
    with pytest.raises((RuntimeError, MemoryError, OSError)) as caught:
        raises()
    found = decode(encode(caught.value))
    assert ("memory ran out: take a smaller batch_size or fewer replicas" in str(found)) == told
