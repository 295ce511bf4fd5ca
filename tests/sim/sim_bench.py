"""A whole run in virtual time with phantoms as hosts, with actions (kills, stops) before given events."""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from squall.protocol import events, machine
from squall.protocol.check import check
from squall.protocol.effects import End
from squall.protocol.evaluator import Evaluator
from squall.protocol.exchanges import Cadence, Exchanges, Rules
from squall.protocol.leases import Leases, Limits
from squall.protocol.link import Linked
from squall.protocol.loop_coordinator import LoopCoordinator
from squall.protocol.nodes import COORDINATOR, NURSERY, Node
from squall.protocol.notes import WorkReported
from squall.protocol.nursery import NurseryMachine
from squall.protocol.policy import Policy
from squall.protocol.replica import Replica
from squall.protocol.shard import Shard
from squall.runtime.wire import Conditions, Network
from squall.runtime.world import World
from squall.runtime.world_nodes import Premises
from squall.sim.proof.invariants import Auditor
from squall.sim.proof.memory import BatchRange
from squall.sim.proof.phantom_hosts import PhantomHosts
from squall.sim.proof.phantoms import Phantom
from squall.strategies import Recipe
from squall.strategies.work import Loop, Update

HANG_S = 120.0  # of virtual time; the runs here take some seconds


def mean_of_three(replicas: int, shards: int) -> Recipe:
    """Rounds of three batches a replica, dealt as a whole."""
    exchanges = Exchanges(Cadence(push_every=3, fetch_every=3), Rules("mean", max_delay=0))
    work = Loop(update=Update(optimizer=partial(torch.optim.SGD, lr=0.1)), exchanges=exchanges)
    return Recipe(replicas=replicas, shards=shards, work=work)


class Bench(PhantomHosts):
    """A run of a recipe; `go` runs it to its end, with actions before given events, and audits all of it."""

    def __init__(
        self, recipe: Recipe, *, network: Network | None = None, seed: int = 0, examples: int = 22, batch_size: int = 4,
        limits: Limits | None = None, notice_s: float = 0.0, keep_trace: bool = False, **policy: Any,
    ) -> None:  # fmt: skip
        super().__init__(recipe, lambda: self.world.now)
        self.batch_size, self.seed = batch_size, seed
        self.limits = limits or Limits(epochs=2)
        self.leases = Leases(examples, batch_size, self.limits)
        self.coordinator = LoopCoordinator(
            Policy(recipe.replicas, recipe.shards, **policy), recipe.loop.exchanges, self.leases
        )
        self.auditor = Auditor(recipe, examples, batch_size, self.limits)
        self.auditor.begin(self)
        self.story: deque[tuple[float, Node, object]] = deque(maxlen=60)
        self.digest = hashlib.sha256() if keep_trace else None
        self.steps = 0
        self._touched: Node = COORDINATOR
        self.world = World(Conditions(network, self.prices, notice_s), seed=seed, spawn=self._member)
        self.world.trace = self._trace
        self.world.add(NURSERY, Linked(NurseryMachine()), Premises())
        nodes = [COORDINATOR, *(Node("shard", i) for i in range(recipe.shards))]
        nodes += [Node("replica", i) for i in range(recipe.replicas)]
        for node in [*nodes, Node("evaluator", recipe.replicas)] if self.coordinator.policy.evaluate else nodes:
            self.world.add(node, *self._member(node))

    def _member(self, node: Node) -> tuple[Linked, Phantom]:
        return Linked(self._machine(node)), self.host(node)

    def _machine(self, node: Node) -> machine.Machine:
        recipe = self.recipe
        match node.role:
            case "coordinator":
                return self.coordinator
            case "shard":
                return Shard(node.index, recipe.loop.exchanges)
            case "replica":
                return Replica(node, recipe.shards, self.batch_size, recipe.loop.exchanges)
        return Evaluator(node, recipe.shards)

    def _trace(self, now: float, node: Node, what: Any) -> None:
        self._touched = node
        self.story.append((now, node, what))
        if self.digest is not None:
            self.digest.update(f"{now!r} {node} {what!r}\n".encode())
        self.auditor.watch(now, node, what)

    # ------------------------------------------------------------ running

    def go(self, actions: Mapping[int, Callable[["Bench"], None]] | None = None) -> "Bench":
        """Run to the end; `actions` happen before the event of their number."""
        actions = actions or {}
        try:
            while not self.world.ended:
                if self.steps in actions:
                    actions[self.steps](self)
                assert self.world._queue, "the queue is empty, but the coordinator has not ended"
                assert self.world.now < HANG_S, "the run hangs"
                self.world.step()
                self.steps += 1
                place = self.world.processes.get(self._touched)
                if place is not None:
                    check(place.linked)
        except AssertionError as error:
            lines = [f"{now:.4f} {node} {what}" for now, node, what in self.story]
            error.add_note("\n".join([f"seed {self.seed}, event {self.steps}; the last events were", *lines]))
            raise
        return self

    def kill(self, role: str, index: int) -> None:
        for node, place in list(self.world.processes.items()):
            if node.role == role and node.index == index and place.end is None:
                self.memories[node].in_use.pop(node.index, None) if role != "shard" else None
                self.world.kill(node)

    def stop(self) -> None:
        self.world.post(COORDINATOR, events.StopRequested("interrupted"))

    @property
    def end(self) -> End:
        end = self.world.processes[COORDINATOR].end
        assert end is not None
        return end

    # ------------------------------------------------------------ what was trained

    def whole(self) -> Counter[BatchRange]:
        """Batch -> how many computations of it *every* shard has applied; no shard may apply one twice."""
        everywhere: Counter[int] = Counter()
        batches: dict[int, BatchRange] = {}
        for shard in self.shards:
            own = [gradient for applied in shard.applied for gradient in applied.gradients]
            numbers = Counter(gradient.number for gradient in own)
            assert max(numbers.values(), default=1) == 1, f"{shard.node} applied a gradient twice: {numbers}"
            everywhere.update(numbers)
            batches.update({gradient.number: (gradient.epoch, gradient.start, gradient.stop) for gradient in own})
        return Counter(batches[number] for number, count in everywhere.items() if count == len(self.shards))

    def expect_all_trained(self, epochs: int = 2) -> None:
        """Every batch was applied by every shard, once; parts of a second time are of a replica that died between."""
        size, n = self.batch_size, self.leases.examples
        wanted = [(e, start, min(start + size, n)) for e in range(epochs) for start in range(0, n, size)]
        assert self.whole() == Counter(wanted)
        assert sum(report.stats.examples for report in self.noted(WorkReported)) == epochs * n

    def expect_nothing_lost(self) -> None:
        """What a run resumed from any of the snapshots would not train again is in every shard's file."""
        for manifest in self.published:
            progress = [(int(lease), upto) for lease, upto in manifest.progress.items()]
            left = Leases.restore(dict(manifest.ledger), progress, self.batch_size, self.limits)
            check(left)
            dealt = {(e, i) for e in range(left.epoch) for i in range(left.examples)}
            dealt |= {(left.epoch, i) for i in range(left.cursor)}
            trained = dealt - {(e, i) for e, start, stop in left.returned for i in range(start, stop)}
            for shard in self.shards:
                gradients = [g for applied in shard.files[manifest.number].applied for g in applied.gradients]
                missing = trained - {(g.epoch, i) for g in gradients for i in range(g.start, g.stop)}
                assert not missing, f"snapshot {manifest.number} of {shard.node} lacks {sorted(missing)[:5]}"
