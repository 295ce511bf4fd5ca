"""What the processes of one replica say to each other: numbers to be added up, and what the first has been told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from squall.parts.spent import NUMBERS, Spent
from squall.runtime.groups import Group
from squall.runtime.mesh_group import MeshGroup
from squall.transports.mesh import MeshBroken

SPEAKER = 0  # a pipeline's backward passes end at the first stage, so part 0 is the last to be done with a batch
TOLD_BYTES = 4096


class Found(NamedTuple):
    """What a part has found in computing a batch."""

    values: tuple[float, float, float]  # its share of the loss, the sum of its gradients, the length of the text
    text: bytes  # for part 0: the numbers beside the loss, of the part that has computed it
    extras: dict[str, float] | None  # these numbers
    teller: int  # that part


NOTHING = Found((0.0, 0.0, 0.0), b"", None, SPEAKER)


class NeighbourLost(Exception):
    """Another process of this replica has died, or has failed: that one knows why."""


class Neighbours:
    """Part `part` of a replica of `parts` processes, which all make this at the same time.

    The group becomes torch's default one in this process, which DTensor and pipelining ask for.
    """

    def __init__(self, group: Group | MeshGroup, part: int, parts: int, tag: int = 0) -> None:
        """`tag`: of the messages here, where others use the group as well."""
        self.part = part
        self.parts = parts
        self._tag = tag
        self.group = group
        self.failing: Callable[[BaseException], object] = lambda error: None  # is told first what this part fails of
        self.torch = group.torch
        self.spent = Spent()
        self.later = False  # parts agree on what they have found when they agree on more
        self.found = NOTHING  # then: of the batch that was computed last
        c10d._update_default_pg(group.torch)
        self._others = [other for other in range(parts) if other != part]
        self._heard = False  # part 0: the others are done
        self.put_off(0.0, 0.0, 0.0)
        self.others = {other: [0.0] * NUMBERS for other in self._others}  # part 0: what they have told of themselves
        self._told = torch.empty(TOLD_BYTES, dtype=torch.uint8)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What fails in here ends the others' waiting: they have `NeighbourLost`."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """This part fails of that, and so do the others."""
        self.failing(error)
        self.group.cut()

    def agreed(self, *values: float) -> list[float]:
        """The sums of the parts' values. By the first part: Gloo's own way takes seven times as long for so few."""
        sums = torch.tensor(values, dtype=torch.float64)
        if self.part == SPEAKER:
            theirs = torch.empty_like(sums)
            for other in self._others:
                sums += self.receive(theirs, other)
            for other in self._others:
                self.send(sums, other)
        else:
            self.send(sums, SPEAKER)
            self.receive(sums, SPEAKER)
        total: list[float] = sums.tolist()
        return total

    def put_off(self, *values: float, text: bytes = b"") -> None:
        """What this part says to the first when it is done, instead of agreeing now."""
        self._values, self._text = values, text

    def done(self) -> None:
        """Part 0 waits here for all others; they tell how they have spent their time, and go on."""
        if self.part == SPEAKER:
            if not self._heard:
                self.all_done()
            self._heard = False
            return
        self.send(torch.tensor([*self._values, *self.spent.told()], dtype=torch.float64), SPEAKER)
        if self._text:
            self.send(torch.frombuffer(bytearray(self._text), dtype=torch.uint8), SPEAKER)
        self.put_off(0.0, 0.0, 0.0)

    def all_done(self) -> list[float]:
        """Part 0: the sums of what the others say when they are done."""
        total = [0.0] * len(self._values)
        for other in self._others:
            said = self.receive(torch.empty(len(total) + NUMBERS, dtype=torch.float64), other).tolist()
            total = [ours + theirs for ours, theirs in zip(total, said)]
            self.others[other] = said[len(total) :]
        self._heard = True
        return total

    def tell(self, text: bytes) -> None:
        """Part 0 says to the others what is next."""
        assert len(text) < TOLD_BYTES - 2, "a replica is told more than there is room for"
        frame = len(text).to_bytes(2, "little") + text
        self._told[: len(frame)] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        for other in self._others:
            self.send(self._told, other)

    def hear(self) -> bytes:
        """What part 0 says next."""
        frame = self.receive(self._told, SPEAKER).numpy().tobytes()
        return frame[2 : 2 + int.from_bytes(frame[:2], "little")]

    def send(self, tensor: Tensor, to: int) -> None:
        """Returns when the tensor may be changed; that may be when it is received."""
        self.sending(tensor, to)()

    def sending(self, tensor: Tensor, to: int) -> Callable[[], None]:
        """Until what this returns has been called, and has returned, the tensor must stay as it is."""
        with lost_neighbours():
            work = self.torch.send([tensor], to, self._tag)

        def wait() -> None:
            with lost_neighbours(), self.spent.waiting():
                work.wait()

        return wait

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        with self.spent.waiting():
            self.receiving(tensor, source)()
        return tensor

    def receiving(self, tensor: Tensor, source: int) -> Callable[[], None]:
        """What this returns waits for it, in any thread: that time does not count."""
        with lost_neighbours():
            work = self.torch.recv([tensor], source, self._tag)

        def wait() -> None:
            with lost_neighbours():
                work.wait()

        return wait


@contextmanager
def lost_neighbours() -> Iterator[None]:
    """torch says `RuntimeError` where a connection breaks, as it does of much else."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, MeshBroken) or any(of in str(error) for of in ("gloo", MeshBroken.__name__))):
            raise
        raise NeighbourLost(f"another part of this replica is gone: {error}") from error
