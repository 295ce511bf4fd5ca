"""What a replay is watched for: an update to stop at, the first difference from the run, a batch that made a NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from squall.protocol.effects import Compute
from squall.protocol.events import BatchSkipped, GradientComputed
from squall.protocol.nodes import Node
from squall.replaying.group_replay import GroupReplay
from squall.replaying.nonfinite import NonFiniteBatch, examine
from squall.replaying.processes import ReplicaProcess
from squall.replaying.replay import Replay
from squall.replaying.replayed_nodes import ReplayedHost
from squall.runtime.lone import LoneHost
from squall.runtime.portions import PortionHost
from squall.runtime.records import SEEN, UNSEEN, Computed, Saved
from squall.runtime.snapshot import Manifest, Restored, Snapshots
from squall.runtime.states import put_together


@dataclass(frozen=True)
class AppliedPush:
    """A push in an update, and the examples [start, stop) of an epoch's order behind it."""

    replica: str
    batches: tuple[tuple[int, int, int], ...]  # epoch, start, stop

    def __str__(self) -> str:
        shown = [f"examples {start} to {stop} of epoch {epoch}" for epoch, start, stop in self.batches[:4]]
        more = f" and {len(self.batches) - 4} more batches" if len(self.batches) > 4 else ""
        return f"{self.replica} ({', '.join(shown)}{more})"


@dataclass(frozen=True)
class Difference:
    """Where a replay first is not what was recorded.

    Attributes:
        update: of the shard; the first that differs. Where only a snapshot tells, the last before it.
        shard: its number; None where a batch differed before it was pushed.
        pushes: what the update was made of.
        what: the difference, in words.
    """

    update: int
    shard: int | None
    pushes: tuple[AppliedPush, ...]
    what: str

    def __str__(self) -> str:
        where = f"update {self.update} of shard {self.shard}" if self.shard is not None else f"update {self.update}"
        made = f", from {'; '.join(map(str, self.pushes))}" if self.pushes else ""
        return f"{where}{made}: {self.what}"


class Holder(Protocol):
    """Who holds elements [start, stop) of the weights and the optimizer's state: a shard, or replicas without any."""

    node: Node
    version: int
    start: int
    stop: int

    @property
    def weights(self) -> Tensor: ...

    def state(self) -> Mapping[str, Tensor]: ...

    def fingerprint(self) -> int:
        """Of the weights behind the last update. To be asked for once."""


class Observer:
    """Watches the replay of one attempt. The replay tells it each step, and ends when it returns True.

    `until` keeps each shard's weights of that update; `check` compares with the record; `around_nan` stops at the first
    batch whose gradient was not finite; `keep` are the snapshots that later attempts go on from, whose state is kept.
    Files of snapshots above `newest` are not compared: a later attempt has written them.
    """

    def __init__(
        self, directory: Path, *, until: int | None, check: bool, around_nan: bool, keep: Set[int],
        newest: float = math.inf,
    ) -> None:  # fmt: skip
        self._snapshots = Snapshots(directory).directory
        self.until = until
        self._check, self._around_nan, self._newest = check, around_nan, newest
        self._last: dict[Node, list[tuple[Node, int]]] = {}  # pushes of each shard's last update
        self.weights: dict[Node, Tensor] = {}  # of the moment that `until` names
        self.kept: dict[int, dict[Node, dict[str, Tensor]]] = {number: {} for number in keep}  # state of the shards
        self.saved_at: dict[int, dict[Node, int]] = {number: {} for number in keep}  # their versions
        self.compared: list[int] = []  # snapshots
        self.fingerprints = 0  # compared
        self.difference: Difference | None = None
        self.nan: NonFiniteBatch | None = None
        self.replay: Replay | GroupReplay  # set before that begins

    @property
    def found(self) -> bool:
        """Whether a difference or a batch that is not finite was found."""
        return self.difference is not None or self.nan is not None

    @property
    def reached(self) -> bool:
        """Whether every shard has come to the update `until`."""
        return self.until is not None and len(self.weights) == len(self.replay.shards)

    @property
    def over(self) -> bool:
        """Whether there is nothing more to look for."""
        kept = self.kept and all(len(states) == len(self.replay.shards) for states in self.kept.values())
        return self.found or self.reached or (bool(kept) and not (self._check or self._around_nan))

    def begin(self) -> bool:
        for shard in self.replay.shards:
            self._look(shard)
        return self.over

    def computing(self, node: Node, batch: Computed, host: ReplayedHost) -> bool:
        """The batch is about to be computed."""
        if self._around_nan and not (batch.finite or batch.skipped):
            if isinstance(host, ReplicaProcess):
                self.nan = host.examine(batch.batch)
            else:
                if isinstance(host, LoneHost):
                    host.training.use(0)
                backward = host.backward if isinstance(host, PortionHost) else host.training.backward
                self.nan = examine(node, batch.batch, backward)
        return self.over

    def computed(self, node: Node, batch: Computed, found: GradientComputed | BatchSkipped) -> bool:
        words = {True: "finite", False: "not finite"}
        was = "left out" if batch.skipped else words[batch.finite]
        now = "left out" if isinstance(found, BatchSkipped) else words[found.finite]
        if now != was:
            what = f"the gradient was {was} in the run, and is {now} here"
            update = max(shard.version for shard in self.replay.shards)
            self.difference = Difference(update, None, (_push(node, [batch.batch]),), what)
        return self.over

    def updated(self, shard: Holder, pushes: list[tuple[Node, int]], fingerprint: int) -> bool:
        """An update was made of these pushes (who, clock); `fingerprint` is of the weights behind it in the run."""
        self._last[shard.node] = pushes
        if self._check:
            found = shard.fingerprint() & SEEN
            self.fingerprints += fingerprint != UNSEEN
            if fingerprint not in (found, UNSEEN):
                self._differs(shard, "the weights behind it are others")
        self._look(shard)
        return self.over

    def saved(self, shard: Holder, snapshot: Saved) -> bool:
        if snapshot.number in self.kept:
            self.saved_at[snapshot.number][shard.node] = snapshot.version
            state = {name: value.clone() for name, value in shard.state().items()}
            self.kept[snapshot.number][shard.node] = state
        path = self._snapshots / f"{snapshot.number:06d}"
        path /= f"shard-{shard.node.index}-of-{len(self.replay.shards)}.safetensors"
        if self._check and snapshot.number <= self._newest and path.exists():
            if snapshot.number not in self.compared:
                self.compared.append(snapshot.number)
            if what := different(path, shard.state()):
                self._differs(shard, f"snapshot {snapshot.number} holds something else: {what}")
        return self.over

    def restored(self, number: int) -> Restored:
        """A snapshot of `keep` as the replay has computed it, for the next attempt; the file may have been removed."""
        job, kept = self.replay.job, self.kept[number]
        tensors: dict[str, Tensor] = {}
        for shard in self.replay.shards:
            put_together(kept[shard.node], shard.start, shard.stop, job.layout.length, tensors)
        versions = tuple(self.saved_at[number][shard.node] for shard in self.replay.shards)
        manifest = Manifest(
            number=number, layout=job.layout, versions=versions, ledger={}, progress={}, asked_s=0.0, trained_s=0.0,
            optimizer="",
        )  # fmt: skip
        return Restored(manifest, tensors)

    def _look(self, shard: Holder) -> None:
        if shard.version == self.until:
            self.weights[shard.node] = shard.weights.clone()

    def _differs(self, shard: Holder, what: str) -> None:
        last, replicas = self._last.get(shard.node, []), self.replay.replicas
        pushes = [_push(node, replicas[node].behind.get(clock, [])) for node, clock in last]
        self.difference = Difference(shard.version, shard.node.index, tuple(pushes), what)


def _push(node: Node, batches: list[Compute]) -> AppliedPush:
    return AppliedPush(str(node), tuple((batch.epoch, batch.start, batch.stop) for batch in batches))


def different(path: Path, state: Mapping[str, Tensor]) -> str:
    """What has other bits in a shard's file of a snapshot than in this state; empty if nothing has."""
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if names != set(state):
                return f"{', '.join(sorted(names ^ set(state)))} on one side alone"
            for name, mine in state.items():
                theirs = file.get_tensor(name)
                if theirs.dtype != mine.dtype or theirs.shape != mine.shape:
                    return f"{name} is {list(theirs.shape)} there, {list(mine.shape)} here"
                a, b = (tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (mine, theirs))
                if not torch.equal(a, b):
                    count = int((a != b).view(-1, mine.element_size()).any(1).sum())
                    return f"{name} in {count} of {mine.numel()} elements"
    except (OSError, SafetensorError) as error:
        return f"{path} cannot be read ({error})"
    return ""
