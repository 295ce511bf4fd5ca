"""Collectives as steps of a mesh: who sends what to whom, and what is added to what.

Sums go round a ring in pieces, as 2 (n - 1) / n of the bytes that each member sends and receives. While a piece is
added the next is on its way, and each goes on as soon as it is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from squall.transports.mesh import Mesh, Steps, Transfer

PIECE_BYTES = 1 << 19


class Ring:
    """Steps of the member `own`, on tensors that are contiguous and on the CPU."""

    def __init__(self, mesh: Mesh, own: int, order: Sequence[int]) -> None:
        """`order`: all members, as they stand in the ring."""
        self._mesh = mesh
        self.own, self.size, self._order = own, len(order), order
        self._at = order.index(own)
        self._before, self._behind = self._next(-1), self._next(1)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def _next(self, steps: int) -> int:
        return self._order[(self._at + steps) % self.size]

    def sum(self, tensor: Tensor) -> Steps:
        """In place, of all members' tensors."""
        if self.size == 1:
            return
        parts = list(tensor.view(-1).tensor_split(self.size))
        on_way = [self._mesh.send(self._behind, _bytes(piece)) for piece in _pieces(parts[self._at])]
        for step in range(1, self.size):
            pieces = _pieces(parts[(self._at - step) % self.size])
            theirs = _pieces(self._room_like(parts[0]))
            coming = [self._mesh.receive(self._before, _bytes(there[: len(own)])) for own, there in zip(pieces, theirs)]
            for piece, there, transfer in zip(pieces, theirs, coming):
                yield transfer
                piece.add_(there[: len(piece)])
                on_way.append(self._mesh.send(self._behind, _bytes(piece)))  # the last time as the whole sum
        for step in range(self.size - 1):
            pieces = _pieces(parts[(self._at - step) % self.size])
            coming = [self._mesh.receive(self._before, _bytes(piece)) for piece in pieces]
            for piece, transfer in zip(pieces, coming):
                yield transfer
                if step < self.size - 2:
                    on_way.append(self._mesh.send(self._behind, _bytes(piece)))
        yield from on_way

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        """Round the ring in pieces, from the root on."""
        pieces = _pieces(tensor.view(-1))
        on_way: list[Transfer] = []
        coming = [self._mesh.receive(self._before, _bytes(piece)) for piece in pieces] if self.own != root else []
        for at, piece in enumerate(pieces):
            if coming:
                yield coming[at]
            if self._behind != root:
                on_way.append(self._mesh.send(self._behind, _bytes(piece)))
        yield from on_way

    def gather(self, tensors: Sequence[Tensor], own: Tensor) -> Steps:
        """Everybody's own, in the order of the members."""
        tensors[self.own].copy_(own)
        on_way: list[Transfer] = []
        for step in range(self.size - 1):
            on_way.append(self._mesh.send(self._behind, _bytes(tensors[self._next(-step)].view(-1))))
            yield self._mesh.receive(self._before, _bytes(tensors[self._next(-step - 1)].view(-1)))
        yield from on_way

    def send(self, tensor: Tensor, to: int) -> Steps:
        yield self._mesh.send(to, _bytes(tensor.view(-1)))

    def receive(self, tensor: Tensor, source: int) -> Steps:
        yield self._mesh.receive(source, _bytes(tensor.view(-1)))

    def _room_like(self, part: Tensor) -> Tensor:
        """Memory for what is to be added to a part."""
        if self._scratch.nbytes < part.nbytes:
            self._scratch = torch.empty(part.nbytes, dtype=torch.uint8)
        return self._scratch[: part.nbytes].view(part.dtype)


def _pieces(part: Tensor) -> list[Tensor]:
    return list(part.split(max(1, PIECE_BYTES // part.element_size()))) if len(part) else []


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)
