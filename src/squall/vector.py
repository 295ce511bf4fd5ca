"""The parameter vector: the only place that knows names, ranges and shards.

All trainable parameters, each once (tied weights share one), ordered by param group and then as `named_parameters()`
orders them; every start is aligned to 64 bytes. Behind them lies the tail: the floating-point buffers (BatchNorm's
statistics), which are averaged instead of optimized. Shards own contiguous ranges of the whole.

    | group 0: parameter, parameter, ... | group 1: ... | tail: buffer, buffer, ... |
    |      shard 0      |       shard 1       |      shard 2      |
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec
import torch
from torch import Tensor, nn

ALIGN = 16  # float32 elements, 64 bytes: no cache line and no vector instruction spans two tensors


class Span(msgspec.Struct, frozen=True):
    """Where one tensor lies: elements [start, start + numel) of the vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int


class Piece(msgspec.Struct, frozen=True):
    """A run of elements [start, stop) that one param group (or the tail, group -1) has in a shard, and in a block."""

    group: int
    start: int
    stop: int
    block: int = 0


class Layout(msgspec.Struct, frozen=True):
    """Names <-> elements <-> shards. Plain data: it is written into every snapshot."""

    parameters: tuple[Span, ...]
    buffers: tuple[Span, ...]
    group_starts: tuple[int, ...]  # first element of each group; the tail begins at `tail`
    tail: int
    length: int  # of the whole vector, padding included

    @classmethod
    def of(cls, model: nn.Module, groups: list[list[nn.Parameter]]) -> Layout:
        """Lay out a model's parameters, grouped as the optimizer will see them."""
        names = {id(p): name for name, p in model.named_parameters()}
        order = {id(p): i for i, p in enumerate(model.parameters())}
        parameters: list[Span] = []
        starts: list[int] = []
        at = 0
        for group in groups:
            starts.append(at)
            for p in sorted(group, key=lambda p: order[id(p)]):
                parameters.append(Span(names[id(p)], tuple(p.shape), at, p.numel()))
                at += _aligned(p.numel())
        tail = at
        buffers: list[Span] = []
        for name, b in _floating_buffers(model):
            buffers.append(Span(name, tuple(b.shape), at, b.numel()))
            at += _aligned(b.numel())
        return cls(tuple(parameters), tuple(buffers), tuple(starts), tail, at)

    @property
    def elements(self) -> int:
        """Trainable elements, padding not counted."""
        return sum(span.numel for span in self.parameters)

    def shard_range(self, shard: int, shards: int) -> tuple[int, int]:
        """Elements [start, stop) that a shard owns; equal shares up to alignment."""
        unit = ALIGN if self.length >= ALIGN * shards else 1
        units = self.length // unit
        return shard * units // shards * unit, (shard + 1) * units // shards * unit

    def pieces(self, start: int, stop: int, blocks: int = 1) -> list[Piece]:
        """What each group, and the tail, has in [start, stop), cut at the blocks' ends; in order, empty ones left out.

        Blocks are equal parts of all parameters, up to alignment.
        """
        ends = [*self.group_starts[1:], self.tail]
        runs = [*zip(range(len(ends)), self.group_starts, ends)]
        units = self.tail // ALIGN
        bounds = [*(block * units // blocks * ALIGN for block in range(blocks)), self.tail]
        cut = [
            Piece(group, max(a, start, low), min(b, stop, high), block)
            for group, a, b in runs
            for block, (low, high) in enumerate(pairwise(bounds))
        ]
        cut.append(Piece(-1, max(self.tail, start), min(self.length, stop)))
        return [piece for piece in cut if piece.start < piece.stop]

    # ------------------------------------------------------------ models

    def parameters_of(self, model: nn.Module) -> list[nn.Parameter]:
        """The model's parameters in the vector's order."""
        by_name = dict(model.named_parameters())
        return [by_name[span.name] for span in self.parameters]

    def buffers_of(self, model: nn.Module) -> list[Tensor]:
        by_name = dict(model.named_buffers())
        return [by_name[span.name] for span in self.buffers]

    def views(self, vector: Tensor) -> list[Tensor]:
        """One view per parameter, in its own shape."""
        return list(_views(vector, self.parameters))

    def buffer_views(self, vector: Tensor) -> list[Tensor]:
        return list(_views(vector, self.buffers))

    def write_model(self, model: nn.Module, vector: Tensor) -> None:
        """Copy a model's parameters and floating buffers into the vector; padding becomes zero."""
        vector.zero_()
        with torch.no_grad():
            for view, source in zip(self.views(vector), self.parameters_of(model)):
                view.copy_(source)
            for view, buffer in zip(self.buffer_views(vector), self.buffers_of(model)):
                view.copy_(buffer)

    def read_model(self, vector: Tensor, model: nn.Module) -> None:
        """Copy the vector into a model."""
        with torch.no_grad():
            for view, target in zip(self.views(vector), self.parameters_of(model)):
                target.copy_(view)
            self.read_buffers(vector, model)

    def read_buffers(self, vector: Tensor, model: nn.Module) -> None:
        for view, buffer in zip(self.buffer_views(vector), self.buffers_of(model)):
            buffer.copy_(view)

    def differences(self, other: Layout) -> list[str]:
        """What tells two models apart, one line a tensor; empty when a snapshot of one fits the other."""
        mine = {s.name: s.shape for s in (*self.parameters, *self.buffers)}
        theirs = {s.name: s.shape for s in (*other.parameters, *other.buffers)}
        lines = [f"{n}: missing here, {list(theirs[n])} there" for n in theirs if n not in mine]
        lines += [f"{n}: {list(mine[n])} here, missing there" for n in mine if n not in theirs]
        lines += [
            f"{n}: {list(mine[n])} here, {list(theirs[n])} there" for n in mine if n in theirs and mine[n] != theirs[n]
        ]
        if not lines and self != other:
            lines.append("the same tensors, in other param groups or another order")
        return lines


def _aligned(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN


def _views(vector: Tensor, spans: tuple[Span, ...]) -> Iterator[Tensor]:
    for span in spans:
        yield vector[span.start : span.start + span.numel].view(span.shape)


def _floating_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, b) for name, b in model.named_buffers() if b.is_floating_point() and b.numel()]
