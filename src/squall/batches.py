"""What a session deals to a loop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from squall.protocol.core import Compute
from squall.task import Batch


class Batches:
    """The batches of one replica, or the numbers of its steps, as they are dealt; a `Session` makes it.

    Every `iter()` goes on where the last one stopped. The training is over, for all replicas, when the data is used
    up, or when one replica wants no more: when it closes its batches or lets go of them, as a plain loop does at its
    end or at a `break`, or when its script ends. From then on the model holds the final weights.
    """

    def __init__(
        self, batches: Generator[Batch], length: int, epochs: int, coming: Callable[[], Compute | None]
    ) -> None:  # fmt: skip
        """`length`: of an epoch. `coming`: says what is next, and None when there is no more."""
        self._batches = batches
        self._length = length
        self._epochs = epochs
        self.epoch = Epoch(batches, length, coming)

    def __iter__(self) -> Iterator[Batch]:
        return self._batches

    def __len__(self) -> int:
        """Batches of all epochs and all replicas together: the most that one of them can get."""
        return self._length * self._epochs

    def close(self) -> None:
        """Take no more batches. A loop that stopped by its own count, and not by the data's end, has to say so."""
        self._batches.close()


class Epoch:
    """The same batches an epoch at a time, for loops that count epochs of their own (Trainer, Lightning).

    An `iter()` ends with the epoch that its first batch is of. So there is a batch in each until the data is used up,
    and a replica that was too slow for one of the epochs has one less.
    """

    def __init__(self, batches: Generator[Batch], length: int, coming: Callable[[], Compute | None]) -> None:
        self._batches = batches
        self._length = length
        self._coming = coming
        self._at = -1  # the newest epoch of which a batch was handed out

    def __iter__(self) -> Iterator[Batch]:
        begun = False
        while (coming := self._coming()) is not None and (coming.epoch <= self._at or not begun):
            begun, self._at = True, max(self._at, coming.epoch)
            yield next(self._batches)
        if coming is None:
            self._batches.close()

    def __len__(self) -> int:
        """Batches in an epoch of all replicas together."""
        return self._length
