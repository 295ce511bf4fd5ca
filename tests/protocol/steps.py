"""Feeding a machine by hand: every step is followed by `check`."""

from typing import Any

from squall.protocol.check import check
from squall.protocol.effects import Effect, Send
from squall.protocol.events import Event, MessageArrived
from squall.protocol.exchanges import Cadence, Dealing, Exchanges, Rules
from squall.protocol.frames import Message
from squall.protocol.machine import Machine
from squall.protocol.messages import Cover, Exchange, Exchanged, Member, View
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.shard import Shard

R0, R1, R2 = (Node("replica", i) for i in range(3))
R1_AGAIN = Node("replica", 1, 1)


def shard_nodes(count: int) -> list[Node]:
    return [Node("shard", i) for i in range(count)]


def give(machine: Machine, event: Event, now: float = 0.0) -> list[Effect]:
    effects = machine.on(event, now)
    check(machine)
    return effects


def tell(machine: Machine, sender: Node, message: Message, now: float = 0.0) -> list[Effect]:
    return give(machine, MessageArrived(sender, message), now)


def sent(effects: list[Effect], kind: type) -> list[tuple[Node, Message]]:
    """Messages of a kind, with their receivers."""
    return [(e.to, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def only(effects: list[Effect], kind: type) -> Effect:
    """The one effect of a kind."""
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, f"{len(found)} {kind.__name__} in {effects}"
    return found[0]


def exchanges_of(settings: dict[str, Any]) -> Exchanges:
    """The settings that are groups' of an `Exchanges`, which are taken out."""

    def taken(group: Any) -> Any:
        return group(**{name: settings.pop(name) for name in group.__struct_fields__ if name in settings})

    return Exchanges(taken(Cadence), taken(Rules), taken(Dealing))


def kinds(effects: list[Effect]) -> list[str]:
    return [type(e.message if isinstance(e, Send) else e).__name__ for e in effects]


# ---------------------------------------------------------------- shards


def view(shard: Shard, number: int, *nodes: Node, entry: int = 0) -> list[Effect]:
    return tell(shard, COORDINATOR, View(number, tuple(Member(n.index, n.incarnation, entry) for n in nodes)))


def shard_of(*nodes: Node, version: int = 0, examples: int = 0, **settings: Any) -> Shard:
    shard = Shard(0, exchanges_of(settings), version, examples)
    assert not settings, f"no group has {settings}"
    view(shard, 1, *nodes)
    return shard


def push(clock: int, basis: int = 0, examples: int = 8, weights: int = 0, covers: tuple[Cover, ...] = ()) -> Exchange:
    return Exchange(clock, 0, weights, basis, examples, covers)


def answers(effects: list[Effect]) -> dict[Node, Exchanged]:
    return dict(sent(effects, Exchanged))
