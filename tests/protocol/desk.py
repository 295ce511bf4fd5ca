"""A replica's machine, and the hand that answers it."""

from squall.protocol.effects import Compute, Effect
from squall.protocol.events import GradientComputed, LoopLeft, Started
from squall.protocol.messages import Exchange, Exchanged, Grant, Lease, Left, Progress, Stop, Welcome
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.replica import Replica
from tests.protocol.steps import exchanges_of, give, only, sent, shard_nodes, tell

SHARDS = shard_nodes(2)
BATCH = 4


class Desk:
    """A replica and the hand that answers it. `effects` holds what the last step gave."""

    def __init__(self, **settings: object) -> None:
        self.replica = Replica(Node("replica", 1), len(SHARDS), BATCH, exchanges_of(settings), pid=77)
        assert not settings, f"no group has {settings}"
        self.version = 100
        self.applied = 400  # examples, by the first shard; the next has applied one less
        self.now = 0.0
        self.leases = 0
        self.exchange: Exchange | None = None  # the newest
        self.pending = False  # it is not answered
        self.computing = False
        self.reported: dict[int, int] = {}  # lease -> upto
        self.effects = give(self.replica, Started())

    def _take(self, effects: list[Effect]) -> "Desk":
        self.effects = effects
        exchanges = sent(effects, Exchange)
        if exchanges:
            assert [to for to, _ in exchanges] == SHARDS
            assert not self.pending
            self.exchange, self.pending = exchanges[0][1], True
        self.computing |= self.has(Compute)
        for _, message in sent(effects, Progress) + sent(effects, Left):
            self.reported.update((cover.lease, cover.upto) for cover in message.covers)
        return self

    def welcome(self, clock: int = 0, answered: bool = True) -> "Desk":
        """Welcomed, and the first weights have come."""
        self._take(tell(self.replica, COORDINATOR, Welcome(clock)))
        return self.answer() if answered else self

    def grant(self, batches: int | None, short: int = 0, epoch: int = 0) -> "Desk":
        lease = None
        if batches is not None:
            self.leases += 1
            lease = Lease(self.leases, epoch, 100 * self.leases, 100 * self.leases + batches * BATCH - short)
        return self._take(tell(self.replica, COORDINATOR, Grant(lease), self.now))

    def computed(self, finite: bool = True, loss: float = 0.5, over: bool = True) -> "Desk":
        self.computing = False
        return self._take(give(self.replica, GradientComputed(loss, finite, 0.25, over=over), self.now))

    def answer(self, staleness: int = 0, clock: int | None = None) -> "Desk":
        """All shards answer the newest exchange."""
        assert self.exchange is not None
        assert self.pending
        clock = self.exchange.clock if clock is None else clock
        stale = staleness if self.exchange.gradient >= 0 else -1
        self.version += 1
        for shard in SHARDS:
            self.pending = shard is not SHARDS[-1]
            answered = Exchanged(clock, self.version + shard.index, stale, examples=self.applied - shard.index)
            self._take(tell(self.replica, shard, answered, self.now))
        return self

    def step(self) -> "Desk":
        """Whatever is under way goes on."""
        return self.answer() if self.pending else self.computed() if self.computing else self

    def left(self) -> "Desk":
        self.computing = False
        return self._take(give(self.replica, LoopLeft(), self.now))

    def stop(self) -> "Desk":
        return self._take(tell(self.replica, COORDINATOR, Stop(), self.now))

    @property
    def batch(self) -> tuple[int, int]:
        compute = only(self.effects, Compute)
        return compute.start, compute.stop

    def has(self, kind: type) -> bool:
        return bool(sent(self.effects, kind)) or any(type(effect) is kind for effect in self.effects)
