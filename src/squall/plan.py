"""The plan of a run is made and checked, before anything is launched."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
import warnings
from functools import partial
from typing import Any

import torch

from squall.checks import require, require_extra
from squall.runtime.answering import PredictionTask, check_prediction
from squall.runtime.backward import named_device, resolve_device
from squall.runtime.optimizers import build_optimizer, check_in_parts, check_optimizers, in_words
from squall.runtime.run_plan import NO_AIMS, Aims, Plan
from squall.runtime.seeds import seed_everything
from squall.settings import Settings
from squall.splits import Tensor
from squall.strategies import STRATEGIES, Recipe, Strategy
from squall.strategies.work import Answering, BatchMethod, Collective, Loop
from squall.task import Task, TaskFunction, check_task
from squall.vector import Layout
from squall.version import __version__


def make_plan(
    strategy: Strategy, settings: Settings, aims: Aims = NO_AIMS, *, seed: int = 0, device: str = "cpu"
) -> Plan:  # fmt: skip
    """All checks that need no task. Raises `ValueError` with the remedy."""
    if not isinstance(strategy, Strategy):
        names = ", ".join(kind.__name__ for kind in STRATEGIES.values())
        raise ValueError(f"strategy must be one of {names}, such as squall.Downpour(replicas=2): got {strategy!r}")
    recipe = strategy.recipe()
    if settings.tensorboard:
        require_extra("tensorboard", "TensorBoard")
    for name in ("epochs", "steps", "patience"):
        value = getattr(aims, name)
        require(name, value, value is None or (isinstance(value, int) and value >= 1), "at least 1, and whole")
    if settings.shard_threads > 1 and isinstance(recipe.work, Collective):
        raise ValueError(f"shard_threads is {settings.shard_threads}: AllReduce has no shards, leave it out")
    if settings.shard_threads > 1 and not (isinstance(recipe.work, Loop) and recipe.work.update.elementwise):
        raise ValueError(
            f"shard_threads is {settings.shard_threads}: {type(strategy).__name__} forms sums on the shards, whose last"
            " bits depend on it: leave it out"
        )
    if settings.copies > 1 and (why := _not_copied(recipe)):
        raise ValueError(f"copies is {settings.copies}, and {why}: leave it out")
    if settings.least_replicas is not None:
        fits = 1 <= settings.least_replicas <= recipe.replicas
        require("least_replicas", settings.least_replicas, fits, f"from 1 to {recipe.replicas}, as many as there are")
    if settings.on_nan != "stop" and (recipe.alone or not isinstance(recipe.work, Loop)):
        raise ValueError(
            f"on_nan is {settings.on_nan!r}, and {type(strategy).__name__} takes no step without a batch of its own:"
            " leave it out, or use a strategy that deals leases and has shards, such as Downpour or Synchronous"
        )
    asked = "the launcher is ray" if settings.launcher == "ray" else f"machines is {settings.machines}"
    if settings.several and (recipe.alone or settings.last_snapshots):
        what = type(strategy).__name__ if recipe.alone else f"keep_schedule {settings.keep_schedule!r}"
        raise ValueError(f"{asked}, and {what} is for one machine: leave one of them out")
    if settings.parts > 1:
        _check_parts(recipe, settings, device)
    if settings.several and isinstance(recipe.work, Collective) and named_device(device).type != "cpu":
        raise ValueError(f"{asked}, and AllReduce computes on CPUs there for now: use device='cpu', or Synchronous")
    if settings.last_snapshots and recipe.why_from_the_start:
        raise ValueError(
            f"keep_schedule is {settings.keep_schedule!r} with {type(strategy).__name__}, where"
            f" {recipe.why_from_the_start}: its replay begins where the run did: give gigabytes, or None for all"
        )
    target = parse_until(aims.until) if aims.until is not None else None
    if settings.seconds is None and dataclasses.replace(aims, keep_best=None) == NO_AIMS and not recipe.work.converges:
        aims = dataclasses.replace(aims, epochs=1)
    (named_device if settings.launcher == "ray" else resolve_device)(device)  # a node of Ray has the GPUs
    processes = -(-recipe.replicas // (settings.machines or 1)) * settings.parts
    threads = settings.threads or default_threads(processes, settings.given)
    return Plan(
        strategy=strategy_name(strategy), strategy_fields=describe(strategy), optimizer=in_words(recipe),
        replicas=recipe.replicas, shards=recipe.shards, seed=seed, device=device, threads=threads, settings=settings,
        **{**vars(aims), "until": target},
    )  # fmt: skip


def _check_parts(recipe: Recipe, settings: Settings, device: str) -> None:
    """Raise `ValueError` for what replicas of several parts cannot do yet."""
    what = ""
    if recipe.alone:
        what = "SingleProcess is one process"
    elif isinstance(recipe.work, Collective):
        what = _not_in_columns(recipe, settings, device)
    if what:
        raise ValueError(f"parts is {settings.parts}, and {what}: leave it out, or use Synchronous or Downpour")
    if settings.several and named_device(device).type != "cpu":
        raise ValueError(
            f"parts is {settings.parts} on several machines, where parts compute on CPUs for now: use device='cpu', or"
            " one machine"
        )


def _not_copied(recipe: Recipe) -> str:
    """Why nobody holds a shard twice; empty where it goes."""
    if recipe.alone:
        return "SingleProcess is one process"
    if isinstance(recipe.work, Collective):
        return "every member of AllReduce has the weights already"
    return "" if isinstance(recipe.work, Loop | BatchMethod) else "there are no shards"


def _not_in_columns(recipe: Recipe, settings: Settings, device: str) -> str:
    """What keeps replicas of several parts from all-reduce, if anything does."""
    if recipe.divided:
        return "AllReduce divides the optimizer's state between parts already, not by shard_optimizer as well"
    return "" if named_device(device).type == "cpu" else "AllReduce computes with parts on CPUs for now"


def check_together(plan: Plan, strategy: Strategy, task: Task) -> Layout:
    """The checks that need the task as well; returns the layout of its parameter vector."""
    groups = task.param_groups()
    layout = Layout.of(task.model, [group["params"] for group in groups])
    if plan.shards > layout.elements:
        raise ValueError(f"{plan.shards} shards for {layout.elements} parameters: use at most {layout.elements} shards")
    if strategy.recipe().divided and len(layout.parameters) < plan.replicas:
        raise ValueError(
            f"shard_optimizer gives each of {plan.replicas} replicas a tensor at least, and the model trains"
            f" {len(layout.parameters)}: use fewer replicas, or leave it out"
        )
    known = ["loss", *task.metrics] if task.validate is not None else []
    named = {"until": plan.until[0] if plan.until is not None else None, "keep_best": plan.keep_best}
    if plan.patience is not None:
        named["patience"] = plan.goal.metric
    for setting, metric in named.items():
        if metric is not None and metric not in known:
            hint = f"the task has {', '.join(known)}" if known else "the task has no validation set to measure it on"
            raise ValueError(f"{setting} names the metric {metric!r}, but {hint}")
    _check_schedule(task, strategy)
    return layout


def build_checked(function: TaskFunction, plan: Plan, strategy: Strategy) -> tuple[Task, Layout]:
    """The plan's task, built and checked in full, and the layout of its parameter vector. Raises `ValueError`."""
    check_optimizers(strategy.recipe())
    seed_everything(plan.seed)
    if not callable(function):
        raise ValueError(f"task must be a function without arguments that builds a squall.Task: it is {function!r}")
    task = function()
    if isinstance(task, PredictionTask):
        check_prediction(task)
    else:
        check_task(task)
    if plan.settings.parts > 1:
        from squall.parts.check import check_split  # which imports torch's compiler

        check_split(task, plan.settings.parts)
        check_in_parts(strategy.recipe(), sliced=isinstance(task.split, Tensor))
    return task, check_together(plan, strategy, task)


def _check_schedule(task: Task, strategy: Strategy) -> None:
    """Build what each shard (or replica, with an optimizer of its own) will build, so that a mistake shows here."""
    recipe = strategy.recipe()
    whole = isinstance(recipe.work, Collective)
    groups = [{**group, "params": _stand_ins(group["params"], whole)} for group in task.param_groups()]
    if isinstance(recipe.work, BatchMethod):
        _check_batches(task, recipe.work, recipe.replicas)
        return
    if isinstance(recipe.work, Answering):
        return
    try:
        optimizer = build_optimizer(recipe.work.tuned, groups)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the optimizer does not take the task's parameters: {error}") from error
    if task.schedule is None:
        return
    scheduler = task.schedule(optimizer)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError("Task.schedule must depend on the number of updates alone: ReduceLROnPlateau needs a metric")


def _stand_ins(parameters: list[torch.nn.Parameter], whole: bool) -> list[torch.nn.Parameter]:
    """Of a param group: an optimizer on shards sees ranges of it, one on a whole model their shapes."""
    if not whole:
        return [torch.nn.Parameter(torch.zeros(1))]
    return [torch.nn.Parameter(torch.empty_like(parameter, device="meta")) for parameter in parameters]


def _check_batches(task: Task, method: BatchMethod, replicas: int) -> None:
    """Raise `ValueError` for what a method that looks at whole batches cannot do, and warn of what spoils it."""
    for name in ("schedule", "clip_norm"):
        if getattr(task, name) is not None:
            raise ValueError(f"Task.{name} is set, and L-BFGS chooses its steps by itself: leave it out")
    if any(set(group) != {"params"} for group in task.param_groups()):
        raise ValueError("Task.groups has settings, and L-BFGS has one for all: put a penalty into Task.loss")
    batch = method.batch(task.examples)
    if batch < replicas:
        raise ValueError(f"a batch of {batch} examples is too small for {replicas} replicas: use fewer")
    noisy = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._BatchNorm)
    found = sorted({type(module).__name__ for module in task.model.modules() if isinstance(module, noisy)})
    if found:
        warnings.warn(
            f"the model has {', '.join(found)}: a line search compares losses, and these make a portion's loss depend"
            " on chance or on the portion; running statistics stay as they are",
            RuntimeWarning,
            stacklevel=4,
        )


def parse_until(text: str) -> tuple[str, float]:
    """'accuracy=0.97' -> ("accuracy", 0.97)."""
    name, equals, value = str(text).partition("=")
    try:
        if not equals or not name.strip():
            raise ValueError
        return name.strip(), float(value)
    except ValueError:
        raise ValueError(f"until is {text!r}: write metric=value, for example accuracy=0.97") from None


def default_threads(replicas: int, cores: int | None = None) -> int:
    """Of each of so many replicas on a machine with so many cores; None: this one's."""
    return max(1, (cores or len(os.sched_getaffinity(0))) // replicas)


def strategy_name(strategy: Strategy) -> str:
    names = {kind: name for name, kind in STRATEGIES.items()}
    return names.get(type(strategy), type(strategy).__name__)


def describe(strategy: Strategy) -> dict[str, Any]:
    """A strategy's settings as plain values."""
    return {field.name: _plain(getattr(strategy, field.name)) for field in dataclasses.fields(strategy)}


def versions() -> dict[str, str]:
    """The versions and the machine that a report names, so that others can judge its numbers."""
    return {
        "squall": __version__,
        "torch": str(torch.__version__),
        "python": sys.version.split()[0],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release()}",
    }


def _plain(value: Any) -> Any:
    if isinstance(value, partial):
        arguments = [repr(a) for a in value.args] + [f"{k}={v!r}" for k, v in value.keywords.items()]
        return f"{getattr(value.func, '__name__', value.func)}({', '.join(arguments)})"
    if value is None or isinstance(value, int | float | str | bool):
        return value
    return getattr(value, "__name__", repr(value))
