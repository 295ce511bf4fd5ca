"""Weights that replicas of other machines show to the evaluator, on the coordinator's machine.

The evaluator may be reading its buffer when something comes that nobody has asked for. So what comes lies beside it
until the coordinator has the evaluator measure it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from squall.protocol.effects import Payload
from squall.runtime.driver import Host, HostAround
from squall.runtime.pieces import Pieces


class ShowingHost(HostAround):
    """The coordinator's."""

    def __init__(self, host: Host, pieces: Pieces, evaluated: Tensor) -> None:
        """`evaluated` is the evaluator's buffer, float32 [length]."""
        super().__init__(host)
        self._pieces = pieces
        self._evaluated = evaluated
        pieces.recall()

    def attach(self, payload: Payload) -> None:
        """Replicas of this machine have put them there themselves."""
        shown = self._pieces.take(payload.owner)
        if shown is not None:
            self._evaluated.copy_(torch.frombuffer(shown, dtype=torch.float32))
