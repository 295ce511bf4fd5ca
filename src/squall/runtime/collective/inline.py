"""All-reduce within one process: members add up each other's gradients where they lie."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from squall.protocol.effects import Gather, JoinGroup, Step
from squall.protocol.events import Event, Gathered, GroupBroken, GroupJoined, StepTaken
from squall.protocol.nodes import Node
from squall.runtime.circle import Groups, joined_whole
from squall.runtime.collective.holding import Holding
from squall.runtime.collective.member import Member
from squall.runtime.collective.shares import ShareLost, givers


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

    def __init__(self, member: Member, holding: Holding | None, node: Node, groups: Groups) -> None:
        self.member, self.holding = member, holding
        self._node = node
        self._groups = groups
        self._number = 0
        self._settled = 0  # the group in which it has got what is its share

    def join(self, effect: JoinGroup) -> None:
        self._number = effect.number
        self._groups.join(self._node, effect, self)

    def gather(self, effect: Gather) -> None:
        self._groups.gather(self._node, effect)

    def cut(self) -> None:
        self._groups.cut(self._node)

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
        finite = member.look()
        if finite:
            if self.holding is not None:
                self.holding.narrow()
            member.move()
        if finite and own.changes is not None:
            changes = [part.changes for part in counted if part.changes is not None]
            member.move_buffers(sum(changes[1:], changes[0]))
            member.look_again()
        guilty = not finite and (not own.finite or (self._node == min(parts) and all(p.finite for p in parts.values())))
        return StepTaken(self._number, own.loss, finite, 0.0, 0.0, own.extras, guilty)

    def joined(self, form: JoinGroup, members: Mapping[Node, InlineMember]) -> Event:
        own = self.holding
        if own is None:
            return joined_whole(self, self._node, form, members)
        try:
            _givers(form, members)
        except ShareLost as error:
            return GroupBroken(form.number, str(error), lost=True)
        if own.behind(form.clock):
            for parameter, ahead in zip(self.member.parameters, members[form.source].member.parameters):
                parameter.grad = ahead.grad
            self.member.move()
        return GroupJoined(form.number, self.member.clock)

    def gathered(self, form: JoinGroup, members: Mapping[Node, InlineMember]) -> Event:
        own = self.holding
        assert own is not None
        if self._settled == form.number:
            for place, other in enumerate(members.values()):
                self._copy(other, *own.bounds[place : place + 2])
            return Gathered(form.number)
        given, source = _givers(form, members), members[form.source].holding
        assert source is not None
        place, comes_new = list(members).index(self._node), self.member.clock != form.clock
        lacks = own.will_hold(place, len(members)) - own.has(form.clock)
        for number, other in enumerate(given):
            self._copy(other, number, number + 1)
            if number in lacks:
                own.take(other.member.states([number]), [number])
        own.tail().copy_(source.tail())
        if comes_new:
            own.take(source.member.settings(), ())
        own.settle(place, len(members), form.clock)
        self._settled = form.number
        return Gathered(form.number)

    def _copy(self, other: InlineMember, first: int, stop: int) -> None:
        """The weights of parameters [first, stop)."""
        assert self.holding is not None
        assert other.holding is not None
        self.holding.weights(first, stop).copy_(other.holding.weights(first, stop))

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.member.state().items()}

    def take_up(self, state: dict[str, Tensor], clock: int) -> None:
        self.member.take_up(state, clock)


def _givers(form: JoinGroup, members: Mapping[Node, InlineMember]) -> list[InlineMember]:
    """Who gives each parameter. Raises `ShareLost`."""
    holdings = [member.holding for member in members.values() if member.holding is not None]
    places = givers([holding.has(form.clock) for holding in holdings], len(holdings[0].sizes))
    return [list(members.values())[place] for place in places]
