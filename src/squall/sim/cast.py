"""The machines of a chaotic world, their phantoms, and the auditor who watches them: for one life after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from squall.protocol.coordinator import Policy
from squall.protocol.core import Machine, Node, PublishSnapshot
from squall.protocol.evaluator import Evaluator
from squall.protocol.leases import Leases, Limits
from squall.protocol.leasing import LeaseCoordinator
from squall.protocol.link import Linked
from squall.protocol.replica import Replica
from squall.protocol.sandblaster.coordinator import BatchCoordinator, Batches
from squall.protocol.sandblaster.method import State
from squall.protocol.sandblaster.portions import Balance
from squall.protocol.sandblaster.replica import BatchReplica
from squall.protocol.sandblaster.shard import BatchShard
from squall.protocol.shard import Shard
from squall.sim.batch_invariants import BatchAuditor
from squall.sim.batch_phantoms import BatchFile, BatchStage
from squall.sim.chaos import Chaos
from squall.sim.invariants import Auditor, restored
from squall.sim.phantoms import File, Phantom, Stage, Written


class Saved(NamedTuple):
    """A published snapshot. All shards of a resumed run count on from the newest version."""

    manifest: PublishSnapshot
    files: Sequence[File]  # by shard

    @property
    def version(self) -> int:
        return max(self.manifest.versions)


class BatchSaved(NamedTuple):
    """A published snapshot of Sandblaster."""

    manifest: PublishSnapshot
    files: Sequence[BatchFile]  # by shard


class LeaseCast:
    """A run that trains batch by batch."""

    stage: Stage

    def __init__(self, chaos: Chaos) -> None:
        self.chaos = chaos
        self.recipe = chaos.recipe
        self.limits = Limits(epochs=chaos.epochs)
        self.auditor = Auditor(self.recipe, chaos.examples, chaos.batch_size, self.limits)
        self._computed = 0  # in earlier lives

    def begin(self, now: Callable[[], float], saved: Saved | None) -> None:
        chaos, self._saved = self.chaos, saved
        self.stage = Stage(self.recipe, now, self._computed)
        if saved is None:
            leases, number = Leases(chaos.examples, chaos.batch_size, self.limits), 0
            self.auditor.begin(self.stage)
        else:
            leases, number = restored(saved.manifest, chaos.batch_size, self.limits), saved.manifest.number
            self.auditor.begin(self.stage, saved.files, leases)
        self.coordinator = LeaseCoordinator(policy_of(chaos), self.recipe.dealing(), leases, number)

    def member(self, node: Node) -> tuple[Linked, Phantom]:
        file = self._saved.files[node.index] if self._saved is not None and node.role == "shard" else None
        return Linked(self._machine(node)), self.stage.host(node, file)

    def _machine(self, node: Node) -> Machine:
        recipe = self.recipe
        match node.role:
            case "coordinator":
                return self.coordinator
            case "shard":
                return Shard(node.index, recipe.rules(), self._saved.version if self._saved is not None else 0)
            case "replica":
                return Replica(node, recipe.shards, self.chaos.batch_size, recipe.cadence())
        return Evaluator(node, recipe.shards)

    def over(self) -> Saved | None:
        """A life is over: what the next goes on from."""
        self._computed = self.stage.computed
        if not self.stage.published:
            return self._saved
        manifest = self.stage.published[-1]
        version, files = max(manifest.versions), [shard.files[manifest.number] for shard in self.stage.shards]
        return Saved(manifest, [File(file.applied, Written(version, file.written.fold)) for file in files])

    def finished(self, lives: int, spoilt: bool) -> None:
        self.auditor.finished(lives, self.coordinator.trained)


class BatchCast:
    """A run of a method that looks at whole batches."""

    stage: BatchStage

    def __init__(self, chaos: Chaos) -> None:
        self.chaos = chaos
        self.recipe = chaos.recipe
        self.auditor = BatchAuditor(self.recipe, chaos.examples)
        self._computed = 0  # in earlier lives

    def begin(self, now: Callable[[], float], saved: BatchSaved | None) -> None:
        chaos, method, self._saved = self.chaos, self.recipe.batch, saved
        assert method is not None
        self.stage = BatchStage(self.recipe, now, self._computed)
        balance = Balance(chaos.batch_size, method.push_every, method.backup)
        limits = Limits(epochs=chaos.epochs if method.rules.sampled else None)
        given = (policy_of(chaos), method.rules, balance, Batches(chaos.examples, method.examples), limits)
        self.coordinator = BatchCoordinator(*given)
        if saved is not None:
            ledger = saved.manifest.ledger
            state, trained = msgspec.convert(ledger["method"], State), msgspec.convert(ledger["trained"], int)
            self.coordinator = BatchCoordinator(*given, state, trained, saved.manifest.number)
        self.auditor.begin(self.stage, self.coordinator, saved.files if saved is not None else None)

    def member(self, node: Node) -> tuple[Linked, Phantom]:
        file = self._saved.files[node.index] if self._saved is not None and node.role == "shard" else None
        return Linked(self._machine(node)), self.stage.host(node, file)

    def _machine(self, node: Node) -> Machine:
        match node.role:
            case "coordinator":
                return self.coordinator
            case "shard":
                return BatchShard(node.index, max(self._saved.manifest.versions) if self._saved is not None else 0)
            case "replica":
                return BatchReplica(node, self.recipe.shards)
        return Evaluator(node, self.recipe.shards)

    def over(self) -> BatchSaved | None:
        """A life is over: what the next goes on from."""
        self._computed = self.stage.computed
        if not self.stage.published:
            return self._saved
        manifest = self.stage.published[-1]
        return BatchSaved(manifest, [store.files[manifest.number] for store in self.stage.stores])

    def finished(self, lives: int, spoilt: bool) -> None:
        self.auditor.finished(spoilt)


def policy_of(chaos: Chaos) -> Policy:
    return Policy(
        chaos.replicas, chaos.recipe.shards, evaluate=chaos.evaluate, snapshot_every_s=chaos.snapshot_every_s
    )  # fmt: skip
