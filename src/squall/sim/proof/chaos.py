"""What a seed decides: a strategy, a small run of it, and the faults that it meets. All of it is plain data."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from squall.prediction import Prediction
from squall.protocol.collective.tries import BROKEN_IN_A_ROW
from squall.protocol.policy import MachineRoom
from squall.runtime.placement import ONE_PART, Parts
from squall.runtime.wire import Network
from squall.sim.proof import chaotic_machines as several
from squall.sim.proof import hung, mortal
from squall.sim.proof.faults import (
    Cut,
    Fault,
    FullDisk,
    Kill,
    Pause,
    Role,
    Skew,
    Spoil,
    Tear,
    UserStop,
    Weather,
)
from squall.sim.proof.rotten import rots
from squall.strategies import (
    AllReduce,
    AsynchronousSGD,
    Averaging,
    BoundedDelay,
    DelayedProximal,
    DiLoCo,
    Downpour,
    ElasticAveraging,
    Recipe,
    Sandblaster,
    Strategy,
    Synchronous,
)
from squall.strategies.work import Loop

ALL_REDUCE, DIVIDED = "all-reduce", "divided all-reduce"  # of the second the members divide the optimizer's state
PREDICTION = "prediction"  # trains nothing: `answers.answering` makes its worlds
Make = Callable[[int, int], Strategy]

# For so many replicas and shards: every strategy but `SingleProcess`, in every form that its machines tell apart.
STRATEGIES: dict[str, Make] = {
    "downpour": lambda n, k: Downpour(replicas=n, shards=k),
    "downpour, push 4, fetch 2": lambda n, k: Downpour(replicas=n, shards=k, push_every=4, fetch_every=2),
    "downpour, push 4, fetch 2, delay 0": lambda n, k: Downpour(
        replicas=n, shards=k, push_every=4, fetch_every=2, max_delay=0
    ),
    "downpour, push 1, fetch 3": lambda n, k: Downpour(replicas=n, shards=k, push_every=1, fetch_every=3),
    "downpour, overlap": lambda n, k: Downpour(replicas=n, shards=k, overlap=True),
    "downpour, warm start": lambda n, k: Downpour(replicas=n, shards=k, warm_start=8),
    "downpour, overlap, push 2": lambda n, k: Downpour(replicas=n, shards=k, overlap=True, push_every=2),
    "bounded delay 0": lambda n, k: BoundedDelay(replicas=n, shards=k, max_delay=0),
    "bounded delay 1": lambda n, k: BoundedDelay(replicas=n, shards=k, max_delay=1),
    "bounded delay 1, overlap": lambda n, k: BoundedDelay(replicas=n, shards=k, max_delay=1, overlap=True),
    "stale synchronous": lambda n, k: BoundedDelay(replicas=n, shards=k, max_delay=2, exchange_every=2),
    "scaled": lambda n, k: AsynchronousSGD(replicas=n, shards=k, staleness="scale"),
    "compensated": lambda n, k: AsynchronousSGD(replicas=n, shards=k, staleness="compensate", max_delay=2),
    "delayed proximal": lambda n, k: DelayedProximal(replicas=n, shards=k, blocks=2, max_delay=1),
    "synchronous": lambda n, k: Synchronous(replicas=n, shards=k),
    "backup, drop": lambda n, k: Synchronous(replicas=n, backup=n // 2),
    "backup, fold": lambda n, k: Synchronous(replicas=n, backup=n // 2, late="fold"),
    "averaging": lambda n, k: Averaging(replicas=n, shards=k, every=2),
    "elastic averaging": lambda n, k: ElasticAveraging(replicas=n, shards=k, every=2),
    "diloco": lambda n, k: DiLoCo(replicas=n, shards=k, inner_steps=2),
    "asynchronous diloco": lambda n, k: DiLoCo(replicas=n, shards=k, inner_steps=2, form="asynchronous"),
    "matched diloco": lambda n, k: DiLoCo(replicas=n, shards=k, inner_steps=3, form="asynchronous", matched=True),
    "decoupled diloco": lambda n, k: DiLoCo(replicas=n, inner_steps=2, form="decoupled"),
    "sandblaster": lambda n, k: Sandblaster(batch="full", replicas=n, shards=k, push_every=2),
    "sandblaster, sampled": lambda n, k: Sandblaster(replicas=n, shards=k, batch=20, push_every=1),
    ALL_REDUCE: lambda n, k: AllReduce(replicas=n),
    DIVIDED: lambda n, k: AllReduce(replicas=n, shard_optimizer=n > 1),
}
FAULTS_AT_MOST = 6
# The word of a group that a death has broken may come before that of the death; and a clock may run twice as fast.
TEARS_AT_MOST, TORN_AT_MOST_S = BROKEN_IN_A_ROW - 3, 1.3
SCRIPTED = 0.4  # of the worlds have loops of users' own
DIVIDES = 0.5  # of the worlds of all-reduce divide the optimizer's state
KEEPS = 0.5  # of the worlds keep the best weights
TRAVELS = 0.5  # of the worlds have hosts without a common memory
BREAKS = 0.3  # of the worlds with loops have one that ends the training
LONG = 0.03  # of the worlds have many batches, soon computed
FOLLOWED = 0.4  # of the cuts, pauses and storms are followed by the death of somebody who is in them
DOOMED = 0.15  # of the deaths are followed by those of all who start in the place
LASTING_S = 4.0  # that an epoch takes longer where a place is left so: else it would be over before that is given up
LAID = {True: ", spread", False: "", None: ", together"}  # parts
MORTAL = ("replica", "evaluator")  # others start in their place
# What a world may go without: the field, its value then, and the flag of `squall simulate` for that.
OFF: dict[str, tuple[bool | None, str]] = {
    "scripted": (False, "--no-script"), "keeps": (False, "--no-best"), "evaluate": (False, "--no-evaluator"),
    "snapshot_every_s": (None, "--no-snapshots"),
}  # fmt: skip


@dataclass(frozen=True)
class Chaos:
    """A run and its faults. `dataclasses.replace` makes a smaller one of it."""

    seed: int
    strategy: str  # of STRATEGIES
    replicas: int
    shards: int
    examples: int
    batch_size: int
    epochs: int
    network: Network  # in good weather
    paces: tuple[float, ...]  # seconds that a batch takes, by slot
    notice_s: float  # until the coordinator hears that a process died
    snapshot_every_s: float | None
    evaluate: bool
    evaluate_every_s: float | None  # beside the evaluation after each epoch
    faults: tuple[Fault, ...]
    scripted: bool = False  # replicas are users' loops
    keeps: bool = False  # the best weights
    travels: bool = False  # hosts share no memory: payloads travel with their frames
    watched: bool = False  # nurseries look for who hangs
    breaks_at: int | None = None  # computation with which a user's loop ends the training, by a break
    machines: int = 1  # that the run begins on; more may join
    parts: int = 1  # of each replica
    spread_parts: bool | None = False  # over as many machines as possible; None: never over two
    loaders: int = 0  # of each member of a group
    copies: int = 1  # of each shard
    deputy: bool = False  # the coordinator has one

    @property
    def recipe(self) -> Recipe:
        return _recipe(self.strategy, self.replicas, self.shards)

    @property
    def rooms(self) -> tuple[MachineRoom, ...]:
        """The machines, where there are several. The first has the coordinator, and room for a replica at least."""
        sizes = self.machines, self.replicas, self.recipe.shards, self.parted, self.copies
        return several.rooms(self.seed, *sizes, self.deputy, self.keeps) if self.machines > 1 else ()

    @property
    def parted(self) -> Parts:
        return Parts(self.parts, self.spread_parts)

    def __str__(self) -> str:
        machines = f" on {self.machines} machines" if self.machines > 1 else ""
        machines += f" in {self.parts} parts{LAID[self.spread_parts]}" if self.parts > 1 else ""
        sizes = f"{self.replicas} replicas, {self.recipe.shards} shards{machines}"
        data = f"{self.epochs} epochs of {self.examples} examples in batches of {self.batch_size}"
        faults = (f"  fault {i}, event {fault.at:4d}: {fault}" for i, fault in enumerate(self.faults))
        return "\n".join([f"world {self.seed}: {self.strategy}, {sizes}, {data}", *faults])


@cache
def _recipe(strategy: str, replicas: int, shards: int) -> Recipe:
    strategies: dict[str, Make] = {**STRATEGIES, PREDICTION: lambda n, k: Prediction(replicas=n)}
    return strategies[strategy](replicas, shards).recipe()


def chaos(seed: int) -> Chaos:
    """World number `seed`: the strategies take turns, all else is chance."""
    chance = random.Random(seed)
    names = [name for name in STRATEGIES if name not in (ALL_REDUCE, DIVIDED)]
    sweep, place = divmod(seed, len(names))
    grouped = place == sweep % len(names)  # it takes one place of each sweep: others' worlds stay as they were
    divided = random.Random(f"{seed} divided").random() < DIVIDES
    strategy = (DIVIDED if divided else ALL_REDUCE) if grouped else names[place]
    replicas, shards = chance.choice((1, 2, 2, 3, 3, 4)), chance.choice((1, 2, 2, 3))
    batch_size, batches, epochs = 4, chance.randint(3, 8), chance.choice((1, 2, 2, 3))
    examples = batches * batch_size - chance.randrange(batch_size)
    if strategy == "sandblaster, sampled":
        examples += 20
    slow, pace_s = chance.choice((1.0, 1.0, 3.0, 8.0)), 0.01
    if chance.random() < LONG:  # as many leases as a replica does not report at once, and more than shards remember
        examples, batch_size, epochs, pace_s = 120, 1, 1, 0.001
    machines = several.machines_of(seed)
    parts = several.parts_of(seed) if machines > 1 and strategy != DIVIDED else ONE_PART
    shards = 0 if grouped else shards
    paces = tuple(pace_s * chance.uniform(0.7, 1.4) * (slow if slot == 0 else 1.0) for slot in range(replicas))
    if isinstance(_recipe(strategy, replicas, shards).work, Loop):
        paces = hung.slowed(seed, paces, examples // batch_size * epochs)
    breaks = random.Random(f"{seed} breaks")  # of its own, as `keeps`: all else of a seed's world stays as it was
    events = 40 + 4 * (examples // batch_size) * epochs * (shards + 2)  # about as many as the run will have
    return _doomed(Chaos(
        seed, strategy, replicas, shards, examples, batch_size, epochs,
        network=Network(latency_s=0.001, jitter_s=chance.choice((0.0, 0.001, 0.004))),
        paces=paces, notice_s=chance.choice((0.0, 0.002, 0.02)), machines=machines,
        snapshot_every_s=chance.choice((None, 0.02, 0.05)), evaluate=chance.random() < 0.7,
        evaluate_every_s=chance.choice((None, None, 0.03)),
        faults=several.slow_stops(seed, machines, hung.at_stops(
            seed, _faults(chance, events, replicas, shards) + several.machine_faults(seed, machines, events)
            + several.lies_and_jams(seed, machines, replicas, events) + mortal.deaths_of_shards(seed, shards, events)
            + mortal.deaths_of_coordinators(seed, events)
            + several.part_faults(seed, parts, replicas, events) + (_tears(seed, events) if grouped else ())
            + hung.hangs(seed, machines, _others(replicas, shards), events)
            + rots(seed, events),
            _others(replicas, shards),
        )) + mortal.others(seed, shards, events)
        + (mortal.deaths_behind_changes(seed, shards, events) if strategy.startswith("sandblaster") else ()),
        parts=parts.number, spread_parts=parts.spread,
        scripted=chance.random() < SCRIPTED, keeps=random.Random(f"{seed} keeps").random() < KEEPS,
        travels=random.Random(f"{seed} travels").random() < TRAVELS,
        loaders=random.Random(f"{seed} loading").choice((0, 0, 1, 3)) if grouped else 0,
        watched=hung.watched(seed), breaks_at=breaks.randint(1, 3 * batches) if breaks.random() < BREAKS else None,
    ))  # fmt: skip


def _faults(chance: random.Random, events: int, replicas: int, shards: int) -> tuple[Fault, ...]:
    parts = [Role("coordinator"), *_others(replicas, shards)]
    found: list[Fault] = []
    count = chance.randint(0, FAULTS_AT_MOST)
    while len(found) < count:
        fault = _fault(chance, events, parts)
        found.append(fault)
        if chance.random() < FOLLOWED:
            found += _death_in(fault, chance, parts)
    return tuple(sorted(found, key=lambda fault: fault.at))


def _tears(seed: int, events: int) -> tuple[Fault, ...]:
    chance = random.Random(f"{seed} tears")
    at = [chance.randrange(events) for _ in range(chance.randint(0, TEARS_AT_MOST))]
    lasting_s = chance.choice((0.0, TORN_AT_MOST_S)) if len(at) == 1 else 0.0
    return tuple(Tear(each, chance.uniform(0.0, lasting_s)) for each in at)


def _others(replicas: int, shards: int) -> list[Role]:
    """All roles but the coordinator."""
    return [
        *(Role("shard", i) for i in range(shards)), *(Role("replica", i) for i in range(replicas)), Role("evaluator"),
    ]  # fmt: skip


def _doomed(world: Chaos) -> Chaos:
    """The world, in which after some deaths the next processes in that place die as they start."""
    chance, faults, paces = random.Random(f"{world.seed} doomed"), list(world.faults), world.paces
    passes = 1 if isinstance(world.recipe.work, Loop) else 4  # more; L-BFGS evaluates its batch again and again
    lasting_s = LASTING_S / passes * world.batch_size / world.examples
    for i, fault in enumerate(faults):
        if isinstance(fault, Kill) and fault.part.role in MORTAL and chance.random() < DOOMED:
            faults[i] = dataclasses.replace(fault, again=chance.randint(1, 6))
            paces = tuple(pace + lasting_s for pace in world.paces)
    return dataclasses.replace(world, faults=tuple(faults), paces=paces)


def _death_in(fault: Fault, chance: random.Random, parts: list[Role]) -> list[Fault]:
    """Deaths of processes whose messages are late or cut off, or that stand still: they leave things half done."""
    match fault:
        case Cut(_, _, sender, receiver):
            ends = [sender, receiver]
        case Pause(_, _, part):
            ends = [part]
        case Weather():
            ends = [chance.choice(parts), Role("evaluator")]
        case _:
            return []
    return [Kill(fault.at + chance.randint(1, 40), part) for part in ends if part.role in MORTAL]


def _fault(chance: random.Random, events: int, parts: list[Role]) -> Fault:
    at = chance.randrange(events)
    mortal = [part for part in parts if part.role in MORTAL]
    match chance.randrange(14):
        case 0 | 1:
            loss, duplication = chance.choice((0.0, 0.05, 0.3)), chance.choice((0.0, 0.1, 0.5))
            return Weather(at, chance.uniform(0.05, 2.0), loss, duplication, chance.choice((0.001, 0.02, 0.2)))
        case 2 | 3 | 4:
            sender, receiver = chance.sample(parts, 2)
            return Cut(at, chance.uniform(0.01, 2.0), sender, receiver, chance.random() < 0.5)
        case 5:
            return Pause(at, chance.choice((0.01, 0.1, 1.5)) * chance.uniform(0.5, 1.0), chance.choice(parts))
        case 6 | 7 | 8:
            return Kill(at, chance.choice(mortal), chance.choice((0.0, 0.003, 0.05)))
        case 9:
            return Kill(at, chance.choice(parts), chance.choice((0.0, 0.05)))
        case 10:
            return Skew(chance.choice(parts), chance.choice((0.5, 0.9, 1.1, 2.0)), chance.uniform(0.0, 1000.0))
        case 11 | 12:
            return chance.choice((Spoil(at), Spoil(at), FullDisk(at)))
    return UserStop(at)


def smaller(world: Chaos) -> list[Chaos]:
    """Worlds with one thing less, the faults first."""
    faults = world.faults
    without: list[dict[str, Any]] = [{"faults": faults[:i] + faults[i + 1 :]} for i in range(len(faults))]
    if world.epochs > 1:
        without.append({"epochs": world.epochs - 1})
    if world.examples > 2 * world.batch_size and world.strategy != "sandblaster, sampled":
        without.append({"examples": world.examples - world.batch_size})
    sizes = [size for size in ("replicas", "shards", "machines", "parts") if getattr(world, size) > 1]
    without += [{size: getattr(world, size) - 1} for size in sizes]
    without += [{name: value} for name, (value, _) in OFF.items() if getattr(world, name) != value]
    return [dataclasses.replace(world, **less) for less in without]
