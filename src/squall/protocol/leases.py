"""Which examples of which epoch are trained, held by whom, and still to do.

The ledger deals ranges of an epoch's order, never single examples: a *lease* is the right of one replica to train
on examples [start, stop). What a lease's holder does not finish comes back and is dealt again before anything new,
so every example of an epoch is trained, and only what was lost between a replica and a shard can repeat.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from squall.protocol.effects import Cause
from squall.protocol.ledger import Ledger, Range, gaps, size, without
from squall.protocol.losses import Losses
from squall.protocol.membership import Applied, common
from squall.protocol.messages import Cover, Lease
from squall.protocol.nodes import Node
from squall.protocol.notes import LeaseEnded
from squall.protocol.since import Held, Since


class Limits(msgspec.Struct, frozen=True):
    """How much a run trains: the first limit that is reached ends it."""

    epochs: int | None = None
    steps: int | None = None  # batches, over all replicas

    def within(self, epoch: int) -> bool:
        return self.epochs is None or epoch < self.epochs


class Leases:
    """The ledger. Deals whole batches; a position in an epoch is always a multiple of the batch size."""

    def __init__(self, examples: int, batch_size: int, limits: Limits) -> None:
        assert min(examples, batch_size) > 0
        self.examples = examples  # in an epoch
        self.batch_size = batch_size
        self.limits = limits
        self.epoch = 0  # that fresh ranges are cut from
        self.cursor = 0  # examples of it that were dealt
        self.returned: list[Range] = []  # came back unfinished, sorted
        self._dropped_by: dict[Range, Node] = {}  # returned range -> its last holder, which was too slow for its round
        self.held: dict[int, Held] = {}
        self._held_of: dict[int, int] = {}  # epoch -> leases held
        self.trained = 0  # examples applied by all shards, repeats counted once
        self.quarantined: list[Range] = []  # batches that gave NaN or Inf twice, at least those of epochs under way
        self._next_id = 0
        self._since: Since | None = None  # from `state` until `extended`, or the next one
        self._steps_dealt = 0  # fresh batches; what comes back is not counted twice
        self._epochs_told = 0  # that are done, by the last `epoch_ended`
        self.losses = Losses(0)  # of shards, where they go back to copies

    # ------------------------------------------------------------ dealing

    def take(self, holder: Node, batches: int, now: float, *, within_epoch: int | None = None) -> Lease | None:
        """Deal up to `batches` batches, returned ranges first; None when nothing is left to deal.

        What a holder was too slow for goes to it again only when there is nothing else. `within_epoch` refuses to begin
        a later epoch (a round of lock-step training does not span two).
        """
        span = (
            self._returned_range(batches, holder)
            or self._fresh_range(batches, within_epoch)
            or self._returned_range(batches, None)
        )
        if span is None:
            return None
        lease = Lease(self._next_id, *span)
        self._next_id += 1
        held = self.held[lease.id] = Held(lease, holder, now)
        if self._since is not None:
            self._since.grant(held)
        self._held_of[lease.epoch] = self._held_of.get(lease.epoch, 0) + 1
        return lease

    def _returned_range(self, batches: int, holder: Node | None) -> Range | None:
        found = [r for r in self.returned if holder is None or self._dropped_by.get(r) != holder]
        if not found or not self.limits.within(found[0].epoch):  # fewer are wanted than when it was begun
            return None
        first = found[0]
        at = self.returned.index(first)
        slow = self._dropped_by.pop(first, None)
        cut = min(first.stop, first.start + batches * self.batch_size)
        rest = [Range(first.epoch, cut, first.stop)] if cut < first.stop else []
        self.returned[at : at + 1] = rest
        if slow is not None:
            self._dropped_by.update((r, slow) for r in rest)
        return Range(first.epoch, first.start, cut)

    def _fresh_range(self, batches: int, within_epoch: int | None) -> Range | None:
        if self.cursor >= self.examples:
            if within_epoch is not None and self.epoch + 1 > within_epoch:
                return None
            self.epoch, self.cursor = self.epoch + 1, 0
        if self.limits.steps is not None:
            batches = min(batches, self.limits.steps - self._steps_dealt)
        if batches <= 0 or not self.limits.within(self.epoch):
            return None
        start = self.cursor
        self.cursor = min(self.examples, start + batches * self.batch_size)
        self._steps_dealt += -(-(self.cursor - start) // self.batch_size)
        return Range(self.epoch, start, self.cursor)

    def left_in_epoch(self) -> int:
        """Batches of the current epoch that nobody holds (the whole next epoch once this one is dealt)."""
        fresh = self.examples - self.cursor or self.examples
        return -(-fresh // self.batch_size)

    # ------------------------------------------------------------ ending

    def done(self, lease: int, upto: int, holder: Node) -> LeaseEnded | None:
        """Examples of the lease up to `upto` are applied by all shards. Returns the lease once it is over.

        A report about a lease that the sender no longer holds changes nothing: it was dealt again.
        """
        held = self.held.get(lease)
        if held is None or held.holder != holder:
            return None
        upto = min(upto, held.lease.stop)
        if upto > held.done:
            lost = self.losses.within(held.lease, held.done, upto)
            self.trained += upto - held.done - sum(map(size, lost))
            self._put_back(lost)
            held.done = upto
        if held.done < held.lease.stop:
            return None
        return self._end(held)

    def give_back(self, holder: Node) -> list[LeaseEnded]:
        """The holder is gone: what it has not trained goes to the front of the queue."""
        ended = [self._end(held) for held in list(self.held.values()) if held.holder == holder]
        for lease in ended:
            self._return(lease)
        return ended

    def drop(self, lease: int, holder: Node) -> LeaseEnded | None:
        """The holder's work on it came to nothing: what is left of the lease goes to the front of the queue."""
        held = self.held.get(lease)
        if held is None or held.holder != holder:
            return None
        ended = self._end(held)
        self._return(ended)
        if ended.done < ended.lease.stop:
            self._dropped_by[Range(ended.lease.epoch, ended.done, ended.lease.stop)] = holder
        return ended

    def _return(self, ended: LeaseEnded) -> None:
        if ended.done < ended.lease.stop:
            self._put_back([Range(ended.lease.epoch, ended.done, ended.lease.stop)])

    def _put_back(self, spans: Sequence[Range]) -> None:
        self.returned = sorted([*self.returned, *spans]) if spans else self.returned

    def kept(self, shard: int, covers: Sequence[Cover]) -> None:
        """The shard cannot lose these any more."""
        self.losses.kept(shard, covers, self.held)

    def lose(self, shard: int, covers: Sequence[Cover]) -> list[Range]:
        """The shard has lost what it had applied of these leases since its last copy. Returns what is dealt again.

        What has not been told yet of a lease that is held comes back when it is.
        """
        at_once, later = self.losses.lose(shard, covers, self.held)
        self.trained -= sum(map(size, at_once))
        self._put_back(at_once)
        return [*at_once, *later]

    def _end(self, held: Held) -> LeaseEnded:
        del self.held[held.lease.id]
        self._held_of[held.lease.epoch] -= 1
        if not self._held_of[held.lease.epoch]:
            del self._held_of[held.lease.epoch]
        self.losses.ended(ended := LeaseEnded(held.lease, held.holder, held.granted_s, held.done))
        return ended

    # ------------------------------------------------------------ questions

    def exhausted(self) -> bool:
        """Nothing is left to deal (leases may still be held)."""
        if self.returned and self.limits.within(self.returned[0].epoch):
            return False
        enough = self.limits.steps is not None and self._steps_dealt >= self.limits.steps
        return enough or not self.limits.within(self.epoch + (self.cursor >= self.examples))

    def over(self) -> tuple[Cause, str] | None:
        """Why nothing is left to train; None while something is."""
        if self.held or not self.exhausted():
            return None
        if not self.limits.within(self.epochs_done()):
            return Cause.DATA, "all data is trained"
        return Cause.STEPS, f"its limit of {self.limits.steps:,} steps is reached"

    def epochs_done(self) -> int:
        """Epochs of which every example is trained."""
        dealt = self.epoch + (self.cursor >= self.examples)
        return min([dealt, *self._held_of, *(r.epoch for r in self.returned[:1])])

    def epoch_ended(self) -> bool:
        """Whether more epochs are done than when this was asked last, or than at the beginning."""
        before, self._epochs_told = self._epochs_told, max(self._epochs_told, self.epochs_done())
        return self._epochs_told > before

    # ------------------------------------------------------------ snapshots

    def state(self) -> dict[str, object]:
        """The data position as plain values: `remaining` is what was dealt but not trained."""
        self._since = Since(self.held)
        remaining = [
            *self.returned,
            *(Range(h.lease.epoch, h.done, h.lease.stop) for h in self.held.values() if h.done < h.lease.stop),
        ]
        lost = {str(h.lease.id): self.losses.within(h.lease, h.done, h.lease.stop) for h in self.held.values()}
        return {
            "examples": self.examples,
            "epoch": self.epoch,
            "cursor": self.cursor,
            "trained": self.trained,
            "steps": self._steps_dealt,
            "next_id": self._next_id,
            "remaining": [list(r) for r in sorted(remaining)],
            "held": {str(h.lease.id): h.state(h.done) for h in self.held.values()},
            "quarantined": [list(batch) for batch in self.quarantined if batch.epoch >= self.epochs_done()],
            "lost": {lease: list(map(list, spans)) for lease, spans in lost.items() if spans},
        }

    def extended(self, state: dict[str, object], covers: Sequence[Applied]) -> tuple[dict[str, object], Applied]:
        """`state()` of a moment ago, with those leases granted since of which a snapshot's files hold something.

        `covers`: what each shard remembers as it writes its file. Returns what all files have beyond the state as well.
        """
        since, self._since = self._since or Since({}), None
        progress = common([since.filled(each, self.losses) for each in covers], len(covers))
        if granted := since.granted(progress):
            dealt = [self.epoch, self.cursor, self._steps_dealt, self._next_id]
            state = {**state, "since": granted, "dealt": dealt}
        return state, progress

    @classmethod
    def restore(
        cls, state: dict[str, object], progress: Sequence[tuple[int, int]], batch_size: int, limits: Limits
    ) -> Leases:
        """Go on from `state()`; `progress` is (lease, upto) of what all shards' files hold beyond it."""
        kept = msgspec.convert(state, Ledger)
        leases = cls(kept.examples, batch_size, limits)
        leases.epoch, leases.cursor, leases.trained = kept.epoch, kept.cursor, kept.trained
        leases._steps_dealt, leases._next_id = kept.steps, kept.next_id
        leases.quarantined = list(kept.quarantined)
        remaining = kept.remaining
        for lease, upto in progress:
            held = kept.held.get(str(lease))
            if held is None or upto <= held[2]:
                continue
            epoch, _, done, stop, _ = held
            remaining.remove(Range(epoch, done, stop))
            lost = [Range(epoch, each.start, min(each.stop, upto)) for each in kept.lost.get(str(lease), ())]
            left = [span for span in (*lost, Range(epoch, upto, stop)) if span.start < span.stop]
            leases.trained += stop - done - sum(map(size, left))
            remaining += left
        if kept.since:
            leases._add_since(kept, dict(progress), remaining)
        leases.returned = sorted(remaining)
        leases._epochs_told = leases.epochs_done()
        return leases

    @classmethod
    def besides(cls, found: Sequence[tuple[int, int]], examples: int, batch_size: int) -> Leases:
        """One epoch, of which these ranges are done already; the first numbers of leases are theirs."""
        leases = cls(examples, batch_size, Limits(epochs=1))
        if found:
            leases.returned = [Range(0, *left) for left in gaps(found, examples)]
            leases.cursor, leases._next_id = examples, len(found)
            leases.trained = examples - sum(map(size, leases.returned))
        return leases

    def _add_since(self, kept: Ledger, progress: dict[int, int], remaining: list[Range]) -> None:
        """Go on from where dealing had come, and have all of that dealt again but what the files hold."""
        last, cursor, self._steps_dealt, self._next_id = kept.dealt
        while (self.epoch, self.cursor) < (last, cursor):
            stop = cursor if self.epoch == last else self.examples
            if self.cursor < stop:
                remaining.append(Range(self.epoch, self.cursor, stop))
            self.epoch, self.cursor = (last, cursor) if self.epoch == last else (self.epoch + 1, 0)
        for name, (epoch, start, _, stop, _) in kept.since.items():
            trained = Range(epoch, start, min(stop, progress.get(int(name), start)))
            left = [part for span in remaining for part in without(span, trained)]
            self.trained += sum(map(size, remaining)) - sum(map(size, left))
            remaining[:] = left
