"""What a coordinator does about machines that are lost, leave or come, and about what is told by their nurseries.

The nursery of each machine tells what has ended there, and starts what it is asked for. A machine of which nothing is
heard any more is taken for lost, with all its processes. It may only have been cut off: what its replicas still push is
dropped, as of any that has left the view, and its nursery is told when it is heard again.
"""

from __future__ import annotations

from abc import abstractmethod

from squall.protocol import notes
from squall.protocol.closing import Phase
from squall.protocol.deputies import Losing
from squall.protocol.effects import Effect, Forget, Send
from squall.protocol.epoch_messages import Voted
from squall.protocol.frames import Message
from squall.protocol.heartbeats import BEGIN_WITHIN_S
from squall.protocol.machine import Refusal
from squall.protocol.messages import Stop
from squall.protocol.nodes import Node
from squall.protocol.nursery_messages import (
    Activity,
    Alive,
    Joined,
    KillProcess,
    Leaving,
    ProcessLost,
    ProcessStuck,
    Replaced,
    StopAsked,
)
from squall.protocol.policy import Policy
from squall.protocol.staffing import Staffing


class MachineStaffing(Staffing):
    def __init__(self, policy: Policy, snapshots: int = 0) -> None:
        super().__init__(policy, snapshots)
        self._listens = False
        self._lost_machines: dict[int, str] = {}  # and those that left before they had come; with why
        self._newest = max(self._placing.rooms, default=0)  # the highest number of all that have come

    @abstractmethod
    def _part(self, now: float, effects: list[Effect]) -> None:
        """With the deputy, if nurseries have said that this may be."""

    @abstractmethod
    def _renew_deputy(self, why: str, now: float, effects: list[Effect]) -> None:
        """Machines have come or gone."""

    def _release(self, node: Node, effects: list[Effect]) -> None:
        """The replica shall leave, as soon as nobody waits for it."""
        effects.append(Send(node, Stop()))

    def _kept_by(self, nodes: list[Node]) -> str:
        """What of the weights these alone have, in words; "" where the others can go on without them."""
        return _shards(nodes)

    def _on_started(self, now: float, effects: list[Effect]) -> None:
        """Whoever goes on in the place of another coordinator has its host do again what it has not answered."""
        if self._listens:
            effects += self._unwritten.values()
            if not self.deputies.whole:  # what that lacks yet nobody has any more
                self.deputies.part("the coordinator was lost before it was whole", now)
                self._part(now, effects)
        else:
            self._listens = True
            self._listen(now, effects)

    def _listen(self, now: float, effects: list[Effect]) -> None:
        """The run begins, on the machines that there are."""
        for machine in self._placing.rooms:
            self._hear(machine, now, BEGIN_WITHIN_S)
        self._start_due(now, effects)

    def _hear(self, machine: int, now: float, grace_s: float = 0.0) -> None:
        if machine != self.home and machine in self._placing.rooms:
            self._heartbeats.heard(Node("nursery", machine), now, grace_s)

    def _on_heard(self, nodes: tuple[Node, ...], now: float) -> None:
        for node in nodes:
            self._heartbeats.signed(Node("nursery", self._machine_of(node) or 0), now)

    def _on_refused(self, speaker: Node, node: Node, why: str, now: float, effects: list[Effect]) -> None:
        """Nobody would say that: what runs on its machine is not what should run there.

        Of the coordinator's own machine others are not believed that, and who cannot hear it cannot stay. A shard that
        has come from another one may have heard it there: whom it does not hear any more makes room for another.
        """
        accused, accuser = self._machine_of(node), self._machine_of(speaker)
        if accused is None or accuser is None:
            return
        machine, text = accused, f"{node} was refused: {why}"
        if accused == self.home != accuser:
            machine, text = accuser, f"{speaker} refused {node}: {why}"
        if machine == self.home and self._copies.has_moved(speaker) and node in self._placing.on:
            effects.append(Send(Node("nursery", self.home), KillProcess(node)))
        elif machine == self.home:
            self._fail(text, effects)
        else:
            self._on_machine_lost(machine, text, now, effects, accuser)

    def _machine_of(self, node: Node) -> int | None:
        """None: the process has left, or another one is in its place."""
        if node == self.node:
            return self.home
        return node.index if node.role == "nursery" else self._placing.on.get(node)

    def _on_nursery(self, nursery: Node, message: Message, now: float, effects: list[Effect]) -> None:
        machine = nursery.index
        if machine in self._lost_machines:
            effects.append(Send(nursery, Replaced(self._lost_machines[machine])))
            return
        match message:
            case Alive():
                self._hear(machine, now)
                effects.append(Send(nursery, Alive()))
            case Activity(spent):
                there = tuple(each for each in spent if self._machine_of(each.node) == machine)
                effects.append(notes.ActivityTold(machine, there))
            case ProcessLost(node, why) if node == self.node:  # it was, before this one
                effects += [notes.MemberDied(node, why), notes.MemberReplaced(node)]
            case ProcessLost(node, why, stood_s, torn):
                if self._placing.on.get(node) == machine:
                    self._replacing.stood(self._placing.whole(node), stood_s)
                if torn and self._placing.on.get(node) == machine and self._copies.can_take_over(node):
                    self._take_over(node, why, now, effects)
                    self._renew_apart([node], now, effects)
                else:
                    self._on_process_lost(machine, node, why, now, effects)
            case ProcessStuck(node, why):
                if self._machine_of(node) == machine:
                    effects.append(notes.Remark("warning", f"{node.role} {node.index} {why}"))
            case StopAsked():
                self._on_stop(message, now, effects)
            case Joined(joined, room):
                if machine != self.home:
                    raise Refusal("it tells of machines that have joined, which the first one's nursery knows")
                self._on_machine_joined(joined, room, now, effects)
            case Leaving(why):
                self._on_leaving(machine, why, now, effects)
            case Voted():
                self.deputies.voted(machine, message)
                self._part(now, effects)
            case _:
                raise AssertionError(f"the coordinator does not know {message!r}")

    def _on_process_lost(self, machine: int, node: Node, why: str, now: float, effects: list[Effect]) -> None:
        if self._placing.on.get(node) == machine:  # else it has left, or others have its work
            replica = self._placing.whole(node)
            if node != replica:
                effects += self._apart.end(replica, {replica: self._placing.on[replica]}, now)
                why = f"its part on machine {machine} was lost: {why}"
            self._on_lost(replica, why, now, effects)
        self._on_ended([node], machine, now, effects)
        self._see_off(now, effects)

    def _on_ended(self, processes: list[Node], machine: int, now: float, effects: list[Effect]) -> None:
        """Who is to start in their place can, if nothing else of theirs is left."""
        ended = [self._apart.ended(process, machine) for process in processes]
        slots = [slot for slot in ended if slot is not None]
        for slot in slots:
            self._replacing.let_go(slot)
        if slots:
            self._start_due(now, effects)

    def _on_machine_joined(self, machine: int, room: int, now: float, effects: list[Effect]) -> None:
        self._newest = max(self._newest, machine)
        if machine in self._lost_machines:
            return
        self._placing.add(machine, room)
        self._hear(machine, now, BEGIN_WITHIN_S)
        effects.append(notes.MachineAdded(machine, room))
        for backup in [each for other in self._placing.rooms for each in self._copies.beside(other)]:
            self._renew_backup(backup, now, effects)
        self._renew_deputy(f"machine {machine} has come", now, effects)
        self._start_due(now, effects)

    def _look_for_silent(self, now: float, effects: list[Effect]) -> None:
        for nursery, silent_s in self._heartbeats.silent(now).items():
            why = f"nothing was heard of it for {silent_s:.0f} s"
            self._on_machine_lost(nursery.index, why, now, effects)

    def _on_machine_lost(
        self, machine: int, why: str, now: float, effects: list[Effect], accuser: int | None = None
    ) -> None:  # fmt: skip
        """`accuser`: the machine that refused one of its processes. Its own shards were not believed, if that is it."""
        if self.phase is Phase.ENDED or machine not in self._placing.rooms:
            return
        shards = [node for node in self._placing.there(machine) if node.role == "shard"]
        goes_on = all(machine != accuser and self._copies.can_take_over(shard, without=machine) for shard in shards)
        if self.deputies.whole and (machine == self.deputies.machine or not goes_on):
            self.deputies.losing[machine] = Losing(why, accuser)
            self._placing.closed[machine] = None
            self.deputies.part(f"machine {machine} was lost: {why}", now)
            self._part(now, effects)
            return
        self._lost_machines[machine] = why
        self._heartbeats.forget(Node("nursery", machine))
        gone, elsewhere = self._placing.remove(machine)
        nodes = [node for node in gone if not self._replacing.awaits(self._placing.whole(node))]
        effects.append(notes.MachineDied(machine, tuple(nodes), why))
        text = f"machine {machine} was lost: {why}"
        shards = [node for node in nodes if node.role == "shard"]
        if not goes_on:
            effects += [notes.MemberDied(node, text) for node in shards]
            self._go_back(f"{text}; it had {_shards(nodes)}", effects, gone)
            return
        lost = [node for node in dict.fromkeys(map(self._placing.whole, nodes)) if node not in shards]
        for node in lost:  # before anybody starts in their places
            effects += self._apart.end(node, elsewhere[node], now)
        for shard in shards:
            self._take_over(shard, text, now, effects)
        for node in lost:
            self._on_lost(node, text, now, effects, blameless=True)
        self._on_ended(self._apart.ending_on(machine), machine, now, effects)
        self._renew_apart(shards, now, effects)
        self._renew_deputy(f"machine {machine} was lost", now, effects)

    def _on_leaving(self, machine: int, why: str, now: float, effects: list[Effect]) -> None:
        """Replicas finish their exchange, and shards go on in the places of their backups.

        Where there are none all finish theirs, and the run goes on elsewhere from a snapshot.
        """
        if self.phase is Phase.ENDED or machine in self._placing.leaving:
            return
        if machine not in self._placing.rooms:  # its nursery may be heard before the launcher says that it has joined
            self._lost_machines[machine] = why
            effects += [Send(Node("nursery", machine), message) for message in (Leaving(why), Stop())]
            return
        if machine == self.home:  # whoever wants it back wants the run to end
            self._hurry(f"machine {machine} leaves ({why}), where the coordinator is", now, effects)
            return
        nodes = list(dict.fromkeys(map(self._placing.whole, self._placing.there(machine))))
        shards = [node for node in nodes if node.role == "shard"]
        if not all(self._copies.can_take_over(shard, without=machine) for shard in shards):
            shards = []
        if kept := self._kept_by([node for node in nodes if node not in shards]):
            self._move(f"machine {machine} leaves ({why}) with {kept}", now, effects)
            return
        self._placing.leaving[machine] = None
        effects.append(Send(Node("nursery", machine), Leaving(why)))
        for shard in shards:
            self._take_over(shard, "", now, effects)
            effects.append(Send(Node("nursery", machine), KillProcess(shard)))
        self._renew_apart(shards, now, effects)
        for node in dict.fromkeys(map(self._placing.whole, self._placing.there(machine))):
            if node in self.members.live:
                self._release(node, effects)
            elif node.role == "backup":
                self._renew_backup(node, now, effects)
            elif node == self.deputies.node:
                self.deputies.part(f"machine {machine} leaves", now)
                self._part(now, effects)
            else:  # nothing is behind it
                if not self._replacing.awaits(node):
                    self._joins.pop(node, None)
                    effects += [Forget(node), notes.MemberLeft(node)]
                    if self.policy.parts > 1:  # the next in its slot starts when this one has ended
                        effects += self._apart.end(node, {node: self._placing.on[node]}, now)
                self._on_left(node, now, effects)
        self._see_off(now, effects)

    def _on_left(self, node: Node, now: float, effects: list[Effect]) -> None:
        awaited = self._replacing.awaits(node)
        if not awaited:
            effects += self._apart.end(node, self._placing.apart(node), now)
        if self._placing.leaving.keys().isdisjoint(self._placing.vacate(node).values()):
            return
        if not awaited and self._needs(node):
            self._successor(node, now, at_once=True)
        self._start_due(now, effects)
        self._see_off(now, effects)

    def _see_off(self, now: float, effects: list[Effect]) -> None:
        """Machines that leave may go when nothing of the run is there."""
        left = ""
        for machine in list(self._placing.leaving):
            if not (self._placing.there(machine) or self._apart.ending_on(machine)):
                self._placing.remove(machine)
                self._heartbeats.forget(Node("nursery", machine))
                effects += [Send(Node("nursery", machine), Stop()), notes.MachineLeft(machine)]
                left = f"machine {machine} has left"
        if left:
            self._renew_deputy(left, now, effects)


def _shards(nodes: list[Node]) -> str:
    """Those among them, in words."""
    return " and ".join(f"shard {node.index}" for node in nodes if node.role == "shard")
