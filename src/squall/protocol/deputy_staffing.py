"""What a coordinator does about its deputy: has one on another machine, parts with it, and was one before.

A deputy that is whole may take over, so it is parted with only by leave of half of the machines (`protocol.deputies`).
Until then nothing that its coordinator says is heard, because everything waits for the deputy (`protocol.copied`).
"""

from __future__ import annotations

from msgspec.structs import replace

from squall.protocol import notes
from squall.protocol.closing import Phase
from squall.protocol.copy_messages import CopyJoined
from squall.protocol.effects import Effect, Forget, Send
from squall.protocol.heartbeats import BEGIN_WITHIN_S
from squall.protocol.machine import Refusal
from squall.protocol.machine_staffing import MachineStaffing
from squall.protocol.messages import Stop
from squall.protocol.nodes import Node, is_address
from squall.protocol.nursery_messages import Leads


class DeputyStaffing(MachineStaffing):
    def _on_deputy_joined(self, deputy: Node, message: CopyJoined, now: float, effects: list[Effect]) -> None:
        if self._placing.on.get(deputy) is None:
            return  # another one is in its place
        if not is_address(message.address, False):
            raise Refusal(f"it says that it is called at {message.address!r}, which is no number and port")
        self._replacing.joined(deputy, now)
        effects += [Send(deputy, Stop())] if self.phase is Phase.ENDED else self.deputies.joined(deputy, message)

    def _renew_deputy(self, why: str, now: float, effects: list[Effect]) -> None:
        """The machines that have a vote are others now."""
        if self.deputies.whole and set(self.deputies.voters) != self._placing.rooms.keys():
            self.deputies.part(why, now)
            self._part(now, effects)

    def _part(self, now: float, effects: list[Effect]) -> None:
        """With the deputy, if that may be; or with the run."""
        if why := self.deputies.refused(now):
            self._fail(why, effects)
        if self.phase is Phase.ENDED or not self.deputies.parted or self.deputies.node is None:
            return
        deputy = self.deputies.node
        effects += [*self.deputies.leave(), notes.MemberLeft(deputy)]
        self._placing.vacate(deputy)
        self._lose(now, effects)
        self._have_another(deputy, now, effects)

    def _lose(self, now: float, effects: list[Effect]) -> None:
        """The machines that were lost while the deputy might have taken over: it may have, on one that was silent."""
        losing, self.deputies.losing, self._placing.closed = self.deputies.losing, {}, {}
        for machine, (why, accuser) in losing.items():
            if machine != self.home:
                self._on_machine_lost(machine, why, now, effects, accuser)

    def _have_another(self, deputy: Node, now: float, effects: list[Effect]) -> None:
        """In the place of this one, if the run has not ended."""
        if self.phase is Phase.ENDED:
            return
        if self._needs(deputy):
            self._replacing.replace(deputy, now, at_once=True)
        self._start_due(now, effects)
        self._see_off(now, effects)

    def _on_moved(self, now: float, effects: list[Effect]) -> None:
        """This goes on in the place of one whose machine is lost, on that of its deputy."""
        deputy, placed = self.deputies.take_over()
        before, self._placing.home = self.home, placed.machine
        self._placing.vacate(deputy)
        self._unwritten.clear()
        self.policy = replace(self.policy, goes_back=False)  # who would begin it again was there
        where = f"machine {placed.machine}, by its deputy"
        why = f"machine {before} was lost"
        effects += [notes.MemberDied(self.node, why), notes.MemberReplaced(self.node, where), notes.MemberLeft(deputy)]
        effects.append(Forget(deputy))
        for machine in self._placing.rooms:
            if machine != before:
                self._hear(machine, now, BEGIN_WITHIN_S)
                effects.append(Send(Node("nursery", machine), placed))
        self._heartbeats.forget(Node("nursery", self.home))
        self._evaluations.moved(effects)
        self._on_machine_lost(before, "the coordinator was there, and is heard no more", now, effects)
        self._lose(now, effects)
        if self.home in self._placing.leaving:  # whoever wants it back wants the run to end, as on any that leads
            del self._placing.leaving[self.home]
            self._hurry(f"machine {self.home} leaves, where the coordinator is now", now, effects)
        if self.phase is Phase.RUNNING:
            effects.append(Send(Node("nursery", self.home), Leads(1 + max([self._newest, *self._lost_machines]))))
        if self._snapshots.under_way:
            self._snapshot_anew(now, effects)  # what was written lies on that machine
        elif self.phase is Phase.RUNNING:
            self._snapshot_at = now
        self._have_another(deputy, now, effects)
