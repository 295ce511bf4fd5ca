"""What a shard is in numbers: its range of the vector, the optimizer's state, and what others are given of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from squall.runtime.arena import Arena
from squall.runtime.compensation import Compensation
from squall.runtime.legacy import Copy, Numbers
from squall.runtime.optimizers import bare_step, build_optimizer, first_state
from squall.runtime.rates import Schedule
from squall.strategies.base import Recipe
from squall.task import Task
from squall.vector import Layout, Piece

_MEAN_SQUARE = "squall.mean_square"  # of gradients, in a snapshot
PIECE = 1 << 20  # elements that travel to a backup together, while exchanges wait; fewer where there are more of each


class ShardState:
    """Weights of elements [start, stop), their optimizer's state and learning-rate schedule.

    The optimizer sees one flat parameter per param group. A successor finds the state where it is left, a backup is
    given it in pieces, and a snapshot has it by name.
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
        self._left: list[tuple[dict[str, Any], dict[str, Any]]] = []  # to a successor: each state, and what was in it

    def _own(self, piece: Piece) -> Tensor:
        return self.weights[piece.start - self.start : piece.stop - self.start]

    def _groups(self, options: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Every group of the task, also those without elements here: schedulers count them."""
        return [
            {**own, "params": [p for piece, p in zip(self.pieces, self.parameters) if piece.group == number]}
            for number, own in enumerate(options)
        ]

    # ------------------------------------------------------------ succession

    def leave(self) -> None:
        """Have the state where a successor finds it. The weights are there."""
        if self._left and all(starmap(_has_same, self._left)):
            return  # as after most updates
        assert self._numbers is not None
        numbers = self._numbers
        for state, key, name in self._state():
            if (value := state[key]) is not None and not numbers.holds(name, value):
                held = numbers.hold(name, value)
                if held is not None:
                    state[key] = held
        states = [self.optimizer.state[parameter] for parameter in self.parameters]
        self._left = [(state, dict(state)) for state in states]

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
            self._have(name, value)
        if self.schedule is not None:
            self.schedule.advance(updates)

    def _have(self, name: str, value: Tensor) -> None:
        """As part of the state."""
        number, _, key = name.partition(":")
        if key == _MEAN_SQUARE:
            self._mean_squares[int(number)] = value
        else:
            self.optimizer.state[self.parameters[int(number)]][key] = value

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
        """Have such a state, of which what belongs to elements comes later. Raises `ValueError` for what is none."""
        assert self._numbers is not None
        likely = [*map(self._likely, range(len(self.parameters)))]
        for name, value in outline.items():
            number, _, key = name.partition(":")
            parameter, like = self.parameters[int(number)], likely[int(number)].get(key)
            if like is not None and (like.dtype, like.shape) != (value.dtype, value.shape):  # kernels do not look
                raise ValueError(f"{key} of the optimizer is {value.dtype}, {tuple(value.shape)}")
            whole = torch.zeros_like(parameter, dtype=value.dtype) if value.shape == (0,) else value
            if (held := self._numbers.hold(name, whole)) is None:
                raise ValueError(f"there is no room for {name}")
            self._have(name, held)

    def _likely(self, number: int) -> dict[str, Tensor]:
        """What a step adds to a parameter's outline, and what is there before."""
        group = self.optimizer.param_groups[self.pieces[number].group]
        settings, two = {key: value for key, value in group.items() if key != "params"}, torch.zeros(2)
        first = first_state(self._update.optimizer, settings, two)
        outline = {key: value[:0] if value.shape == two.shape else value for key, value in first.items()}
        return {**outline, _MEAN_SQUARE: two[:0]}

    def piece_end(self, start: int) -> int:
        """Where a piece of its elements ends that begins at this one, and can be moved without the others."""
        vectors = 1 + (0 if self.fetched is None else len(self.fetched))
        stop = start + max(1, PIECE // vectors)
        if not self._update.elementwise or stop >= len(self.weights):
            return len(self.weights)
        return stop + sum(
            piece.start < self.start + stop < piece.stop and (self.start + stop - piece.start) % 2
            for piece in self._counters  # of two elements each
        )

    def piece(self, start: int, stop: int) -> dict[str, Tensor]:
        """Views of all that is of these elements of its own, by name; of all elements the optimizer's whole state."""
        found = {"weights": self.weights[start:stop]}
        if self.fetched is not None:
            found["fetched"] = self.fetched[:, start:stop]
        for number, (piece, parameter) in enumerate(zip(self.pieces, self.parameters)):
            ends = (min(max(self.start + at, piece.start), piece.stop) for at in (start, stop))
            low, high = (end - piece.start for end in ends)
            for key, value in self._values(number).items():
                if value.shape != parameter.shape and not self._update.elementwise:
                    found[f"{number}:{key}"] = value
                elif low < high and value.shape == parameter.shape:
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


def _has_same(state: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """The same objects, whatever is in them now."""
    return len(state) == len(before) and all(map(is_, state.values(), before.values()))
