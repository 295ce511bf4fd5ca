"""A coordinator's machine, and hands for its shards and replicas."""

from typing import TypeVar

from squall.protocol.effects import Effect, Send
from squall.protocol.events import Event
from squall.protocol.frames import Message
from squall.protocol.leases import Leases, Limits
from squall.protocol.loop_coordinator import LoopCoordinator
from squall.protocol.messages import (
    Cover,
    Departed,
    Evaluate,
    Evaluated,
    Grant,
    Join,
    Lease,
    LeaseRequest,
    Left,
    Progress,
    SnapshotTaken,
    Stats,
    TakeSnapshot,
    View,
    ViewSeen,
    Weights,
    Welcome,
)
from squall.protocol.nodes import NURSERY, Node
from squall.protocol.notes import Remark
from squall.protocol.nursery_messages import ProcessLost, StartProcess
from squall.protocol.policy import Policy
from tests.protocol.steps import exchanges_of, give, sent, shard_nodes, tell

BATCH = 10
N = TypeVar("N", bound=Effect)


def start(node: Node, machine: int = 0) -> Send:
    """What the coordinator says to have a process started."""
    return Send(Node("nursery", machine), StartProcess(node))


class Office:
    """`said` keeps every message of the coordinator; views are seen at once unless `prompt` is False."""

    def __init__(
        self, *, replicas: int = 2, shards: int = 2, examples: int = 100, limits: Limits | None = None,
        **settings: object,
    ) -> None:  # fmt: skip
        exchanges = exchanges_of(settings)
        self.leases = Leases(examples, BATCH, limits or Limits(epochs=1))
        policy = Policy(replicas, shards, **{"snapshot_every_s": None, **settings})
        self.machine = LoopCoordinator(policy, exchanges, self.leases)
        self.shards = shard_nodes(shards)
        self.evaluator = Node("evaluator", replicas)
        self.prompt = True
        self.now = 0.0
        self.said: list[tuple[Node, Message]] = []
        self.effects: list[Effect] = []
        self.applied: dict[Node, tuple[Cover, ...]] = {}  # what shards will say of a replica that departs
        self._views: list[View] = []
        self._known: dict[Node, None] = {}

    def _take(self, effects: list[Effect]) -> list[Effect]:
        self.effects = effects
        self.said += sent(effects, object)
        for to, view in sent(effects, View):
            if to == self.shards[0]:
                self._views.append(view)
        if self.prompt:
            effects = effects + self.see()
        self.effects = effects
        return effects

    def tell(self, sender: Node, message: Message) -> list[Effect]:
        return self._take(tell(self.machine, sender, message, self.now))

    def give(self, event: Event) -> list[Effect]:
        return self._take(give(self.machine, event, self.now))

    def see(self, *shards: Node) -> list[Effect]:
        """Shards see all views that are on their way."""
        effects: list[Effect] = []
        views, self._views = self._views, []
        for view in views:
            nodes = [Node("replica", m.slot, m.incarnation) for m in view.members]
            gone = [node for node in self._known if node not in nodes]
            self._known = dict.fromkeys(nodes)
            applied = {n: {cover.lease: cover.upto for cover in self.applied.get(n, ())} for n in gone}
            departed = tuple(Departed(n.index, n.incarnation, applied[n]) for n in gone)
            for shard in shards or self.shards:
                effects += self.tell(shard, ViewSeen(view.number, departed))
        return effects

    def join(self, *indices: int, incarnation: int = 0) -> list[Node]:
        nodes = [Node("replica", i, incarnation) for i in indices]
        for node in nodes:
            self.tell(node, Join(1000 + node.index))
        return nodes

    def ask(self, node: Node) -> Lease | None:
        """What the node is granted; fails if it has to wait."""
        grants = sent(self.tell(node, LeaseRequest()), Grant)
        assert [to for to, _ in grants] == [node]
        return grants[0][1].lease

    def trained(self, node: Node, lease: Lease, upto: int | None = None) -> list[Effect]:
        return self.tell(node, Progress((Cover(lease.id, lease.stop if upto is None else upto),), Stats()))

    def work(self, node: Node) -> None:
        """Train until nothing is left."""
        while (grants := sent(self.tell(node, LeaseRequest()), Grant)) and grants[0][1].lease:
            self.trained(node, grants[0][1].lease)

    def leave(self, *nodes: Node) -> list[Effect]:
        return [effect for node in nodes for effect in self.tell(node, Left((), Stats()))]

    def lose(self, node: Node, why: str = "killed") -> list[Effect]:
        return self.tell(NURSERY, ProcessLost(node, why))

    def snapshot(self, error: str = "", *, trained: tuple[Cover, ...] = ()) -> list[Effect]:
        """Every shard writes the snapshot that was asked for last."""
        number = [message.number for _, message in self.said if isinstance(message, TakeSnapshot)][-1]
        answers = [SnapshotTaken(number, 7 + shard.index, trained, error, 70 + shard.index) for shard in self.shards]
        return [effect for shard, answer in zip(self.shards, answers) for effect in self.tell(shard, answer)]

    def evaluated(self, **values: float) -> list[Effect]:
        number = [message.number for _, message in self.said if isinstance(message, Evaluate)][-1]
        return self.tell(self.evaluator, Evaluated(number, Weights(5, 40, 0.25), values or {"loss": 0.5}))

    def heard(self, node: Node, kind: type) -> list[Message]:
        """What the coordinator has said of a kind to a node."""
        return [message for to, message in self.said if to == node and isinstance(message, kind)]

    def welcomed(self, node: Node) -> bool:
        return bool(self.heard(node, Welcome))

    def notes(self, kind: type[N]) -> list[N]:
        """Of the last step."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def remarks(self, kind: str) -> list[str]:
        """Alike."""
        return [remark.text for remark in self.notes(Remark) if remark.kind == kind]
