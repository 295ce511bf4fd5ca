"""Ctrl-C and SIGTERM as a request instead of an exception."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


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
