"""What the coordinator has others do beside training: evaluations and snapshots, one of each at a time."""

from __future__ import annotations

from collections.abc import Callable

from squall.protocol.best import Best, Verdict
from squall.protocol.effects import Effect, PublishSnapshot, Send
from squall.protocol.messages import Evaluate, Evaluated, Logged, SnapshotTaken, TakeSnapshot
from squall.protocol.nodes import Node
from squall.protocol.notes import Remark, SnapshotAsked, WeightsMeasured

Extend = Callable[[dict[str, object], dict[str, int]], dict[str, object]]


class Evaluations:
    """Asks the evaluator; an evaluation wanted while one is under way follows it, on the weights of then."""

    def __init__(self, evaluator: Node, best: Best) -> None:
        self.evaluator = evaluator
        self.best = best
        self.under_way: int | None = None  # its number
        self.wanted = False
        self._count = 0

    def ask(self, effects: list[Effect]) -> None:
        if self.under_way is not None:
            self.wanted = True
            return
        self.wanted = False
        self.under_way = self._count
        self._count += 1
        effects.append(Send(self.evaluator, Evaluate(self.under_way, self.best.value)))

    def logged(self, message: Logged, effects: list[Effect]) -> Verdict:
        """Results that a user's script has measured itself."""
        effects.append(WeightsMeasured(message.values, message.weights))
        return self.best.judge(message.values)

    def replaced(self, evaluator: Node, effects: list[Effect]) -> None:
        """An evaluator joined. A new one repeats what its predecessor was lost over."""
        if evaluator == self.evaluator:
            return  # what was asked of the first before it joined has reached it: links resend
        self.evaluator = evaluator
        if self.under_way is not None:
            effects.append(Send(evaluator, Evaluate(self.under_way, self.best.value)))

    def awaits(self, message: Evaluated) -> bool:
        return message.number == self.under_way

    def answered(self, message: Evaluated, effects: list[Effect]) -> Verdict:
        self.under_way = None
        effects.append(WeightsMeasured(message.values, message.weights))
        if message.error:
            effects.append(Remark("error", f"the best weights could not be kept: {message.error}"))
        return self.best.judge(message.values, kept=not message.error)


class SnapshotRounds:
    """Asks every shard for its part; when all are on disk the snapshot is published with the ledger of the asking.

    The ledger is taken before the shards are asked, so everything that it calls trained is in their files; what was
    trained in between is told by the shards themselves (`progress`), of leases that the ledger is `extended` by where
    they were granted later. Nothing is lost, and nothing repeats that all files have.
    """

    def __init__(self, shards: list[Node], newest: int) -> None:
        self.newest = newest  # number of the last one asked for
        self.failure = ""  # why the last one could not be written
        self._shards = shards
        self._answers: dict[Node, SnapshotTaken] | None = None
        self._ledger: dict[str, object] = {}

    @property
    def under_way(self) -> bool:
        return self._answers is not None

    @property
    def awaited(self) -> list[Node]:
        """Shards that have not answered."""
        return [shard for shard in self._shards if shard not in (self._answers or {})]

    def take(self, ledger: dict[str, object], effects: list[Effect]) -> None:
        assert not self.under_way
        self.newest += 1
        effects.append(SnapshotAsked(self.newest))
        self._answers = {}
        self._ledger = ledger
        effects.extend(Send(shard, TakeSnapshot(self.newest)) for shard in self._shards)

    def answered(
        self, shard: Node, message: SnapshotTaken, final: bool, extended: Extend, effects: list[Effect]
    ) -> bool:
        """True when this was the last answer; the snapshot is then published, or its failure noted.

        `extended` adds to the ledger what only the shards' progress tells of.
        """
        if self._answers is None or message.number != self.newest:
            return False
        self._answers[shard] = message
        if len(self._answers) < len(self._shards):
            return False
        answers = [self._answers[shard] for shard in self._shards]
        self._answers = None
        self.failure = next((answer.error for answer in answers if answer.error), "")
        if self.failure:
            effects.append(Remark("error", f"snapshot {self.newest} could not be written: {self.failure}"))
        else:
            versions = tuple(answer.version for answer in answers)
            progress = _common(answers)
            ledger = extended(self._ledger, progress)
            examples = tuple(answer.examples for answer in answers)
            checksums = tuple(answer.checksum for answer in answers)
            effects.append(PublishSnapshot(self.newest, ledger, versions, examples, progress, checksums, final))
        return True


def _common(answers: list[SnapshotTaken]) -> dict[str, int]:
    """Lease -> upto that every shard's file holds."""
    covers = [{cover.lease: cover.upto for cover in answer.progress} for answer in answers]
    leases = [lease for lease in covers[0] if all(lease in c for c in covers)]
    return {str(lease): min(c[lease] for c in covers) for lease in leases}
