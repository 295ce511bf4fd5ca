"""The examples' data and models, without a run: splits that share nothing, losses that have a gradient."""

from __future__ import annotations

import importlib.util
import re
import sys
import sysconfig
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

import squall
from squall.parts.check import check_split

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[module.__name__]


@pytest.fixture(scope="module")
def digits() -> Iterator[ModuleType]:
    yield from load("digits")


@pytest.fixture(scope="module")
def alexnet() -> Iterator[ModuleType]:
    yield from load("alexnet_digits")


@pytest.fixture(scope="module")
def lm() -> Iterator[ModuleType]:
    yield from load("stdlib_lm")


@pytest.fixture(scope="module")
def lm_task(lm: ModuleType) -> squall.Task:
    torch.manual_seed(0)
    return lm.task()


def first(data: Any, count: int) -> Any:
    return default_collate([data[i] for i in range(count)])


def check_functions(task: squall.Task) -> None:
    batch = first(task.train, 5)
    loss = task.loss(task.model, batch)
    assert loss.shape == ()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in task.model.parameters())
    for metric in task.metrics.values():
        assert metric(task.model, batch).shape == (5,)


@pytest.mark.parametrize("name", ["digits", "stdlib_lm"])
def test_an_example_carries_what_the_command_line_needs(name: str, request: pytest.FixtureRequest) -> None:
    module = request.getfixturevalue("digits" if name == "digits" else "lm")
    assert isinstance(module.strategy, squall.Downpour)
    assert isinstance(module.epochs, int)
    assert "sklearn" not in vars(module)


# ---------------------------------------------------------------- digits


def test_digits_are_split_into_two_parts_of_the_whole(digits: ModuleType) -> None:
    from sklearn.datasets import load_digits

    train, test = digits.split()
    assert train.tensors[0].shape == (1437, 1, 8, 8)
    assert test.tensors[0].shape == (360, 1, 8, 8)
    parts = torch.cat([train.tensors[0], test.tensors[0]]).flatten(1).tolist()
    whole = (load_digits().data / 16).tolist()
    assert sorted(parts) == sorted(whole)  # each digit once, and no two of them are equal:
    assert len({tuple(digit) for digit in whole}) == len(whole)


def test_digits_are_split_alike_in_every_process(digits: ModuleType) -> None:
    torch.manual_seed(1)
    first_time = digits.split()[1].tensors[1]
    torch.manual_seed(2)
    assert first_time.equal(digits.split()[1].tensors[1])


def test_digits_loss_and_accuracy(digits: ModuleType) -> None:
    check_functions(digits.task())


# ---------------------------------------------------------------- the language model


def test_files_are_either_trained_on_or_held_out(lm: ModuleType) -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = list(lm.files(root))
    sizes = sum(path.stat().st_size for path in paths)
    train, held_out = lm.source(held_out=False), lm.source(held_out=True)
    assert len(train) + len(held_out) == sizes
    assert 0.03 < len(held_out) / sizes < 0.3
    assert len(set(paths)) == len(paths)
    assert not any("site-packages" in str(path.relative_to(root)) or path.parent.name == "test" for path in paths)


def test_a_file_keeps_its_side_whatever_else_there_is(
    lm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    for i in range(100):
        (tmp_path / f"module{i}.py").write_text(f"<{i}>")
    before = bytes(lm.source(held_out=True).tolist())
    (tmp_path / "another.py").write_text("x")
    (tmp_path / "test").mkdir()
    (tmp_path / "test/test_left_out.py").write_text("y")
    after = bytes(lm.source(held_out=True).tolist())
    assert after.replace(b"x", b"") == before
    assert b"y" not in after + bytes(lm.source(held_out=False).tolist())


def test_windows_are_views_of_one_text(lm: ModuleType) -> None:
    text = torch.arange(5000).to(torch.uint8)
    data = lm.windows(text, 20)
    assert len(data) == 20
    assert data[7][0].shape == (lm.CONTEXT + 1,)
    assert data[7][0].dtype == torch.uint8
    assert data[0][0].data_ptr() == text.data_ptr()
    starts = [window[0].data_ptr() - text.data_ptr() for window in data]
    assert {b - a for a, b in pairwise(starts)} == {(5000 - lm.CONTEXT - 1) // 20}


def test_language_model_loss_and_bits_per_byte(lm: ModuleType, lm_task: squall.Task) -> None:
    check_functions(lm_task)
    batch = first(lm_task.validate, 4)
    lm_task.model.eval()
    with torch.no_grad():
        nats = lm_task.loss(lm_task.model, batch)
        bits = lm_task.metrics["bits_per_byte"](lm_task.model, batch)
    torch.testing.assert_close(bits.mean(), nats / torch.log(torch.tensor(2.0)))
    assert 7 < bits.mean() < 9  # 8 for a model that knows nothing


def test_the_model_does_not_look_ahead(lm: ModuleType, lm_task: squall.Task) -> None:
    model = lm_task.model.eval()
    text = torch.randint(256, (1, lm.CONTEXT), generator=torch.Generator().manual_seed(0))
    changed = text.clone()
    changed[0, 64:] += 1
    changed %= 256
    with torch.no_grad():
        torch.testing.assert_close(model(text)[:, :64], model(changed)[:, :64])


def test_only_matrices_decay_and_each_parameter_has_one_group(lm_task: squall.Task) -> None:
    decayed, others = lm_task.param_groups()
    names = {id(p): name for name, p in lm_task.model.named_parameters()}
    assert sorted(names[id(p)] for p in decayed["params"] + others["params"]) == sorted(names.values())
    assert {names[id(p)].split(".")[-2] for p in decayed["params"]} == {"qkv", "out", "up", "down"}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)


def test_the_rate_warms_up_and_falls_to_a_tenth(lm: ModuleType, lm_task: squall.Task) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = lm_task.schedule(optimizer)
    updates = lm.epochs * lm.TRAIN_WINDOWS // lm.BATCH
    rates = []
    for _ in range(updates + 10):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(0.01)
    assert rates.index(max(rates)) == 99
    assert rates[-1] == rates[updates] == pytest.approx(0.1)


def test_a_few_steps_teach_the_model_something(lm: ModuleType, lm_task: squall.Task) -> None:
    task = lm.task()
    optimizer = lm.strategy.optimizer(task.groups(task.model))
    batch = first(task.train, 4)
    losses = []
    for _ in range(4):
        loss = task.loss(task.model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


def test_writing_goes_on_from_its_start(lm: ModuleType, lm_task: squall.Task) -> None:
    text = lm.write(lm_task.model.eval(), start="def ", count=3)
    assert text.startswith("def ")
    assert len(text.encode()) >= 5


def test_the_columns_of_alexnet_are_parts_of_a_replica(alexnet: ModuleType) -> None:
    _, text = check_split(alexnet.task(), 2)
    columns = re.findall(r"part \d: (left|right), ([\d,]+) parameters", text)
    assert [name for name, _ in columns] == ["left", "right"]
    assert columns[0][1] == columns[1][1]
