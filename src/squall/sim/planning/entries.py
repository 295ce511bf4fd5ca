"""Candidates and what is known of them, and which are worth a simulation with real gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from squall.plan import describe
from squall.sim.cluster.forecast import Forecast
from squall.sim.planning.candidates import Candidate
from squall.sim.planning.speed import Speed
from squall.sim.planning.survival import Survival

ALIKE = 0.05  # differences below this are within what a few simulated seconds can tell
AS_FAST = 0.10  # a looser coupling has to be faster by this much to be worth what it costs


@dataclass(frozen=True, kw_only=True)
class RankingEntry:
    """One candidate and what is known of it. `trial` is its simulation with real gradients, where there was one."""

    candidate: Candidate
    speed: Speed
    survival: Survival
    trial: Forecast | None = None

    @property
    def useful(self) -> float:
        """Examples a second that are trained on, failures included, in the long run."""
        return self.speed.examples_per_second * self.survival.left

    @property
    def goodput(self) -> float:
        """Share of what the replicas would compute without failures that is trained on."""
        return self.speed.kept * self.survival.left

    @property
    def reached_s(self) -> float | None:
        """Virtual seconds to the target; None: not reached, or not tried."""
        return self.trial.reached_s if self.trial is not None else None

    @property
    def failed(self) -> bool:
        """Its trial ended before its time, with numbers that are none, or with a process that was not replaced."""
        return self.trial is not None and self.trial.status != "finished"

    def to_json_dict(self) -> dict[str, Any]:
        return {
            "name": str(self.candidate), "strategy": self.candidate.family,
            "settings": describe(self.candidate.strategy), "useful_examples_per_second": self.useful,
            "goodput": self.goodput, "seconds_to_target": self.reached_s, "speed": asdict(self.speed),
            "survival": asdict(self.survival), "trial": self.trial.to_json_dict() if self.trial is not None else None,
        }  # fmt: skip


def best_sizes(entries: Iterable[RankingEntry]) -> list[RankingEntry]:
    """The fastest of each strategy's settings, over all numbers of processes; fastest first."""
    found: dict[str, RankingEntry] = {}
    for entry in sorted(entries, key=lambda entry: -entry.useful):
        found.setdefault(entry.candidate.name, entry)
    return list(found.values())


def finalists(entries: Iterable[RankingEntry], trials: int) -> list[RankingEntry]:
    """The settings to simulate with real gradients: the best of each strategy in turn, then the second best, ...

    What an example teaches is not known before. So of settings that are about as fast, the one with the tighter
    coupling is better; and beyond the first of a strategy, tighter ones come first: the loosest is seldom the best.
    """
    families: dict[str, list[RankingEntry]] = defaultdict(list)
    for entry in entries:
        families[entry.candidate.family].append(entry)
    orders = [_order(of_family) for of_family in families.values()]
    orders.sort(key=lambda order: -order[0].useful)
    turns = [order[0] for order in orders]
    for number in range(1, max(map(len, orders), default=0)):
        turn = [order[number] for order in orders if number < len(order)]
        turns += sorted(turn, key=lambda entry: entry.candidate.coupling)
    return turns[:trials]


def _order(entries: Sequence[RankingEntry]) -> list[RankingEntry]:
    """One entry for each setting of a strategy, in the order in which they are worth a trial."""
    by_name: dict[str, list[RankingEntry]] = defaultdict(list)
    for entry in entries:
        by_name[entry.candidate.name].append(entry)
    sized = [_tightest(of_name) for of_name in by_name.values()]
    first = _tightest(sized)
    rest = [entry for entry in sized if entry is not first]
    return [first, *sorted(rest, key=lambda entry: (entry.candidate.coupling, -entry.useful))]


def _tightest(entries: Sequence[RankingEntry]) -> RankingEntry:
    """Of those about as fast as the fastest, the one with the least coupling to lose, and the fewest processes."""
    fastest = max(entry.useful for entry in entries)
    able = [entry for entry in entries if entry.useful >= (1 - AS_FAST) * fastest]
    return min(able, key=lambda entry: (*entry.candidate.coupling, entry.candidate.recipe.shards, -entry.useful))
