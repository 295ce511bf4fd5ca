"""Chance: what is seeded, and what is left alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import squall
from squall.run import Run
from tests import deep
from tests.tasks import INLINE, LOCAL, regression

DOWNPOUR = squall.Downpour(replicas=2, optimizer=partial(torch.optim.SGD, lr=0.05))


def drawn() -> tuple[Any, ...]:
    return torch.rand(()).item(), np.random.rand(), random.random()


def trained(directory: Path) -> Run:
    return squall.fit(regression(), DOWNPOUR, steps=4, run_dir=directory / "run", settings=INLINE)


def processes(directory: Path) -> None:
    squall.fit(regression(), DOWNPOUR, steps=4, run_dir=directory / "run", settings=LOCAL)


def replayed(directory: Path) -> None:
    squall.replay(trained(directory).directory, check=True)


def looked_at(directory: Path) -> None:
    assert trained(directory).model is not None


def refused(directory: Path) -> None:
    trained(directory)
    with pytest.raises(ValueError, match="exists"):
        trained(directory)


@pytest.mark.parametrize("act", [trained, pytest.param(processes, marks=deep.only), replayed, looked_at, refused])
def test_the_callers_chance_is_left_alone(act: Callable[[Path], object], tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    act(tmp_path)
    assert drawn() == expected
