"""A nursery's machine: starts what the coordinator asks for on its machine, and tells what has ended there.

Each machine of a run has one. It decides who hangs there (`protocol.hangs`), the coordinator included, and its own
end: when all is over, when it is told that others have taken its place, or when it has heard nothing of the coordinator
for so long that this must have happened: sooner, where the launching process is gone as well. It has a vote on who goes
on as the coordinator (`protocol.deputy`).
"""

from __future__ import annotations

import math

from squall.protocol.effects import Admit, Effect, End, Forget, KillMember, KillMembers, Send, StartMember
from squall.protocol.epoch_messages import Abandon, Follow, Voted
from squall.protocol.events import (
    ActivitySeen,
    Event,
    LauncherLost,
    LeaveRequested,
    MachineJoined,
    MessageArrived,
    ProcessEnded,
    ProcessesSeen,
    Started,
    StopRequested,
    TimePassed,
)
from squall.protocol.frames import Message
from squall.protocol.hangs import Hangs, Hung
from squall.protocol.heartbeats import PATIENCE, Heartbeats, Pulse
from squall.protocol.machine import Refusal
from squall.protocol.messages import Stop
from squall.protocol.nodes import COORDINATOR, NURSERY, Node
from squall.protocol.nursery_messages import (
    Activity,
    Alive,
    Joined,
    KillProcess,
    Leads,
    Leaving,
    Placed,
    ProcessLost,
    ProcessStuck,
    Replaced,
    StartProcess,
    StopAsked,
)
from squall.protocol.replacing import LOST_IN_A_ROW

SOON_S = 1.0  # after its start; a coordinator that dies so often so soon would do so again
LEAVE_WITHIN_S = 10.0  # for replicas that were told to leave to finish their exchange; who takes longer is killed


class Redirect(Effect, frozen=True, gc=False):
    """Tell all processes of this machine, and those that start, where the coordinator is."""

    placed: Placed


class LetIn(Effect, frozen=True, gc=False):
    """Further machines, in the place of the run's first one, under numbers from this one on."""

    number: int


class NurseryMachine:
    """Of the machine `node.index`. `pulse` is None where the coordinator is on the same machine."""

    def __init__(self, node: Node = NURSERY, pulse: Pulse | None = None) -> None:
        self.node = node
        self._hangs = Hangs()
        self._pulse = pulse
        limits = (pulse.every_s, PATIENCE * pulse.lost_after_s) if pulse is not None else (0.0, 0.0)
        self._heartbeats = Heartbeats(*limits)  # of the coordinator
        self._tell_at: float | None = None  # that this machine is alive
        self._coordinator_since, self._coordinators_lost = -math.inf, 0  # when it started last; how many in a row
        self._behind: dict[Node, StartProcess] = {}  # backups that are to end, and who goes on from each
        self._ended: set[Node] = set()  # backups that have
        self._votes: dict[Node, bool] = {}  # whether it follows a deputy, for ever
        self._deputies: dict[Node, int] = {}  # that it calls, and their machines
        self._followed = False  # there is a deputy, which may ask this
        self._moved: Placed | None = None  # the coordinator, which began elsewhere
        self._leads = False  # it goes on on this machine
        self._leaving = self._let_go = False  # it wants to; the run goes on without it, and at once
        self._leave_by: float | None = None

    @property
    def wake_at(self) -> float | None:
        times = (self._heartbeats.wake_at, self._tell_at, self._leave_by)
        return min((at for at in times if at is not None), default=None)

    def on(self, event: Event, now: float) -> list[Effect]:
        match event:
            case MessageArrived(sender, message):
                return self._on_message(sender, message, now)
            case MachineJoined(machine, room):
                return [Send(COORDINATOR, Joined(machine, room))]
            case ProcessEnded(node, why, torn):
                hung = self._hangs.ended(node)
                lost = ProcessLost(node, why, torn=torn)
                if hung is not None:
                    lost = ProcessLost(node, hung.why, hung.stood_s, torn)
                return self._on_coordinator_lost(lost, now) if node == COORDINATOR else self._on_ended(lost)
            case ProcessesSeen():
                return self._on_seen(event, now)
            case ActivitySeen(spent):
                return [Send(COORDINATOR, Activity(spent))]
            case StopRequested(why, failed, wanted):
                return [Send(COORDINATOR, StopAsked(why, failed, wanted))]
            case LeaveRequested(why) if not self._leaving:
                self._leaving = True
                return [Send(COORDINATOR, Leaving(why))]
            case LauncherLost() if self._pulse is not None and not self._followed:  # a coordinator in order is heard
                self._heartbeats.limit_s = self._pulse.lost_after_s
                return []
            case Started() if self._pulse is not None:
                self._heartbeats.heard(COORDINATOR, now)
                self._tell_at = now + self._pulse.every_s
                return [Send(COORDINATOR, Alive())]
            case TimePassed():
                return self._on_time(now)
            case Started() | LeaveRequested() | LauncherLost():
                return []
        raise AssertionError(f"{self.node} does not know {event!r}")

    def _on_coordinator_lost(self, lost: ProcessLost, now: float) -> list[Effect]:
        """Its successor goes on from what it has left in memory, unless they die one after the other."""
        soon = now - self._coordinator_since - lost.stood_s < SOON_S
        self._coordinators_lost = self._coordinators_lost + 1 if soon else 1
        self._coordinator_since = now
        if self._coordinators_lost >= LOST_IN_A_ROW:
            text = f"the coordinator was lost {LOST_IN_A_ROW} times in a row, last: {lost.why}"
            return [KillMembers(text), End("failed", text)]
        return [StartMember(COORDINATOR), Send(COORDINATOR, lost)]

    def _on_ended(self, lost: ProcessLost) -> list[Effect]:
        """Its successor may have waited for the end of a backup."""
        if lost.node.role in ("backup", "deputy"):
            self._ended.add(lost.node)
            if (start := self._behind.pop(lost.node, None)) is not None:
                if start.node == COORDINATOR:
                    self._leads = True
                    self._heartbeats.cease()
                return [StartMember(start.node, start.first, start.ends)]
        return [Send(COORDINATOR, lost)]

    def _on_seen(self, seen: ProcessesSeen, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for found in self._hangs.look(seen.sights, seen.after_s, now):
            if isinstance(found, Hung):
                effects.append(KillMember(found.node, found.why))
            else:
                effects.append(Send(COORDINATOR, ProcessStuck(found.node, found.why)))
        return effects

    def _on_message(self, sender: Node, message: Message, now: float) -> list[Effect]:
        match message:
            case Follow(deputy):
                return self._on_follow(sender, deputy, now)
            case Abandon(deputy):
                vote = Send(sender, Voted(deputy, self._votes.setdefault(deputy, False)))
                return [vote, *([] if self._votes[deputy] else self._forget(deputy))]
            case Placed(Node("deputy") as deputy, machine, address):
                self._followed = True
                before = [effect for other in list(self._deputies) for effect in self._forget(other)]
                if self._votes.get(deputy) is False:
                    return before
                self._deputies[deputy] = machine
                return [*before, Admit(deputy, machine, address)]
            case Placed():
                self._hear(now)
                self._moved = message
                return [Redirect(message)]
            case Leads(number):
                return [LetIn(number)]
            case StartProcess(node, _, ends) if sender != COORDINATOR:
                if node != COORDINATOR or ends != sender:  # most machines follow it, whatever this one has promised
                    raise Refusal(f"it has {node} started, and is not the coordinator")
                if sender in self._ended:  # which was told: the coordinator may go on without it
                    return []
                self._behind[sender] = message
                return []
            case StartProcess(node) if self._leaving and node.role != "shard":  # which has what the run ends with
                # Nothing is awaited of it, but by a replica of its parts.
                return [Send(COORDINATOR, ProcessLost(node, "its machine leaves"))] if node.role == "part" else []
            case StartProcess(ends=Node() as ends) if ends not in self._ended:
                self._behind[ends] = message
                return []
            case StartProcess(node, first, ends):
                return [StartMember(node, first, ends)]
            case KillProcess(node):
                return [KillMember(node)]
            case Alive():
                self._hear(now)
                return []
            case Leaving():
                self._leave_by, self._let_go = now + LEAVE_WITHIN_S, True
                return []
            case Replaced(why):
                return [KillMembers(f"replaced: {why}"), End("failed", why)]
            case Stop():
                return [End("left" if self._let_go else "finished")]  # or the run moves, as the head says
        raise AssertionError(f"{self.node} does not know {message!r}")

    def _hear(self, now: float) -> None:
        """Of the coordinator; of one on this machine it sees whether that is there."""
        if not self._leads:
            self._heartbeats.heard(COORDINATOR, now)

    def _forget(self, deputy: Node) -> list[Effect]:
        """Who answers where it was called is no coordinator of this machine's. Its own nursery hears it to its end."""
        machine = self._deputies.pop(deputy, self.node.index)
        return [] if machine == self.node.index else [Forget(deputy)]

    def _on_follow(self, sender: Node, deputy: Node, now: float) -> list[Effect]:
        """Only where nothing is heard of the coordinator here either."""
        if deputy != sender:
            raise Refusal(f"it asks to follow {deputy}")
        if self._pulse is not None and self._heartbeats.quiet_s(COORDINATOR, now) >= self._pulse.lost_after_s:
            self._votes.setdefault(deputy, True)
        return [Send(sender, Voted(deputy, self._votes[deputy]))] if deputy in self._votes else []

    def _on_time(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for silent_s in self._heartbeats.silent(now).values():
            why = f"nothing was heard of the coordinator for {silent_s:.0f} s"
            return [KillMembers(why), End("failed", why)]
        if self._tell_at is not None and now >= self._tell_at:
            assert self._pulse is not None
            self._tell_at = now + self._pulse.every_s  # whether it is answered or not: the answer may wait for long
            effects.append(Send(COORDINATOR, Alive()))
            if self._moved is not None:  # a process may have been starting
                effects.append(Redirect(self._moved))
        if self._leave_by is not None and now >= self._leave_by:
            self._leave_by = None
            effects.append(KillMembers("they did not leave in time"))
        return effects
