"""What the phantoms of a run share: memory, what the coordinator's was told, and how they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from squall.protocol import effects
from squall.protocol.effects import Effect, PublishSnapshot
from squall.protocol.events import Event
from squall.protocol.messages import Factors
from squall.protocol.nodes import Node
from squall.protocol.notes import Note
from squall.runtime.wire import Price
from squall.runtime.world import World
from squall.sim.proof.memory import BatchRange, File, Memory
from squall.sim.proof.phantoms import (
    COMPUTE_S,
    NOTHING,
    EvaluatorPhantom,
    PartPhantom,
    Phantom,
    ReplicaPhantom,
    ShardPhantom,
)
from squall.strategies.base import Recipe

N = TypeVar("N", bound=Note)


class PhantomHosts:
    """Makes the hosts of a run, and holds what they share: memory, and what the coordinator's host was told."""

    def __init__(self, recipe: Recipe, now: Callable[[], float], first: int = 0) -> None:
        self.recipe = recipe
        self.now = now  # the world's time, in seconds
        self.travels = False  # every host has a memory of its own
        self.memories: dict[Node, Memory] = {}
        self.machine: Callable[[Node], int] = lambda node: 0  # on which a node is
        self.gone: Callable[[int], bool] = lambda machine: False  # a machine, with all that was there
        self.cut_off: Callable[[Node, Node], bool] = lambda one, other: False
        self.waits: Callable[[Node], bool] = lambda node: False  # for another part of the replica
        self.others: Callable[[Node], Sequence[int]] = lambda node: ()  # parts of a replica on several machines
        self.ask: Callable[[Node, Event], None] = lambda node, event: None  # those parts for something
        self._shared: dict[int, Memory] = {}  # by the processes of a machine
        self.shards: list[ShardPhantom] = []
        self.arrived: dict[tuple[int, int], File] = {}  # snapshot, part -> the file that is there
        self.notes: list[Note] = []  # that are in the record
        self.together = 1  # notes that are written into it at once
        self.unwritten: Callable[[], Sequence[Note]] = lambda: ()
        self.published: list[PublishSnapshot] = []
        self.computed = first  # computations so far
        self.compute_s: Callable[[Node], float] = lambda node: COMPUTE_S * (1 + 0.37 * node.index)
        self.poison: Callable[[int, BatchRange], bool] = lambda number, batch: False
        self.steps_on: Callable[[int], int] | None = None  # on a batch, by loops that step several times
        self.leaves_out: Callable[[int], bool] = lambda number: False
        self.breaks: Callable[[int], bool] = lambda number: False
        self.factors: Callable[[int], Factors] = lambda number: ()
        self.disk: Callable[[int], str] = lambda number: ""
        self.copies_every = 0  # updates of a shard; 0: there are none
        self.logs = False  # the first replica is a script that measures all weights that it gets
        self.metrics: Callable[[], dict[str, float]] | None = None
        self.best: tuple[float, float] | None = None  # the loss that was told, and that of the weights that were kept
        self.prices: dict[type[Effect], Price] = {
            effects.Compute: lambda node, effect, begins: self.compute_s(node),
            **dict.fromkeys((effects.EvaluateModel, effects.WriteSnapshot), lambda node, effect, begins: COMPUTE_S),
        }

    def enter(self, world: World, seed: int) -> None:
        """The world of a life is there."""

    def new_memory(self) -> Memory:
        return Memory(self.recipe)

    def memory(self, node: Node) -> Memory:
        """The memory of a new process."""
        machine = self.machine(node)
        if not self.travels and machine not in self._shared:
            self._shared[machine] = self.new_memory()
        found = self.memories[node] = self.new_memory() if self.travels else self._shared[machine]
        return found

    def files(self, number: int) -> list[File]:
        """The files of a snapshot, by shard, as they are on the coordinator's machine."""
        return [self.arrived.get((number, shard.node.index), NOTHING) for shard in self.shards]

    def noted(self, kind: type[N]) -> list[N]:
        """The notes of a kind that the coordinator has made."""
        return [note for note in (*self.notes, *self.unwritten()) if isinstance(note, kind)]

    def host(self, node: Node, version: int = 0, file: File | None = None) -> Phantom:
        """A host for a new process. `version`, `file`: what a shard goes on from."""
        made = self.make(node, version, file)
        if node.role not in ("shard", "backup", "part"):
            made.memory.new_process(node.index)
        if isinstance(made, ShardPhantom):
            self.shards.append(made)
        return made

    def goes_on(self, shard: Node, before: ShardPhantom) -> ShardPhantom:
        """The host of a shard whose backup has had that one."""
        made = self.make(shard, before.version, None)
        assert isinstance(made, ShardPhantom)
        self.memories[shard] = made.memory = before.memory
        made.take_whole(before.whole())
        (place,) = (place for place, other in enumerate(self.shards) if other.node == shard)
        self.shards[place] = made
        return made

    def make(self, node: Node, version: int, file: File | None) -> Phantom:
        match node.role:
            case "coordinator":
                from squall.sim.proof.coordinator_phantom import CoordinatorPhantom  # which is one of these

                return CoordinatorPhantom(self, node)
            case "shard":
                return ShardPhantom(self, node, version, file)
            case "replica":
                return ReplicaPhantom(self, node)
            case "part":
                return PartPhantom(self, node)
        return EvaluatorPhantom(self, node)
