"""The parameter vector: the only place that knows names, ranges and shards.

All trainable parameters, each once (tied weights share one), ordered by param group and then as `named_parameters()`
orders them; every start is aligned to 64 bytes. Behind them lies the tail, which is averaged instead of optimized: the
floating-point buffers (BatchNorm's statistics), and then the integer ones (its count of batches), each as the sum of
two elements: a count goes beyond what one float32 holds. Shards own contiguous ranges of the whole. Other buffers
(sparse, complex) are no part of it and stay as the task built them.

    | group 0: parameter, parameter, ... | group 1: ... | tail: buffer, buffer, ... counter, ... |
    |        shard 0        |        shard 1        |        shard 2        |
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise

import msgspec
import torch
from torch import Tensor, nn

_KINDS = ("parameters", "buffers", "counters")
ALIGN = 16  # float32 elements, 64 bytes: no cache line and no vector instruction spans two tensors


class Span(msgspec.Struct, frozen=True):
    """Where one tensor lies: elements [start, start + numel) of the vector."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int


class Piece(msgspec.Struct, frozen=True):
    """A run of elements [start, stop) that a param group has in a shard, and in a block; -1: buffers, -2: counters."""

    group: int
    start: int
    stop: int
    block: int = 0


class Slice(msgspec.Struct, frozen=True):
    """Of a tensor: the part with this number of so many equal ones along a dimension."""

    dim: int
    number: int
    of: int


class Layout(msgspec.Struct, frozen=True, omit_defaults=True):
    """Names <-> elements <-> shards. Plain data: it is written into every snapshot.

    That of a whole model has no slices; `share` makes one of what a process of a replica has of it.
    """

    parameters: tuple[Span, ...]
    buffers: tuple[Span, ...]
    group_starts: tuple[int, ...]  # first element of each group; the tail begins at `tail`
    tail: int
    length: int  # of the whole vector, padding included
    counters: tuple[Span, ...] = ()  # integer buffers; each value has two elements
    slices: dict[str, Slice] = {}  # parameters of which this has a slice alone

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
        dense = [(name, b) for name, b in model.named_buffers() if b.layout == torch.strided and b.numel()]
        for name, b in dense:
            if b.is_floating_point():
                buffers.append(Span(name, tuple(b.shape), at, b.numel()))
                at += _aligned(b.numel())
        counters: list[Span] = []
        for name, b in dense:
            if not b.is_floating_point() and not b.is_complex():
                counters.append(Span(name, tuple(b.shape), at, b.numel()))
                at += _aligned(2 * b.numel())
        return cls(tuple(parameters), tuple(buffers), tuple(starts), tail, at, tuple(counters))

    @property
    def names(self) -> set[str]:
        """Of parameters and buffers."""
        return {span.name for kind in _KINDS for span in getattr(self, kind)}

    @property
    def elements(self) -> int:
        """Trainable elements, padding not counted."""
        return sum(span.numel for span in self.parameters)

    @property
    def counted(self) -> int:
        """The element at which counters begin."""
        return self.counters[0].start if self.counters else self.length

    def shard_range(self, shard: int, shards: int) -> tuple[int, int]:
        """Elements [start, stop) that a shard owns; equal shares up to alignment."""
        unit = ALIGN if self.length >= ALIGN * shards else 2 if self.counters else 1
        units = self.length // unit
        return shard * units // shards * unit, (shard + 1) * units // shards * unit

    def pieces(self, start: int, stop: int, blocks: int = 1) -> list[Piece]:
        """What each group, and each part of the tail, has in [start, stop), cut at the blocks' ends; none is empty.

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
        counted = self.counted
        cut.append(Piece(-1, max(self.tail, start), min(counted, stop)))
        cut.append(Piece(-2, max(counted, start), min(self.length, stop)))
        return [piece for piece in cut if piece.start < piece.stop]

    def share(self, names: Collection[str], slices: Mapping[str, Slice] | None = None) -> Layout:
        """The tensors of these names, or the slices of them, each in its place in the whole vector."""
        kept = {kind: tuple(s for s in getattr(self, kind) if s.name in names) for kind in _KINDS}
        own = {name: cut for name, cut in (slices or {}).items() if name in names}
        return msgspec.structs.replace(self, **kept, slices=own)

    def regions(self, vector: Tensor, *kinds: str) -> list[Tensor]:
        """What this has of the vector, of these kinds or all: slices by themselves, all else as runs with padding."""
        found: list[Tensor] = []
        begin = end = -1
        for kind in kinds or _KINDS:
            views = self.views(vector) if kind == "parameters" and self.slices else []
            for number, span in enumerate(getattr(self, kind)):
                if span.name in self.slices:
                    found.append(views[number])
                    continue
                if span.start != end:
                    found += [vector[begin:end]] if begin < end else []
                    begin = span.start
                end = span.start + _aligned(span.numel * (2 if kind == "counters" else 1))
        return found + ([vector[begin:end]] if begin < end else [])

    # ------------------------------------------------------------ models

    def parameters_of(self, model: nn.Module) -> list[nn.Parameter]:
        """The model's parameters in the vector's order."""
        by_name = dict(model.named_parameters())
        return [by_name[span.name] for span in self.parameters]

    def buffers_of(self, model: nn.Module) -> list[Tensor]:
        """The model's floating buffers, and behind them its counters."""
        by_name = dict(model.named_buffers())
        return [by_name[span.name] for span in (*self.buffers, *self.counters)]

    def counters_of(self, model: nn.Module) -> list[Tensor]:
        return self.buffers_of(model)[len(self.buffers) :] if self.counters else []

    def views(self, vector: Tensor) -> list[Tensor]:
        """One view per parameter, in its own shape, or in that of its slice."""
        whole = zip(self.parameters, _views(vector, self.parameters))
        return [self.own_slice(span, view) for span, view in whole]

    def own_slice(self, span: Span, whole: Tensor) -> Tensor:
        """What this has of a tensor in its own shape."""
        return whole if (cut := self.slices.get(span.name)) is None else cut_of(whole, cut)

    def counter_views(self, vector: Tensor) -> list[Tensor]:
        """One view per counter, [..., 2], for `count_in` and `put_count`."""
        return [vector[s.start : s.start + 2 * s.numel].view(*s.shape, 2) for s in self.counters]

    def write_model(self, model: nn.Module, vector: Tensor) -> None:
        """Copy a model's parameters and buffers into the vector; padding becomes zero."""
        vector.zero_()
        with torch.no_grad():
            for view, source in zip(self.views(vector), self.parameters_of(model)):
                view.copy_(source)
            self.write_buffers(model, vector)

    def write_buffers(self, model: nn.Module, vector: Tensor) -> None:
        if self.tail == self.length:  # the usual case; to find that out below would walk the model
            return
        buffers = self.buffers_of(model)
        for view, buffer in zip(_views(vector, self.buffers), buffers):
            view.copy_(buffer)
        for view, counter in zip(self.counter_views(vector), buffers[len(self.buffers) :]):
            put_count(view, counter.double())

    def read_model(self, vector: Tensor, model: nn.Module) -> None:
        """Copy the vector into a model."""
        with torch.no_grad():
            for view, target in zip(self.views(vector), self.parameters_of(model)):
                target.copy_(view)
            self.read_buffers(vector, model)

    def read_buffers(self, vector: Tensor, model: nn.Module) -> None:
        """Counters are rounded; an integer that nothing was added to keeps its value, however large it is."""
        buffers = self.buffers_of(model)
        for view, buffer in zip(_views(vector, self.buffers), buffers):
            buffer.copy_(view)
        for view, counter in zip(self.counter_views(vector), buffers[len(self.buffers) :]):
            count = count_in(view)
            value = count if counter.dtype == torch.bool else count.round()
            counter.copy_(torch.where(count == counter, counter, value.to(counter.dtype)))

    def differences(self, other: Layout) -> list[str]:
        """What tells two models apart, one line a tensor; empty when a snapshot of one fits the other."""
        mine = {s.name: s.shape for s in (*self.parameters, *self.buffers, *self.counters)}
        theirs = {s.name: s.shape for s in (*other.parameters, *other.buffers, *other.counters)}
        lines = [f"{n}: missing here, {list(theirs[n])} there" for n in theirs if n not in mine]
        lines += [f"{n}: {list(mine[n])} here, missing there" for n in mine if n not in theirs]
        lines += [
            f"{n}: {list(mine[n])} here, {list(theirs[n])} there" for n in mine if n in theirs and mine[n] != theirs[n]
        ]
        if not lines and self != other:
            lines.append("the same tensors, in other param groups or another order")
        return lines


def count_in(pairs: Tensor) -> Tensor:
    """float32 [..., 2] -> float64 [...]."""
    return pairs.double().sum(-1)


def put_count(pairs: Tensor, count: Tensor) -> None:
    """float64 [...] -> float32 [..., 2]: what the first element cannot hold is in the second."""
    pairs[..., 0] = count
    pairs[..., 1] = count - pairs[..., 0]


def cut_of(tensor: Tensor, cut: Slice) -> Tensor:
    """The slice of a tensor."""
    return tensor.chunk(cut.of, cut.dim)[cut.number]


def _aligned(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN


def _views(vector: Tensor, spans: tuple[Span, ...]) -> Iterator[Tensor]:
    for span in spans:
        yield vector[span.start : span.start + span.numel].view(span.shape)
