"""Who says what to whom in a world, and what becomes of those that say what nobody would."""

from __future__ import annotations

from collections.abc import Callable

from squall.protocol.effects import Admit, Apply, Effect, End, StartMember, Transmit
from squall.protocol.events import Event, FrameArrived, PeerRefused
from squall.protocol.frames import Frame
from squall.protocol.messages import Exchange, Parcel
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.notes import MachineDied
from squall.protocol.nursery_messages import Refused
from squall.protocol.policy import MachineRoom
from squall.protocol.speaking import ANSWERS, BATCHES, COLLECTIVE, LOOP, Says, places_of
from squall.sim.proof.broken import Broken
from squall.sim.proof.chaos import Chaos
from squall.strategies.work import Answering, BatchMethod, Collective, Loop

SAYS: dict[type, Says] = {Loop: LOOP, BatchMethod: BATCHES, Collective: COLLECTIVE, Answering: ANSWERS}


class Manners:
    """Of one life."""

    def __init__(self, chaos: Chaos, machine: Callable[[Node], int], rooms: tuple[MachineRoom, ...]) -> None:
        """`machine` says where a node is; `rooms` are those that the life begins on."""
        self._machine = machine
        self.liars: dict[Node, None] = {}  # who has been caught at a lie
        self._says = SAYS[type(chaos.recipe.work)]
        self._refused: set[tuple[Node, Node]] = set()  # by whom, and who
        self._last: dict[Node, dict[Node, int]] = {}  # number of the newest message of a process to another
        self._newest: dict[tuple[Node, Node], int] = {}  # the same -> highest clock that had come before
        self._several = bool(rooms)
        self._first = {node for room in rooms for node in room.nodes}
        self._admitted: set[tuple[Node, Node]] = set()  # by whom, and who

    def watch(self, node: Node, what: Event | Effect) -> None:
        match what:
            case Transmit(to, frame, payload):
                try:
                    places_of(self._says, node, to, frame.message, payload)
                except ValueError as error:
                    raise Broken("I12", f"{node} to {to}: {error}") from error
                if isinstance(frame.message, Refused) and frame.message.node not in self.liars:
                    raise Broken("I12", f"{node} refuses {frame.message.node}: {frame.message.why}")
            case End("failed", reason) if node == COORDINATOR and reason.partition(" ")[2].startswith("was refused: "):
                home = self._machine(node)
                if not any(self._machine(by) == self._machine(liar) == home for by, liar in self._refused):
                    raise Broken("I12", f"another machine's word ends the run: {reason}")
            case MachineDied(machine, _, why) if " refused" in why and not self.liars:
                raise Broken("I12", f"machine {machine} is given up, and nobody has lied: {why}")
            case StartMember(shard, ends=Node()):  # who goes on may not have heard of it
                self._refused = {(by, refused) for by, refused in self._refused if by != shard}
            case Admit(newcomer):
                self._admitted.add((node, newcomer))
            case FrameArrived(Node("replica" | "part") as sender, Frame(message=Exchange(clock) | Parcel(clock))):
                self._on_exchange(node, sender, clock)
            case PeerRefused(liar):
                self.liars[liar] = None
                self._refused.add((node, liar))
            case Apply(terms):
                for owner, clock in ((term.owner, term.clock) for term in terms):
                    if (node, owner) in self._refused and clock > self._newest.get((node, owner), 0):
                        raise Broken("I12", f"{node} applies clock {clock} of {owner}, which it had refused before")

    def watch_order(self, node: Node, what: Event | Effect) -> None:
        """Also of what a process does again that one before it has done."""
        match what:
            case StartMember(successor):
                self._last.pop(successor, None)  # it has connections of its own
            case Transmit(to, frame, again=False) if frame.number > 0:
                last = self._last.setdefault(node, {})
                if frame.number < last.get(to, 0):
                    raise Broken("I28", f"{node} sends {to} message {frame.number} behind {last[to]}")
                last[to] = frame.number

    def _on_exchange(self, node: Node, sender: Node, clock: int) -> None:
        if self._several and sender not in self._first and (node, sender) not in self._admitted:
            raise Broken("I12", f"{node} hears {sender}, and does not know on which machine that is")
        if (node, sender) not in self._refused:
            self._newest[node, sender] = max(clock, self._newest.get((node, sender), 0))
