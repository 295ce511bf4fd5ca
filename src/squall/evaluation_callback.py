"""`on_evaluation`: the user's function that is told every evaluation while a run goes on, and may end it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from squall.protocol.events import StopRequested

OnEvaluation = Callable[[dict[str, float]], object]


class EvaluationCallback:
    """Calls the user's function, in the launching process. The run ends in order once `why` says something."""

    def __init__(self, call: OnEvaluation | None = None) -> None:
        if call is not None and not callable(call):
            raise ValueError(f"on_evaluation is {call!r}: give a function of an evaluation, or leave it out")
        self._call = call
        self.why = ""
        self.error: Exception | None = None

    def told(self, evaluation: Mapping[str, float | None]) -> None:
        """A NaN has come as None from another process."""
        if self._call is None or self.why:
            return
        try:
            wanted = self._call({name: math.nan if value is None else value for name, value in evaluation.items()})
        except Exception as error:
            self.error, self.why = error, f"on_evaluation raised {type(error).__name__}: {error}"
            return
        if wanted is True:
            self.why = "on_evaluation has ended the run"

    def stop(self) -> StopRequested:
        return StopRequested(self.why, failed=self.error is not None, wanted=True)
