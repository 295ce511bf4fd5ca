"""Runs in chaotic worlds that are no loops with shards: all-reduce, and methods that look at whole batches."""

from __future__ import annotations

import msgspec

from squall.protocol.collective.coordinator import CollectiveCoordinator
from squall.protocol.collective.replica import CollectiveReplica
from squall.protocol.leases import Leases, Limits
from squall.protocol.machine import Machine
from squall.protocol.nodes import Node
from squall.protocol.sandblaster.coordinator import BatchCoordinator, BatchWork
from squall.protocol.sandblaster.method import MethodState
from squall.protocol.sandblaster.portions import Balance
from squall.protocol.sandblaster.replica import BatchReplica
from squall.protocol.sandblaster.shard import BatchShard
from squall.sim.proof.batch_invariants import BatchAuditor
from squall.sim.proof.batch_phantoms import BatchPhantomHosts
from squall.sim.proof.chaos import Chaos
from squall.sim.proof.group_invariants import GroupAuditor
from squall.sim.proof.group_phantoms import GroupPhantomHosts, MemberPhantom, Weights
from squall.sim.proof.loops import leaves_out
from squall.sim.proof.positions import restored
from squall.sim.proof.runs import ADDRESS, ChaoticRun
from squall.sim.proof.share_phantoms import SharePhantom
from squall.strategies.work import BatchMethod


class ChaoticGroupRun(ChaoticRun):
    """A run of all-reduce. What a snapshot holds is the weights of the member that has written it."""

    hosts: GroupPhantomHosts
    _kind_of_hosts = GroupPhantomHosts
    _auditor: GroupAuditor
    _coordinator: CollectiveCoordinator

    def __init__(self, chaos: Chaos) -> None:
        super().__init__(chaos)
        self._limits = Limits(epochs=chaos.epochs)
        self._auditor = GroupAuditor()
        self._weights = Weights()  # that a life begins with

    def _begin(self) -> None:
        chaos, saved = self.chaos, self.saved
        self.hosts.travels = False
        if chaos.scripted and not self.recipe.divided:
            self.hosts.logs, self.hosts.leaves_out = True, leaves_out
        self.hosts.kind, self.hosts.begun = SharePhantom if self.recipe.divided else MemberPhantom, self._weights
        leases, number = Leases(chaos.examples, chaos.batch_size, self._limits), 0
        if saved is not None:
            leases, number = restored(saved.manifest, chaos.batch_size, self._limits), saved.manifest.number
        divided = self.recipe.divided
        self._coordinator = CollectiveCoordinator(self._policy, leases, self._weights.clock, number, divided)
        self._auditor.begin(self.hosts, lambda: self._coordinator, self._weights)

    def _machine(self, node: Node) -> Machine:
        begun = self._weights.clock, self._weights.examples
        return CollectiveReplica(node, self.chaos.replicas, *begun, address=ADDRESS, divided=self.recipe.divided)

    def over(self) -> None:
        super().over()
        if self.hosts.published:
            self._weights = self.hosts.written[self.hosts.published[-1].number]

    def finished(self, lives: int, spoilt: bool) -> None:
        self._auditor.finished(self.chaos.examples, self.chaos.epochs, self._coordinator.trained)

    def tear(self, seconds: float) -> None:
        """Break the newest group, and all that form so long."""
        self.hosts.circle.tear(seconds)


class ChaoticBatchRun(ChaoticRun):
    """A run of a method that looks at whole batches."""

    hosts: BatchPhantomHosts
    _kind_of_hosts = BatchPhantomHosts
    _auditor: BatchAuditor
    _coordinator: BatchCoordinator

    def __init__(self, chaos: Chaos) -> None:
        super().__init__(chaos)
        self._auditor = BatchAuditor(self.recipe, chaos.examples)

    def _begin(self) -> None:
        chaos, saved, method = self.chaos, self.saved, self.recipe.work
        assert isinstance(method, BatchMethod)
        balance = Balance(chaos.batch_size, method.push_every, method.backup)
        limits = Limits(epochs=chaos.epochs if method.rules.sampled else None)
        state, trained, number = MethodState(), 0, 0
        if saved is not None:
            ledger, number = saved.manifest.ledger, saved.manifest.number
            state, trained = msgspec.convert(ledger["method"], MethodState), msgspec.convert(ledger["trained"], int)
        work = BatchWork(method.rules, chaos.examples, method.examples, balance, limits)
        self._coordinator = BatchCoordinator(self._policy, work, state, trained, number)
        self._auditor.begin(self.hosts, lambda: self._coordinator, saved.files if saved is not None else None)

    def _machine(self, node: Node) -> Machine:
        if node.role == "shard":
            return BatchShard(node.index, self._version, self._examples)
        return BatchReplica(node, self.recipe.shards, address=ADDRESS, part=self._part(node))

    def finished(self, lives: int, spoilt: bool) -> None:
        self._auditor.finished(spoilt)
