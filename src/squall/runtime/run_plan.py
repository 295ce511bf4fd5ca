"""What a run will do, as plain data that prints itself and goes into run.json. `squall.plan` makes and checks it."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from squall.protocol.best import Goal
from squall.protocol.leases import Limits
from squall.protocol.policy import Policy
from squall.settings import Settings
from squall.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Aims:
    """How much a run trains at most, and the metric that it is judged by; each as of `fit`."""

    epochs: int | None = None
    steps: int | None = None
    until: str | None = None
    keep_best: str | None = None
    patience: int | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a run that is not code. `str(plan)` is what a person reads."""

    strategy: str
    strategy_fields: dict[str, Any]
    optimizer: str  # in words, with its rate; a script may give another one to `join`
    replicas: int
    shards: int
    epochs: int | None
    steps: int | None
    until: tuple[str, float] | None
    keep_best: str | None
    patience: int | None
    seed: int
    device: str
    threads: int  # of each replica; the settings may leave them open
    settings: Settings
    simulated: bool = False  # on a cluster that is not there

    @property
    def goal(self) -> Goal:
        metric = self.keep_best or (self.until[0] if self.until is not None else "loss")
        return Goal(metric, self.keep_best is not None, self.patience)

    @property
    def aims(self) -> Aims:
        until = None if self.until is None else f"{self.until[0]}={self.until[1]}"
        return Aims(
            epochs=self.epochs, steps=self.steps, until=until, keep_best=self.keep_best, patience=self.patience
        )  # fmt: skip

    def limits(self) -> Limits:
        return Limits(self.epochs, self.steps)

    def policy(self, task: Task) -> Policy:
        return Policy(
            self.replicas, self.shards, task.validate is not None, self.settings.evaluate_every_s, self.until,
            self.settings.seconds, self.settings.snapshot_every_s, goal=self.goal,
            parts=self.settings.parts, spread_parts=self.settings.spread_parts, copies=self.settings.copies,
            loaders=task.loader.get("num_workers", 0),
            quarantine=self.settings.quarantine(-(-task.examples // task.batch_size)),
        )  # fmt: skip

    def __str__(self) -> str:
        limits = [
            f"{self.epochs} epochs" if self.epochs else "",
            f"{self.steps} steps" if self.steps else "",
            f"{self.settings.seconds:g} s" if self.settings.seconds else "",
            f"until {self.until[0]} is {self.until[1]:g}" if self.until else "",
            f"patience {self.patience}" if self.patience else "",
        ]
        parts = f" of {self.settings.parts} parts" if self.settings.parts > 1 else ""
        where = f"{self.replicas} replicas{parts} x {self.threads} threads on {self.device}, {self.shards} shards"
        return ", ".join([f"{self.strategy}: {where}", self.optimizer, *filter(None, limits), f"seed {self.seed}"])


NO_AIMS = Aims()  # everything is left to the defaults
