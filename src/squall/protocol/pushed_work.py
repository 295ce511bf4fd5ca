"""What is in a replica's push: how many examples, of which leases, and with which loss."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from squall.protocol.messages import Cover, Extras, Factors


def covered(known: tuple[Cover, ...], more: tuple[Cover, ...]) -> tuple[Cover, ...]:
    """Put two lists of covers together, the oldest lease first. A replica never returns to a lease that it has left."""
    if known and more and known[-1].lease == more[0].lease:
        return known[:-1] + more
    return known + more


class PushedWork(msgspec.Struct, frozen=True, gc=False):
    """The batches in a gradient buffer, which are pushed together."""

    examples: int = 0
    batches: int = 0
    loss_sum: float = 0.0  # over batches: mean loss x examples
    covers: tuple[Cover, ...] = ()
    factors: Factors = ()  # of the newest batch
    extras: Extras | None = None

    def and_batch(
        self, cover: Cover, examples: int, loss: float, factors: Factors, extras: Mapping[str, float] | None = None
    ) -> PushedWork:
        covers = covered(self.covers, (cover,))
        found = self.extras
        if extras:
            found = added(found or {}, {name: (value * examples, examples) for name, value in extras.items()})
        loss_sum = self.loss_sum + examples * loss
        return PushedWork(self.examples + examples, self.batches + 1, loss_sum, covers, factors, found)

    def and_step(self, factors: Factors) -> PushedWork:
        """A further step on a batch that is counted already."""
        return msgspec.structs.replace(self, batches=self.batches + 1, factors=factors)

    def and_none_of(self, cover: Cover) -> PushedWork:
        """A batch that a script's loop has left out."""
        return msgspec.structs.replace(self, covers=covered(self.covers, (cover,)))


NO_WORK = PushedWork()


def added(first: Extras, second: Extras) -> Extras:
    """The sums of both."""
    found = dict(first)
    for name, (total, examples) in second.items():
        before = found.get(name, (0.0, 0))
        found[name] = (before[0] + total, before[1] + examples)
    return found
