"""The invariants where there are no shards: what every member's weights have come through is kept by its host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from squall.protocol.collective.coordinator import LOST, SHARE_LOST, CollectiveCoordinator
from squall.protocol.collective.messages import Shown
from squall.protocol.effects import End as Ended
from squall.protocol.effects import EvaluateModel, Expect, PublishSnapshot, Step, Transmit
from squall.protocol.events import Gathered, GroupJoined, StepTaken
from squall.protocol.messages import Evaluated, Logged, SnapshotTaken
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.notes import BatchLeftOut, LeaseEnded, WeightsMeasured, WorkReported
from squall.sim.proof.broken import Broken
from squall.sim.proof.group_phantoms import GroupPhantomHosts, Weights
from squall.sim.proof.memory import BatchRange
from squall.sim.proof.share_phantoms import NUMBERS, SIZES, SharePhantom

Label = tuple[int, int]  # updates and examples


class GroupAuditor:
    """Watches the lives of one run. `watch` is a world's trace; it raises `Broken`."""

    def begin(self, hosts: GroupPhantomHosts, coordinator: Callable[[], CollectiveCoordinator], saved: Weights) -> None:
        self.hosts, self.coordinator, self._saved = hosts, coordinator, saved
        self._told: set[Label] = set()
        self._counted: Counter[BatchRange] = Counter(saved.batches)  # that the coordinator calls trained
        self.final = saved
        self._reported = 0  # examples of this life, in the record, or left out as that has it
        self._left_out: dict[int, int] = {}  # lease -> examples
        self._joined: dict[Node, int] = {}  # the group that each is in
        self._announced: set[tuple[Node, BatchRange]] = set()

    def watch(self, now: float, node: Node, what: object) -> None:
        match what:
            case Expect(epoch, start, stop):
                self._announced.add((node, (epoch, start, stop)))
            case Step(_, epoch, start, stop) if start < stop and (node, (epoch, start, stop)) not in self._announced:
                raise Broken(
                    "I17", f"{node} steps on [{start}, {stop}) of epoch {epoch}, which its loaders do not know"
                )
            case StepTaken(finite=True):
                self._check_once(self.hosts.members[node].weights)
            case WorkReported(_, stats):
                self._reported += stats.examples
            case GroupJoined(number) if not self.coordinator()._divided:
                self._joined[node] = number
            case Gathered(number):
                self._joined[node] = number
            case BatchLeftOut(_, batch):
                self._left_out[batch.lease] = batch.stop - batch.start
            case LeaseEnded(lease, done=done) if done > lease.start:
                self._reported += self._left_out.get(lease.id, 0)
                self._on_counted((lease.epoch, lease.start, done))
            case Transmit(again=False):
                self._on_sent(node, what.frame.message)
            case EvaluateModel() if self.hosts.shown is None:
                raise Broken("I7", "nothing was shown, and it is measured")
            case WeightsMeasured(_, weights) if (weights.updates, weights.examples) not in self._told:
                raise Broken("I7", f"the record names weights that nobody has told of: {weights}")
            case PublishSnapshot():
                self._on_published(what)
            case Ended("failed", reason) if node == COORDINATOR and reason == LOST:
                self._check_lost()
            case Ended("failed", reason) if node == COORDINATOR and reason == SHARE_LOST:
                self._check_share_lost()

    def _check_once(self, weights: Weights) -> None:
        twice = [batch for batch, count in Counter(weights.batches).items() if count > 1]
        if twice:
            raise Broken("I2", f"{twice} moved the same weights twice")

    def _on_counted(self, batch: BatchRange) -> None:
        """A survivor must have it, whoever dies now but for one."""
        self._counted[batch] += 1
        if self._counted[batch] > 1:
            raise Broken("I4", f"{batch} is counted twice")
        live = [self.hosts.members[node].weights for node in self.coordinator().members.live]
        if live and not any(batch in weights.batches for weights in live):
            raise Broken("I1", f"{batch} is counted, and no live replica has it")

    def _on_sent(self, node: Node, message: object) -> None:
        match message:
            case Shown(_, weights) | Logged(_, weights):
                has = self.hosts.members[node].weights
                if (weights.updates, weights.examples) != (has.clock, has.examples):
                    raise Broken("I7", f"{node} shows {has.clock} rounds of {has.examples} examples as {weights}")
                if isinstance(message, Logged):
                    self._told.add((weights.updates, weights.examples))
            case Evaluated(_, weights):
                self._told.add((weights.updates, weights.examples))
                shown = self.hosts.shown
                if shown is None or (weights.updates, weights.examples) != (shown.clock, shown.examples):
                    raise Broken("I7", f"{weights} is told of {shown}")
            case SnapshotTaken(number, version, error="") if version != self.hosts.written[number].clock:
                raise Broken("I6", f"snapshot {number} is told as of round {version}")

    def _on_published(self, published: PublishSnapshot) -> None:
        number, ledger, versions, examples = published.number, published.ledger, published.versions, published.examples
        if tuple(file.checksum for file in self.hosts.files(number)) != published.checksums:
            raise Broken("I6", f"snapshot {number} has other files than those that were written, or not all")
        weights = self.hosts.written[number]
        labels = set(zip(versions, examples))
        if ledger["trained"] != weights.examples or labels != {(weights.clock, weights.examples)}:
            raise Broken("I7", f"snapshot {number} holds {weights.examples} examples, and tells {ledger['trained']}")
        if ledger["held"] or Counter(weights.batches) != self._counted:
            raise Broken("I1", f"snapshot {number} holds other batches than those that are counted")
        parts = self.hosts.parts.get(number)
        if parts is not None:
            saved = [each for place in range(len(versions)) for each in parts[place].values()]
            if len(saved) != len(SIZES) or any(each != (weights, weights) for each in saved):
                raise Broken("I15", f"snapshot {number} has not of each parameter the newest weights and state once")
        self.final = weights

    def _check_lost(self) -> None:
        for node in self.coordinator().members.live:
            if self._joined.get(node) == self.coordinator()._formed:
                raise Broken("I1", f"the run gives up, and {node} is a survivor of its group")

    def _check_share_lost(self) -> None:
        members = [self.hosts.members[node] for node in self.coordinator().members.live]
        clock = max((member.weights.clock for member in members), default=0)
        held = [member.has(clock) for member in members if isinstance(member, SharePhantom)]
        if set().union(*held) == set(NUMBERS):
            raise Broken("I15", "the run gives up, and of each parameter somebody has the state")

    def finished(self, examples: int, epochs: int, trained: int) -> None:
        """Every example of every epoch is in the last snapshot's weights once."""
        found = Counter((epoch, i) for epoch, start, stop in self.final.batches for i in range(start, stop))
        wrong = [(e, i) for e in range(epochs) for i in range(examples) if found[e, i] != 1]
        if wrong or trained != examples * epochs:
            raise Broken("I4", f"examples {wrong[:5]} are not trained once, and {trained} are counted")
        if self._reported != trained - self._saved.examples:
            raise Broken("I4", f"the record tells of {self._reported} examples, and {trained} were trained")
