"""A whole run in virtual time with fake hosts, with actions (kills, stops) before given events."""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from sim_hosts import COMPUTE_S, Batch, CoordinatorHost, EvaluatorHost, Gradient, ReplicaHost, ShardHost

from squall.protocol import core
from squall.protocol.check import check
from squall.protocol.coordinator import Policy
from squall.protocol.core import COORDINATOR, End, Node, Note, PublishSnapshot
from squall.protocol.evaluator import Evaluator
from squall.protocol.leases import Leases, Limits
from squall.protocol.leasing import LeaseCoordinator
from squall.protocol.link import Linked
from squall.protocol.replica import Replica
from squall.protocol.shard import Shard
from squall.sim.world import Network, World
from squall.strategies import Recipe

HANG_S = 120.0  # of virtual time; the runs here take some seconds


class Bench:
    """A run of a recipe; `go` runs it to its end, with actions before given events."""

    def __init__(
        self, recipe: Recipe, *, network: Network | None = None, seed: int = 0, examples: int = 22, batch_size: int = 4,
        limits: Limits | None = None, notice_s: float = 0.0, keep_trace: bool = False, **policy: Any,
    ) -> None:  # fmt: skip
        self.recipe, self.batch_size, self.seed = recipe, batch_size, seed
        self.limits = limits or Limits(epochs=2)
        self.leases = Leases(examples, batch_size, self.limits)
        self.coordinator = LeaseCoordinator(
            Policy(recipe.replicas, recipe.shards, **policy), recipe.dealing(), self.leases
        )
        self.notes: list[Note] = []
        self.published: list[PublishSnapshot] = []
        self.computed = 0
        self.gradients: dict[tuple[int, int], list[Gradient]] = {}
        slots = [(slot, buffer) for slot in range(recipe.replicas + 1) for buffer in range(2)]
        self.weights = {key: [0] * recipe.shards for key in slots}
        self.in_use: dict[int, tuple[int, float]] = {}  # slot -> weights buffer, until when
        self.poison: Callable[[int, Batch], bool] = lambda number, batch: False
        self.disk: Callable[[int], str] = lambda number: ""
        self.metrics: Callable[[], dict[str, float]] = lambda: {"loss": 1.0}
        self.story: deque[tuple[float, Node, object]] = deque(maxlen=60)
        self.digest = hashlib.sha256() if keep_trace else None
        self.steps = 0
        self._touched: Node = COORDINATOR
        self.world = World(network=network, seed=seed, duration=self._duration, spawn=self._member, notice_s=notice_s)
        self.world.trace = self._trace
        self.shards: list[ShardHost] = []
        nodes = [COORDINATOR, *(Node("shard", i) for i in range(recipe.shards))]
        nodes += [Node("replica", i) for i in range(recipe.replicas)]
        for node in [*nodes, Node("evaluator", recipe.replicas)] if self.coordinator.policy.evaluate else nodes:
            self.world.add(node, *self._member(node))

    def _member(self, node: Node) -> tuple[Linked, Any]:
        recipe = self.recipe
        self.in_use.pop(node.index, None)
        match node.role:
            case "coordinator":
                return Linked(self.coordinator), CoordinatorHost(self, node)
            case "shard":
                self.shards.append(ShardHost(self, node))
                return Linked(Shard(node.index, recipe.rules())), self.shards[-1]
            case "replica":
                return Linked(Replica(node, recipe.shards, self.batch_size, recipe.cadence())), ReplicaHost(self, node)
            case _:
                return Linked(Evaluator(node, recipe.shards)), EvaluatorHost(self, node)

    def compute_s(self, node: Node) -> float:
        return COMPUTE_S * (1 + 0.37 * node.index)

    def _duration(self, node: Node, effect: Any, now: float) -> float:
        match effect:
            case core.Compute():
                return self.compute_s(node)
            case core.EvaluateModel() | core.WriteSnapshot():
                return COMPUTE_S
        return 0.0

    def _trace(self, now: float, node: Node, what: Any) -> None:
        self._touched = node
        self.story.append((now, node, what))
        if self.digest is not None:
            self.digest.update(f"{now!r} {node} {what!r}\n".encode())

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
                place = self.world.places.get(self._touched)
                if place is not None:
                    check(place.linked)
        except AssertionError as error:
            lines = [f"{now:.4f} {node} {what}" for now, node, what in self.story]
            error.add_note("\n".join([f"seed {self.seed}, event {self.steps}; the last events were", *lines]))
            raise
        return self

    def kill(self, role: str, index: int) -> None:
        for node, place in list(self.world.places.items()):
            if node.role == role and node.index == index and place.end is None:
                self.in_use.pop(node.index, None) if role != "shard" else None
                self.world.kill(node)

    def stop(self) -> None:
        self.world.post(COORDINATOR, core.StopRequested("interrupted"))

    @property
    def end(self) -> End:
        end = self.world.places[COORDINATOR].end
        assert end is not None
        return end

    # ------------------------------------------------------------ what was trained

    def whole(self) -> Counter[Batch]:
        """Batch -> how many computations of it *every* shard has applied; no shard may apply one twice."""
        everywhere: Counter[int] = Counter()
        batches: dict[int, Batch] = {}
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
        assert sum(note.stats.examples for note in self.notes if note.stats is not None) == epochs * n

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
                gradients = [g for applied in shard.files[manifest.number] for g in applied.gradients]
                missing = trained - {(g.epoch, i) for g in gradients for i in range(g.start, g.stop)}
                assert not missing, f"snapshot {manifest.number} of {shard.node} lacks {sorted(missing)[:5]}"
