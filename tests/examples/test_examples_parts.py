"""The examples with replicas of several processes train what they train with one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest
import torch

import squall
from tests import deep
from tests.examples.test_examples_data import load
from tests.tasks import LOCAL, difference


@pytest.fixture
def lm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The language model, small, and without chance: the stages of a pipeline draw otherwise than the whole."""
    for module in load("stdlib_lm"):
        small = {"LAYERS": 2, "TRAIN_WINDOWS": 48, "HELD_OUT_WINDOWS": 16, "DROPOUT": 0.0}
        for name, value in small.items():
            monkeypatch.setattr(module, name, value)
        monkeypatch.setattr(module, "files", lambda folder, all_of=module.files: islice(all_of(folder), 60))
        cloudpickle.register_pickle_by_value(module)
        yield module
        cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.usefixtures("without_report")
@deep.only
def test_the_language_model_in_parts_is_the_one_without(lm: ModuleType, tmp_path: Path) -> None:
    strategy = squall.Synchronous(replicas=1, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    runs = {
        (task.__name__, parts): squall.fit(
            task, strategy, run_dir=tmp_path / f"{task.__name__}-{parts}",
            settings=dataclasses.replace(LOCAL, parts=parts),
        )
        for task, parts in ((lm.task, 1), (lm.task, 2), (lm.in_slices, 2))
    }  # fmt: skip
    whole = runs.pop(("task", 1))
    for run in runs.values():
        assert run.summary().updates == whole.summary().updates == 6
        assert difference(run.model, whole.model) < 1e-5
        assert run.summary().metrics["loss"] == pytest.approx(whole.summary().metrics["loss"], rel=1e-5)
