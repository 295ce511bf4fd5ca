"""The head of a run, as its plan wants it."""

from __future__ import annotations

import math

from squall.launchers.head import Head
from squall.launchers.joining.address import parse_address
from squall.launchers.on_ray.machines import RayMachines
from squall.launchers.roster import Wanted
from squall.runtime.run_plan import Plan
from squall.strategies import Recipe


def head_of(plan: Plan, recipe: Recipe) -> Head | None:
    """The head of a run that wants several machines. Raises `ValueError` where it cannot listen, or has no Ray."""
    settings = plan.settings
    listen = None if settings.listen is None else parse_address(settings.listen, "listen")
    # Processes that take the place of others have files of their own: a machine may have some more than its share.
    kept = 2e9 * settings.keep_schedule if isinstance(settings.keep_schedule, int | float) else math.inf
    wanted = Wanted.of(plan)
    if settings.launcher == "ray":
        machines = RayMachines(plan)
        try:
            wanted = wanted._replace(machines=machines.count, least_replicas=None)
            return Head(listen or machines.address(), wanted, recipe, machines, kept)
        except BaseException:
            machines.close()
            raise
    if listen is None:
        return None
    return Head(listen, wanted, recipe, schedules_bytes=kept)
