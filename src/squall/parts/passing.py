"""What parts with no memory in common pass to each other of the weights that they step: all through the first part."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from squall.parts.neighbours import SPEAKER, Neighbours
from squall.runtime.job import Job
from squall.vector import Layout

ByPart = Mapping[int, Layout]  # of the part at the other end


class Passing:
    """One part's end."""

    def __init__(self, row: Neighbours, job: Job) -> None:
        self._row = row
        lacked = set[str]().union(*(share.lacks for share in job.shares))
        self._written, self._lent, self._lacking = dict[int, Layout](), dict[int, Layout](), dict[int, Layout]()
        for part, share in enumerate(job.shares[1:], start=1):
            if row.part in (SPEAKER, part):
                end = part if row.part == SPEAKER else SPEAKER
                self._written[end] = share.writes
                self._lent[end] = job.layout.share(lacked.intersection(share.writes.names))
                self._lacking[end] = job.layout.share(share.lacks)

    def bring(self, vector: Tensor) -> None:
        """What others write comes to the first part."""
        (self._receive if self._row.part == SPEAKER else self._send)(self._written, vector)

    def share_steps(self, weights: Tensor) -> None:
        """What one part has stepped, those have who read it."""
        if self._row.part == SPEAKER:
            self._receive(self._lent, weights)
            self._send(self._lacking, weights)
        else:
            self._send(self._lent, weights)
            self._receive(self._lacking, weights)

    def _send(self, what: ByPart, vector: Tensor) -> None:
        """Returns when the vector may be changed."""
        given = [(region.contiguous(), end) for end, layout in what.items() for region in layout.regions(vector)]
        for wait in [self._row.sending(*each) for each in given]:
            wait()

    def _receive(self, what: ByPart, vector: Tensor) -> None:
        for end, layout in what.items():
            for region in layout.regions(vector):
                if region.is_contiguous():
                    self._row.receive(region, end)
                else:  # a slice
                    region.copy_(self._row.receive(torch.empty(region.shape, dtype=region.dtype), end))
