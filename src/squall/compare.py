"""Several strategies on one task, one after another, and one page that shows them side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from squall.plan import Settings, check_together, make_plan
from squall.report.comparison import Comparison, Trial
from squall.run import Run, TaskFunction, new_directory
from squall.runtime.optimizers import check_optimizers
from squall.runtime.seeds import chance_kept, seed_everything
from squall.strategies import Strategy
from squall.task import check_task
from squall.train import fit

_UNSAFE = str.maketrans(":/ ", "___")  # in a run's directory


@chance_kept()
def compare(
    task: TaskFunction,
    strategies: Mapping[str, Strategy],
    *,
    epochs: int | None = None,
    steps: int | None = None,
    until: str | None = None,
    seeds: int = 1,
    seed: int = 0,
    device: str = "cpu",
    run_dir: str | Path | None = None,
    settings: Settings | None = None,
) -> Comparison:
    """Train a task with each strategy, and write one page that compares the runs.

    Args:
        task: as of `fit`.
        strategies: name on the page -> strategy.
        epochs, steps: limits of each run, as of `fit`.
        until: a metric's target, such as "accuracy=0.97": what the page tells the time and examples to. A run goes on
            to its other limit, so that the curves can be compared; without one it ends there.
        seeds: runs of each strategy, with the seeds `seed`, `seed` + 1, ...
        seed: the first of them.
        device: as of `fit`.
        run_dir: where the runs and the page are kept; a new directory under runs/ by default.
        settings: as of `fit`, for all of them.

    Returns:
        What came out; `str()` is a table, `page` and `picture` are files.

    Raises:
        ValueError: a setting of one of them is wrong; nothing was launched.
        SquallError: a run ended with an error. The runs before it are kept.
    """
    settings = settings or Settings()
    if not strategies:
        raise ValueError("there is nothing to compare: name at least one strategy")
    if seeds < 1:
        raise ValueError(f"seeds is {seeds}: it must be at least 1")
    limited = epochs is not None or steps is not None or settings.seconds is not None
    limits: dict[str, Any] = {"epochs": epochs, "steps": steps, "until": None if limited else until}
    folders = {name.translate(_UNSAFE): name for name in strategies}
    if len(folders) < len(strategies):
        raise ValueError("two names of strategies differ only in characters that no file name should have")
    seed_everything(seed)
    built = check_task(task())
    for strategy in strategies.values():
        plan = make_plan(strategy, settings, epochs=epochs, steps=steps, until=until, seed=seed, device=device)
        check_optimizers(strategy.recipe())
        check_together(plan, strategy, built)
    directory = new_directory(run_dir)
    trials = []
    for number in range(seed, seed + seeds):  # seed by seed: a noisy hour falls on all strategies alike
        for name, strategy in strategies.items():
            path = directory / f"{name.translate(_UNSAFE)}-seed-{number}"
            run = _train(task, strategy, limits, number, device, path, settings)
            trials.append(Trial(name, number, run.directory))
    comparison = Comparison(directory, trials, plan.until)
    comparison.write()
    return comparison


def _train(
    task: TaskFunction, strategy: Strategy, limits: dict[str, Any], seed: int, device: str, path: Path,
    settings: Settings,
) -> Run:  # fmt: skip
    if strategy.in_process:  # all cores for the one process, as its user would
        settings = dataclasses.replace(settings, threads=None)
    return fit(task, strategy, **limits, seed=seed, device=device, run_dir=path, settings=settings)
