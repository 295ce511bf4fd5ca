"""Several strategies on one task, one after another, and one page that shows them side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from squall.plan import check_together, default_threads, make_plan
from squall.report.comparison import ComparedRun, Comparison
from squall.run import new_directory
from squall.runtime.optimizers import check_optimizers
from squall.runtime.run_plan import Aims, Plan
from squall.runtime.seeds import chance_kept, seed_everything
from squall.settings import Settings, with_given
from squall.sim.cluster.own_step import own_step_s
from squall.strategies import Strategy
from squall.task import Task, TaskFunction, check_task
from squall.train import fit
from squall.vector import Layout

TRIES = 2  # measurements with one thread, and with all, in turn
WORTH = 0.9  # threads that take longer than this share of the time of one are not worth their cores
_UNSAFE = str.maketrans(":/ ", "___")  # characters that are replaced in the name of a run's directory


@chance_kept()
def compare(
    task: TaskFunction,
    strategies: Mapping[str, Strategy],
    *,
    epochs: int | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    until: str | None = None,
    seeds: int = 1,
    seed: int = 0,
    device: str = "cpu",
    run_dir: str | Path | None = None,
    settings: Settings | None = None,
) -> Comparison:
    """Train a task with each strategy, and write one page that compares the runs.

    All of them have the same cores: those of the strategy with the most replicas, a core for each of their threads. The
    others' replicas divide them; a single process, in which threads may wait for each other longer than they compute,
    has all of them or one, whichever is found to be faster before the first run.

    Args:
        task: as of `fit`.
        strategies: name on the page -> strategy.
        epochs, steps, seconds: limits of each run, as of `fit`.
        until: a metric's target, such as "accuracy=0.97": what the page tells the time and examples to. A run goes on
            to its other limit, so that the curves can be compared; without one it ends there.
        seeds: runs of each strategy, with the seeds `seed`, `seed` + 1, ...
        seed: the first of them.
        device: as of `fit`.
        run_dir: where the runs and the page are kept; a new directory under runs/ by default.
        settings: as of `fit`, for all of them; `threads` is of the strategy with the most replicas.

    Returns:
        What came out; `str()` is a table, `page` and `picture` are files.

    Raises:
        ValueError: a setting of one of them is wrong; nothing was launched.
        SquallError: a run ended with an error. The runs before it are kept.
    """
    settings = with_given(settings, seconds=seconds)
    _check_names(strategies, seeds)
    seed_everything(seed)
    most = max(strategy.recipe().replicas for strategy in strategies.values())
    cores = most * (settings.threads or default_threads(most))
    make = partial(make_plan, aims=Aims(epochs=epochs, steps=steps, until=until), seed=seed, device=device)
    fitted, target = _fitted(strategies, settings, check_task(task()), cores, make)
    limited = epochs is not None or steps is not None or settings.seconds is not None
    train = partial(fit, task, epochs=epochs, steps=steps, until=None if limited else until, device=device)
    directory = new_directory(run_dir)
    runs = []
    for number in range(seed, seed + seeds):  # seed by seed: a noisy hour falls on all strategies alike
        for name, strategy in strategies.items():
            path = directory / f"{name.translate(_UNSAFE)}-seed-{number}"
            run = train(strategy, seed=number, run_dir=path, settings=fitted[name])
            runs.append(ComparedRun(name, number, run.directory))
    comparison = Comparison(directory / "compare.html", runs, target, cores)
    comparison.write()
    return comparison


def _check_names(strategies: Mapping[str, Strategy], seeds: int) -> None:
    if not strategies:
        raise ValueError("there is nothing to compare: name at least one strategy")
    if seeds < 1:
        raise ValueError(f"seeds is {seeds}: it must be at least 1")
    if len({name.translate(_UNSAFE) for name in strategies}) < len(strategies):
        raise ValueError("two names of strategies differ only in characters that no file name should have")


def _fitted(
    strategies: Mapping[str, Strategy], settings: Settings, task: Task, cores: int,
    make: Callable[[Strategy, Settings], Plan],
) -> tuple[dict[str, Settings], tuple[str, float] | None]:  # fmt: skip
    """Each strategy's settings, by which its replicas divide the cores, all checked; and the target."""
    fitted: dict[str, Settings] = {}
    for name, strategy in strategies.items():
        fitted[name] = dataclasses.replace(settings, threads=max(1, cores // strategy.recipe().replicas))
        plan = make(strategy, fitted[name])
        check_optimizers(strategy.recipe())
        layout = check_together(plan, strategy, task)
        if strategy.recipe().alone and cores > 1:
            fitted[name] = dataclasses.replace(settings, threads=_faster_threads(plan, task, layout))
    return fitted, plan.until


def _faster_threads(plan: Plan, task: Task, layout: Layout) -> int:
    """The plan's number of threads, or one: threads that wait for each other all stand still if one loses its core."""
    alone = msgspec.structs.replace(plan, threads=1)
    tried = [(own_step_s(plan, task, layout), own_step_s(alone, task, layout)) for _ in range(TRIES)]
    together_s, alone_s = (min(times) for times in zip(*tried))
    return plan.threads if together_s < WORTH * alone_s else 1
