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

from squall.checks import require
from squall.launchers.joining.address import parse_address
from squall.runtime.backward import named_device, resolve_device
from squall.runtime.optimizers import build_optimizer, check_optimizers, in_words
from squall.runtime.run_plan import NO_AIMS, Aims, Plan, last_snapshots
from squall.runtime.seeds import seed_everything
from squall.strategies import STRATEGIES, Strategy
from squall.strategies.work import BatchMethod, Loop
from squall.task import Task, TaskFunction, check_task
from squall.vector import Layout
from squall.version import __version__

LAUNCHERS = ("local", "inline", "ray")
SIMULATED = "simulated"  # the launcher of a run on a cluster that is not there


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is carried out, beside what it trains. The defaults suit most runs.

    Args:
        launcher: "local" (processes on this machine), "inline" (everything in this process, deterministic) or "ray"
            (processes on the nodes of a Ray cluster; without one, a Ray is started here).
        threads: torch threads of each replica; None: the cores divided among the replicas.
        shard_threads: torch threads of each shard. More than one make updates of millions of elements faster where
            cores are idle while replicas wait, and far slower where they are not.
        machines: how many machines train; the others join by `squall join`, and training begins when all are there.
            None: this one alone; with Ray so many nodes that each replica has a processor, if they are there.
        listen: "HOST:PORT", where this machine listens for the others. With Ray it need not be said.
        cores: with Ray: processors of each machine; None: one for each of its replicas.
        packed: with Ray: machines are on few nodes, and not each on a node of its own where that goes.
        least_replicas: training begins when there is room (cores) for so many of the strategy's replicas, and others
            start as machines join; None: with all of them, whatever cores there are.
        plaintext: what goes between machines is not encrypted, for networks that are already, such as a VPN. All
            processes still prove who they are.
        lost_after_s: a machine that is not heard of for so many seconds is taken for lost, and its work done elsewhere.
        seconds: end after so much training time.
        evaluate_every_s: evaluate so often, in seconds, beside the evaluation after each epoch.
        snapshot_every_s: seconds between snapshots; None: only at the end.
        keep_schedule: gigabytes that the schedule, which a replay needs, may take; None: no limit, 0: there is none.
            It is kept from the beginning, because a replay begins there, and ends where it has that size. "last:3"
            keeps its end: what a replay needs that begins at one of the last three snapshots. Not for
            SingleProcess, Sandblaster, replicas with an optimizer of their own, and more than four pushes a fetch.
        progress: show progress while the run goes on.
        slow: for experiments: the last replica computes at this fraction of its speed, such as 0.1.
    """

    launcher: str = "local"
    threads: int | None = None
    shard_threads: int = 1
    machines: int | None = None
    listen: str | None = None
    cores: int | None = None
    packed: bool = False
    least_replicas: int | None = None
    plaintext: bool = False
    lost_after_s: float = 2.0
    seconds: float | None = None
    evaluate_every_s: float | None = None
    snapshot_every_s: float | None = 60.0
    keep_schedule: float | str | None = 2.0
    progress: bool = True
    slow: float | None = None

    def __post_init__(self) -> None:
        if self.launcher not in LAUNCHERS:
            raise ValueError(f"launcher is {self.launcher!r}: use one of {', '.join(LAUNCHERS)}")
        threads, slow = self.threads, self.slow
        require("threads", threads, threads is None or threads >= 1, "at least 1, or None to divide the cores")
        require("shard_threads", self.shard_threads, self.shard_threads >= 1, "at least 1")
        require("slow", slow, slow is None or 0 < slow <= 1, "above 0 and at most 1, such as 0.1")
        machines = self.machines
        require("machines", machines, machines is None or machines >= 1, "at least 1")
        require("cores", self.cores, self.cores is None or self.cores >= 1, "at least 1")
        if self.launcher != "ray" and (self.cores is not None or self.packed):
            raise ValueError("cores and packed are for the launcher ray: leave them out")
        if self.listen is not None:
            parse_address(self.listen, "listen")
        elif self.several and self.launcher != "ray":
            raise ValueError(f"machines is {machines}: say where others reach this one: listen='10.0.0.1:7700'")
        if self.several and self.launcher == "inline":
            raise ValueError("machines or listen is given, and an inline run is in one process: leave one out")
        if self.plaintext and not self.several:
            raise ValueError("plaintext is for what goes between machines, and there is one: leave it out")
        if self.least_replicas is not None and self.listen is None:
            raise ValueError("replicas are a range, which grows as machines join: say where, listen='10.0.0.1:7700'")
        kept = self.keep_schedule
        if not (last_snapshots(kept) if isinstance(kept, str) else kept is None or kept >= 0):
            raise ValueError(
                f"keep_schedule is {kept!r}: give gigabytes, 0 for none, None for all, or 'last:3' for what a replay"
                " from the last three snapshots needs"
            )
        for name in ("lost_after_s", "seconds", "evaluate_every_s", "snapshot_every_s"):
            value = getattr(self, name)
            require(name, value, value is None or value > 0, "positive, or None")

    @property
    def several(self) -> bool:
        """Machines may come beside this one."""
        return self.launcher == "ray" or (self.machines or 1) > 1 or self.listen is not None

    @property
    def given(self) -> int | None:
        """Cores of a machine that Ray gives; None: it gives none. Where only replicas decide, each has one."""
        return None if self.launcher != "ray" else (self.machines and self.cores) or 1


def timed(settings: Settings | None, seconds: float | None) -> Settings:
    """Settings in which `seconds`, where given, is the limit."""
    settings = settings or Settings()
    return settings if seconds is None else dataclasses.replace(settings, seconds=seconds)


def make_plan(
    strategy: Strategy, settings: Settings, aims: Aims = NO_AIMS, *, seed: int = 0, device: str = "cpu"
) -> Plan:  # fmt: skip
    """All checks that need no task. Raises `ValueError` with the remedy."""
    if not isinstance(strategy, Strategy):
        names = ", ".join(kind.__name__ for kind in STRATEGIES.values())
        raise ValueError(f"strategy must be one of {names}, such as squall.Downpour(replicas=2): got {strategy!r}")
    recipe = strategy.recipe()
    for name in ("epochs", "steps", "patience"):
        value = getattr(aims, name)
        require(name, value, value is None or (isinstance(value, int) and value >= 1), "at least 1, and whole")
    if settings.shard_threads > 1 and not (isinstance(recipe.work, Loop) and recipe.work.update.elementwise):
        raise ValueError(
            f"shard_threads is {settings.shard_threads}: {type(strategy).__name__} forms sums on the shards, whose last"
            " bits depend on it: leave it out"
        )
    if settings.least_replicas is not None:
        fits = 1 <= settings.least_replicas <= recipe.replicas
        require("least_replicas", settings.least_replicas, fits, f"from 1 to {recipe.replicas}, as many as there are")
    if settings.several and (recipe.alone or last_snapshots(settings.keep_schedule)):
        what = type(strategy).__name__ if recipe.alone else f"keep_schedule {settings.keep_schedule!r}"
        asked = "the launcher is ray" if settings.launcher == "ray" else f"machines is {settings.machines}"
        raise ValueError(f"{asked}, and {what} is for one machine: leave one of them out")
    if last_snapshots(settings.keep_schedule) and recipe.why_from_the_start:
        raise ValueError(
            f"keep_schedule is {settings.keep_schedule!r} with {type(strategy).__name__}, where"
            f" {recipe.why_from_the_start}: its replay begins where the run did: give gigabytes, or None for all"
        )
    target = parse_until(aims.until) if aims.until is not None else None
    if settings.seconds is None and dataclasses.replace(aims, keep_best=None) == NO_AIMS and not recipe.work.converges:
        aims = dataclasses.replace(aims, epochs=1)
    (named_device if settings.launcher == "ray" else resolve_device)(device)  # a node of Ray has the GPUs
    threads = settings.threads or default_threads(-(-recipe.replicas // (settings.machines or 1)), settings.given)
    return Plan(
        strategy=strategy_name(strategy), strategy_fields=describe(strategy), replicas=recipe.replicas,
        shards=recipe.shards, seed=seed, device=device, optimizer=in_words(recipe),
        **{**_fields(settings), "threads": threads},
        **{**vars(aims), "until": target},
    )  # fmt: skip


def _fields(settings: Settings) -> dict[str, Any]:
    """The fields of `Settings` by name, also where an older version has pickled fewer, or a subclass has more."""
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(Settings)}


def check_together(plan: Plan, strategy: Strategy, task: Task) -> Layout:
    """The checks that need the task as well; returns the layout of its parameter vector."""
    groups = task.param_groups()
    layout = Layout.of(task.model, [group["params"] for group in groups])
    if plan.shards > layout.elements:
        raise ValueError(f"{plan.shards} shards for {layout.elements} parameters: use at most {layout.elements} shards")
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
    task = check_task(function())
    return task, check_together(plan, strategy, task)


def _check_schedule(task: Task, strategy: Strategy) -> None:
    """Build what each shard (or replica, with an optimizer of its own) will build, so that a mistake shows here."""
    groups = [{**group, "params": [torch.nn.Parameter(torch.zeros(1))]} for group in task.param_groups()]
    recipe = strategy.recipe()
    if isinstance(recipe.work, BatchMethod):
        _check_batches(task, recipe.work, recipe.replicas)
        return
    optimizer = build_optimizer(recipe.loop.tuned, groups)
    if task.schedule is None:
        return
    scheduler = task.schedule(optimizer)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError("Task.schedule must depend on the number of updates alone: ReduceLROnPlateau needs a metric")


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
