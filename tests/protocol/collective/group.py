"""All-reduce's coordinator, and hands for its replicas."""

from squall.protocol.collective.coordinator import CollectiveCoordinator
from squall.protocol.collective.messages import Finished, Form, Turn
from squall.protocol.effects import Effect, Send
from squall.protocol.events import Event, MessageArrived
from squall.protocol.frames import Message
from squall.protocol.leases import Leases, Limits
from squall.protocol.messages import Join, SnapshotTaken, Stats, TakeSnapshot, View, ViewSeen
from squall.protocol.nodes import NURSERY, Node, replica_node
from squall.protocol.nursery_messages import ProcessLost
from squall.protocol.policy import Policy

BATCH = 10


class Circle:
    """`said` keeps what the coordinator says; views are seen, and rounds finished, only when a test has it so."""

    def __init__(
        self, replicas: int = 2, examples: int = 100, epochs: int = 1, divided: bool = False, **settings: object
    ) -> None:
        self.leases = Leases(examples, BATCH, Limits(epochs=epochs))
        policy = Policy(replicas, 0, **{"snapshot_every_s": None, "evaluate": False, **settings})
        self.machine = CollectiveCoordinator(policy, self.leases, divided=divided)
        self.now = 0.0
        self.said: list[tuple[Node, Message]] = []
        self.effects: list[Effect] = []
        self._answered: dict[Node, int] = {}

    def give(self, event: Event) -> list[Effect]:
        effects = self.machine.on(event, self.now)
        self.effects += effects
        self.said += [(effect.to, effect.message) for effect in effects if isinstance(effect, Send)]
        return effects

    def tell(self, sender: Node, message: Message) -> list[Effect]:
        return self.give(MessageArrived(sender, message))

    def heard(self, node: Node, kind: type) -> list[Message]:
        return [message for to, message in self.said if to == node and isinstance(message, kind)]

    def join(self, *nodes: Node) -> None:
        for node in nodes:
            self.tell(node, Join(1, "10.0.0.1:7700"))

    def see(self, **clocks: int) -> None:
        """Each live replica has seen the newest view; `r0=3` has finished round 3."""
        while waiting := [node for node in self.machine.members.live if not self._has_answered(node)]:
            for node in waiting:
                newest = [message for message in self.heard(node, View) if isinstance(message, View)][-1]
                self._answered[node] = newest.number
                self.tell(node, ViewSeen(newest.number, clock=clocks.get(f"r{node.index}", 0)))

    def _has_answered(self, node: Node) -> bool:
        shown = [message.number for message in self.heard(node, View) if isinstance(message, View)]
        return not shown or shown[-1] == self._answered.get(node)

    def begun(self) -> list[Node]:
        """All replicas are there, and have formed their group."""
        nodes = [replica_node(slot, 0) for slot in range(self.machine.policy.replicas)]
        self.join(*nodes)
        self.see()
        return nodes

    def finish(self, clock: int, *nodes: Node) -> None:
        for node in nodes:
            self.tell(node, Finished(clock, Stats(BATCH, 1, float(BATCH))))

    def lose(self, node: Node) -> list[Effect]:
        return self.tell(NURSERY, ProcessLost(node, "killed"))

    def turns(self, node: Node) -> list[int]:
        return [message.clock for message in self.heard(node, Turn) if isinstance(message, Turn)]

    def forms(self, node: Node) -> list[Form]:
        return [message for message in self.heard(node, Form) if isinstance(message, Form)]

    def save(self, clock: int, examples: int) -> None:
        """The newest snapshot that was asked for is written."""
        to, asked = next((to, m) for to, m in reversed(self.said) if isinstance(m, TakeSnapshot))
        self.tell(to, SnapshotTaken(asked.number, clock, (), examples=examples))
