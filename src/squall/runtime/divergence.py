"""Tells a training that has gone astray from one that learns slowly."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

REPORTS, FEW = 9, 3  # of replicas, a quarter of a second of work each: the median of these is the training loss of now
GROWN = 3.0  # times the first loss, in training: one that learns is below it, one that does not stays about there
GROWN_MEASURED = 10.0  # on the validation set, where a model that knows its examples by heart may also do worse
REMEDY = "take a smaller learning rate or Task.clip_norm, or with Downpour a warm start"


class Divergence:
    """Compares losses with the first one, of the weights that the run began with. `text` says what is wrong."""

    def __init__(self, first: float | None = None) -> None:
        """`first`: as an earlier attempt of the run has seen it."""
        self.first = first
        self.text = ""
        self._recent: deque[float] = deque(maxlen=REPORTS)

    def trained(self, loss: float) -> bool:
        """A replica reports a mean training loss; tells whether `text` is another now. NaN: it is not known."""
        if math.isnan(loss):
            return False
        if self.first is None:
            self.first = loss
        self._recent.append(loss)
        return len(self._recent) == REPORTS and self._judge("training", median(self._recent), GROWN)

    def measured(self, loss: float) -> bool:
        """The loss on the validation set, likewise."""
        return self.first is not None and self._judge("validation", loss, GROWN_MEASURED)

    def ended(self) -> bool:
        """The run is over, perhaps after few reports. One that ends no lower than it began has not learned."""
        if self.first is None or self.text or len(self._recent) < FEW:
            return False
        loss = median(self._recent)
        if not self._judge("training", loss, GROWN) and loss > self.first:
            self.text = f"the training loss ends at {loss:.3g}, and was {self.first:.3g} at first: {REMEDY}"
        return bool(self.text)

    def _judge(self, kind: str, loss: float, grown: float) -> bool:
        assert self.first is not None
        before = self.text
        if not loss <= self.first + (grown - 1) * abs(self.first):
            self.text = f"the {kind} loss has grown to {loss:.3g}, and was {self.first:.3g} at first: {REMEDY}"
        elif self.text.startswith(f"the {kind} "):
            self.text = ""
        return bool(before) != bool(self.text)
