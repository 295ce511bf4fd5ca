"""All-reduce within one process: members add up each other's gradients where they lie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from squall.protocol.effects import JoinGroup, Step
from squall.protocol.events import Event, StepTaken
from squall.protocol.nodes import Node
from squall.runtime.circle import Groups
from squall.runtime.collective.member import Member


class Part(NamedTuple):
    """What a member brings to a step."""

    share: float
    gradients: list[Tensor | None]
    changes: Tensor | None  # of the model's buffers, times the share
    loss: float
    extras: dict[str, float] | None

    @property
    def finite(self) -> bool:
        return all(g is None or math.isfinite(g.sum().item()) for g in self.gradients)


class InlineMember:
    """A member in a world, which tells its answers."""

    wakes: Sequence[int] = ()

    def __init__(self, member: Member, node: Node, groups: Groups) -> None:
        self.member = member
        self._node = node
        self._groups = groups
        self._number = 0

    def join(self, effect: JoinGroup) -> None:
        self._number = effect.number
        self._groups.join(self._node, effect, self)

    def cut(self) -> None:
        self._groups.cut(self._node)

    def poll(self) -> None:
        """Answers come by themselves."""

    def rest(self) -> None:
        self.member.batches.prepare()

    def leave(self) -> None:
        self._groups.leave(self._node)

    def step(self, effect: Step) -> None:
        member, share = self.member, self.member.share(effect)
        batch = member.load(effect)
        loss = member.backward.differentiate(batch) if batch is not None else 0.0
        gradients = [parameter.grad for parameter in member.parameters]
        part = Part(share, gradients, member.buffer_changes(share), loss, member.backward.extras)
        member.look_again()
        self._groups.step(self._node, effect, part)

    def reduced(self, effect: Step, parts: Mapping[Node, Part]) -> Event:
        member, own = self.member, parts[self._node]
        counted = [part for part in parts.values() if part.share > 0]
        for parameter, *gradients in zip(member.parameters, *(part.gradients for part in counted)):
            terms = [g if part.share == 1 else g * part.share for part, g in zip(counted, gradients) if g is not None]
            parameter.grad = sum(terms[1:], terms[0]) if terms else None
        finite = member.move()
        if finite and own.changes is not None:
            changes = [part.changes for part in counted if part.changes is not None]
            member.move_buffers(sum(changes[1:], changes[0]))
            member.look_again()
        guilty = not finite and (not own.finite or (self._node == min(parts) and all(p.finite for p in parts.values())))
        return StepTaken(self._number, own.loss, finite, 0.0, 0.0, own.extras, guilty)

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.member.state().items()}

    def take_up(self, state: dict[str, Tensor], clock: int) -> None:
        self.member.take_up(state, clock)
