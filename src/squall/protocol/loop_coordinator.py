"""The coordinator of all algorithms that train batch by batch: it deals leases, and knows what is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence

from squall.protocol import notes
from squall.protocol.closing import Phase
from squall.protocol.coordinator import Coordinator
from squall.protocol.dealing import Dealer
from squall.protocol.effects import Cause, Effect, Send
from squall.protocol.exchanges import Exchanges
from squall.protocol.frames import Message
from squall.protocol.leases import Leases
from squall.protocol.ledger import Range
from squall.protocol.loss_messages import Kept, UpdatesLost
from squall.protocol.losses import Losses
from squall.protocol.machine import Refusal
from squall.protocol.membership import Applied, common
from squall.protocol.messages import (
    Cover,
    Dropped,
    Grant,
    LeaseRequest,
    Left,
    NonFinite,
    Progress,
    Skip,
    SkipNoted,
    Stats,
)
from squall.protocol.nodes import Node
from squall.protocol.notes import BatchLeftOut, LeaseEnded, Remark
from squall.protocol.policy import Policy


class LoopCoordinator(Coordinator):
    def __init__(self, policy: Policy, exchanges: Exchanges, leases: Leases, snapshots: int = 0) -> None:
        super().__init__(policy, snapshots)
        self.leases = leases
        self.dealer = Dealer(policy.replicas, exchanges, leases)
        self._requests: dict[Node, None] = {}  # replicas that wait for a grant
        self._skips: dict[int, list[tuple[int, int]]] = {}  # lease -> examples left out of it
        self.leases.losses = Losses(policy.shards if policy.succeeds else 0)
        self._sure_at = 0  # view that a shard was replaced before: when it is seen, its successor has said what is lost
        self._starved: dict[Node, None] = {}  # waiting replicas that were told that there is nothing for now

    # ------------------------------------------------------------ what the base asks

    @property
    def trained(self) -> int:
        return self.leases.trained

    @property
    def _entry_clock(self) -> int:
        """Behind the rounds that were dealt; without rounds the shards know best."""
        return self.dealer.newest_clock if self.dealer.in_rounds else 0

    def _on_work(self, sender: Node, message: Message, now: float, effects: list[Effect]) -> None:
        match message:
            case LeaseRequest(step_s):
                if sender in self.members.live:  # else it was lost while this was on its way
                    self._requests[sender] = None
                    self.dealer.paced(sender, step_s)
                    self._answer(sender, now, effects)
            case Progress(covers, stats) | Left(covers, stats):
                self._on_progress(sender, covers, stats, now, effects)
            case Skip():
                if sender in self.members.live:
                    self._leave_out(sender, message, effects)
            case Dropped(lease):
                self._close(self.leases.drop(lease, sender), effects)
                self._proceed(now, effects)
            case Kept(covers):
                self.leases.kept(sender.index, covers)
            case UpdatesLost():
                self._on_updates_lost(sender, message, now, effects)
            case _:
                raise AssertionError(f"the coordinator does not know {message!r}")

    def _proceed(self, now: float, effects: list[Effect]) -> None:
        for node in list(self._requests):
            self._answer(node, now, effects)

    def _answer(self, node: Node, now: float, effects: list[Effect]) -> None:
        if node not in self.members.live or not self._may_grant():
            return
        grant = self.dealer.grant(node, self.members.live, now)
        if grant is not None:
            del self._requests[node]
            self._starved.pop(node, None)
            effects.append(Send(node, grant))
        elif node not in self._starved:
            self._starved[node] = None
            effects.append(Send(node, Grant(None)))

    def _take_back(self, node: Node, applied: list[Applied], effects: list[Effect]) -> None:
        """What all shards have of it is trained; the rest is dealt again."""
        known, left_out = self.leases.trained, 0
        for lease, upto in common(applied, self.policy.shards).items():
            left_out += self._left_out(lease, upto)
            self._close(self.leases.done(lease, upto, node), effects)
        unreported = self.leases.trained - known - left_out  # it did not live to tell
        if unreported:
            self._replacing.fruitful(node)
            batches = -(-unreported // self.leases.batch_size)
            self._note_stats(node, Stats(unreported, batches, loss_sum=math.nan), effects)
        for ended in self.leases.give_back(node):
            self._close(ended, effects)

    def _left_out(self, lease: int, upto: int) -> int:
        """Examples that will count as trained when this is done, and that nobody has trained."""
        if (held := self.leases.held.get(lease)) is None:
            return 0
        lost = self.leases.losses.within(held.lease, held.done, upto)
        left_out = [span for span in self._skips.get(lease, ()) if held.done <= span[0] < upto]
        return sum(
            stop - start for start, stop in left_out if not any(each.start <= start < each.stop for each in lost)
        )

    def _forget(self, node: Node) -> None:
        self._requests.pop(node, None)
        self._starved.pop(node, None)
        self.dealer.forget(node)

    def _over(self) -> tuple[Cause, str] | None:
        return self.leases.over() if self.members.reached >= self._sure_at else None

    def _ledger(self) -> dict[str, object]:
        return self.leases.state()

    def _extended(self, ledger: dict[str, object], covers: Sequence[Applied]) -> tuple[dict[str, object], Applied]:
        return self.leases.extended(ledger, covers)

    # ------------------------------------------------------------ losses

    def _on_shard_lost(self, shard: Node, why: str, now: float, effects: list[Effect]) -> None:
        super()._on_shard_lost(shard, why, now, effects)
        if self.phase is not Phase.ENDED:
            self.members.renew()
            self._sure_at = self.members.number + 1
            self._show_view(effects)

    def _on_updates_lost(self, shard: Node, lost: UpdatesLost, now: float, effects: list[Effect]) -> None:
        again = self.leases.lose(shard.index, lost.covers)
        over = self.phase is not Phase.RUNNING
        effects.append(notes.UpdatesLost(shard.index, lost.first, lost.last, tuple(again), over))
        if self._snapshots.under_way and shard in self._snapshots.awaited:
            self._snapshot_anew(now, effects)  # its file will lack what the ledger had
        self._proceed(now, effects)

    # ------------------------------------------------------------ leases

    def _may_grant(self) -> bool:
        """Rounds begin with all replicas, and never while the members of a round could be in doubt."""
        if self.phase is not Phase.RUNNING:
            return False
        if not self.dealer.in_rounds:
            return True
        expected = self.policy.replicas - len(self._replacing.given_up) - self._placing.replicas_waiting
        begun = self.dealer.newest_clock > 0
        return self.members.settled and (begun or len(self.members.live) == expected)

    def _on_progress(
        self, node: Node, covers: tuple[Cover, ...], stats: Stats, now: float, effects: list[Effect]
    ) -> None:
        if node not in self.members.live:
            return  # it was lost meanwhile: the shards say what they have applied of it
        self._note_stats(node, stats, effects)
        if covers:
            for fruitful in (node, *self._shards):
                self._replacing.fruitful(fruitful)
        warming, returned = self.dealer.warming_up, len(self.leases.returned)
        for cover in covers:
            self._close(self.leases.done(cover.lease, cover.upto, node), effects)
        if (warming and not self.dealer.warming_up) or len(self.leases.returned) > returned:  # what a shard has lost
            self._proceed(now, effects)
        if self.leases.epoch_ended() and self.policy.evaluate and self._over() is None:
            self._evaluations.ask(effects)
        self._look_for_end(now, effects)

    def _leave_out(self, node: Node, skip: Skip, effects: list[Effect], nonfinite: bool = False) -> None:
        """What is left out of a lease that came to nothing is dealt again with it."""
        held = self.leases.held.get(skip.lease)
        if held is not None and held.holder == node:
            known = self._skips.get(skip.lease, [])
            after = known[-1][1] if known else held.lease.start
            if skip.epoch != held.lease.epoch or not after <= skip.start < skip.stop <= held.lease.stop:
                raise Refusal(f"it leaves out {skip}, and has the next batch of {held.lease}")
            self._skips.setdefault(skip.lease, []).append((skip.start, skip.stop))
            effects.append(BatchLeftOut(node, skip, nonfinite))
        effects.append(Send(node, SkipNoted()))

    def _quarantined(self, sender: Node, message: NonFinite, text: str, effects: list[Effect]) -> bool:
        """It is left out, unless that mends nothing, or as many of its epoch were that may be."""
        at_most, batch = self.policy.quarantine, Range(message.epoch, message.start, message.stop)
        known = self.leases.quarantined
        count = len({batch, *self._quarantined_of(batch.epoch)})
        if message.spoilt or count > at_most:
            return False
        if sender not in self.members.live:
            return True  # it is dealt to others, who will tell
        if batch not in known:  # else it was dealt again, as its holder died
            known.append(batch)
        effects.append(Remark("nonfinite", f"{text}, twice; left out, number {count} of at most {at_most} an epoch"))
        self._leave_out(sender, Skip(message.lease, *batch), effects, nonfinite=True)
        return True

    def _quarantined_of(self, epoch: int) -> list[Range]:
        return [batch for batch in self.leases.quarantined if batch.epoch == epoch]

    def _hopeless(self, message: NonFinite, text: str) -> str:
        why = super()._hopeless(message, text)
        if message.spoilt and self.policy.quarantine:
            return f"{why}; it is not left out: the weights are not finite, or have come through a step on it"
        before = ", ".join(f"{batch.start} to {batch.stop}" for batch in self._quarantined_of(message.epoch))
        return f"{why}; of this epoch were left out before it examples {before}" if before else why

    def _close(self, ended: LeaseEnded | None, effects: list[Effect]) -> None:
        if ended is not None:
            self._skips.pop(ended.lease.id, None)
            effects.append(ended)
