"""A whole run with fake hosts: no numbers, but the same buffers, so that every applied gradient can be told.

A gradient buffer holds which batches were computed into it and on which versions; a weights buffer holds the versions
that the shards wrote. What a shard applies is read from the buffers at that moment, as in a real run, so a buffer that
is used too early shows as a gradient applied twice, or as weights written while they are computed on.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from squall.protocol.check import check
from squall.protocol.coordinator import Coordinator, Policy
from squall.protocol.core import COORDINATOR, Apply, ClearGradient, Compute, End, EvaluateModel, GradientComputed
from squall.protocol.core import ModelEvaluated, Node, Note, Payload, PublishSnapshot, SnapshotWritten, StopRequested
from squall.protocol.core import UseWeights, WriteSnapshot
from squall.protocol.evaluator import Evaluator
from squall.protocol.leases import Leases, Limits
from squall.protocol.link import Linked
from squall.protocol.replica import Replica
from squall.protocol.shard import Shard
from squall.sim.world import Network, World
from squall.strategies import Recipe

HANG_S = 40.0  # of virtual time; the runs here take some seconds
COMPUTE_S = 0.01


class Gradient(NamedTuple):
    """One computation of one batch."""

    number: int
    epoch: int
    start: int
    stop: int
    basis: tuple[int, ...]  # version of each shard

    @property
    def batch(self) -> tuple[int, int, int]:
        return self.epoch, self.start, self.stop


class Applied(NamedTuple):
    """One pushed buffer in one update of one shard."""

    gradients: tuple[Gradient, ...]
    staleness: int  # as measured: of the oldest gradient
    weight: float


class _Host:
    def __init__(self, bench: "Bench", node: Node) -> None:
        self.bench, self.node = bench, node

    def attach(self, payload: Payload) -> None:
        pass

    def poll(self) -> None:
        return None

    def perform(self, effect: Any, now: float) -> Any:
        return None


class ReplicaHost(_Host):
    active = 0

    def perform(self, effect: Any, now: float) -> Any:
        bench, slot = self.bench, self.node.index
        match effect:
            case Compute(epoch, start, stop, buffer, accumulate):
                bench.computed += 1
                finite = not bench.poison(bench.computed, (epoch, start, stop))
                basis = tuple(bench.weights[slot, self.active])
                bench.in_use[slot] = (self.active, now + bench.compute_s(self.node))
                if not accumulate:
                    bench.gradients[slot, buffer] = []
                if finite:
                    bench.gradients[slot, buffer].append(Gradient(bench.computed, epoch, start, stop, basis))
                return GradientComputed(1.0, finite, bench.compute_s(self.node))
            case UseWeights(buffer):
                self.active = buffer
            case ClearGradient(buffer):
                bench.gradients[slot, buffer] = []
        return None


class ShardHost(_Host):
    def __init__(self, bench: "Bench", node: Node) -> None:
        super().__init__(bench, node)
        self.applied: list[Applied] = []
        self.version = 0
        self.files: dict[int, list[Applied]] = {}  # snapshot -> what was applied before it

    def attach(self, payload: Payload) -> None:
        bench, slot = self.bench, payload.slot
        buffer, until = bench.in_use.get(slot, (-1, 0.0))
        assert buffer != payload.buffer or bench.world.now >= until, f"slot {slot}: weights written while in use"
        bench.weights[slot, payload.buffer][self.node.index] = self.version

    def perform(self, effect: Any, now: float) -> Any:
        match effect:
            case Apply(terms, _):
                assert [t.slot for t in terms] == sorted(t.slot for t in terms)
                for term in terms:
                    gradients = tuple(self.bench.gradients[term.slot, term.buffer])
                    oldest = min(gradient.basis[self.node.index] for gradient in gradients)
                    self.applied.append(Applied(gradients, self.version - oldest, term.weight))
                self.version += 1
            case WriteSnapshot(number):
                self.files[number] = list(self.applied)
                return SnapshotWritten(number, self.bench.disk(number))
        return None


class EvaluatorHost(_Host):
    def perform(self, effect: Any, now: float) -> Any:
        if isinstance(effect, EvaluateModel):
            self.bench.in_use[self.node.index] = (effect.buffer, now + COMPUTE_S)
            return ModelEvaluated(self.bench.metrics())
        return None


class CoordinatorHost(_Host):
    def perform(self, effect: Any, now: float) -> Any:
        match effect:
            case Note():
                self.bench.notes.append(effect)
            case PublishSnapshot():
                self.bench.published.append(effect)
        return None


class Bench:
    """A run of a recipe; `go` runs it to its end, with actions before given events."""

    def __init__(
        self, recipe: Recipe, *, network: Network | None = None, seed: int = 0, examples: int = 22, batch_size: int = 4,
        limits: Limits | None = None, notice_s: float = 0.0, keep_trace: bool = False, **policy: Any,
    ) -> None:  # fmt: skip
        self.recipe, self.batch_size, self.seed = recipe, batch_size, seed
        self.limits = limits or Limits(epochs=2)
        self.leases = Leases(examples, batch_size, self.limits)
        self.coordinator = Coordinator(Policy(recipe.dealing(), recipe.shards, **policy), self.leases)
        self.notes: list[Note] = []
        self.published: list[PublishSnapshot] = []
        self.computed = 0
        self.gradients: dict[tuple[int, int], list[Gradient]] = {}
        slots = [(slot, buffer) for slot in range(recipe.replicas + 1) for buffer in range(2)]
        self.weights = {key: [0] * recipe.shards for key in slots}
        self.in_use: dict[int, tuple[int, float]] = {}  # slot -> weights buffer, until when
        self.poison: Callable[[int, tuple[int, int, int]], bool] = lambda number, batch: False
        self.disk: Callable[[int], str] = lambda number: ""
        self.metrics: Callable[[], dict[str, float]] = lambda: {"loss": 1.0}
        self.story: deque[str] = deque(maxlen=60)
        self.digest = hashlib.sha256() if keep_trace else None
        self.steps = 0
        self._touched: Node = COORDINATOR
        self.world = World(
            network=network, seed=seed, duration=self._duration, spawn=self._member, notice_s=notice_s
        )  # fmt: skip
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

    def _duration(self, node: Node, effect: Any) -> float:
        match effect:
            case Compute():
                return self.compute_s(node)
            case EvaluateModel() | WriteSnapshot():
                return COMPUTE_S
        return 0.0

    def _trace(self, now: float, node: Node, what: Any) -> None:
        self._touched = node
        line = (now, node, what)
        self.story.append(line)  # type: ignore[arg-type]
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
            lines = [f"{now:.4f} {node} {what}" for now, node, what in self.story]  # type: ignore[misc]
            error.add_note("\n".join([f"seed {self.seed}, event {self.steps}; the last events were", *lines]))
            raise
        return self

    def kill(self, role: str, index: int) -> None:
        for node, place in list(self.world.places.items()):
            if node.role == role and node.index == index and place.end is None:
                self.in_use.pop(node.index, None) if role != "shard" else None
                self.world.kill(node)

    def stop(self) -> None:
        self.world.post(COORDINATOR, StopRequested("interrupted"))

    @property
    def end(self) -> End:
        end = self.world.places[COORDINATOR].end
        assert end is not None
        return end

    # ------------------------------------------------------------ what was trained

    def once(self) -> Counter[tuple[int, int, int]]:
        """Batch -> how many computations of it every shard has applied. Nothing may be applied twice by a shard."""
        everywhere: Counter[int] = Counter()
        batches: dict[int, tuple[int, int, int]] = {}
        for shard in self.shards:
            own = Counter(g.number for applied in shard.applied for g in applied.gradients)
            twice = [number for number, count in own.items() if count > 1]
            assert not twice, f"{shard.node} applied gradients twice: {twice}"
            everywhere.update(own)
            batches.update({g.number: g.batch for applied in shard.applied for g in applied.gradients})
        whole = [number for number, count in everywhere.items() if count == len(self.shards)]
        return Counter(batches[number] for number in whole)

    def all_batches(self, epochs: int) -> list[tuple[int, int, int]]:
        size, n = self.batch_size, self.leases.examples
        return [(e, start, min(start + size, n)) for e in range(epochs) for start in range(0, n, size)]
