"""What `squall run` can do with a user's own script, checked before anything is launched."""

from __future__ import annotations

import dataclasses

from squall.plan import make_plan
from squall.runtime.backward import named_device
from squall.runtime.optimizers import check_optimizers
from squall.runtime.run_plan import Aims, Plan
from squall.settings import Settings
from squall.strategies import Recipe, Strategy
from squall.strategies.work import Collective, Loop


def script_plan(strategy: Strategy, settings: Settings, aims: Aims, *, seed: int = 0, device: str = "cpu") -> Plan:
    """The plan of a script's run. How much it trains, the script says itself.

    Args:
        strategy: that the replicas train with.
        settings: as of `fit`.
        aims: `until`, of a metric that the script logs, and `patience`, in that metric, else in the loss that it logs.
        seed: of the data order, and of chance when the script begins; it may seed anew what it makes before it joins.
        device: as of `fit`.

    Raises:
        ValueError: a setting is wrong.
    """
    recipe = strategy.recipe()
    if recipe.alone or settings.launcher == "inline":
        raise ValueError(f"{type(strategy).__name__} runs in one process: start the script with python instead")
    if isinstance(recipe.work, Collective):
        _check_group(recipe, settings, device)
    elif not isinstance(recipe.work, Loop):
        raise ValueError(f"{type(strategy).__name__} computes a batch many times over, which no loop does: use fit")
    if settings.spread_parts:
        raise ValueError("spread_parts is set: the parts of a script's replica have memory in common: leave it out")
    if settings.last_snapshots:
        raise ValueError(
            f"keep_schedule is {settings.keep_schedule!r}: a script's loop may hold anything, so its replay begins"
            " where the run did: give gigabytes, or None for all"
        )
    aims = dataclasses.replace(aims, epochs=None, steps=None)
    settings = dataclasses.replace(settings, spread_parts=None)
    plan = make_plan(strategy, settings, aims, seed=seed, device=device)
    check_optimizers(recipe)
    return plan


def _check_group(recipe: Recipe, settings: Settings, device: str) -> None:
    """Raise `ValueError` for what a group of scripts cannot do yet."""
    what = ""
    if settings.parts > 1:
        what = f"parts is {settings.parts}"
    elif recipe.divided:
        what = "shard_optimizer is set"
    elif named_device(device).type != "cpu":
        what = f"device is {device!r}"
    if what:
        raise ValueError(
            f"{what}, which AllReduce is not for in scripts for now: leave it out, or use Synchronous, which makes the"
            " same updates, or fit"
        )
