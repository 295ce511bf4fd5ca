"""What a coordinator does about processes that are lost, and whom it has started in their place."""

from __future__ import annotations

from abc import abstractmethod

from squall.protocol import notes
from squall.protocol.closing import Closing, Phase
from squall.protocol.effects import Admit, Effect, Forget, Send
from squall.protocol.events import StopRequested
from squall.protocol.messages import Stop
from squall.protocol.nodes import Node
from squall.protocol.nursery_messages import (
    KillProcess,
    Placed,
    StartProcess,
    StopAsked,
)
from squall.protocol.replacing import LOST_IN_A_ROW


class Staffing(Closing):
    @abstractmethod
    def _depart(self, node: Node, now: float, effects: list[Effect]) -> bool:
        """False if the node was not a member, so that no view has to be seen without it."""

    @abstractmethod
    def _proceed(self, now: float, effects: list[Effect]) -> None:
        """Members have come or gone: give work to those who wait for it and may have it now."""

    @abstractmethod
    def _lose(self, now: float, effects: list[Effect]) -> None:
        """The machines for which the deputy had to go first, now that it has."""

    def _on_stop(self, asked: StopRequested | StopAsked, now: float, effects: list[Effect]) -> None:
        if asked.failed:
            self.error = asked.why
        if asked.wanted and not (asked.failed or self._moves or self.phase is Phase.RUNNING):
            return  # the training is over already
        self._stay(asked.wanted)
        self._wanted |= asked.wanted and self.phase is Phase.RUNNING
        self._hurry(asked.why, now, effects, asked.wanted)

    # ------------------------------------------------------------ processes

    def _on_lost(self, node: Node, why: str, now: float, effects: list[Effect], blameless: bool = False) -> None:
        """`blameless`: another process in its place need not end the same way."""
        if self.phase is Phase.ENDED:
            return
        effects.append(notes.MemberDied(node, why))
        effects += self._apart.end(node, self._placing.apart(node), now)
        if node.role == "shard":
            self._on_shard_lost(node, why, now, effects)
            return
        if node.role == "backup":
            self._copies.lost(node, effects)
        elif node.role == "deputy":
            effects += self.deputies.lost(node)
        if node.role == "evaluator" or not self._depart(node, now, effects):
            effects.append(Forget(node))  # at once: its Join may still be on its way, and nobody is behind it
        self._replace(node, why, now, effects, blameless)
        if node.role == "deputy":
            self._lose(now, effects)
        self._look_for_end(now, effects)

    def _on_shard_lost(self, shard: Node, why: str, now: float, effects: list[Effect]) -> None:
        """Its successor on the same machine has its name, and goes on from what it has left in memory."""
        text, machine, lost = f"shard {shard.index} was lost", self._placing.on[shard], self._replacing.lost(shard, now)
        if self.error or not self.policy.succeeds:
            self._fail(f"{text} ({why})", effects, [shard])
        elif lost < LOST_IN_A_ROW:
            self._replacing.joined(shard, now)
            effects += [Send(Node("nursery", machine), StartProcess(shard)), notes.MemberReplaced(shard, "")]
            if (half := self._copies.half(shard)) is not None:  # what that lacks yet nobody has any more
                self._renew_backup(half, now, effects)
        elif self._copies.can_take_over(shard, without=machine):
            self._replacing.fruitful(shard)
            self._take_over(shard, f"{why}, {LOST_IN_A_ROW} times in a row", now, effects)
            self._renew_apart([shard], now, effects)
        else:
            self._fail(f"{text} {LOST_IN_A_ROW} times in a row, last: {why}", effects, [shard])

    def _take_over(self, shard: Node, why: str, now: float, effects: list[Effect]) -> None:
        """Its backup goes on as this shard, with all that was acknowledged, and gets a backup of its own.

        `why`: how it died; empty where it has not.
        """
        backup, placed = self._copies.take_over(shard)
        where = f"machine {placed.machine}, by its backup"
        effects.append(notes.MemberDied(shard, why) if why else notes.MemberLeft(shard))
        effects += [notes.MemberReplaced(shard, where), notes.MemberLeft(backup)]
        effects.append(Send(backup, Stop()))
        effects.append(Send(Node("nursery", placed.machine), StartProcess(shard, ends=backup)))
        if self.policy.rooms:
            callers = [*self.members.live, *self._joins]
            callers += [self._evaluations.evaluator] if self._evaluations.evaluator in self._placing.on else []
            effects += [Admit(shard, placed.machine), *(Send(node, placed) for node in callers)]
        self._replacing.joined(shard, now)
        if self._snapshots.under_way and shard in self._snapshots.awaited:
            self._snapshot_anew(now, effects)  # its file was on the other machine
        self._replacing.replace(backup, now, at_once=True)
        self._start_due(now, effects)

    def _renew_backup(self, backup: Node, now: float, effects: list[Effect]) -> None:
        """Another one in its place, where it is best now."""
        if self._replacing.awaits(backup):  # it has not started
            self._placing.vacate(backup)
            return
        machine = self._placing.on[backup]
        self._copies.lost(backup, effects)
        self._placing.vacate(backup)
        effects += [Send(Node("nursery", machine), KillProcess(backup)), Forget(backup), notes.MemberLeft(backup)]
        self._replacing.replace(backup, now, at_once=True)
        self._start_due(now, effects)

    def _renew_apart(self, shards: list[Node], now: float, effects: list[Effect]) -> None:
        """Other processes in the places of replicas whose parts, elsewhere, call these shards where they were."""
        names = " and ".join(f"shard {shard.index}" for shard in shards)
        joined = [*self.members.live, *self._joins]  # the parts of others are still to start
        apart = [node for node in joined if self._placing.apart(node)] if shards else []
        for node in apart:
            effects += self._apart.end(node, {node: self._placing.on[node]}, now)
            self._on_lost(node, f"{names} moved, and its other parts call where that was", now, effects, blameless=True)

    def _replace(self, node: Node, why: str, now: float, effects: list[Effect], blameless: bool) -> None:
        ends = self.phase is Phase.EVALUATING  # and would not, if each evaluator died late
        hopeless = not blameless and self._replacing.lost(node, now, however_late=ends) >= LOST_IN_A_ROW
        if not self._needs(node):
            self._placing.vacate(node)
            return
        text = f"{node.role} {node.index} was lost {LOST_IN_A_ROW} times in a row, last: {why}"
        if node.role == "replica" and hopeless:
            self._give_slot_up(node, text, now, effects)
        elif node.role in ("backup", "deputy") and hopeless:
            self._placing.vacate(node)
            backed = "the coordinator" if node.role == "deputy" else f"shard {node.index}"
            effects.append(notes.Remark("warning", f"{text}; {backed} goes on without one"))
        elif hopeless and ends:
            effects.append(notes.Remark("warning", f"{text}; the final weights are not evaluated"))
            self._close_with_snapshot(now, effects)
        else:
            self._placing.succeed(node, self._successor(node, now, at_once=blameless))
            if ends:
                self._replacing.hasten(now)
            self._start_due(now, effects)

    def _successor(self, node: Node, now: float, *, at_once: bool) -> Node:
        successor = self._replacing.replace(node, now, at_once)
        if node.role == "replica" and self._apart.ends(node.index):
            self._replacing.hold(successor)
        return successor

    def _needs(self, node: Node) -> bool:
        """Somebody in its place: until all is trained, or for the evaluation of the final weights."""
        if self.phase is Phase.RUNNING:
            return True
        return node.role == "evaluator" and not self._hurried and self.phase is not Phase.SNAPSHOT

    def _give_slot_up(self, node: Node, text: str, now: float, effects: list[Effect]) -> None:
        """Nobody takes this replica's place any more; without any replica the run ends."""
        self._replacing.given_up[node.index] = None
        self._placing.vacate(node)
        if len(self._replacing.given_up) < self.policy.replicas:
            effects.append(notes.Remark("warning", f"{text}; the others go on without it"))
            self._start_due(now, effects)  # who waits for room has it now
            self._proceed(now, effects)
        else:
            self.error = text
            self._hurry(text, now, effects)

    def _start_due(self, now: float, effects: list[Effect]) -> None:
        for node in [*self._placing.waiting, *self._replacing.take_due(now)]:
            if not self._needs(node):
                continue
            waited = node in self._placing.waiting
            machine, why = self._placing.place(node)
            if machine is not None:
                self._let_in(node, machine, effects)
                effects += [Send(Node("nursery", machine), StartProcess(node, self._apart.first(node)))]
                effects.append(notes.MemberReplaced(node, why))
            elif not waited:
                effects.append(notes.Remark("warning", f"{node.role} {node.index} waits: {why}"))
                self._proceed(now, effects)  # who waits for it need not

    def _let_in(self, node: Node, machine: int, effects: list[Effect]) -> None:
        """Whom it will call must know where it is: else it could be any machine's."""
        if self.policy.rooms:
            effects.append(Admit(node, machine))
            places = {node: machine, **self._placing.apart(node)}
            shards = self._shards if node.role != "deputy" else ()
            effects += [Send(shard, Placed(*place)) for shard in shards for place in places.items()]
