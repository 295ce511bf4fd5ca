"""A shard's numbers as exchanges move them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from squall.protocol.effects import Term
from squall.protocol.messages import Factors
from squall.runtime.arena import newest_first
from squall.runtime.optimizers import rates_scaled
from squall.runtime.ranges import Elements
from squall.runtime.seeds import mix
from squall.runtime.shard_state import ShardState
from squall.vector import count_in, put_count


class Store(ShardState):
    """It reads pushed gradients where they lie (no copy), and a fetch is one copy into the replica's buffer."""

    @cached_property
    def _sums(self) -> list[Tensor]:
        """Of several pushes, cut as the parameters are."""
        return [torch.empty_like(parameter) for parameter in self.parameters]

    @cached_property
    def _gradients(self) -> dict[tuple[int, int], list[Tensor]]:
        """(slot, buffer) -> its part of each parameter."""
        return {}

    @cached_property
    def _targets(self) -> dict[tuple[int, int, Elements | None], tuple[list[tuple[Tensor, Tensor]], Any]]:
        """Where weights are delivered, and learning rates, by slot, buffer and elements."""
        return {}

    def apply(
        self, terms: Sequence[Term], share: float, clock: int = 1, rate: float = 1.0, factors: Factors = ()
    ) -> None:  # fmt: skip
        """One optimizer step on the weighted sum of pushed gradients; buffers move by `share` to the pushed ones, and
        counters by `share` of what was added to them.

        Only the elements of the block whose turn it is at this clock are moved. `rate` is a factor on the learning
        rates of this step, and `factors` are more, one a group; groups with None are not stepped.
        """
        if self._numbers is not None:
            self._numbers.begin()
        block = turn(clock, self._update.blocks, self._update.block_order)
        with torch.no_grad():
            for piece, parameter, gradient in zip(self.pieces, self.parameters, self._gradient(terms)):
                parameter.grad = gradient if piece.block == block else None
            if rate == 1.0 and not factors:
                self._step()
            else:
                with rates_scaled(self.optimizer, rate, factors):
                    self._step()
        if self.schedule is not None:
            self.schedule.step()
        if self._tail:
            self._move_buffers(terms, share)
        for piece in self._counters:
            own = self._own(piece).view(-1, 2)
            pushed = [self.arena.gradient(t.slot, t.buffer)[piece.start : piece.stop].view(-1, 2) for t in terms]
            put_count(own, sum((count_in(p) * (t.weight * share) for t, p in zip(terms, pushed)), count_in(own)))
        if self._numbers is not None:
            self.leave()
            self._numbers.made()

    def _gradient(self, terms: Sequence[Term]) -> list[Tensor]:
        """What the optimizer steps on, cut as the parameters are."""
        first = terms[0]
        if self._pushes_weights:
            return [torch.sub(own, total, out=total) for own, total in zip(self.parameters, self._sum(terms))]
        if len(terms) > 1 or first.weight != 1.0:
            return self._sum(terms)
        pushed = self._pushed(first.slot, first.buffer)
        if self._compensation is None:
            return pushed
        # The slot still holds what was fetched into it, and the replica has computed on.
        own = (
            self.arena.weights(first.slot, 0)[self.start : self.stop]
            if self.fetched is None
            else self.fetched[first.slot]
        )
        then = [own[piece.start - self.start : piece.stop - self.start] for piece in self.pieces]
        return self._compensation.correct(pushed, self.parameters, then)

    def _pushed(self, slot: int, buffer: int) -> list[Tensor]:
        """A slot's gradient, cut as the parameters are. Cut once: a small exchange is over before three slices are."""
        views = self._gradients.get((slot, buffer))
        if views is None:
            whole = self.arena.gradient(slot, buffer)
            views = self._gradients[slot, buffer] = [whole[piece.start : piece.stop] for piece in self.pieces]
        return views

    def _sum(self, terms: Sequence[Term]) -> list[Tensor]:
        for i, total in enumerate(self._sums):
            torch.mul(self._pushed(terms[0].slot, terms[0].buffer)[i], terms[0].weight, out=total)
            for term in terms[1:]:
                total.add_(self._pushed(term.slot, term.buffer)[i], alpha=term.weight)
        return self._sums

    def _move_buffers(self, terms: Sequence[Term], share: float) -> None:
        """Move buffers towards the mean of the pushed ones. What no push has changed (a mask of infinities) stays."""
        for piece in self._tail:
            own, inside = self._own(piece), slice(piece.start, piece.stop)
            pushed = [self.arena.gradient(term.slot, term.buffer)[inside] for term in terms]
            if len(terms) == 1 and terms[0].weight * share >= 1:
                own.copy_(pushed[0])
                continue
            before = own.clone()
            for term, theirs in zip(terms, pushed):
                own.add_(torch.where(theirs == before, 0.0, theirs - before), alpha=term.weight * share)

    def deliver(self, slot: int, buffer: int, some: Elements | None = None) -> None:
        """Write the current weights, or some of them, and learning rates into a slot's buffer."""
        target = self._targets.get((slot, buffer, some))
        if target is None:
            whole = self.arena.weights(slot, buffer)
            if some is None:
                pieces = [*zip(newest_first(whole[self.start : self.stop]), newest_first(self.weights))]
            else:
                pieces = [*zip(some.of(whole), some.of(self.weights, self.start))]
            target = self._targets[slot, buffer, some] = (pieces, self.arena.rates(slot, buffer).numpy())
        pieces, rates = target
        for there, own in pieces:
            there.copy_(own)
        for number, group in enumerate(self.optimizer.param_groups):
            rates[number] = group.get("lr", 0.0)

    def keep_fetched(self, slot: int) -> None:
        """The current weights are delivered to this slot."""
        if self.fetched is not None:
            self.fetched[slot].copy_(self.weights)


def turn(clock: int, blocks: int, order: str) -> int:
    """The block of an exchange; clocks count from 1. Every sweep visits each block once."""
    sweep, place = divmod(clock - 1, blocks)
    if blocks == 1 or order == "cyclic":
        return place
    generator = torch.Generator().manual_seed(mix(blocks, sweep))
    return int(torch.randperm(blocks, generator=generator)[place])
