"""The public list: exactly this, each with a docstring, and cheap to import."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import squall
from tests import deep

PUBLIC = {
    "AllReduce", "AsynchronousSGD", "Averaging", "Batches", "BoundedDelay", "Branches", "Cluster", "DelayedProximal",
    "DiLoCo", "Distilled", "Downpour", "ElasticAveraging", "Forecast", "Interrupted", "NotFinite", "PeerFault",
    "Pipeline", "Predictions", "ProcessLost", "Replayed", "Run", "Sandblaster", "Session", "Settings", "SingleProcess",
    "SnapshotMismatch", "SquallError", "Strategy", "Synchronous", "Task", "TaskError", "Tensor", "__version__",
    "distill", "fit", "join", "load", "predict", "replay", "resume", "simulate",
}  # fmt: skip


def test_the_public_list_is_this_one() -> None:
    assert set(squall.__all__) == PUBLIC
    assert squall.__all__ == sorted(squall.__all__)
    assert dir(squall) == squall.__all__


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_everything_public_is_there_and_says_what_it_is(name: str) -> None:
    found = getattr(squall, name)
    assert found.__name__ == name
    assert len(inspect.getdoc(found) or "") > 20


def test_nothing_else_is_made_up() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Fit'"):
        squall.Fit  # noqa: B018


@pytest.mark.parametrize("what", ["squall", "squall.launchers.local"])
def test_torch_is_imported_when_its_time_has_come(what: str) -> None:
    """The nursery imports it beside the process that has started it early."""
    program = f"import sys, {what}; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


COMPILER = """
import sys
from functools import partial
import squall
from torch.optim.lr_scheduler import StepLR
from squall.run import Run
from tests.tasks import INLINE, regression
Run.report = lambda run: None
for strategy in (squall.Downpour(replicas=2), squall.DiLoCo(replicas=2), squall.SingleProcess()):
    task = regression(schedule=partial(StepLR, step_size=1))
    squall.fit(task, strategy, run_dir=f"{sys.argv[1]}/{type(strategy).__name__}", settings=INLINE)
print([name for name in ("torch._dynamo", "sympy", "matplotlib") if name in sys.modules])
"""


def test_training_does_not_import_torch_s_compiler(tmp_path: Path) -> None:
    """It takes as long to import as torch itself, and the first step of any optimizer of torch's asks for it."""
    done = subprocess.run([sys.executable, "-c", COMPILER, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("kind", [squall.Task, squall.Settings, squall.Downpour, squall.Synchronous])
def test_every_field_is_described_and_must_be_named(kind: type) -> None:
    text = inspect.getdoc(kind) or ""
    for field in dataclasses.fields(kind):
        assert f"\n    {field.name}: " in text, f"{kind.__name__}.{field.name} has no line in its docstring"
        assert field.kw_only


@pytest.mark.parametrize(
    "first", deep.sweep(["import_module('squall.train')", "squall.resume", "from_module()", "squall.Task"], 1)
)
def test_fit_is_the_function_whatever_was_imported_before(first: str) -> None:
    """A package's submodule of the same name would take its place."""
    program = f"""
from importlib import import_module
import squall
def from_module():
    from squall.train import Launch
{first}
assert squall.fit.__class__.__name__ == "function", squall.fit
from squall import fit
assert fit is squall.fit
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_all_errors_of_a_run_are_squall_errors() -> None:
    for kind in (squall.NotFinite, squall.PeerFault, squall.ProcessLost, squall.SnapshotMismatch, squall.TaskError):
        assert issubclass(kind, squall.SquallError)
        assert not issubclass(kind, ValueError)
