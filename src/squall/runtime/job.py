"""What every process of a run starts from. Forked processes inherit it; nothing of it is copied or sent."""

from __future__ import annotations

import copy
import dataclasses
import mmap
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.nursery_messages import PartPlace
from squall.protocol.policy import SAVE_WITHIN_S
from squall.runtime.arena import Arena, Shape
from squall.runtime.backward import resolve_device
from squall.runtime.board import Board, Entry
from squall.runtime.inside import Inside
from squall.runtime.journal import Journal
from squall.runtime.legacy import Legacy
from squall.runtime.ranges import Ranges
from squall.runtime.rates import NAME, Schedule
from squall.runtime.run_plan import Plan
from squall.runtime.site import Site
from squall.runtime.snapshot import Restored
from squall.strategies import Recipe, Strategy
from squall.task import Task
from squall.vector import Layout

if TYPE_CHECKING:
    from squall.parts.shares import Share
    from squall.runtime.deputing import Kept

VECTORS = 3  # in a snapshot: weights, and the two that most optimizers keep
SLOW_DISK_BYTES_S = 50e6


@dataclass(frozen=True, kw_only=True)
class Job:
    plan: Plan
    strategy: Strategy
    task: Task
    layout: Layout
    arena: Arena
    initial: Tensor  # float32 [length]: the weights that training starts from, and then the shards' own
    directory: Path  # of the run
    commanded_at: float = field(default_factory=time.time)  # when the user gave the command, seconds since 1970
    restored: Restored | None = None  # the snapshot that the run goes on from
    by_itself: bool = False  # it goes on, or begins again, without anybody's command
    site: Site | None = None  # None: the run has one machine
    schedule: Path | None = None  # where hosts keep their schedules; None: there will be no replay
    scratch: Path | None = None  # of its processes on this machine; removed when they have ended
    starts: tuple[int, ...] = ()  # where the stages of a pipeline begin, in a replica of several parts
    shares: tuple[Share, ...] = ()  # of the vector, of the parts of each replica, which the task splits
    inside: Inside | None = None  # this process's place in such a replica
    own: Tensor | None = None  # float32 [length]: weights that its parts share, where it trains on its own
    listener: socket.socket | None = None  # where other replicas, or parts of this one, call this process
    first: PartPlace | None = None  # of a replica on several machines: its first part, which this process is or calls
    board: Board | None = None  # where this machine's processes tell what they do
    journal: Journal | None = None  # of the coordinator, to its successors, if it begins on this machine
    legacies: dict[int, Legacy] = field(default_factory=dict)  # of this machine's shards, to their successors
    backups: dict[Node, Legacy] = field(default_factory=dict)  # of backups here, to shards that go on in their place
    deputies: dict[Node, Kept] = field(default_factory=dict)  # of one here, to who goes on in its place
    scripted: bool = False  # users' loops train
    turn: int | None = None  # in which the process of this job takes a GPU; None: a replica takes that of its slot

    @cached_property
    def recipe(self) -> Recipe:
        return self.strategy.recipe()

    def succeeds(self, node: Node) -> bool:
        """Another process had its name before, and has left what this one needs to go on."""
        if node == COORDINATOR:
            return self.journal is not None and self.journal.begun
        return node.role == "shard" and node.index in self.legacies and self.legacies[node.index].journal.begun

    @property
    def kept(self) -> Mapping[str, Any]:
        """What the host of a coordinator that was killed knew."""
        kept = self.journal.kept if self.journal is not None else None
        return cast("Mapping[str, Any]", kept) if kept is not None else {}

    @cached_property
    def ranges(self) -> Ranges:
        """Which elements go with a payload."""
        return Ranges(self.layout, self.recipe.shards, self.shares, self.recipe.work.local is not None)

    def entry(self, node: Node) -> Entry | None:
        return self.board.entry(node, time.monotonic()) if self.board is not None else None

    def alone(self, alone: bool = True) -> None:
        """For `protocol.hangs`: what this process does from now on depends on no other one, or it does."""
        if self.board is not None:
            self.board.own.works() if alone else self.board.own.rests()

    def with_shares(self) -> Job:
        """Before the task's model is changed: each part of a replica makes its own of it."""
        if self.plan.settings.parts == 1 or self.task.split is None:
            return self
        from squall.parts.shares import shares  # which imports torch's compiler

        found = shares(self.task, self.layout, self.starts, self.plan.settings.parts)
        return dataclasses.replace(self, shares=found)

    def keep(self, schedule: Schedule | None) -> None:
        """Keep a learning-rate schedule in the run's directory, so that no process has to take all of its steps."""
        if schedule is not None:
            schedule.file = self.directory / NAME

    @property
    def save_within_s(self) -> float:
        """How long the last snapshot of a run that a user stops may take, on a slow disk."""
        return SAVE_WITHIN_S + VECTORS * self.layout.length * 4 / SLOW_DISK_BYTES_S

    def slowness(self, node: Node) -> float:
        """How many times as long a node's computations shall take."""
        last = node.role == "replica" and node.index == self.recipe.replicas - 1
        return 1 / (self.plan.settings.slow or 1.0) if last else 1.0

    def device(self, slot: int) -> torch.device:
        """Replicas share the GPUs of their machine in turn, unless one is named.

        An evaluator is where the run is kept, which may have no GPU: its turn is the CPU's then.
        """
        if slot == self.recipe.replicas and self.site is not None and not torch.cuda.is_available():
            return torch.device("cpu")
        device = resolve_device(self.plan.device)
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", (slot if self.turn is None else self.turn) % torch.cuda.device_count())
        return device


def private_job(
    plan: Plan, strategy: Strategy, task: Task, layout: Layout, directory: Path, restored: Restored | None = None
) -> Job:  # fmt: skip
    """A job for a run within this process; the task's model is left as it is."""
    arena, initial = Arena.private(arena_shape(layout, strategy.recipe())), initial_vector(layout, task)
    return own_model(Job(
        plan=plan, strategy=strategy, task=task, layout=layout, arena=arena, initial=initial, directory=directory,
        restored=restored,
    ))  # fmt: skip


def own_model(job: Job) -> Job:
    """The job with a model of its own, for one of several replicas within a process."""
    return dataclasses.replace(job, task=dataclasses.replace(job.task, model=copy.deepcopy(job.task.model)))


def arena_shape(layout: Layout, recipe: Recipe) -> Shape:
    buffers = recipe.work.buffers
    return Shape(layout.length, recipe.replicas, buffers, buffers, len(layout.group_starts))


def initial_vector(layout: Layout, task: Task) -> Tensor:
    """In memory that processes share which are forked from this one."""
    vector = torch.frombuffer(mmap.mmap(-1, 4 * layout.length), dtype=torch.float32)
    layout.write_model(task.model, vector)
    return vector
