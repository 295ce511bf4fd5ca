"""What stands behind a session: one replica of a run, its replay, or the script alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from squall.protocol.effects import Compute
from squall.protocol.messages import Factors
from squall.task import Batch, Task

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SessionBackend(Protocol):
    """What stands behind a session: one replica of a run, or the script alone."""

    rank: int
    replicas: int
    part: int = 0  # of the replica
    parts: int = 1
    group: ProcessGroup | None = None  # of the replica's parts, where there are several
    replayed: bool = False  # whether this repeats a recorded run
    several_steps: bool = True  # whether a batch may be stepped several times
    status: str = "running"  # or how the training has ended

    def begin(self, task: Task, epochs: int) -> None:
        """Say what is trained on; called once."""

    def next(self) -> Compute | None:
        """The next batch to compute on; None when the training is over. Raises what it ended with, if not well."""

    def load(self, effect: Compute) -> Batch: ...

    def accept(
        self, effect: Compute, loss: float | None, started: float, factors: Factors = (), over: bool = True
    ) -> bool:  # fmt: skip
        """The fresh gradients of that batch are in the parameters' `grad`; its loss may not be known.

        If the batch is not `over`, the model has newer weights when this returns. False: the gradients are not finite,
        and the batch will come again.
        """

    def done(self, effect: Compute) -> None:
        """The loop has finished a batch that `accept` was told is not over."""
        return None

    def skip(self, effect: Compute) -> None:
        """The batch is left out."""
        return None

    def log(self, values: Mapping[str, float]) -> None: ...

    def leave(self) -> None:
        """The script wants no more batches; without effect once the training is over. Raises as `next` does."""
