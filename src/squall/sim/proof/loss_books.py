"""What shards have lost by deaths inside updates, and what the record says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from squall.protocol.notes import UpdatesLost
from squall.sim.proof.broken import Broken
from squall.sim.proof.memory import BatchRange
from squall.sim.proof.positions import batches


class LossBooks:
    """Of one life. What is told to be lost may be trained once more, by shards that have it as well."""

    def __init__(self, shards: int, batch_size: int, allowed: Counter[BatchRange]) -> None:
        self.examples = 0  # told
        self._size, self._allowed = batch_size, allowed
        self._lost = [Counter[BatchRange]() for _ in range(shards)]
        self._told = [Counter[BatchRange]() for _ in range(shards)]

    def had(self, shard: int, batch: BatchRange) -> None:
        """The shard has it no more."""
        self._lost[shard][batch] += 1

    def lost(self, shard: int, batch: BatchRange) -> bool:
        return self._lost[shard][batch] > 0

    def told(self, note: UpdatesLost, left_out: Container[BatchRange]) -> None:
        lost, told = self._lost[note.shard], self._told[note.shard]
        for span in note.ranges:
            for batch in batches(*span, self._size):
                told[batch] += 1
                if told[batch] > lost[batch] and batch not in left_out:
                    raise Broken("I4", f"shard {note.shard} has lost {batch} {lost[batch]} times, and tells more")
            self.examples += span.stop - span.start
            self._allowed.update(batches(*span, self._size))
