"""Who may say what to whom.

Machines (`protocol.machine`) believe each other. A process of another machine may be broken, or another program: where
its messages come in, what its role never says to this one is refused (`runtime.part`). What it may say, though not now,
a machine refuses itself (`Refusal`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from squall.protocol import copy_messages as k
from squall.protocol import epoch_messages as e
from squall.protocol import messages as m
from squall.protocol import nursery_messages as n
from squall.protocol.answering.messages import AnswersPiece, NotKept
from squall.protocol.collective import messages as c
from squall.protocol.effects import Payload
from squall.protocol.frames import Message
from squall.protocol.loss_messages import Kept, SnapshotLost, UpdatesLost
from squall.protocol.nodes import Node
from squall.protocol.sandblaster import messages as s

Says = Mapping[tuple[str, str], frozenset[type]]  # (role that speaks, role that hears) -> messages

COMMON: Says = {
    ("backup", "coordinator"): frozenset({k.CopyJoined, k.CopyKept, n.Heard, n.Refused}),
    ("backup", "shard"): frozenset({k.Has}),
    ("coordinator", "backup"): frozenset({n.Placed, m.Stop}),
    ("coordinator", "evaluator"): frozenset({m.Evaluate, n.Placed, m.Stop}),
    ("coordinator", "deputy"): frozenset({k.Whole, k.Entry, n.Placed, m.Stop}),
    ("deputy", "coordinator"): frozenset({k.CopyJoined, k.CopyKept, k.Has, n.Heard, n.Refused}),
    ("deputy", "nursery"): frozenset({e.Follow, n.StartProcess}),
    ("nursery", "deputy"): frozenset({e.Voted}),
    ("coordinator", "nursery"): frozenset(
        {n.StartProcess, n.KillProcess, n.Leaving, n.Alive, n.Replaced, n.Placed, n.Leads, e.Abandon, m.Stop}
    ),
    ("coordinator", "replica"): frozenset({m.Welcome, n.PartsPlaced, n.Placed, m.Stop}),
    ("coordinator", "shard"): frozenset({m.View, m.TakeSnapshot, m.PieceKept, n.Placed, k.KeepCopy, m.Stop}),
    ("shard", "backup"): frozenset({k.Whole, k.Entry}),
    ("evaluator", "coordinator"): frozenset({m.Join, m.Evaluated, n.Heard, n.Refused}),
    ("evaluator", "shard"): frozenset({m.Exchange}),
    ("nursery", "coordinator"): frozenset(
        {
            n.ProcessLost,
            n.ProcessStuck,
            n.StopAsked,
            n.Leaving,
            n.Alive,
            n.Activity,
            n.Joined,
            e.Voted,
        }
    ),
    ("replica", "coordinator"): frozenset({m.Join, m.Progress, m.Left, n.Heard, n.Refused}),
    ("part", "shard"): frozenset({m.Parcel}),
    ("replica", "shard"): frozenset({m.Exchange}),
    ("shard", "coordinator"): frozenset({m.ViewSeen, m.SnapshotTaken, m.SnapshotPiece, n.Heard, n.Refused}),
    ("shard", "evaluator"): frozenset({m.Exchanged}),
    ("shard", "part"): frozenset({m.Parcel}),
    ("shard", "replica"): frozenset({m.Exchanged}),
}

_WEIGHTS = ("weights", "trial")
# Numbers that come with what names no place of them: what belongs to whom is looked at where they are put.
BRINGS = {
    k.Whole: ("copy",),
    k.Entry: ("gradient",),
    m.Exchanged: _WEIGHTS,
    m.Evaluate: _WEIGHTS,
    c.Shown: _WEIGHTS,
    m.Parcel: (*_WEIGHTS, "gradient"),
}


def _and(more: Says) -> Says:
    return {ends: said | more.get(ends, frozenset()) for ends, said in COMMON.items()}


LOOP = _and({
    ("coordinator", "replica"): frozenset({m.Grant, m.SkipNoted}),
    ("replica", "coordinator"): frozenset({m.LeaseRequest, m.Dropped, m.Logged, m.NonFinite, m.Skip}),
    ("shard", "coordinator"): frozenset({Kept, UpdatesLost, SnapshotLost}),
})  # fmt: skip
BATCHES = _and({
    ("coordinator", "replica"): frozenset({s.Portion}),
    ("coordinator", "shard"): frozenset({s.Calculation}),
    ("replica", "coordinator"): frozenset({s.PortionRequest}),
    ("replica", "shard"): frozenset({s.PushPortions}),
    ("shard", "coordinator"): frozenset({s.Calculated, s.PortionsTaken, SnapshotLost}),
    ("shard", "replica"): frozenset({s.PortionsTaken}),
})  # fmt: skip

COLLECTIVE = _and({
    ("coordinator", "replica"): frozenset({
        m.View, m.TakeSnapshot, m.PieceKept, m.SkipNoted, c.Form, c.Turn, c.ShowWeights,
    }),
    ("replica", "coordinator"): frozenset({
        m.ViewSeen, m.SnapshotTaken, m.SnapshotPiece, m.Logged, m.NonFinite, m.Skip, c.Finished, c.Shown, c.Broken,
    }),
})  # fmt: skip


ANSWERS = _and({
    ("coordinator", "replica"): frozenset({m.Grant, m.PieceKept}),
    ("replica", "coordinator"): frozenset({m.LeaseRequest, AnswersPiece, NotKept}),
})  # fmt: skip


def hears(one: Node, other: Node) -> bool:
    """Whether the other's role says anything to the one's."""
    return (other.role, one.role) in COMMON


def places_of(
    says: Says, sender: Node, receiver: Node, message: Message | None, payload: Payload | None
) -> list[Payload]:
    """The places that are named by what is said.

    Raises `ValueError` for what the sender's role never says to the receiver's, or of one that it does not hear, and
    for numbers of something else.
    """
    if message is None:
        if payload is not None:
            raise ValueError("numbers come with no message")
        return []
    kind = type(message)
    if kind not in says.get((sender.role, receiver.role), ()):
        raise ValueError(f"a {sender.role} says {kind.__name__} to no {receiver.role}")
    for node in _spoken_of(message):
        if not hears(sender, node):
            raise ValueError(f"a {sender.role} says {kind.__name__} of a {node.role}, which it does not hear")
    named = list(_named(message, sender, receiver))
    if type(message) is m.Parcel:
        if payload is None or (payload.clock, payload.buffer) != (message.clock, message.buffer):
            raise ValueError(f"{payload} is not what {message} tells of")
        named.append(payload)
    if payload is not None and payload.kind not in BRINGS.get(kind, ()):
        all_of_it = payload if payload.part < 0 else replace(payload, part=-1)
        if all_of_it not in named:
            raise ValueError(f"{payload} does not belong to {kind.__name__}")
    return named


def _spoken_of(message: Message) -> tuple[Node, ...]:
    match message:
        case n.Heard(nodes):
            return nodes
        case n.Refused(node):
            return (node,)
    return ()


def _named(message: Message, sender: Node, receiver: Node) -> Iterator[Payload]:
    match message:
        case m.Exchange(clock, gradient, weights):
            if gradient != -1:
                yield Payload("gradient", sender, gradient, clock, receiver.index)
            if weights != -1:
                yield Payload("weights", sender, weights, clock, receiver.index)
        case s.PushPortions(_, buffer, _, clock):
            yield Payload("gradient", sender, buffer, clock, receiver.index)
        case AnswersPiece(lease, _, _, number, _, size):
            yield Payload("piece", sender, size, number, sender.index, lease)
        case m.SnapshotPiece(number, start, size):
            yield Payload("piece", sender, size, start // m.PIECE_BYTES, sender.index, number)
