"""A shard's numbers: its range of the vector, and the optimizer that moves it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from squall.protocol.effects import Term
from squall.protocol.messages import Factors
from squall.runtime.arena import Arena, newest_first
from squall.runtime.compensation import Compensation
from squall.runtime.legacy import Copy, Numbers
from squall.runtime.optimizers import bare_step, build_optimizer, rates_scaled
from squall.runtime.ranges import Elements
from squall.runtime.rates import Schedule
from squall.runtime.seeds import mix
from squall.strategies.base import Recipe
from squall.task import Task
from squall.vector import Layout, Piece, count_in, put_count

_MEAN_SQUARE = "squall.mean_square"  # of gradients, in a snapshot
PIECE = 1 << 20  # elements that travel to a backup together, while exchanges wait


class Store:
    """Weights of elements [start, stop), their optimizer state and learning-rate schedule.

    The optimizer sees one flat parameter per param group. It reads pushed gradients where they lie (no copy), and a
    fetch is one copy into the replica's buffer.
    """

    def __init__(
        self, task: Task, recipe: Recipe, layout: Layout, shard: int, arena: Arena, initial: Tensor,
        numbers: Numbers | None = None, weights: Tensor | None = None, fetched: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`numbers`: where its state is left to a successor. `weights`: its own, where not those of `initial`.

        `fetched`: float32 [slots, shard elements], what was last delivered to each, where its slot may have another.
        """
        loop = recipe.loop
        self.start, self.stop = layout.shard_range(shard, recipe.shards)
        # float32 [shard elements], from now on this shard's
        self.weights = initial[self.start : self.stop] if weights is None else weights
        self.arena = arena
        self.fetched = fetched
        pieces = layout.pieces(self.start, self.stop, loop.blocks)
        self.pieces = [piece for piece in pieces if piece.group >= 0]
        self._tail = [piece for piece in pieces if piece.group == -1]
        self._counters = [piece for piece in pieces if piece.group == -2]
        self.parameters = [nn.Parameter(self._own(piece)) for piece in self.pieces]
        # A replica with an optimizer of its own takes the task's param groups and schedule for that.
        local = loop.local is not None
        options = [{k: v for k, v in g.items() if k != "params" and not local} for g in task.param_groups()]
        self.optimizer = build_optimizer(loop.update.optimizer, self._groups(options))
        self.schedule = Schedule(task, self.optimizer) if task.schedule is not None and not local else None
        self._step = bare_step(self.optimizer)
        self._update = loop.update
        self._pushes_weights = loop.local is not None and loop.local.pushes == "weights"
        self._compensation: Compensation | None = None
        if loop.update.compensation is not None:
            self._compensation = Compensation(loop.update.compensation, loop.update.adaptive, self.parameters)
        self._mean_squares = self._compensation.mean_squares if self._compensation is not None else []
        self._numbers = numbers
        self._sums: list[Tensor] = []  # of several pushes, cut as the parameters are
        self._gradients: dict[tuple[int, int], list[Tensor]] = {}  # (slot, buffer) -> its part of each parameter
        self._targets: dict[tuple[int, int, Elements | None], tuple[list[tuple[Tensor, Tensor]], Any]] = {}

    def _own(self, piece: Piece) -> Tensor:
        return self.weights[piece.start - self.start : piece.stop - self.start]

    def _groups(self, options: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Every group of the task, also those without elements here: schedulers count them."""
        return [
            {**own, "params": [p for piece, p in zip(self.pieces, self.parameters) if piece.group == number]}
            for number, own in enumerate(options)
        ]

    # ------------------------------------------------------------ exchanges

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
        if not self._sums:
            self._sums = [torch.empty_like(parameter) for parameter in self.parameters]
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

    # ------------------------------------------------------------ succession

    def leave(self) -> None:
        """Have the state where a successor finds it. The weights are there."""
        assert self._numbers is not None
        numbers = self._numbers
        for state, key, name in self._state():
            if (value := state[key]) is not None and not numbers.holds(name, value):
                held = numbers.hold(name, value)
                if held is not None:
                    state[key] = held

    def _state(self) -> Iterator[tuple[Any, Any, str]]:
        """Where each value is, and its name."""
        for number, parameter in enumerate(self.parameters):
            state = self.optimizer.state[parameter]
            yield from ((state, key, f"{number}:{key}") for key in state)
        for number in range(len(self._mean_squares)):
            yield self._mean_squares, number, f"{number}:{_MEAN_SQUARE}"

    def succeed(self, updates: int) -> None:
        """Go on from what another process has left behind so many updates."""
        assert self._numbers is not None
        for name, value in self._numbers.taken_over().items():
            number, _, key = name.partition(":")
            if key == _MEAN_SQUARE:
                self._mean_squares[int(number)] = value
            else:
                self.optimizer.state[self.parameters[int(number)]][key] = value
        if self.schedule is not None:
            self.schedule.advance(updates)

    def go_back(self, copy: Copy, updates: int) -> None:
        """Go on from the copy; it is made so many updates old at once, which the schedule counts."""
        copy.put_back(self.weights)
        self.optimizer.state.clear()
        self.succeed(updates)

    # ------------------------------------------------------------ backups

    def outline(self) -> dict[str, Tensor]:
        """The optimizer's state: what belongs to elements has none here, only its type."""
        found: dict[str, Tensor] = {}
        for number, parameter in enumerate(self.parameters):
            for key, value in self._values(number).items():
                found[f"{number}:{key}"] = value[:0] if value.shape == parameter.shape else value
        return found

    def take_outline(self, outline: Mapping[str, Tensor]) -> None:
        """Have such a state, of which what belongs to elements comes later."""
        assert self._numbers is not None
        for name, value in outline.items():
            number, _, key = name.partition(":")
            parameter = self.parameters[int(number)]
            whole = torch.zeros_like(parameter, dtype=value.dtype) if value.shape == (0,) else value
            if (held := self._numbers.hold(name, whole)) is None:
                raise ValueError(f"there is no room for {name}")
            if key == _MEAN_SQUARE:
                self._mean_squares[int(number)] = held
            else:
                self.optimizer.state[parameter][key] = held

    def piece_end(self, start: int) -> int:
        """Where a piece of its elements ends that begins at this one, and can be moved without the others."""
        if not self._update.elementwise or start + PIECE >= len(self.weights):
            return len(self.weights)
        stop = start + PIECE
        return stop + sum(
            piece.start < self.start + stop < piece.stop and (self.start + stop - piece.start) % 2
            for piece in self._counters  # of two elements each
        )

    def piece(self, start: int, stop: int) -> dict[str, Tensor]:
        """Views of all that is of these elements of its own, by name."""
        found = {"weights": self.weights[start:stop]}
        if self.fetched is not None:
            found["fetched"] = self.fetched[:, start:stop]
        for number, (piece, parameter) in enumerate(zip(self.pieces, self.parameters)):
            ends = (min(max(self.start + at, piece.start), piece.stop) for at in (start, stop))
            low, high = (end - piece.start for end in ends)
            for key, value in self._values(number).items():
                if low < high and value.shape == parameter.shape:
                    found[f"{number}:{key}"] = value[low:high]
        return found

    def _values(self, number: int) -> dict[str, Tensor]:
        """The optimizer's state of a parameter."""
        state = self.optimizer.state[self.parameters[number]]
        found = {key: value for key, value in state.items() if value is not None}
        return {**found, _MEAN_SQUARE: self._mean_squares[number]} if self._mean_squares else found

    # ------------------------------------------------------------ snapshots

    def state(self) -> dict[str, Tensor]:
        """Weights and optimizer state by name; elementwise state is named by the piece that it belongs to."""
        tensors = {"weights": self.weights}
        for piece, parameter in zip(self.pieces, self.parameters):
            for key, value in self.optimizer.state[parameter].items():
                if value is not None:
                    name = f"{piece.group}:{piece.start}:{piece.stop}:{key}"
                    tensors[name] = value if isinstance(value, Tensor) else torch.tensor(value)
        for piece, value in zip(self.pieces, self._mean_squares):
            tensors[f"{piece.group}:{piece.start}:{piece.stop}:{_MEAN_SQUARE}"] = value
        return tensors

    def restore(self, state: Mapping[str, Tensor], updates: int) -> None:
        """Go on from whole-vector state: "weights" and the optimizer's tensors [length] or scalars per group."""
        own = {"weights": state["weights"][self.start : self.stop]}
        for piece in self.pieces:
            for name, value in state.items():
                group, _, key = name.partition(":")
                if key and int(group) == piece.group:
                    part = value[piece.start : piece.stop] if value.ndim else value
                    own[f"{group}:{piece.start}:{piece.stop}:{key}"] = part
        self.take_up(own, updates)

    def take_up(self, state: Mapping[str, Tensor], updates: int) -> None:
        """Go on from what `state` gave, of the same elements.

        The schedule is a function of the number of updates, and advances to it.
        """
        self.weights.copy_(state["weights"])
        for piece, parameter in zip(self.pieces, self.parameters):
            own, its = self.optimizer.state[parameter], f"{piece.group}:{piece.start}:{piece.stop}:"
            for name, value in state.items():
                key = name.removeprefix(its)
                if key not in (name, _MEAN_SQUARE):
                    own[key] = value.clone()
        for piece, own_mean in zip(self.pieces, self._mean_squares):
            if (kept := state.get(f"{piece.group}:{piece.start}:{piece.stop}:{_MEAN_SQUARE}")) is not None:
                own_mean.copy_(kept)
        if self.schedule is not None:
            self.schedule.advance(updates)


def turn(clock: int, blocks: int, order: str) -> int:
    """The block of an exchange; clocks count from 1. Every sweep visits each block once."""
    sweep, place = divmod(clock - 1, blocks)
    if blocks == 1 or order == "cyclic":
        return place
    generator = torch.Generator().manual_seed(mix(blocks, sweep))
    return int(torch.randperm(blocks, generator=generator)[place])
