"""A member of a group whose gradients the loop of a user's script computes.

The loop calls the model as it likes, and as often, so nothing can be added up before it has stepped. What a member
brings is added up then, with the examples that are behind it: a script may have left its batch out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from squall.protocol.effects import Gather, JoinGroup, Step
from squall.protocol.events import Event, GroupBroken, GroupJoined, StepTaken
from squall.protocol.messages import Factors
from squall.protocol.nodes import Node
from squall.runtime.collective.adding import Sum, add_up
from squall.runtime.collective.given import broadcast_state
from squall.runtime.collective.holding import Holding
from squall.runtime.collective.meeting import Fellows, fellows_of, in_a_line
from squall.runtime.collective.member import Member
from squall.runtime.compute import all_finite
from squall.runtime.groups import Group
from squall.runtime.job import Job
from squall.runtime.mesh_group import MeshGroup


class Stepped(NamedTuple):
    """What a loop says of the batch that it has stepped on."""

    loss: float | None  # None: it is not known
    started: float  # by `time.perf_counter()`
    factors: Factors  # of the learning rates of each param group


class LoopMember:
    """A member in a process of its own. Its loop has computed the gradients of a step, where that has a batch of it."""

    holding: Holding | None = None

    def __init__(self, member: Member, node: Node, fellows: Fellows) -> None:
        self.member = member
        self.stepped: Stepped | None = None  # on the batch of the step that comes
        self._node, self._fellows = node, fellows
        self._group: Group | MeshGroup | None = None
        self._number = 0

    @classmethod
    def of(cls, job: Job, node: Node) -> LoopMember:
        member = Member(job, node.index)
        return cls(member, node, fellows_of(job, node, member.device))

    # ------------------------------------------------------------ the group

    def join(self, effect: JoinGroup) -> Event:
        self._number = effect.number
        own, source, given = effect.members.index(self._node), effect.members.index(effect.source), None
        try:
            self._group = self._fellows.form(effect, own)
            if effect.transfer:
                state = self.member.state() if own == source else None
                given = broadcast_state(self._group, source, state, self.member, whole=True)
        except RuntimeError as error:
            return self._broken(in_a_line(error))
        if given is not None and own != source:  # only now: who fails to join has come no further
            self.member.take_up(given, effect.clock)
        self._sum = Sum(self.member.parameters)
        return GroupJoined(effect.number, self.member.clock)

    def _broken(self, why: str) -> GroupBroken:
        self.leave()
        return GroupBroken(self._number, why)

    def cut(self) -> None:
        self._fellows.cut()

    def leave(self) -> None:
        for parameter in self.member.parameters:
            parameter.grad = None
        self.member.look_again()  # a step that was given up has moved the model's buffers
        if self._group is not None:
            self._group.close()
            self._group = None
        self._fellows.left()

    def rest(self) -> None:
        self.member.batches.prepare()

    def state(self) -> dict[str, Tensor]:
        return self.member.state()

    def gather(self, effect: Gather) -> Event:
        raise AssertionError("the optimizer's state is not divided")

    # ------------------------------------------------------------ steps

    def step(self, effect: Step) -> Event:
        member, begun = self.member, time.perf_counter()
        stepped, self.stepped = self.stepped or Stepped(None, begun, ()), None
        if has_batch := effect.start < effect.stop:
            own = member.backward.fresh()
        else:
            member.look_again()  # a batch that was left out may have moved the model's buffers
            member.load(effect)
            own = member.backward.gradients()
        share, told = member.share(effect), self._told(effect, stepped)
        self._sum.bring(own, share)
        changes = member.buffer_changes(share)
        if why := add_up(self._group, self._sum.vector, told, *([] if changes is None else [changes])):
            return self._broken(why)
        wait_s = time.perf_counter() - begun
        examples, strange, *factors = told.tolist()
        if not examples:  # all have left their batches out
            member.pass_by()
            return self._taken(stepped, wait_s)
        if examples != effect.examples:  # some have
            for summed in (self._sum.vector, *([] if changes is None else [changes])):
                summed *= effect.examples / examples
        for parameter, gradient in zip(member.parameters, self._sum.gradients):
            parameter.grad = gradient
        finite = not strange and member.look()
        guilty = not finite and self._guilty(has_batch and not _finite(own, stepped.loss))
        if finite:
            member.move(tuple(factor / examples for factor in factors))
            member.move_buffers(changes)
        member.look_again()
        return self._taken(stepped, wait_s, finite, guilty)

    def _told(self, effect: Step, stepped: Stepped) -> Tensor:
        """Examples behind the gradients, whether the loss is strange, and of each param group its factor x examples."""
        examples, groups = effect.stop - effect.start, len(self.member.optimizer.param_groups)
        factors = [examples * (factor or 0.0) for factor in stepped.factors or (1.0,) * groups]
        return torch.tensor([examples, not _finite([], stepped.loss), *factors], dtype=torch.float64)

    def _taken(self, stepped: Stepped, wait_s: float, finite: bool = True, guilty: bool = False) -> StepTaken:
        loss = math.nan if stepped.loss is None else stepped.loss
        compute_s = time.perf_counter() - stepped.started - wait_s
        return StepTaken(self._number, loss, finite, max(0.0, compute_s), wait_s, guilty=guilty)

    def _guilty(self, mine: bool) -> bool:
        """The mean is not finite: whether it is the member's own batch, or nobody's and it speaks for all."""
        guilty = torch.tensor([float(mine)])
        broken = add_up(self._group, guilty)
        first = self._group is not None and self._group.own == 0
        return mine or (not broken and not guilty.item() and first)


def _finite(gradients: Sequence[Tensor | None], loss: float | None) -> bool:
    return (loss is None or math.isfinite(loss)) and all_finite([g for g in gradients if g is not None])
