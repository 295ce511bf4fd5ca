"""What the coordinator knows of its deputy, and how they part: never so that both could go on (`protocol.deputy`)."""

from __future__ import annotations

from typing import NamedTuple

from squall.protocol.copied import CopyTo
from squall.protocol.copy_messages import CopyJoined
from squall.protocol.effects import Effect, Forget, Send
from squall.protocol.epoch_messages import Abandon, Voted
from squall.protocol.heartbeats import PATIENCE
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.notes import MemberJoined
from squall.protocol.nursery_messages import KillProcess, Placed
from squall.protocol.placing import Placing
from squall.protocol.policy import Policy


class Losing(NamedTuple):
    """Why a machine is lost as soon as the deputy is parted with: its own, or one behind which the run goes back."""

    why: str
    accuser: int | None  # the machine that has refused what runs there


class Deputed(Effect, frozen=True, gc=False):
    """Whether others could go on without this machine, as far as is known here: said where that changes."""

    leads: bool


class Deputies:
    """One at a time. Each is a node of its own, and so its name is the epoch in which it may take over."""

    def __init__(self, policy: Policy, placing: Placing) -> None:
        self._placing, self._pulse = placing, policy.pulse
        self.node: Node | None = None  # that has joined
        self.whole = False  # it can take over
        self.voters: tuple[int, ...] = ()  # machines, as it became whole
        self.parting = ""  # why it is to go, and nurseries are asked
        self.wake_at: float | None = None  # when they are asked again
        self._ask_until = 0.0
        self._pid, self._address = -1, ""
        self.losing: dict[int, Losing] = {}  # by machine
        self._without: dict[int, None] = {}  # machines that never follow it
        self._with: dict[int, None] = {}  # that do

    def joined(self, node: Node, message: CopyJoined) -> list[Effect]:
        """The coordinator makes it whole, and nurseries are told where it is."""
        self._begin(node)
        self._pid, self._address = message.pid, message.address
        machine = self._placing.on[node]
        placed = Placed(node, machine, message.address)
        others = [other for other in self._placing.rooms if other != self._placing.home]
        return [*(Send(Node("nursery", other), placed) for other in others), CopyTo(node, machine)]

    def _begin(self, node: Node | None) -> None:
        self.node, self.whole, self.voters, self.parting, self.wake_at = node, False, (), "", None
        self._without, self._with = {}, {}

    def kept(self, node: Node, effects: list[Effect]) -> None:
        if node == self.node:
            self.whole, self.voters = True, tuple(self._placing.rooms)
            effects += [Deputed(True)] if 2 * (len(self.voters) - 1) > len(self.voters) else []
            effects.append(MemberJoined(node, self._pid, self._placing.on[node], ()))

    @property
    def machine(self) -> int | None:
        """On which it is, if it can take over."""
        return self._placing.on.get(self.node) if self.node is not None and self.whole else None

    def lost(self, node: Node) -> list[Effect]:
        """Its nursery says so, by which it will never start another in its place."""
        if node != self.node:
            return []
        self._begin(None)
        return [CopyTo(None)]

    def part(self, why: str, now: float) -> None:
        """It is to go. One that is whole may take over, so nurseries are asked."""
        if self.parting or self.node is None:
            return
        self.parting, self.wake_at = why, now
        self._ask_until = now + PATIENCE * self._pulse.lost_after_s

    def ask(self, now: float) -> list[Effect]:
        assert self.node is not None
        self.wake_at = now + self._pulse.every_s
        asked = [machine for machine in self.voters if machine != self._placing.home]
        return [Deputed(False), *(Send(Node("nursery", machine), Abandon(self.node)) for machine in asked)]

    def voted(self, machine: int, message: Voted) -> None:
        if message.deputy == self.node and machine in self.voters:
            (self._with if message.follows else self._without)[machine] = None

    @property
    def accused(self) -> bool:
        """Something on its machine was refused, so it does not take over."""
        return self.machine in self.losing and self.losing[self.machine].accuser is not None

    @property
    def parted(self) -> bool:
        """Half of the machines at least stay with this coordinator."""
        stay = {self._placing.home, *self._without}
        return bool(self.parting) and (not self.whole or 2 * len(stay) >= len(self.voters))

    def refused(self, now: float) -> str:
        """Why this coordinator cannot go on, though that deputy is not heard."""
        if 2 * len(self._with) > len(self.voters):
            return f"{self.parting}; most machines go on without this one"
        if self.parting and not self.parted and now >= self._ask_until:
            return f"{self.parting}, and too few machines are heard: others may go on with the run"
        return ""

    def leave(self) -> list[Effect]:
        """It takes over nothing any more, though it may be there."""
        assert self.node is not None
        effects: list[Effect] = [CopyTo(None), Forget(self.node)]
        if self.machine not in self.losing:
            effects.append(Send(Node("nursery", self._placing.on[self.node]), KillProcess(self.node)))
        self._begin(None)
        return effects

    def take_over(self) -> tuple[Node, Placed]:
        """It has, and is this coordinator: who it was, and where that is called."""
        assert self.node is not None
        deputy, placed = self.node, Placed(COORDINATOR, self._placing.on[self.node], self._address)
        self._begin(None)
        return deputy, placed
