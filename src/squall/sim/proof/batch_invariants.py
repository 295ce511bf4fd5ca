"""The invariants where a method looks at whole batches (Sandblaster): its pushes are sums of portions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from squall.protocol.copied import Attach
from squall.protocol.effects import (
    AddPortions,
    CalculateVectors,
    Effect,
    EvaluateModel,
    Payload,
    PublishSnapshot,
    Transmit,
    UseWeights,
    WriteSnapshot,
)
from squall.protocol.frames import Frame
from squall.protocol.messages import Evaluated, Exchanged
from squall.protocol.nodes import Node
from squall.protocol.notes import WorkReported
from squall.protocol.sandblaster.coordinator import BatchCoordinator
from squall.protocol.sandblaster.messages import Calculated, Calculation, PortionsTaken, PushPortions
from squall.sim.proof.batch_phantoms import (
    WIDTH,
    BatchPhantomHosts,
    KeptPortion,
    Vector,
    added,
    combined,
    entry_of,
    example,
)
from squall.sim.proof.broken import Broken
from squall.sim.proof.memory import File, folded_with
from squall.strategies.base import Recipe
from squall.strategies.work import BatchMethod

NEAR = 1e-3  # of the minimum


class _Log:
    """What one shard has applied."""

    def __init__(self, fold: int, examples: int, vectors: Mapping[str, Vector]) -> None:
        self.fold = fold
        self.examples = examples  # evaluated before the weights were accepted
        self.calculated = self.added = 0  # calculations, and pushes: who succeeds it may be asked for the last again
        self.evaluation = 0
        self.opened = 0  # calculation that opened it
        self.sum: dict[tuple[int, int], int] = {}  # portion (start, stop) -> computation, in the sum
        self.vectors = dict(vectors)  # as they are behind all this


def _point(log: _Log) -> tuple[int, int]:
    return log.calculated, log.added


class _Heard:
    """What others know of a shard."""

    calculated = 0  # the newest result
    evaluation = 0  # the newest of which a push was acknowledged

    def __init__(self) -> None:
        self._sum: set[tuple[int, int]] = set()  # examples of that

    def added(self, evaluation: int, portion: tuple[int, int]) -> None:
        if evaluation != self.evaluation:
            self.evaluation, self._sum = evaluation, set()
        self._sum.add(portion)

    def beyond(self, calculated: int, evaluation: int, added: Collection[tuple[int, int]]) -> str:
        """What of it is not so."""
        if self.calculated > calculated:
            return f"what comes of calculation {self.calculated}"
        lacking = self._sum.difference(added) if self.evaluation == evaluation else set()
        return f"that it has added {sorted(lacking)}" if lacking or self.evaluation > evaluation else ""


class BatchAuditor:
    """Watches the lives of one run. `watch` is a world's trace; it raises `Broken`."""

    def __init__(self, recipe: Recipe, examples: int) -> None:
        assert isinstance(recipe.work, BatchMethod)
        self.method, self.shards = recipe.work, recipe.shards
        self.examples = examples
        self._examples_saved = 0  # in the newest snapshot, by the shard that has fewest

    def begin(
        self, hosts: BatchPhantomHosts, coordinator: Callable[[], BatchCoordinator], files: Sequence[File] | None
    ) -> None:
        self.hosts, self.coordinator = hosts, coordinator
        self._begun = coordinator().trained
        begun = files or [File(0, vectors=dict.fromkeys(("weights", "direction"), (0.0,) * WIDTH))] * self.shards
        self._logs = [_Log(file.fold, self._examples_saved, file.vectors) for file in begun]
        # Of each shard, what its log was at each point: so many calculations and pushes.
        self._points = [{_point(log): copy.deepcopy(log)} for log in self._logs]
        self._sent: list[dict[int, Calculation]] = [{} for _ in begun]  # to each shard, by number
        self._heard = [_Heard() for _ in begun]
        self._saved: list[dict[int, int]] = [{} for _ in begun]  # of each shard, examples of the snapshots' files
        self._kept_back: dict[tuple[Node, Payload], tuple[int, int]] = {}  # what such an answer was of
        self._pushes: dict[Node, tuple[PushPortions, tuple[KeptPortion, ...]]] = {}  # the last one
        self._answered: dict[Node, dict[int, tuple[int, int]]] = {}  # fold, examples of each shard's last answer

    def watch(self, now: float, node: Node, what: object) -> None:
        match what:
            case Attach(payload) if payload.kind in ("weights", "trial"):
                self._check_vectors(node.index)
                self._kept_back[node, payload] = self._logs[node.index].fold, self._logs[node.index].examples
            case Transmit(to, _, payload, True) if payload is not None and (node, payload) in self._kept_back:
                self._answered.setdefault(to, {})[node.index] = self._kept_back.pop((node, payload))
            case Transmit(to, Frame(message=Calculation() as calculation)):
                self._on_asked(to.index, calculation)
            case Transmit(to, frame, payload, False):
                if payload is not None:
                    self._kept_back.pop((node, payload), None)  # of a shard that was lost before it could say so
                self._on_sent(node, to, frame.message)
            case CalculateVectors(calculation):
                self._on_calculation(node.index, calculation)
            case WriteSnapshot(number):
                self._saved[node.index][number] = self._logs[node.index].examples
            case PublishSnapshot(number, examples=examples):
                if examples != (found := tuple(saved[number] for saved in self._saved)):
                    raise Broken("I7", f"snapshot {number} is of {examples} examples, and holds {found}")
                self._examples_saved = min(found)
            case AddPortions():
                self._on_push(node.index, what)
            case UseWeights(buffer) | EvaluateModel(buffer):
                for shard, found in enumerate(self.hosts.memories[node].weights[node.index, buffer]):
                    if found.fold != self._answered[node][shard][0]:
                        raise Broken("I6", f"{node} has of shard {shard} what the log does not explain")

    def _on_sent(self, node: Node, to: Node, message: object) -> None:
        match message:
            case PushPortions():
                self._pushes[node] = (message, tuple(self.hosts.memories[node].kept[node.index]))
            case Calculated(number):
                self._check_vectors(node.index)
                self._heard[node.index].calculated = number
            case Exchanged():
                self._check_vectors(node.index)
                log = self._logs[node.index]
                self._answered.setdefault(to, {})[node.index] = log.fold, log.examples
            case Evaluated(_, weights):
                examples = min(examples for _, examples in self._answered[node].values())
                if weights.examples != examples:
                    raise Broken("I7", f"{node} says {weights.examples} examples of weights with {examples}")
            case PortionsTaken(evaluation, portions) if evaluation == self._logs[node.index].evaluation:
                dealer = self.coordinator().dealer
                ranges = dealer.portions.ranges if dealer.portions is not None else []
                if dealer.evaluation != evaluation:
                    return  # the shard is behind: its sum is not of interest any more
                for start, stop in ((ranges[p].start, ranges[p].stop) for p in portions if p < len(ranges)):
                    if (start, stop) not in self._logs[node.index].sum:
                        raise Broken("I1", f"{node} acknowledges examples {start} to {stop}, and has not added them")
                    self._heard[node.index].added(evaluation, (start, stop))

    def _check_vectors(self, shard: int) -> None:
        """What has happened to them has happened once, and in order."""
        for name, vector in self._logs[shard].vectors.items():
            if self.hosts.shards[shard].vector(name) != vector:
                raise Broken("I6", f"{name} of shard {shard} is not what was made of it")

    def _on_asked(self, shard: int, asked: Calculation) -> None:
        if asked.number not in self._sent[shard]:  # else it is sent again
            self._sent[shard][asked.number] = asked
            self._check_whole(asked)

    def _check_whole(self, asked: Calculation) -> None:
        """The sum is used: it must be of the whole batch."""
        names = {name for combine in asked.combine for name, _ in combine.terms} | {*asked.rows, *asked.columns}
        portions = sorted(self._logs[0].sum)
        if "sum" not in names:
            return
        expected = self.method.examples
        for shard, log in enumerate(self._logs):
            examples = sum(stop - start for start, stop in log.sum)
            if examples != (expected or self.examples) or sorted(log.sum) != portions:
                raise Broken("I4", f"the gradient is used, and shard {shard} has {examples} examples of it")

    def _on_calculation(self, shard: int, calculation: Calculation) -> None:
        log = self._logs[shard]
        if calculation.number <= log.calculated:
            return
        if calculation.number != log.calculated + 1 or self._sent[shard].get(calculation.number) != calculation:
            raise Broken("I6", f"shard {shard} carries out calculation {calculation.number} out of turn")
        log.calculated = calculation.number
        log.fold = folded_with(log.fold, (calculation.number,))
        for combine in calculation.combine:
            log.vectors[combine.target] = combined(combine, log.vectors.__getitem__)
        if any(combine.target == "weights" for combine in calculation.combine):
            reports = (report.stats.examples for report in self.hosts.noted(WorkReported))
            log.examples = self._begun + sum(reports)
        if calculation.opens is not None:
            log.evaluation, log.opened = calculation.opens, calculation.number
            log.sum.clear()
            log.vectors["sum"] = (0.0,) * WIDTH
        self._points[shard][_point(log)] = copy.deepcopy(log)

    def _on_push(self, shard: int, adds: AddPortions) -> None:
        log, memory = self._logs[shard], self.hosts.memories[Node("shard", shard)]
        if adds.number <= log.added:
            return
        log.added, owner, buffer = adds.number, adds.owner, adds.buffer
        there = memory.gradient(owner.index, buffer, shard, self.hosts.others(owner))
        push = next((p for node, p in self._pushes.items() if node.index == owner.index and p[1] == there), None)
        if push is None:
            raise Broken("I6", f"shard {shard} adds what slot {owner.index} has not pushed")
        for kept in there:
            gradient = kept.gradient
            portion = (gradient.start, gradient.stop)
            if portion in log.sum:
                raise Broken("I2", f"shard {shard} adds examples {portion[0]} to {portion[1]} twice")
            if gradient.basis[shard] != log.opened:
                raise Broken("I3", f"shard {shard} adds examples {portion[0]} to {portion[1]} of other trial weights")
            log.sum[portion] = gradient.number
        log.vectors["sum"] = added(log.vectors["sum"], there, shard)
        log.fold = folded_with(log.fold, entry_of(there))
        self._points[shard][_point(log)] = copy.deepcopy(log)

    def taken_over(self, shard: int, point: Any, made: Sequence[tuple[object, Effect]]) -> None:
        """Its backup goes on from there; what is beyond it nobody has heard of. It has `made` changes."""
        points = self._points[shard]
        ahead: list[Effect] = []
        for before, effect in reversed(made):  # the shard may have died inside the last one
            if point in points:
                break
            point, ahead = before, [effect, *ahead]
        while point != (last := next(reversed(points))):
            del points[last]
        log = self._logs[shard] = copy.deepcopy(points[point])
        for effect in ahead:
            self.watch(0.0, Node("shard", shard), effect)
        if wrong := self._heard[shard].beyond(log.calculated, log.evaluation, log.sum):
            raise Broken("I23", f"shard {shard} has said {wrong}, and its backup does not have that")

    def finished(self, spoilt: bool) -> None:
        """The run says that it has found the minimum, or that all data is trained."""
        if self.method.examples is not None or spoilt:
            return
        for shard, store in enumerate(self.hosts.shards):
            for i, found in enumerate(store.vectors["weights"]):
                least = sum(example(number, WIDTH * shard + i) for number in range(self.examples)) / self.examples
                if abs(found - least) > NEAR:
                    raise Broken(
                        "I6", f"element {i} of shard {shard} is {found:.6f}, and the minimum is at {least:.6f}"
                    )
