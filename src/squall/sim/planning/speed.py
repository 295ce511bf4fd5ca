"""How fast a strategy runs on a cluster, from short simulations without gradients and without failures.

A run's beginning is no sample of the rest: within a bounded delay, fast replicas run ahead until they have used it up.
So two runs are simulated, one twice as long as the other, and what counts is what the longer one does more.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch.utils.data import ConcatDataset

from squall.protocol.nodes import Node
from squall.protocol.reports import REPORT_LEASES
from squall.settings import Settings
from squall.sim.cluster.costs import UPDATE_SHARE
from squall.sim.cluster.forecast import Forecast
from squall.sim.cluster.jitter import Constant, Trace
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.parts import MachineKind
from squall.sim.cluster.placement import Placement
from squall.sim.cluster.simulate import simulate
from squall.sim.planning.candidates import Candidate
from squall.strategies import Recipe, Strategy
from squall.strategies.work import Loop
from squall.task import Task

ROUNDS = 10  # exchanges of the slowest replica in the shorter run, beyond a bounded delay
MESSAGES = 8_000  # about so many at most in the shorter run, as long as it has two rounds: a fraction of a second
REPORTS = 4  # of a replica in the shorter run
FEWEST = 5  # exchanges of a replica, or the shorter run is made longer
INNER = 16  # batches between exchanges that are simulated one by one; of more, several are taken as one long one
DRAWS = 400  # times that stand for the law of the mean of several steps


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Of a run that goes on for ever and in which nothing fails; times are virtual seconds."""

    examples_per_second: float
    idle: float  # share of the replicas' time that they wait
    shard_busy: float  # share of the time that shards work
    bytes_per_second: float  # pushed and fetched
    network: float  # share of the time that the busiest network interface is full
    staleness: float  # updates, mean over pushes
    kept: float  # share of the computed examples that are trained on: rounds with backup replicas drop some
    round_s: float  # between two pushes of a replica, mean
    simulated_s: float
    wall_s: float


def speed_of(candidate: Candidate, task: Task, cluster: Cluster, seed: int) -> Speed:
    """`cluster` has step times of its own. Raises `ValueError` as `simulate` does."""
    calm = dataclasses.replace(cluster, failures={}, preemptions=())
    strategy, work, calm = _coarser(candidate.strategy, task, calm)
    recipe = strategy.recipe()
    placement = Placement(calm, recipe)
    elements = sum(parameter.numel() for group in task.param_groups() for parameter in group["params"])
    seconds = _span_s(recipe, placement, calm, elements)
    short = _run(work, strategy, calm, seconds, seed)
    wall_s = short.wall_s
    for _ in range(6):  # the network, and not the replicas, decides how long a round is
        if _exchanges(short) >= FEWEST or short.messages > MESSAGES:
            break
        seconds *= 3
        short = _run(work, strategy, calm, seconds, seed)
        wall_s += short.wall_s
    long = _run(work, strategy, calm, 2 * seconds, seed)
    return _difference(short, long, _load(placement, recipe), wall_s + long.wall_s)


def _run(task: Task, strategy: Strategy, cluster: Cluster, seconds: float, seed: int) -> Forecast:
    settings = Settings(seconds=seconds, snapshot_every_s=None)
    return simulate(lambda: task, strategy, cluster, gradients="none", seed=seed, settings=settings)


def _exchanges(forecast: Forecast) -> float:
    """Exchanges of a replica, mean."""
    return sum(forecast.staleness.values()) / max(1, forecast.shards) / forecast.replicas


def _difference(short: Forecast, long: Forecast, busiest: float, wall_s: float) -> Speed:
    """What the longer run did after the shorter one had ended. `busiest`: seconds of an interface for each byte."""
    seconds = long.training_s - short.training_s
    if seconds <= 0 or long.examples <= short.examples:  # the short one's last round went far beyond its end
        seconds, short = long.training_s, dataclasses.replace(
            short, training_s=0.0, examples=0, bytes=0, staleness={}, goodput=1.0
        )  # fmt: skip

    def share(of_long: float, of_short: float) -> float:
        more = (of_long * long.training_s - of_short * short.training_s) / seconds if seconds else 0.0
        return min(max(more, 0.0), 1.0)

    def computed(forecast: Forecast) -> float:
        return forecast.examples / forecast.goodput if forecast.goodput else 0.0

    examples, travelled = long.examples - short.examples, long.bytes - short.bytes
    pushes = Counter(long.staleness)
    pushes.subtract(short.staleness)
    count = max(sum(pushes.values()), 1)
    tried = computed(long) - computed(short)
    return Speed(
        examples_per_second=examples / seconds if seconds else 0.0, idle=share(long.idle, short.idle),
        shard_busy=share(long.shard_busy, short.shard_busy), bytes_per_second=travelled / seconds if seconds else 0.0,
        network=min(busiest * travelled / seconds, 1.0) if seconds else 0.0,
        staleness=max(sum(updates * n for updates, n in pushes.items()) / count, 0.0),
        kept=min(examples / tried, 1.0) if tried > 0 else 1.0,
        round_s=seconds * long.replicas * max(1, long.shards) / count, simulated_s=long.training_s, wall_s=wall_s,
    )  # fmt: skip


# ---------------------------------------------------------------- how long to simulate


def _span_s(recipe: Recipe, placement: Placement, cluster: Cluster, elements: int) -> float:
    """Seconds of the shorter run: enough rounds of the slowest replica, and not too many messages of all."""
    on = Counter(placement.of(Node("replica", index)) for index in range(recipe.replicas))
    steps = {place: cluster.step_s(place.kind) * place.kind.slowdown_of(count) for place, count in on.items()}
    messages = 1 + 3 * max(1, recipe.shards) / recipe.work.every  # of a batch, about
    rate = sum(count * messages / steps[place] for place, count in on.items())
    code = [place.kind.overhead for place in placement.places]
    code_s = max(each.exchange_s + recipe.replicas * (each.serve_s + each.lease_s) for each in code)
    if not recipe.shards:
        code_s = max(place.kind.round_s(elements) for place in on)
    round_s = recipe.work.every * max(steps.values()) + code_s
    rounds = ROUNDS + (recipe.loop.exchanges.rules.max_delay or 0 if isinstance(recipe.work, Loop) else 0)
    if any(each.lease_s for each in code):  # which the coordinator pays for by the report
        rounds = max(rounds, REPORTS * REPORT_LEASES)
    return max(min(rounds * round_s, MESSAGES / rate), 2 * round_s)


def _load(placement: Placement, recipe: Recipe) -> float:
    """Seconds that the busiest interface is full, for each byte that replicas and shards exchange.

    Every pair of a replica and a shard has an equal part of the bytes, half of them each way. A ring passes each
    machine once.
    """
    replicas = Counter(placement.of(Node("replica", index)) for index in range(recipe.replicas))
    shards = Counter(placement.of(Node("shard", index)) for index in range(recipe.shards))
    if not recipe.shards:
        return max(1 / (2 * recipe.replicas) / place.kind.interface for place in replicas) if len(replicas) > 1 else 0.0
    pairs = recipe.replicas * recipe.shards
    loads = []
    for place in replicas | shards:
        away = replicas[place] * (recipe.shards - shards[place]) + shards[place] * (recipe.replicas - replicas[place])
        loads.append(away / pairs / 2 / place.kind.interface)
    return max(loads)


# ---------------------------------------------------------------- long inner loops


def _coarser(strategy: Strategy, task: Task, cluster: Cluster) -> tuple[Strategy, Task, Cluster]:
    """The same strategy with fewer, longer batches between exchanges.

    A replica that trains alone for 500 batches does nothing that an exchange could be late for: 10 batches, each 50
    times as long and with 50 times the examples, tell as much.
    """
    recipe = strategy.recipe()
    every = recipe.work.every
    field = next((name for name in ("inner_steps", "every") if hasattr(strategy, name)), None)
    task = dataclasses.replace(task, validate=None)  # evaluations would take simulated time, and say nothing
    if recipe.work.local is None or field is None or every <= INNER:
        return strategy, task, cluster
    times = max(n for n in range(1, every // (INNER // 2) + 1) if every % n == 0)
    elements = sum(p.numel() for group in task.param_groups() for p in group["params"])
    machines = tuple(_longer(kind, cluster, elements, times) for kind in cluster.machines)
    changed: Any = strategy
    return (
        dataclasses.replace(changed, **{field: every // times}),
        dataclasses.replace(task, train=ConcatDataset([task.train] * times), batch_size=times * task.batch_size),
        dataclasses.replace(cluster, machines=machines),
    )


def _longer(kind: MachineKind, cluster: Cluster, elements: int, times: int) -> MachineKind:
    """The machine with steps that are each as long as `times` steps and the replica's own updates between them."""
    update_s = UPDATE_SHARE * kind.work_s(elements) + kind.overhead.batch_s
    step_s = times * cluster.step_s(kind) + (times - 1) * update_s
    law, chance = kind.jitter, random.Random(times)
    if not isinstance(law, Constant):
        law = Trace("", tuple(sum(law.draw(chance) for _ in range(times)) / times for _ in range(DRAWS)))
    return dataclasses.replace(kind, step_s=step_s, jitter=law)
