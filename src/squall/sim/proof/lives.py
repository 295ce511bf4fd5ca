"""The machines of a chaotic world, their phantoms, and the auditor who watches them: for one life after the other."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from squall.protocol.best import Goal
from squall.protocol.effects import PublishSnapshot
from squall.protocol.evaluator import Evaluator
from squall.protocol.leases import Leases, Limits
from squall.protocol.link import Linked
from squall.protocol.loop_coordinator import LoopCoordinator
from squall.protocol.machine import Machine
from squall.protocol.nodes import Node
from squall.protocol.notes import WeightsMeasured
from squall.protocol.policy import Policy
from squall.protocol.replica import Replica
from squall.protocol.sandblaster.coordinator import BatchCoordinator, BatchOrder, BatchWork
from squall.protocol.sandblaster.method import MethodState
from squall.protocol.sandblaster.portions import Balance
from squall.protocol.sandblaster.replica import BatchReplica
from squall.protocol.sandblaster.shard import BatchShard
from squall.protocol.shard import Shard
from squall.sim.proof.batch_invariants import BatchAuditor
from squall.sim.proof.batch_phantoms import BatchStage
from squall.sim.proof.broken import Broken
from squall.sim.proof.chaos import Chaos
from squall.sim.proof.invariants import Auditor
from squall.sim.proof.loops import leaves_out, rates, rates_of_one, steps
from squall.sim.proof.memory import File
from squall.sim.proof.phantoms import Phantom, PhantomStage
from squall.sim.proof.positions import restored
from squall.strategies.work import BatchMethod


class SavedSnapshot(NamedTuple):
    """A published snapshot. All shards of a resumed run count on from the newest version, and the fewest examples."""

    manifest: PublishSnapshot
    files: Sequence[File]  # by shard

    @property
    def version(self) -> int:
        return max(self.manifest.versions)

    @property
    def examples(self) -> int:
        return min(self.manifest.examples)


class Life(ABC):
    """Everybody in a world. `begin` is called once for each life."""

    stage: PhantomStage

    def __init__(self, chaos: Chaos) -> None:
        self.chaos = chaos
        self.recipe = chaos.recipe
        self.saved: SavedSnapshot | None = None  # what this life goes on from
        self.computed = 0  # in earlier lives
        self.best: tuple[float, float] | None = None  # alike: `Stage.best`
        self._least = math.inf  # of all losses that were recorded

    @abstractmethod
    def begin(self, now: Callable[[], float]) -> None: ...

    @abstractmethod
    def watch(self, now: float, node: Node, what: object) -> None:
        """Raise `Broken` where an invariant does not hold."""

    def check_best(self, what: object) -> None:
        """Raise `Broken` where an evaluation is recorded, and better weights are not kept."""
        if not self.chaos.keeps or not isinstance(what, WeightsMeasured) or "loss" not in what.values:
            return
        self._least = min(self._least, what.values["loss"])
        told, kept = self.stage.best or (math.inf, math.inf)
        if told != kept or self._least < kept:
            raise Broken("I9", f"the best loss is {self._least}, and weights of {kept} are kept as those of {told}")

    @abstractmethod
    def finished(self, lives: int, spoilt: bool) -> None:
        """The run has ended well. Raise `Broken` where that is not so."""

    @abstractmethod
    def _machine(self, node: Node) -> Machine: ...

    def member(self, node: Node) -> tuple[Linked, Phantom]:
        """A process."""
        file = self.saved.files[node.index] if self.saved is not None and node.role == "shard" else None
        return Linked(self._machine(node)), self.stage.host(node, self._version, file)

    def over(self) -> None:
        """A life is over: the next goes on from its newest snapshot."""
        self.computed, self.best = self.stage.computed, self.stage.best
        if self.stage.published:
            manifest = self.stage.published[-1]
            self.saved = SavedSnapshot(manifest, self.stage.files(manifest.number))

    @property
    def _policy(self) -> Policy:
        chaos = self.chaos
        return Policy(
            chaos.replicas, self.recipe.shards, evaluate=chaos.evaluate, evaluate_every_s=chaos.evaluate_every_s,
            snapshot_every_s=chaos.snapshot_every_s,
            goal=Goal(keep=chaos.keeps, best=self.best[0] if self.best is not None else None),
        )  # fmt: skip

    @property
    def _version(self) -> int:
        return self.saved.version if self.saved is not None else 0

    @property
    def _examples(self) -> int:
        return self.saved.examples if self.saved is not None else 0


class LoopLife(Life):
    """A run that trains batch by batch."""

    def __init__(self, chaos: Chaos) -> None:
        super().__init__(chaos)
        self._limits = Limits(epochs=chaos.epochs)
        self._auditor = Auditor(self.recipe, chaos.examples, chaos.batch_size, self._limits)

    def watch(self, now: float, node: Node, what: object) -> None:
        self._auditor.watch(now, node, what)

    def begin(self, now: Callable[[], float]) -> None:
        chaos, saved = self.chaos, self.saved
        self.stage = PhantomStage(self.recipe, now, self.computed)
        self.stage.best, self.stage.travels = self.best, chaos.travels
        self.stage.logs = chaos.scripted
        if chaos.scripted:
            self.stage.leaves_out = leaves_out
        if chaos.scripted and self.recipe.work.several_steps:
            self.stage.steps_on, self.stage.factors = steps, rates_of_one
        elif chaos.scripted and self.recipe.work.local is None:  # its own optimizer would take the rates itself
            self.stage.factors = rates
        if saved is None:
            leases, number = Leases(chaos.examples, chaos.batch_size, self._limits), 0
            self._auditor.begin(self.stage)
        else:
            leases, number = restored(saved.manifest, chaos.batch_size, self._limits), saved.manifest.number
            self._auditor.begin(self.stage, saved.version, saved.files, leases)
        self._coordinator = LoopCoordinator(self._policy, self.recipe.loop.exchanges, leases, number)

    def _machine(self, node: Node) -> Machine:
        recipe = self.recipe
        match node.role:
            case "coordinator":
                return self._coordinator
            case "shard":
                return Shard(node.index, recipe.loop.exchanges.rules, self._version, self._examples)
            case "replica":
                return Replica(node, recipe.shards, self.chaos.batch_size, recipe.loop.exchanges)
        return Evaluator(node, recipe.shards, keep="loss" if self.chaos.keeps else "")

    def finished(self, lives: int, spoilt: bool) -> None:
        self._auditor.finished(lives, self._coordinator.trained)


class BatchLife(Life):
    """A run of a method that looks at whole batches."""

    def __init__(self, chaos: Chaos) -> None:
        super().__init__(chaos)
        self._auditor = BatchAuditor(self.recipe, chaos.examples)

    def begin(self, now: Callable[[], float]) -> None:
        chaos, saved, method = self.chaos, self.saved, self.recipe.work
        assert isinstance(method, BatchMethod)
        stage = self.stage = BatchStage(self.recipe, now, self.computed)
        stage.best, stage.travels = self.best, chaos.travels
        balance = Balance(chaos.batch_size, method.push_every, method.backup)
        limits = Limits(epochs=chaos.epochs if method.rules.sampled else None)
        state, trained, number = MethodState(), 0, 0
        if saved is not None:
            ledger, number = saved.manifest.ledger, saved.manifest.number
            state, trained = msgspec.convert(ledger["method"], MethodState), msgspec.convert(ledger["trained"], int)
        work = BatchWork(method.rules, BatchOrder(chaos.examples, method.examples), balance, limits)
        self._coordinator = BatchCoordinator(self._policy, work, state, trained, number)
        self._auditor.begin(stage, self._coordinator, saved.files if saved is not None else None)

    def watch(self, now: float, node: Node, what: object) -> None:
        self._auditor.watch(now, node, what)

    def _machine(self, node: Node) -> Machine:
        match node.role:
            case "coordinator":
                return self._coordinator
            case "shard":
                return BatchShard(node.index, self._version, self._examples)
            case "replica":
                return BatchReplica(node, self.recipe.shards)
        return Evaluator(node, self.recipe.shards, keep="loss" if self.chaos.keeps else "")

    def finished(self, lives: int, spoilt: bool) -> None:
        self._auditor.finished(spoilt)
