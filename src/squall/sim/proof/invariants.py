"""The invariants of docs/design.md, checked at every event of a world by somebody who trusts no machine.

The auditor sees what passes between machines and hosts: frames that are sent, effects, and what lies in the buffers at
that moment. From the pushes as they were *sent* it keeps a log of its own for every shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from squall.protocol.copied import Attach
from squall.protocol.effects import (
    Apply,
    Effect,
    EvaluateModel,
    Payload,
    PublishSnapshot,
    Transmit,
    UseWeights,
    WriteSnapshot,
)  # fmt: skip
from squall.protocol.leases import Leases, Limits
from squall.protocol.ledger import Range
from squall.protocol.messages import Exchange, Exchanged, Lease
from squall.protocol.nodes import Node
from squall.protocol.notes import BatchLeftOut, LeaseEnded, UpdatesLost, WorkReported
from squall.protocol.unsaved import GoBack
from squall.sim.proof.broken import Broken
from squall.sim.proof.logs import Labels, SentPush, ShardLog, bound, numbers, text, wrong_weights
from squall.sim.proof.loss_books import LossBooks
from squall.sim.proof.memory import BatchRange, File, Gradient, Written
from squall.sim.proof.phantom_hosts import PhantomHosts
from squall.sim.proof.positions import LeaseRows, batches, restored, trained
from squall.strategies.base import Recipe


class Auditor:
    """Watches the lives of one run. `watch` is a world's trace; it raises `Broken`."""

    def __init__(self, recipe: Recipe, examples: int, batch_size: int, limits: Limits, copied: bool = False) -> None:
        """`copied`: shards have backups, for which their answers wait."""
        self.recipe, self._copied = recipe, copied
        self.examples, self.batch_size, self.limits = examples, batch_size, limits
        self._left_out: set[tuple[int, BatchRange]] = set()  # by loops: lease and batch
        self._skipped: set[BatchRange] = set()  # of these, the batches that were over without a step
        self.allowed: Counter[BatchRange] = Counter()  # repeats that the audit names: what was given back by its holder
        self._batches = partial(batches, size=batch_size)
        self._bound = bound(recipe)
        self._rows = LeaseRows()
        self._examples_saved = 0  # in the newest snapshot, by the shard that has fewest

    def begin(
        self, hosts: PhantomHosts, version: int = 0, files: Sequence[File] = (), left: Leases | None = None
    ) -> None:  # fmt: skip
        """A life begins, from the files of a snapshot where there is one; `left` is its data position."""
        shards = range(self.recipe.shards)
        self.hosts = hosts
        self._rows.begin()
        folds = [file.fold for file in files] or [0] * self.recipe.shards
        self._logs = [ShardLog(Written(version, fold), self._examples_saved) for fold in folds]
        self._applied: list[dict[BatchRange, list[int]]] = [{} for _ in shards]  # computations, by shard
        self._further: list[dict[BatchRange, list[int]]] = [{} for _ in shards]  # those of further steps on a batch
        self._shards_with: Counter[int] = Counter()  # of a computation
        self._whole: Counter[BatchRange] = Counter()  # computations that all shards have
        self._pushes: dict[tuple[Node, int], SentPush] = {}  # by sender and buffer
        self._under_way: dict[Node, SentPush | None] = {}  # of replicas: the last push sent
        self._answered: dict[Node, dict[int, int]] = {}  # version that each shard's last answer had
        self._losses = LossBooks(self.recipe.shards, self.batch_size, self.allowed)
        self._kept_back: set[tuple[Node, Payload]] = set()  # weights that wait for backups, and by whom
        self._labels = Labels(self._logs, self.recipe.work.local is not None)
        for shard, file in enumerate(files):
            for applied in file.applied:
                for gradient in applied.gradients:
                    self._have(shard, gradient)
        self._go_on(left or Leases(self.examples, self.batch_size, self.limits))

    def _go_on(self, left: Leases) -> None:
        """A batch that is dealt again may be in some shards' files already; one that is not may have been left out."""
        done = trained(left, self.batch_size)
        for batch in sorted({batch for applied in self._applied for batch in applied} - done):
            self.allowed[batch] += 1
        self._left_out = {(lease, batch) for lease, batch in self._left_out if lease < left._next_id}
        self._skipped = {batch for _, batch in self._left_out if batch in done}

    # ------------------------------------------------------------ what is seen

    def watch(self, now: float, node: Node, what: object) -> None:
        match what:
            case Attach(payload) if payload.kind == "weights":
                self._at_version(node.index, payload.version, f"its answer to {payload.owner}")
                self._kept_back.add((node, payload))
            case Transmit(to, frame, payload, True) if (node, payload) in self._kept_back:
                self._kept_back.discard((node, payload))
                if isinstance(frame.message, Exchanged):  # else it is a parcel of one
                    self._on_exchanged(node.index, to, frame.message)
            case Transmit(again=False):
                if type(what.frame.message) is Exchange:
                    self._on_exchange(node, what.frame.message)
                elif type(what.frame.message) is Exchanged:
                    self._on_exchanged(node.index, what.to, what.frame.message)
            case Apply():
                self._on_apply(node.index, what)
            case GoBack(version):
                self._on_gone_back(node.index, version)
            case UpdatesLost():
                self._losses.told(what, {batch for _, batch in self._left_out})
            case UseWeights(buffer) | EvaluateModel(buffer):
                self._on_use(node, buffer)
            case WriteSnapshot(_, version):
                self._at_version(node.index, version, "a snapshot")
            case BatchLeftOut(_, batch):
                self._left_out.add((batch.lease, (batch.epoch, batch.start, batch.stop)))
            case LeaseEnded(lease, done=done):
                self._on_lease(lease, done)
            case PublishSnapshot():
                self._on_published(what)
        if wrong := self._labels.wrong(node, what):
            raise Broken("I7", wrong)

    def _on_exchange(self, node: Node, exchange: Exchange) -> None:
        if exchange.gradient < 0:
            self._under_way[node] = None
            return
        known = self._pushes.get((node, exchange.gradient))
        if known is None or known.exchange.clock != exchange.clock:  # to the first shard
            there = self.hosts.memories[node].gradients[node.index, exchange.gradient]
            gradients = tuple(there) if exchange.batches else ()
            known = self._pushes[node, exchange.gradient] = SentPush(node, exchange, gradients)
        self._under_way[node] = known

    def _on_apply(self, shard: int, apply: Apply) -> None:
        log, memory = self._logs[shard], self.hosts.memories[Node("shard", shard)]
        pushes = []
        for term in apply.terms:
            push = self._pushes.get((term.owner, term.buffer))
            now_there = memory.gradient(term.slot, term.buffer, shard, self.hosts.others(term.owner))
            if push is None or push.gradients != now_there:
                sent = "nothing" if push is None else numbers(push.gradients)
                raise Broken("I6", f"shard {shard} applies {numbers(now_there)}, and the push had {sent}")
            if shard in push.staleness:
                raise Broken("I2", f"shard {shard} applies clock {push.exchange.clock} of {push.node} twice")
            for gradient in push.gradients:
                self._have(shard, gradient)
            self._check_staleness(shard, push, apply)
            pushes.append(push)
        if wrong := wrong_weights(apply, pushes, self.recipe.loop.exchanges.rules.gather):
            raise Broken("I6", f"shard {shard} {wrong}")
        log.add(pushes, [term.weight for term in apply.terms])

    def _on_exchanged(self, shard: int, to: Node, answer: Exchanged) -> None:
        if answer.version > self._logs[shard].version or not self._copied:
            self._at_version(shard, answer.version, f"its answer to {to}")
        self._answered.setdefault(to, {})[shard] = answer.version
        push = self._under_way.get(to)
        if push is None or not push.exchange.batches or answer.clock < push.exchange.clock:
            return  # the last is an answer once more, by who died before it had told that it was sent
        if answer.dropped:
            if not self.recipe.loop.exchanges.droppable:
                raise Broken("I1", f"shard {shard} drops a push of {to}, where every push counts")
            if shard in push.staleness:
                raise Broken("I1", f"shard {shard} calls a push of {to} dropped that it has applied")
        elif shard not in push.staleness:
            raise Broken(
                "I1", f"shard {shard} acknowledges clock {push.exchange.clock} of {to}, and has not applied it"
            )
        elif answer.staleness != push.staleness[shard]:
            raise Broken("I3", f"shard {shard} reports {answer.staleness} to {to} for {push.staleness[shard]}")

    def _on_use(self, node: Node, buffer: int) -> None:
        for shard, found in enumerate(self.hosts.memories[node].weights[node.index, buffer]):
            answered = self._answered.get(node, {}).get(shard)
            if answered is None:
                raise Broken("I6", f"{node} uses weights that shard {shard} has not sent")
            if found != self._logs[shard].written(answered):
                raise Broken("I6", f"{node} has of shard {shard} what is not its version {answered}")
        self._labels.used(node, self._answered[node])

    def _at_version(self, shard: int, version: int, where: str) -> None:
        applied = self._logs[shard].version
        if version != applied:
            raise Broken("I6", f"shard {shard} has applied {applied} updates, and {where} says {version}")

    # ------------------------------------------------------------ one update

    def _have(self, shard: int, gradient: Gradient) -> None:
        """The shard has applied this computation; it must be for the first time."""
        batch, number = gradient.batch, gradient.number
        kept = self._further if gradient.further else self._applied
        computations = kept[shard].setdefault(batch, [])
        if number in computations:
            raise Broken("I2", f"shard {shard} applies computation {number}, of {text(batch)}, twice")
        computations.append(number)
        if gradient.further:
            return
        self._shards_with[number] += 1
        if self._shards_with[number] == self.recipe.shards:
            self._whole[batch] += 1

    def _on_gone_back(self, shard: int, version: int) -> None:
        for gradient in self._logs[shard].back_to(version):
            self._has_not(shard, gradient)
            if not gradient.further:
                self._losses.had(shard, gradient.batch)

    def _has_not(self, shard: int, gradient: Gradient) -> None:
        """The shard has this computation no more."""
        batch, number = gradient.batch, gradient.number
        (self._further if gradient.further else self._applied)[shard][batch].remove(number)
        if not gradient.further:
            self._whole[batch] -= self._shards_with[number] == self.recipe.shards
            self._shards_with[number] -= 1

    def taken_over(self, shard: int, version: Any, made: Sequence[tuple[object, Effect]]) -> None:
        """Its backup goes on from that version; what is beyond it nobody has heard of. It has `made` updates."""
        for to, versions in self._answered.items():
            if versions.get(shard, 0) > version:
                raise Broken(
                    "I23", f"shard {shard} has answered {to} with version {versions[shard]}, and is at {version}"
                )
        for gradient in self._logs[shard].only(version, shard):
            self._has_not(shard, gradient)
        if missing := version - self._logs[shard].version:  # the shard has died inside it
            for _, apply in made[-missing:]:
                assert isinstance(apply, Apply)
                self._on_apply(shard, apply)

    def _check_staleness(self, shard: int, push: SentPush, apply: Apply) -> None:
        log = self._logs[shard]
        basis = min((gradient.basis[shard] for gradient in push.gradients), default=log.version)
        staleness = push.staleness[shard] = log.version - basis
        for gradient in push.gradients:
            batch = gradient.batch
            if not gradient.further and len(self._applied[shard][batch]) > 1 + self.allowed[batch]:
                raise Broken("I4", f"shard {shard} applies {text(batch)} again, and no lease on it was given back")
            if not gradient.further and self._whole[batch] > 1:
                raise Broken("I4", f"all shards have {text(batch)} twice")
        if self.recipe.loop.exchanges.rules.scaled and apply.rate != 1 / max(1, staleness):
            raise Broken("I3", f"shard {shard} scales a push of staleness {staleness} by {apply.rate}")
        if self._bound is None:
            return
        own, others = self._bound
        between = Counter(node for nodes in log.pushers[basis - log.first :] for node in nodes)
        for node, count in between.items():
            if count > (own if node == push.node else others):
                raise Broken("I3", f"shard {shard} applies a push of {push.node} after {count} newer ones of {node}")

    # ------------------------------------------------------------ the accounting

    def _on_lease(self, lease: Lease, done: int) -> None:
        for batch in self._batches(lease.epoch, lease.start, done):
            if (lease.id, batch) in self._left_out:
                self._skipped.add(batch)
                continue
            for shard, applied in enumerate(self._applied):
                if not applied.get(batch) and not self._losses.lost(shard, batch):
                    raise Broken("I1", f"{text(batch)} counts as trained, and shard {shard} does not have it")
        self.allowed.update(self._batches(lease.epoch, done, lease.stop))
        self._rows.add(lease.id, Range(lease.epoch, lease.start, done))

    def _on_published(self, manifest: PublishSnapshot) -> None:
        """A run that goes on from it trains exactly what is not in every shard's file."""
        ledger = trained(restored(manifest, self.batch_size, self.limits), self.batch_size)
        written = self.hosts.files(manifest.number)
        if manifest.checksums != tuple(file.checksum for file in written):
            raise Broken("I1", f"the manifest of snapshot {manifest.number} has the checksums of other files")
        behind = tuple(log.examples_at(version) for log, version in zip(self._logs, manifest.versions))
        if manifest.examples != behind:
            raise Broken("I7", f"snapshot {manifest.number} is of {manifest.examples} examples, and holds {behind}")
        self._examples_saved = min(behind)
        files = [[g for applied in file.applied for g in applied.gradients if not g.further] for file in written]
        skipped = {batch for _, batch in self._left_out}
        for shard, gradients in enumerate(files):
            missing = sorted(ledger - {gradient.batch for gradient in gradients} - skipped)
            if missing:
                where = f"snapshot {manifest.number} of shard {shard}"
                raise Broken("I1", f"the ledger calls {text(missing[0])} trained, and {where} lacks it")
        common = set.intersection(*({gradient.number for gradient in gradients} for gradients in files))
        again = sorted({gradient.batch for gradient in files[0] if gradient.number in common} - ledger)
        if again:
            raise Broken("I4", f"all files of snapshot {manifest.number} have {text(again[0])}, which is dealt again")
        told = {batch for span in self._rows.published(manifest) for batch in self._batches(*span)}
        if unknown := sorted(ledger - told):
            raise Broken("I4", f"snapshot {manifest.number} is there before any row that {text(unknown[0])} is trained")

    def finished(self, lives: int, trained: int) -> None:
        """The run says that all data is trained."""
        assert self.limits.epochs is not None
        for epoch in range(self.limits.epochs):
            for batch in self._batches(epoch, 0, self.examples):
                if not self._whole[batch] and batch not in self._skipped:
                    raise Broken("I4", f"{text(batch)} was never trained")
        told = sum(stop - start for _, start, stop in self._skipped)
        told += sum(report.stats.examples for report in self.hosts.noted(WorkReported))
        if trained != self.limits.epochs * self.examples:
            raise Broken("I4", f"the ledger counts {trained} examples")
        if lives == 1 and not trained <= told <= trained + self._losses.examples:
            raise Broken("I4", f"the reports name {told} examples of {trained}")
