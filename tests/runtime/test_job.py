"""What a process of a run starts from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from squall import Downpour, Settings
from squall.plan import make_plan
from squall.runtime.job import private_job
from squall.vector import Layout
from tests.tasks import regression


def test_an_evaluator_computes_where_the_run_is_kept_also_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray has the replicas on other machines. Without a GPU those do not begin; on one machine nobody does."""
    strategy, task = Downpour(replicas=2), regression()()
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    alone = private_job(
        make_plan(strategy, Settings(launcher="ray"), device="cuda"), strategy, task, layout, tmp_path
    )  # fmt: skip
    site: Any = object()
    one_of_several = dataclasses.replace(alone, site=site)
    assert one_of_several.device(2) == torch.device("cpu")
    for job, slot in ((one_of_several, 0), (alone, 2)):
        with pytest.raises(ValueError, match="torch sees no CUDA GPU here"):
            job.device(slot)
