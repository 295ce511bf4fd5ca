"""All-reduce between processes: torch's DistributedDataParallel, in a group that is made anew when one dies."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from squall.protocol.effects import Gather, JoinGroup, Step
from squall.protocol.events import Event, Gathered, GroupBroken, GroupJoined, StepTaken
from squall.protocol.nodes import Node
from squall.runtime.collective.given import broadcast_state
from squall.runtime.collective.holding import Holding
from squall.runtime.collective.meeting import Fellows, in_a_line, lost
from squall.runtime.collective.member import Member
from squall.runtime.collective.shares import ShareLost
from squall.runtime.collective.sharing import Sharing
from squall.runtime.groups import Group
from squall.runtime.inside import Alone
from squall.runtime.mesh_group import MeshGroup
from squall.task import Batch, Task


class _Loss(nn.Module):
    """The task's loss as a module's forward pass, which is what DistributedDataParallel wraps.

    So the loss has the user's own model, with its attributes. Of no batch it is zero, with gradients of zero.
    """

    def __init__(self, task: Task, alone: Callable[[bool], None]) -> None:
        """`alone`: says that what begins now depends on no other member, or that it does."""
        super().__init__()
        self.model = task.model
        self._loss = task.loss
        self._alone = alone

    def forward(self, batch: Batch | None) -> Any:
        if batch is None:
            return sum((parameter * 0).sum() for parameter in self.model.parameters())
        self._alone(True)
        loss = self._loss(self.model, batch)
        self._alone(False)
        return loss


class GroupedMember:
    """A member in a process of its own. It does what it is told before it hears more."""

    def __init__(self, member: Member, holding: Holding | None, node: Node, fellows: Fellows) -> None:
        self.member, self.holding = member, holding
        self._sharing: Sharing | None = None  # of the group's state, where it is divided
        self._node = node
        self._fellows = fellows
        self._group: Group | MeshGroup | None = None
        self._number = 0
        self._wrapped: DistributedDataParallel | None = None
        assert isinstance(member.backward.inside, Alone)
        self._inside = member.backward.inside
        self.unused = False  # some batch does not use all parameters, of which torch has to be told
        self._computed_at = 0.0  # when the last gradient of its own was there
        first = member.backward.on_vector.model.parameters()
        next(p for p in first if p.requires_grad).register_post_accumulate_grad_hook(self._note_computed)

    def _note_computed(self, parameter: Tensor) -> None:
        self._computed_at = time.perf_counter()

    # ------------------------------------------------------------ the group

    def join(self, effect: JoinGroup) -> Event:
        self._number = effect.number
        try:
            self._form(effect)
        except RuntimeError as error:
            self.leave()
            return GroupBroken(effect.number, in_a_line(error), lost=isinstance(error, ShareLost))
        return GroupJoined(effect.number, self.member.clock)

    def _form(self, effect: JoinGroup) -> None:
        own, source = effect.members.index(self._node), effect.members.index(effect.source)
        self._group = group = self._fellows.form(effect, own)
        given = None
        if effect.transfer and self.holding is None:
            state = self.member.state() if own == source else None
            given = broadcast_state(group, source, state, self.member, whole=True)
        if len(effect.members) > 1:
            unused = torch.tensor([int(self.unused)], device=self.member.device)
            dist.all_reduce(unused, group=group.torch)
            self.unused = bool(unused.item())
            self._wrapped = DistributedDataParallel(
                _Loss(self.member.task, self.member.alone), process_group=group.torch, init_sync=False,
                gradient_as_bucket_view=True, find_unused_parameters=self.unused,
            )  # fmt: skip
            self._wrapped.broadcast_buffers = False  # the argument has another name before torch 2.13
            self._inside.wrapped = self._wrapped
        if self.holding is not None:
            self._sharing = Sharing(self.holding, group, source, effect.clock)  # nothing may fail behind it
        elif given is not None and own != source:  # only now: who fails to join has come no further
            self.member.take_up(given, effect.clock)

    def state(self) -> dict[str, Tensor]:
        return self.member.state()

    def leave(self) -> None:
        self._wrapped = self._inside.wrapped = self._sharing = None
        if self.holding is None:  # else those who have not made the step may need its gradients
            for parameter in self.member.parameters:
                parameter.grad = None
        self.member.look_again()  # a step that was given up has moved the model's buffers
        if self._group is not None:
            self._group.close()
            self._group = None
        self._fellows.left()

    def cut(self) -> None:
        self._fellows.cut()

    def rest(self) -> None:
        self.member.batches.prepare()

    # ------------------------------------------------------------ steps

    def step(self, effect: Step) -> Event | None:
        return self._unless_broken(lambda: self._step(effect))

    def gather(self, effect: Gather) -> Event:
        assert self._sharing is not None
        return self._unless_broken(self._sharing.gather) or Gathered(self._number)

    def _unless_broken(self, work: Callable[[], Event | None]) -> Event | None:
        try:
            return work()
        except RuntimeError as error:
            if not lost(error):
                raise
            self.leave()
            return GroupBroken(self._number, in_a_line(error))

    def _step(self, effect: Step) -> Event:
        member, started = self.member, time.perf_counter()
        share, members = member.share(effect), len(self._group.members) if self._group is not None else 1
        self._computed_at = started
        self._inside.scale = share * members  # torch divides by their number
        member.alone()
        batch = member.load(effect)
        member.alone(members == 1)
        loss = member.backward.differentiate(batch)
        reduced = time.perf_counter()
        told = self.unused or self._wrapped is None
        if not told and any(parameter.grad is None for parameter in member.parameters):
            self.unused = True  # what others have of this step is not the sum of all
            self.leave()
            return GroupBroken(self._number, "a batch does not use all parameters")
        changes = member.buffer_changes(share)
        if changes is not None and self._wrapped is not None:
            dist.all_reduce(changes, group=self._wrapped.process_group)
        finite = member.look()
        guilty = not finite and self._guilty(effect)
        if finite:
            if self.holding is not None:
                self.holding.narrow()
            member.move()
            member.move_buffers(changes)
        member.look_again()
        wait_s = max(0.0, reduced - self._computed_at)
        compute_s = time.perf_counter() - started - wait_s
        return StepTaken(self._number, loss, finite, compute_s, wait_s, member.backward.extras, guilty)

    def _guilty(self, effect: Step) -> bool:
        """The mean is not finite: whether it is the member's own batch, or nobody's and it speaks for all."""
        member = self.member
        if self._wrapped is None:
            return True
        self._inside.scale = 1.0
        with self._wrapped.no_sync():
            member.backward.differentiate(member.load(effect))
        own = not all(bool(p.grad.isfinite().all()) for p in member.parameters if p.grad is not None)
        guilty = torch.tensor([int(own and effect.stop > effect.start)], device=member.device)
        mine = bool(guilty.item())
        dist.all_reduce(guilty, group=self._wrapped.process_group)
        return mine or (not guilty.item() and self._group is not None and self._group.own == 0)


def import_beforehand() -> None:
    """Import what the first group needs, which takes more than a second: before the forks, once for all replicas."""
    importlib.import_module("torch._dynamo")
