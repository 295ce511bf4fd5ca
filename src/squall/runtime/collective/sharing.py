"""A group of processes whose members divide the optimizer's state: what they give each other as it forms, and after
every step."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from squall.runtime.collective.given import broadcast_state
from squall.runtime.collective.holding import Holding
from squall.runtime.collective.shares import givers, runs
from squall.runtime.groups import Group
from squall.runtime.mesh_group import MeshGroup


class Sharing:
    """Raises `ShareLost` where nobody has some of the state, and `RuntimeError` where the group has broken."""

    def __init__(self, holding: Holding, group: Group | MeshGroup, source: int, clock: int) -> None:
        """Those who are one step behind make it, with the gradients of `source`, which is at round `clock`."""
        self._holding, self._group, self._source, self._clock = holding, group, source, clock
        member = holding.member
        own = torch.zeros(2 + len(holding.sizes), dtype=torch.int64)
        own[:2] = torch.tensor([holding.behind(clock), member.clock])
        own[[2 + number for number in holding.has(clock)]] = 1
        rows = [torch.empty_like(own, device=member.device) for _ in group.members]
        dist.all_gather(rows, own.to(member.device), group=group.torch)
        self._had = [{number for number, has in enumerate(row[2:].tolist()) if has} for row in rows]
        self._givers = givers(self._had, len(holding.sizes))
        self._settled = False
        if any(row[0].item() for row in rows):
            for parameter in member.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                dist.broadcast(parameter.grad, group=group.torch, group_src=source)
            if holding.behind(clock):
                member.move()

    def gather(self) -> None:
        """The weights of all shares, of the group's newest round; at first also the state of what is the member's."""
        if not self._settled:
            self._settle()
            self._settled = True
            return
        bounds = self._holding.bounds
        shares = [self._holding.weights(*ends) for ends in pairwise(bounds)]
        under_way = [
            dist.broadcast(share, group=self._group.torch, group_src=place, async_op=True)
            for place, share in enumerate(shares)
        ]
        for work in under_way:
            work.wait()

    def _settle(self) -> None:
        holding, own, members = self._holding, self._group.own, len(self._group.members)
        lacks = [holding.will_hold(place, members) - had for place, had in enumerate(self._had)]
        comes_new = not self._had[own]
        for giver, first, stop in runs(self._givers):
            self._broadcast(holding.weights(first, stop), giver)
            numbers = range(first, stop)
            if any(not lacking.isdisjoint(numbers) for lacking in lacks):
                given = self._tensors(giver, holding.member.states(numbers) if own == giver else None)
                holding.take(given, lacks[own].intersection(numbers))
        if holding.tail().numel():
            self._broadcast(holding.tail(), self._source)
        settings = self._tensors(self._source, holding.member.settings() if own == self._source else None)
        if comes_new:
            holding.take(settings, ())
        holding.settle(own, members, self._clock)

    def _broadcast(self, tensor: Tensor, place: int) -> None:
        dist.broadcast(tensor, group=self._group.torch, group_src=place)

    def _tensors(self, place: int, given: dict[str, Tensor] | None) -> dict[str, Tensor]:
        return broadcast_state(self._group, place, given, self._holding.member)
