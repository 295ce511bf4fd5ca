"""What a plan tries: strategies with their settings, each with the replicas and shards that a cluster has room for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from squall.report.words import plural
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.parts import ROLES
from squall.strategies import STRATEGIES, Recipe, Strategy
from squall.strategies.work import Loop

LEFT_OUT = {
    "single_process": "is in every ranking: leave it out",
    "sandblaster": "decides by what it computes, so its speed is not known without: try it with `squall simulate`",
}
REPLICAS_OF_A_SHARD = 4  # fewer would leave it with nothing to do for most of the time

_OTHER_FORMS = {"matched": False, "momentum_every": None, "quorum": None}  # settings that a form may not allow

# Strategy -> (what follows its name in a table, the fields that are set). {} is the file's own settings.
_SWEPT: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "synchronous": (("", {"backup": 0}), (", 1 backup", {"backup": 1})),
    "all_reduce": (("", {}),),
    "bounded_delay": tuple((f", tau {tau}", {"max_delay": tau}) for tau in (1, 4, 16)),
    "downpour": tuple((f", push every {n}", {"push_every": n, "fetch_every": n}) for n in (1, 8)),
    "averaging": tuple((f", every {n}", {"every": n}) for n in (8, 32)),
    "elastic_averaging": tuple((f", every {n}", {"every": n}) for n in (8, 32)),
    "diloco": (
        *((f", {n} steps", {"form": "synchronous", "inner_steps": n, **_OTHER_FORMS}) for n in (20, 100, 500)),
        *((f", {n} steps, async", {"form": "asynchronous", "inner_steps": n, **_OTHER_FORMS, "matched": True})
          for n in (20, 100)),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """A strategy with all its settings. `name` is of those without the numbers of replicas and shards."""

    name: str
    strategy: Strategy

    @property
    def family(self) -> str:
        """The strategy's name without settings."""
        return next((name for name, kind in STRATEGIES.items() if type(self.strategy) is kind), self.name)

    @property
    def recipe(self) -> Recipe:
        return self.strategy.recipe()

    @property
    def coupling(self) -> tuple[int, int, int]:
        """(batches between exchanges, delay, replicas): the lower they are, the more an example teaches."""
        if not isinstance(self.recipe.work, Loop):
            return self.recipe.work.every, 0, self.recipe.replicas
        rules = self.recipe.loop.exchanges.rules
        delay = 0 if rules.gather == "mean" else 1 + (rules.max_delay if rules.max_delay is not None else 10**6)
        return self.recipe.work.every, delay, self.recipe.replicas

    @property
    def sizes(self) -> str:
        """Replicas + shards."""
        return "1 alone" if self.recipe.alone else f"{self.recipe.replicas} + {self.recipe.shards}"

    def __str__(self) -> str:
        if self.recipe.alone:
            return self.name
        shards = f", {plural(self.recipe.shards, 'shard')}" if self.recipe.shards else ""
        return f"{self.name}, {plural(self.recipe.replicas, 'replica')}{shards}"


def default_strategies(
    from_file: Sequence[Strategy] = (), names: Iterable[str] = tuple(_SWEPT), batches: int | None = None
) -> dict[str, Strategy]:
    """Name in a table -> strategy, with each strategy's settings swept.

    Args:
        from_file: a file's own strategies, whose other settings and optimizers are taken.
        names: of strategies, as in `STRATEGIES`; those without a sweep come with the file's or their own settings.
        batches: of an epoch: longer inner loops are left out.

    Raises:
        ValueError: a name is unknown, or nothing that can be planned.
    """
    found: dict[str, Strategy] = {}
    for name in names:
        if name not in STRATEGIES:
            raise ValueError(f"there is no strategy {name!r}: use {', '.join(sorted(set(STRATEGIES) - set(LEFT_OUT)))}")
        if name in LEFT_OUT:
            raise ValueError(f"{name} {LEFT_OUT[name]}")
        for text, settings in _SWEPT.get(name, (("", {}),)):
            strategy = _with(name, settings, from_file)
            if batches is None or strategy.recipe().work.every <= max(batches, 1):
                found[name + text] = strategy
    return found


def baseline(strategies: Iterable[Strategy]) -> Candidate:
    """One process, with its own settings where it is among these, or with the first optimizer of them."""
    return Candidate("single_process", _with("single_process", {}, list(strategies)))


def _with(name: str, settings: Mapping[str, Any], from_file: Sequence[Strategy]) -> Strategy:
    """The file's strategy that is nearest to the settings, with them put in; else one with the file's optimizer."""
    kind: Any = STRATEGIES[name]
    own = [strategy for strategy in from_file if type(strategy) is kind]
    if own:
        base = max(own, key=lambda strategy: sum(getattr(strategy, n) == v for n, v in settings.items()))
    else:
        optimizers = [getattr(strategy, "optimizer", None) for strategy in from_file]
        given = next((optimizer for optimizer in optimizers if optimizer is not None), None)
        base = kind() if given is None else kind(optimizer=given)
    changed: Strategy = dataclasses.replace(base, **settings)
    return changed if changed.recipe().alone else _sized(changed, 2, 1)


def _sized(strategy: Strategy, replicas: int, shards: int) -> Strategy:
    changed: Any = strategy
    counts = {"replicas": replicas} if not _has_shards(strategy) else {"replicas": replicas, "shards": shards}
    return dataclasses.replace(changed, **counts)  # type: ignore[no-any-return]


def _has_shards(strategy: Strategy) -> bool:
    return any(field.name == "shards" for field in dataclasses.fields(strategy))


# ---------------------------------------------------------------- how many processes


def cores(cluster: Cluster, role: str | None = None) -> int:
    """Cores of all machines, or of those that may have processes of a role."""
    return sum(kind.count * kind.cores for kind in cluster.machines if role is None or role in kind.roles)


def counts(cluster: Cluster, budget: int) -> list[tuple[int, int]]:
    """(replicas, shards) with replicas + shards <= budget, each on cores of their own if they were alone.

    Replicas are powers of two, the most that fit, and those that leave out the kinds of machines at the end of the
    file, which may be the slow ones; shards are powers of two up to a quarter of the replicas. Several replicas without
    shards are for strategies that have none.

    Raises:
        ValueError: the budget has no room for a replica and a shard, or the cluster has none for some role.
    """
    if budget < 2:
        raise ValueError(f"budget is {budget}: it must be at least 2, a replica and a shard")
    room = {role: cores(cluster, role) for role in ROLES}
    for role, there in room.items():
        if not there:
            raise ValueError(f"no machine of the cluster may have a {role}: add {role!r} to the roles of one")
    able = [kind for kind in cluster.machines if "replica" in kind.roles]
    leaving_out = {sum(kind.count * kind.cores for kind in able[:n]) for n in range(1, len(able))}
    leaving_out |= {sum(kind.count for kind in able[:n]) for n in range(1, len(able))}  # placed machine by machine
    found = []
    shards = 0
    while shards <= room["shard"] and shards < budget:
        most = min(budget - shards, room["replica"])
        sizes = {1 << n for n in range(most.bit_length())} | {most} | leaving_out
        least = {0: 2, 1: 1}.get(shards, REPLICAS_OF_A_SHARD * shards)
        found += [(replicas, shards) for replicas in sizes if least <= replicas <= most]
        shards = 2 * shards or 1
    return sorted(found)


def sweep(strategies: Mapping[str, Strategy], sizes: Sequence[tuple[int, int]], budget: int) -> list[Candidate]:
    """Every strategy with each of these (replicas, shards) that it allows; they keep to the budget.

    One replica is plain training whatever the strategy: it is tried once.

    Raises:
        ValueError: a strategy allows none of them.
    """
    if not strategies:
        raise ValueError("there is no strategy to plan with: name at least one")
    found: list[Candidate] = []
    alone = False
    for name, strategy in strategies.items():
        refused: ValueError | None = None
        before = len(found)
        for replicas, shards in sizes:
            if (replicas == 1 and alone) or (shards > 0) != _has_shards(strategy):
                continue
            try:
                candidate = Candidate(name, _sized(strategy, replicas, shards))
                candidate.strategy.recipe()
            except ValueError as error:
                refused = error
            else:
                alone |= replicas == 1
                found.append(candidate)
        if len(found) == before and refused is not None:
            raise ValueError(f"{name} fits no number of replicas within a budget of {budget}: {refused}")
    return found
