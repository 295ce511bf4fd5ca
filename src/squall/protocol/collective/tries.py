"""When members try again whose group has broken, though none of them was lost.

A link between machines that is gone for a second comes back. Where it does not, something is wrong that another try
does not remove: the run ends, in 6 seconds and what members wait for each other.
"""

from __future__ import annotations

BROKEN_IN_A_ROW = 6  # groups that finish no round
PAUSE_S = 0.2  # before the first other try; each is twice as long as the one before


class Tries:
    def __init__(self) -> None:
        self.in_a_row = 0  # groups that have broken and finished no round
        self.again_at: float | None = None  # when the next is to form

    def broke(self, now: float) -> bool:
        """False: too often."""
        self.in_a_row += 1
        self.again_at = now + PAUSE_S * 2 ** (self.in_a_row - 1)
        return self.in_a_row < BROKEN_IN_A_ROW

    def due(self, now: float) -> bool:
        return self.again_at is not None and now >= self.again_at

    def over(self) -> None:
        """There is a reason, and it is gone."""
        self.in_a_row, self.again_at = 0, None
