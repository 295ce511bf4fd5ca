"""The order of what was simulated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from squall.sim.planning.entries import RankingEntry, best_sizes
from squall.sim.planning.reasons import reason


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """`entries`: the first is the best. Those without a trial come last where there is a target.

    `left_out`: strategies for which the budget has room for one replica only, and which another one stands for.
    `unfit`: strategies that cannot train the task, mostly because of its optimizer, and why.
    """

    target: tuple[str, float] | None
    budget: int
    entries: Sequence[RankingEntry] = field(default_factory=tuple)
    interrupted: bool = False
    left_out: Sequence[str] = ()
    unfit: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> list[RankingEntry]:
        """With a target those that were tried for it; else the best numbers of processes of each strategy."""
        if any(entry.trial is not None for entry in self.entries):
            return [entry for entry in self.entries if entry.trial is not None]
        return best_sizes(self.entries)

    @property
    def first(self) -> RankingEntry:
        return self.shown[0]

    def to_json_dict(self) -> dict[str, Any]:
        return {
            "target": None if self.target is None else f"{self.target[0]}={self.target[1]:g}",
            "budget": self.budget, "interrupted": self.interrupted, "left_out": list(self.left_out),
            "unfit": dict(self.unfit),
            "reason": reason(self),
            "ranking": [entry.to_json_dict() for entry in self.entries],
        }  # fmt: skip


def ranked(
    entries: Iterable[RankingEntry], target: tuple[str, float] | None, budget: int, interrupted: bool = False,
    left_out: Sequence[str] = (), unfit: Mapping[str, str] | None = None,
) -> Ranking:  # fmt: skip
    """By time to the target; then what did not get there, what failed, and what was not tried, by useful examples."""

    def place(entry: RankingEntry) -> tuple[int, float, float]:
        reached_s = entry.reached_s
        tried = 3 if entry.trial is None else 1 + entry.failed
        return (tried, math.inf, -entry.useful) if reached_s is None else (0, reached_s, -entry.useful)

    order = tuple(sorted(entries, key=place))
    return Ranking(
        target=target, budget=budget, entries=order, interrupted=interrupted, left_out=left_out, unfit=unfit or {}
    )  # fmt: skip
