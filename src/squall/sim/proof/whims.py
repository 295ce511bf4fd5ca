"""What hosts of a world do beside what they are asked for: computations and files that fail, loops that break off."""

from __future__ import annotations

from squall.protocol.events import StopRequested
from squall.protocol.nodes import COORDINATOR, NURSERY
from squall.runtime.world import World
from squall.sim.proof.chaos import Chaos
from squall.sim.proof.memory import BatchRange
from squall.sim.proof.phantom_hosts import PhantomHosts
from squall.sim.proof.rotten import Rotten

NOTES_TOGETHER = 3  # come into the record


class Whims:
    def __init__(self, chaos: Chaos, rotten: Rotten) -> None:
        self._chaos, self._rotten = chaos, rotten

    def begin(self, hosts: PhantomHosts, world: World) -> None:
        """Of a new life."""
        self.spoilt = self.full = 0  # computations and files to come that fail
        self._world = world
        hosts.poison, hosts.disk, hosts.together = self._poison, self._disk, NOTES_TOGETHER
        if self._chaos.scripted:
            hosts.breaks = self._breaks

    def _poison(self, number: int, batch: BatchRange) -> bool:
        self.spoilt, spoilt = max(0, self.spoilt - 1), self.spoilt
        return self._rotten.spoils(batch) or spoilt > 0

    def _breaks(self, number: int) -> bool:
        """Whether a loop ends the training here. In a real run its process tells the nursery."""
        breaks = number == self._chaos.breaks_at
        if breaks:
            coordinator = self._world.processes.get(COORDINATOR)
            nursery = NURSERY if coordinator is None else coordinator.home
            self._world.post(nursery, StopRequested("a loop takes no more batches", wanted=True))
        return breaks

    def _disk(self, number: int) -> str:
        self.full, full = max(0, self.full - 1), self.full
        return "no space left on device" if full else ""
