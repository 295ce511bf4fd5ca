"""The coordinator's line to whatever starts and watches the processes."""

from __future__ import annotations

from typing import Protocol

from squall.protocol.effects import End
from squall.protocol.events import Event


class Channel(Protocol):
    def end(self, end: End) -> None: ...

    def poll(self) -> Event | None: ...

    def saving(self, received: int, total: int) -> None:
        """A run that the user has stopped waits for bytes of its snapshot that go on arriving."""

    def evaluated(self, number: int, evaluation: dict[str, float]) -> None:
        """Tell the user: time_s, epoch, examples and updates of the weights, and each metric.

        The number grows. A coordinator that goes on in another's place may tell what that has told already.
        """
