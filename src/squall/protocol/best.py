"""What evaluations decide: whether a target is reached, which was the best, and how long there was no better one."""

from __future__ import annotations

import math

import msgspec

from squall.protocol.effects import Cause


class Goal(msgspec.Struct, frozen=True):
    """What a run is to get better at. A loss is best when it is lowest, everything else when it is highest."""

    metric: str = "loss"
    keep: bool = False  # the weights of the best evaluation are kept
    patience: int | None = None  # so many evaluations in a row without an improvement end the run
    best: float | None = None  # the best value so far, where a run is resumed


def better(metric: str, value: float, than: float | None) -> bool:
    """NaN is never better."""
    if than is None or math.isnan(than):
        return not math.isnan(value)
    return value < than if metric == "loss" else value > than


Verdict = tuple[Cause, str] | None  # why the run may end


class Best:
    """The best evaluation so far. `until`: a target that ends the run, such as ("accuracy", 0.97)."""

    def __init__(self, goal: Goal, until: tuple[str, float] | None) -> None:
        self.goal, self._until = goal, until
        self.value = self.kept = goal.best  # and of the weights that are kept, where they are
        self._without = 0  # evaluations since the best one

    def judge(self, values: dict[str, float], kept: bool = True) -> Verdict:
        """Count an evaluation. One whose weights could not be kept is not the best, but a target is a target."""
        if kept and self.goal.metric in values and better(self.goal.metric, values[self.goal.metric], self.kept):
            self.kept = values[self.goal.metric]
        tired = self._tired(values) if kept else ""
        name, target = self._until or ("", 0.0)
        if name in values and (values[name] == target or better(name, values[name], target)):
            return Cause.REACHED, f"{name} {values[name]:.4f} reached {target:g}"
        return (Cause.PATIENCE, tired) if tired else None

    def _tired(self, values: dict[str, float]) -> str:
        metric, patience = self.goal.metric, self.goal.patience
        if metric not in values:
            return ""
        if better(metric, values[metric], self.value):
            self.value, self._without = values[metric], 0
            return ""
        self._without += 1
        if patience is None or self._without < patience:
            return ""
        best = "a number" if self.value is None else f"better than {self.value:.4f}"
        return f"{metric} was not {best} in {patience} evaluation{'s' * (patience != 1)} in a row"
