"""Ctrl-C and SIGTERM as a request instead of an exception."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def collected_interrupts(requests: int = 1) -> Iterator[list[int]]:
    """The signals caught so far: so many are requests; the next raises `KeyboardInterrupt` at once."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught  # only the main thread may set handlers, and signals arrive there
        return

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if len(caught) > requests:
            raise KeyboardInterrupt

    handlers = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """SIGTERM raises `KeyboardInterrupt`, so that whoever has files beside the final ones removes them."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class LeftToLauncher:
    """A handler of SIGTERM in a run's processes: the launching process ends them in order.

    Who ends a job often tells all of its processes: SLURM, Ray's job server. Workers that the user's code forks end.
    """

    def __init__(self) -> None:
        self._process = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def leave_signals() -> dict[int, Any]:
    """Leave Ctrl-C and SIGTERM to the launching process; returns the handlers that there were."""
    handlers: dict[int, Any] = {signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: LeftToLauncher()}
    return {number: signal.signal(number, handler) for number, handler in handlers.items()}
