"""What a session deals to a loop, and what it means that a loop lets go of it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator, Iterator
from dis import opname
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from squall.task import Batch

if TYPE_CHECKING:
    from squall.session.session import Session


class Batches:
    """The batches of one replica, or the numbers of its steps, as they are dealt; a `Session` makes it.

    The training is over, for all replicas, when the data is used up, or when one replica wants no more: when its loop
    over the batches ends by a `break`, however that holds them (a variable, tqdm), when it closes its batches, or when
    its script ends. From then on the model holds the final weights.

    A loop over `epoch`, or over an iterator that a variable keeps (`it = iter(batches)`, `it = enumerate(batches)`),
    may go on after a `break`, where it stopped: close the batches behind it. Nor does an exception end the training: a
    script that catches it closes its batches, or fails, and the run with it.
    """

    def __init__(self, session: Session, length: int, epochs: int) -> None:
        """`length` counts the batches of an epoch."""
        self._session = session
        self._length = length
        self._epochs = epochs
        self._broken = False
        self._at = -1  # the newest epoch of which `epoch` has handed out a batch

    @property
    def epoch(self) -> Epoch:
        """The same batches, for a loop that counts epochs of its own."""
        return Epoch(self)

    def __iter__(self) -> Iterator[Batch]:
        return self._loop()

    def _loop(self) -> Generator[Batch]:
        if self._broken:
            raise RuntimeError(
                "the loop over these batches was left before its end, which has ended the training: a loop that comes"
                " back iterates over batches.epoch, or always over the same iter(batches), and calls batches.close()"
            )
        try:
            while self._session._next() is not None:
                yield self._session._take()
        except GeneratorExit:
            if _raising():
                raise
            self._broken = True  # and is closed below: what that raises is not told as if this had led to it
        self.close()

    def __len__(self) -> int:
        """Batches of all epochs and all replicas together: the most that one of them can get."""
        return self._length * self._epochs

    def close(self) -> None:
        """End the training. A loop that stops by a count of its own, before the data's end, has to call this."""
        self._session._leave()

    def __del__(self) -> None:
        if not _raising():
            self.close()


class Epoch:
    """The same batches an epoch at a time, for loops that count epochs of their own (Trainer, Lightning).

    An `iter()` ends with the epoch that its first batch is of. So there is a batch in each until the data is used up,
    and a replica that was too slow for one of the epochs has one less.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches  # keeps them alive: when they are deleted, the training ends

    def __iter__(self) -> Iterator[Batch]:
        batches, session, begun = self._batches, self._batches._session, False
        while (coming := session._next()) is not None and (coming.epoch <= batches._at or not begun):
            begun, batches._at = True, max(batches._at, coming.epoch)
            yield session._take()
        if coming is None:
            batches.close()

    def __len__(self) -> int:
        """Batches in an epoch of all replicas together."""
        return self._batches._length


def _raising() -> bool:
    """Whether it is an exception that lets go of the batches, which then ends no training well, and not a `break`.

    Python tells a generator that it is closed, and not why. But where an exception is on its way out of a loop, the
    loop's frame stands where it raises again, or where a traceback ends. Between that frame and here may be those of
    other generators, which are closed too, and stand where they yield.
    """
    frame: FrameType | None = sys._getframe(1).f_back
    while frame is not None and _stands_at(frame) in ("YIELD_VALUE", "RESUME"):
        frame = frame.f_back
    if frame is None:
        return False
    traces = (found for found in gc.get_referrers(frame) if isinstance(found, TracebackType))
    return _stands_at(frame) == "RERAISE" or any(trace.tb_lasti == frame.f_lasti for trace in traces)


def _stands_at(frame: FrameType) -> str:
    return opname[frame.f_code.co_code[frame.f_lasti]]
