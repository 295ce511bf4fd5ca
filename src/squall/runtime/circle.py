"""The groups of a world: what torch's collectives do between processes happens here at a moment of the world's clock.

A step is over when all members have brought their part to it, and not for all at the same moment: should one be lost
between the first and the last of these, some have made the step and others not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from squall.protocol.effects import Gather, JoinGroup, Step
from squall.protocol.events import Event, GroupBroken, GroupJoined
from squall.protocol.nodes import Node
from squall.runtime.world import World
from squall.runtime.world_nodes import Answer

RESENT_S = 0.05  # what was lost between machines
Work = JoinGroup | Step | Gather
Delays = Callable[[Sequence[Node], Work], Sequence[float]]  # seconds until each of the nodes has it
Told = Callable[[Node, Event], Event]  # what a member hears of what it has come to


class Circling(Protocol):
    """A member in a world."""

    def state(self) -> Any: ...

    def take_up(self, state: Any, clock: int) -> None: ...

    def joined(self, form: JoinGroup, members: Mapping[Node, Any]) -> Event:
        """All are there, in their order."""

    def reduced(self, effect: Step, parts: Mapping[Node, Any]) -> Event:
        """Make the step with what all members have brought, in their order."""

    def gathered(self, form: JoinGroup, members: Mapping[Node, Any]) -> Event:
        """Take from the others what is theirs to give."""


class Groups(Protocol):
    """Where members meet. They are told by an event."""

    def join(self, node: Node, effect: JoinGroup, member: Circling) -> None: ...

    def step(self, node: Node, effect: Step, part: Any) -> None: ...

    def gather(self, node: Node, effect: Gather) -> None: ...

    def cut(self, node: Node) -> None: ...

    def leave(self, node: Node) -> None: ...


class _Group:
    def __init__(self, form: JoinGroup) -> None:
        self.form = form
        self.broken = False
        self.members: dict[Node, Circling] = {}  # that have come
        self.parts: dict[Node, Any] = {}  # that they have brought to the step under way
        self.waiting: dict[Node, None] = {}  # members that are to hear of what they wait for
        self.ready_at = 0.0  # when the last of them had done its own

    @property
    def ordered(self) -> dict[Node, Circling]:
        return {node: self.members[node] for node in self.form.members}


class Between(Protocol):
    """What is between machines."""

    def parted(self, nodes: Sequence[Node]) -> bool:
        """Some are cut off from others or from parts of their own, though no connection has broken: all wait."""

    def silent(self, node: Node) -> bool:
        """Its whole machine is gone, so that nothing tells of its end."""


class Circle:
    """Members call it with what they are told to do, and hear of it by an event."""

    def __init__(
        self, world: World, delays: Delays | None = None, told: Told | None = None, between: Between | None = None
    ) -> None:  # fmt: skip
        self._world = world
        self._between = between
        self._delays = delays or (lambda nodes, effect: [0.0] * len(nodes))
        self._told = told or (lambda node, event: event)
        self._groups: dict[int, _Group] = {}
        self._of: dict[Node, int] = {}
        self._torn_until = -math.inf
        world.on_kill.append(self._lose)

    def join(self, node: Node, effect: JoinGroup, member: Circling) -> None:
        group = self._groups.setdefault(effect.number, _Group(effect))
        self._of[node] = effect.number
        group.members[node] = member
        self._wait(node, group)
        torn = self._world.now < self._torn_until
        if group.broken or torn or any(self._refuses(other) for other in effect.members):
            self._break(effect.number, "a member cannot be called")
        elif len(group.members) == len(effect.members):
            self._over(group, effect, lambda member, group: group.members[member].joined(group.form, group.ordered))

    def step(self, node: Node, effect: Step, part: Any) -> None:
        parts = self._meet(node, part)
        if parts is not None:
            self._over(
                self._groups[self._of[node]], effect,
                lambda member, group: group.members[member].reduced(effect, parts),
            )  # fmt: skip

    def gather(self, node: Node, effect: Gather) -> None:
        if self._meet(node, None) is not None:
            self._over(
                self._groups[self._of[node]], effect,
                lambda member, group: group.members[member].gathered(group.form, group.ordered),
            )  # fmt: skip

    def _meet(self, node: Node, part: Any) -> dict[Node, Any] | None:
        """What all have brought, in their order, when the last of them has."""
        number = self._of[node]
        group = self._groups[number]
        group.parts[node] = part
        self._wait(node, group)
        if group.broken:
            self._break(number, "a member is gone")
        elif len(group.parts) == len(group.form.members):
            parts, group.parts = group.parts, {}
            return {member: parts[member] for member in group.form.members}
        return None

    def tear(self, seconds: float) -> None:
        """The connections of the newest group break, and nobody has died. For so long there are no others."""
        self._torn_until = self._world.now + seconds
        if self._groups:
            self._break(max(self._groups), "a connection has broken")

    def cut(self, node: Node) -> None:
        """It has what is under way in its group fail, but for those who have it already."""
        if node in self._of:
            self._break(self._of[node], f"{node} has cut it")

    def leave(self, node: Node) -> None:
        """It is gone, of itself or because it was killed."""
        number = self._of.pop(node, None)
        if number is not None:
            if node not in self._world.processes:
                self._groups[number].waiting.pop(node, None)
            self._break(number, f"{node} has left")

    def _lose(self, node: Node) -> None:
        if self._between is None or not self._between.silent(node):
            self.leave(node)
        elif (number := self._of.pop(node, None)) is not None:
            self._groups[number].waiting.pop(node, None)

    def _refuses(self, node: Node) -> bool:
        """Whoever calls it learns at once that it is gone."""
        gone = node not in self._world.processes
        return gone and (self._between is None or not self._between.silent(node))

    def _wait(self, node: Node, group: _Group) -> None:
        group.waiting[node] = None
        group.ready_at = max(group.ready_at, self._world.now, self._world.processes[node].busy_until)

    def _break(self, number: int, why: str) -> None:
        group = self._groups[number]
        group.broken = True
        for node in group.waiting:
            self._world.post(node, GroupBroken(number, why))
        group.waiting = {}

    def _over(self, group: _Group, effect: Work, make: Callable[[Node, _Group], Event]) -> None:
        """Once all have done their own, which others on their machine may have put off since they began."""
        for node in group.waiting:
            group.ready_at = max(group.ready_at, self._world.processes[node].busy_until)
        if self._between is not None and self._between.parted(group.form.members):
            group.ready_at = self._world.now + RESENT_S
        if group.ready_at > self._world.now:
            self._world.at(group.ready_at, partial(self._over, group, effect, make))
            return
        nodes = group.form.members
        if not group.broken:
            for node, delay_s in zip(nodes, self._delays(nodes, effect)):
                self._world.at(self._world.now + delay_s, partial(self._tell, node, group, make))

    def _tell(self, node: Node, group: _Group, make: Callable[[Node, _Group], Event]) -> None:
        if node in group.waiting:
            del group.waiting[node]
            self._world.post(node, Answer(partial(self._made, node, group, make)))

    def _made(self, node: Node, group: _Group, make: Callable[[Node, _Group], Event]) -> Event:
        """As the node hears of it; by then it may have left."""
        number = group.form.number
        if self._of.get(node) != number:
            return GroupBroken(number, "it has left")
        return self._told(node, make(node, group))


def joined_whole(member: Circling, node: Node, form: JoinGroup, members: Mapping[Node, Circling]) -> Event:
    """The answer to `JoinGroup` of a member that takes up the state of the source where that has to travel."""
    if form.transfer and node != form.source:
        member.take_up(members[form.source].state(), form.clock)
    return GroupJoined(form.number)
