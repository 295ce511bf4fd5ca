"""What the processes of one replica say to each other: numbers to be added up, and what the first has been told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from squall.runtime.groups import Group

PATIENCE = timedelta(days=365)  # a replica waits for data and for others as long as it takes; a death ends it
SPEAKER = 0  # a pipeline's backward passes end at the first stage, so part 0 is the last to be done with a batch
TOLD_BYTES = 1024


class NeighbourLost(Exception):
    """Another process of this replica has died, or has failed: that one knows why."""


class Neighbours:
    """Part `part` of a replica of `parts` processes, which all make this at the same time.

    The group becomes torch's default one in this process, which DTensor and pipelining ask for.
    """

    def __init__(self, group: Group, part: int, parts: int) -> None:
        self.part = part
        self.parts = parts
        self.group = group
        self.torch = group.torch
        c10d._set_pg_timeout(PATIENCE, group.torch)
        c10d._update_default_pg(group.torch)
        self._told = torch.empty(TOLD_BYTES, dtype=torch.uint8)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What fails in here ends the others' waiting: they have `NeighbourLost`."""
        try:
            yield
        except BaseException:
            self.group.cut()
            raise

    def agreed(self, values: Sequence[float]) -> list[float]:
        """The sums of the parts' values."""
        sums = torch.tensor(values, dtype=torch.float64)
        with lost_neighbours():
            dist.all_reduce(sums, group=self.torch)
        total: list[float] = sums.tolist()
        return total

    def tell(self, text: bytes) -> None:
        """Part 0 says to the others what is next."""
        assert len(text) < TOLD_BYTES - 2, "a replica is told more than there is room for"
        frame = len(text).to_bytes(2, "little") + text
        self._told[: len(frame)] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        with lost_neighbours():
            dist.broadcast(self._told, SPEAKER, self.torch)

    def hear(self) -> bytes:
        """What part 0 says next."""
        with lost_neighbours():
            dist.broadcast(self._told, SPEAKER, self.torch)
        frame = self._told.numpy().tobytes()
        return frame[2 : 2 + int.from_bytes(frame[:2], "little")]

    def send(self, tensor: Tensor, to: int) -> dist.Work:
        """Not over before `wait`: until then the tensor must stay as it is."""
        with lost_neighbours():
            work = dist.isend(tensor, to, self.torch)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        with lost_neighbours():
            dist.recv(tensor, source, self.torch)
        return tensor


@contextmanager
def lost_neighbours() -> Iterator[None]:
    """torch says `RuntimeError` where a connection breaks, as it does of much else."""
    try:
        yield
    except RuntimeError as error:
        if "gloo" not in str(error):
            raise
        raise NeighbourLost(f"another part of this replica is gone: {error}") from error
